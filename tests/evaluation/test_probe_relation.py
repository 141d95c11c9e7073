"""Real relation: analysis of variance against references, and mixers whose relation is known."""

import math
from functools import partial

import pytest
import torch

from seqarch.evaluation.probe_jacobian import Layer, influence
from seqarch.evaluation.probe_relation import FACTORS, components, log_distances, relation, two_way
from seqarch.mixer import Tags
from seqarch_attention import Attention
from seqarch_mamba import Mamba2
from seqarch_top1 import Top1Element
from tests.evaluation.probed_mixers import explicit, inputs


def shares(layer, **options):
    u = inputs(1, 1, layer.inputs.shape[-1], seed=5)[0]
    options = {"generator": torch.Generator().manual_seed(0), "distances": 4, "contents": 4, **options}
    return relation(layer, u, influence(layer, u).floor, **options)


def test_two_way_against_loops():
    table = inputs(1, 4, 3)[0]
    A, B = table.shape
    mean = table.mean()
    rows, columns = [table[a].mean() for a in range(A)], [table[:, b].mean() for b in range(B)]
    rest = sum((table[a, b] - rows[a] - columns[b] + mean) ** 2 for a in range(A) for b in range(B)) / (
        (A - 1) * (B - 1)
    )
    of_rows = B * sum((r - mean) ** 2 for r in rows) / (A - 1)
    of_columns = A * sum((c - mean) ** 2 for c in columns) / (B - 1)
    expected = [float(v) for v in ((of_rows - rest) / B, (of_columns - rest) / A, rest)]
    assert two_way(table) == pytest.approx(expected)
    assert two_way(torch.stack([table, table + 1.0])) == pytest.approx(expected)


def test_components_of_random_effects():
    """Of tables drawn with known variances."""
    P, S, A, B = 300, 6, 5, 4
    normal = partial(torch.randn, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    true = {"position": 4.0, "others": 1.0, "query": 2.0, "key": 0.5, "pair": 3.0}
    shapes = {"position": (P, 1, 1, 1), "others": (P, S, 1, 1), "query": (P, S, A, 1), "key": (P, S, 1, B)}
    log_G = sum(math.sqrt(true[name]) * normal(shapes.get(name, (P, S, A, B))) for name in FACTORS)
    for name, variance in components(log_G).items():
        assert variance == pytest.approx(true[name], rel=0.15), name
    assert components(log_G[:1])["position"] == 0.0


def signed(factors):
    """Weights exp(Σ of the factors' terms), each a sign of the contents, or the distance."""

    def weights(x):
        sign = x.sign()
        i, j = torch.arange(x.shape[1])[:, None], torch.arange(x.shape[1])
        terms = {
            "position": -0.3 * (i - j).double().expand(len(x), -1, -1),
            "others": sign[:, :1, :1].expand(-1, x.shape[1], x.shape[1]),
            "query": sign[:, :, 1, None].expand(-1, -1, x.shape[1]),
            "key": sign[:, None, :, 2].expand(-1, x.shape[1], -1),
            "pair": sign[:, :, 3, None] * sign[:, None, :, 4],
        }
        return sum(terms[name] for name in factors).exp().tril()

    return weights


@pytest.mark.parametrize("factor", ["position", "others", "query", "key"])
def test_weights_of_one_factor(factor):
    layer = explicit(signed([factor]), N=4)
    layer.inputs[:2, 0, 0] = 1.0
    layer.inputs[2:, 0, 0] = -1.0
    found = shares(layer, distances=3)
    assert max(found["distances"]) < 15  # the first token, which the weights ask, stays as it is
    # A finite draw of signs leaves something to chance between the tables' means, but never to a third factor.
    assert found["shares"][factor] == pytest.approx(1.0, abs=1e-6 if factor in ("position", "others") else 0.3)
    assert {name for name, v in found["shares"].items() if v > 1e-9} <= {factor, "position", "others"}


def test_separable_weights_have_no_pair_term_and_products_have():
    separable = shares(explicit(signed(["position", "query", "key"]), N=4))
    assert separable["shares"]["pair"] < 1e-9
    assert min(separable["shares"][name] for name in ("position", "query", "key")) > 0.05
    assert sum(separable["shares"].values()) == pytest.approx(1.0)
    assert separable["nats"]["query"] == pytest.approx(1.0, abs=0.3)
    product = shares(explicit(signed(["pair"]), N=4), contents=8)
    assert product["shares"]["pair"] > 0.8


def test_weights_that_never_vary():
    found = shares(explicit(lambda x: torch.ones(len(x), x.shape[1], x.shape[1]).double().tril()))
    assert found["shares"] is None
    assert max(found["nats"].values()) < 1e-6


def layer(factory, T=24, D=8, N=3):
    torch.manual_seed(0)
    return Layer(factory(D).double().requires_grad_(False), inputs(N, T, D), {})


@pytest.mark.parametrize("n_heads", [1, 2])
def test_random_keys_and_scores_have_no_pair_term(n_heads):
    qk = shares(layer(partial(Attention, n_heads=n_heads)))["shares"]
    assert qk["pair"] > 0.6
    keys = shares(layer(partial(Attention, n_heads=n_heads, relation="random_keys")))["shares"]
    assert keys["pair"] < 1e-9
    assert keys["key"] < 1e-9
    assert keys["query"] > 0.5
    scores = shares(layer(partial(Attention, n_heads=n_heads, relation="random_scores")))["shares"]
    assert scores["position"] == pytest.approx(1.0, abs=1e-9)


def test_only_distances_inside_a_window_count():
    found = shares(layer(partial(Attention, n_heads=1, window=4)))
    assert found["distances"] == [d for d in log_distances(18, 4) if d < 4]
    assert found["shares"]["pair"] > 0.5
    nothing = shares(layer(partial(Attention, n_heads=1, window=1)))
    assert (nothing["shares"], nothing["nats"], nothing["distances"]) == (None, None, [])


def test_fast_decay_makes_weights_a_matter_of_position():
    def fast(D):
        mixer = Mamba2(D, expand=1, head_dim=8, state_dim=4, conv=False, decay="shared")
        with torch.no_grad():
            mixer.A_log.fill_(0.7)
            mixer.dt_bias.fill_(0.5)
        return mixer

    found = shares(layer(fast))["shares"]
    assert found["position"] > 0.8
    assert found["pair"] < 0.1


def test_a_selection_is_a_relation():
    found = shares(layer(partial(Top1Element, n_heads=2), N=4))
    assert found["shares"]["pair"] > 0.5


def test_a_selection_that_always_jumps_is_refused():
    def weights(x):
        return 1.0 + torch.rand(len(x), x.shape[1], x.shape[1], dtype=torch.float64).tril()

    unsteady = explicit(weights, tags=Tags(discontinuous=True))
    with pytest.raises(ValueError, match="Explicit: its selection changes under every perturbation"):
        relation(unsteady, inputs(1, 1, 6)[0], 1e-9, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("longest", "count", "expected"),
    [(192, 6, [1, 3, 8, 23, 67, 192]), (12, 6, [1, 2, 3, 4, 7, 12]), (3, 6, [1, 2, 3]), (64, 4, [1, 4, 16, 64])],
)
def test_distances(longest, count, expected):
    assert log_distances(longest, count) == expected
