"""Top-1 Chunk against the dense formulas: values, gradients, selection, layout, memory."""

from functools import partial
from itertools import pairwise, product

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from seqarch_top1 import Top1Chunk
from seqarch_top1.chunk import top1_chunk
from seqarch_top1.layout import packed
from seqarch_top1.router import NONE, route
from tests.plugins import top1_reference as reference
from tests.plugins.test_top1_element import compare, heads
from tests.plugins.top1_memory import largest

C = 8
SELECTIONS = pytest.mark.parametrize("selection", ["exact", "approx"])
VARIANTS = pytest.mark.parametrize(
    ("selection", "local", "select"), list(product(("exact", "approx"), (True, False), ("chunk", "element")))
)


@pytest.fixture(params=[None, 200], ids=["whole", "blocks"])
def blocks(request, monkeypatch):
    """Also with blocks so small that every loop turns many times, and chosen chunks are split."""
    if request.param is not None:
        monkeypatch.setattr("seqarch_top1.tiles.CPU_SCORES", request.param)
        monkeypatch.setattr("seqarch_top1.slots._LONGEST", 3)


def both(selection, local=True, select="chunk", scale=0.7, chunk_size=C):
    """Ours and the reference for one choice of options."""
    ours = partial(
        top1_chunk,
        scale=scale,
        chunk_size=chunk_size,
        exact=selection == "exact",
        local=local,
        element=select == "element",
    )

    def theirs(q, k, v):
        return reference.chunk(q, k, v, scale, chunk_size, selection, local, select)[0]

    return ours, theirs


@VARIANTS
@pytest.mark.parametrize(("H", "G"), [(2, 2), (4, 2)])
@pytest.mark.parametrize("T", [1, C - 1, C, C + 1, 2 * C, 5 * C + 3])
@pytest.mark.usefixtures("blocks")
def test_values_and_gradients(T, H, G, selection, local, select):
    qkv = heads(2, T, H, G)
    ours, theirs = both(selection, local, select)
    compare(ours(*qkv), theirs(*qkv), qkv, 1e-10)


@SELECTIONS
@pytest.mark.parametrize("scale", [0.05, 4.0])
@pytest.mark.parametrize("chunk_size", [1, 3, 64])
def test_temperatures_and_chunk_sizes(selection, scale, chunk_size):
    qkv = heads(1, 50, 3, 1)
    ours, theirs = both(selection, scale=scale, chunk_size=chunk_size)
    compare(ours(*qkv), theirs(*qkv), qkv, 1e-10)


@VARIANTS
def test_float32(selection, local, select):
    qkv = heads(2, 60, 4, 2, dtype=torch.float32)
    ours, theirs = both(selection, local, select)
    compare(ours(*qkv), theirs(*qkv), qkv, 4e-6)


@VARIANTS
@pytest.mark.parametrize(
    "bounds", [[0, 20, 60], [0, 1, 2, 9, 9, 17, 20, 60], [0, 8, 16, 33], [0, 7], [0, 5, 30, 33, 36, 61, 64]]
)
@pytest.mark.usefixtures("blocks")
def test_documents_are_cut_each_on_its_own(bounds, selection, local, select):
    qkv = heads(1, bounds[-1], 4, 2)
    ours, theirs = both(selection, local, select)
    expected = torch.cat([theirs(*(t[:, a:b] for t in qkv)) for a, b in pairwise(bounds) if b > a], dim=1)
    compare(ours(*qkv, cu_seqlens=torch.tensor(bounds, dtype=torch.int32)), expected, qkv, 1e-10)


@VARIANTS
@pytest.mark.parametrize("start", [1, C, 2 * C + 3, 4 * C - 1])
@pytest.mark.usefixtures("blocks")
def test_queries_may_be_the_last_of_more_keys(start, selection, local, select):
    q, k, v = heads(2, 5 * C + 3, 4, 2)
    ours, theirs = both(selection, local, select)
    compare(ours(q[:, start:], k, v), theirs(q, k, v)[:, start:], (q, k, v), 1e-10)


@VARIANTS
@pytest.mark.usefixtures("blocks")
def test_all_queries_may_choose_one_chunk(selection, local, select):
    q, k, v = heads(1, 12 * C, 2, 2)
    with torch.no_grad():
        q[..., 0] = 5
        k[:, C : 2 * C, :, 0] += 5
    chosen = reference.chunk(q, k, v, 0.7, C, selection, local, select)[1]
    assert (chosen[..., 2 * C :] == 1).all()
    ours, theirs = both(selection, local, select)
    compare(ours(q, k, v), theirs(q, k, v), (q, k, v), 1e-10)


@SELECTIONS
@pytest.mark.usefixtures("blocks")
def test_the_smallest_index_wins_a_tie(selection):
    """All chunks are alike, with exact scores: whoever can select takes chunk 0, with probability 1/candidates."""
    g = torch.Generator().manual_seed(0)
    q = torch.randint(-3, 4, (1, 6, C, 4), generator=g).float()
    k = torch.randint(-3, 4, (1, 1, C, 4), generator=g).float().repeat(1, 6, 1, 1)
    index, P = route(q, k if selection == "exact" else k.mean(2, keepdim=True), None, None, 0)
    assert (index[:, 0] == NONE).all()
    assert (index[:, 1:] == 0).all()
    expected = torch.tensor([0, 1, 1 / 2, 1 / 3, 1 / 4, 1 / 5]).view(1, 6, 1).expand_as(P)
    torch.testing.assert_close(P, expected)


@SELECTIONS
@pytest.mark.parametrize("local", [True, False])
def test_without_documents_it_sees_but_two_chunks(selection, local):
    """Of the values, an output depends on its own chunk's past and one earlier chunk; alone on either without local."""
    q, k, v = heads(1, 6 * C, 1, 1)
    ours, _ = both(selection, local)
    chosen = reference.chunk(q, k, v, 0.7, C, selection, local)[1][0, 0]
    seen = torch.autograd.functional.jacobian(lambda v: ours(q, k, v)[0, :, 0, 0], v)[:, 0, :, 0, 0] != 0
    t = torch.arange(6 * C)
    expected = chosen[:, None] == t // C
    if local:
        expected |= t[:, None] // C == t // C
    assert torch.equal(seen, expected & (t <= t[:, None]))
    assert len(set(chosen.tolist())) > 3


@SELECTIONS
def test_the_router_learns(selection):
    """A key that no query attends to still gets gradient, through the probability of the chunk that was selected."""
    q, k, v = heads(1, 6 * C, 1, 1)
    ours, _ = both(selection)
    chosen = reference.chunk(q, k, v, 0.7, C, selection)[1][0, 0]
    last = chosen[-1].item()
    (dk,) = torch.autograd.grad(ours(q, k, v)[0, -1].sum(), k)
    reached = dk[0, :, 0].abs().sum(-1).view(6, C).sum(-1) > 0
    assert reached.all()
    assert 0 <= last < 5


def test_exact_and_approx_agree_where_the_scores_of_a_chunk_are_equal():
    q, k, v = heads(1, 6 * C, 2, 2)
    k = k.detach()[:, ::C].repeat_interleave(C, dim=1)
    for local in (True, False):
        exact, approx = (both(s, local)[0](q, k, v) for s in ("exact", "approx"))
        torch.testing.assert_close(exact, approx)


def test_layout_of_packed_documents():
    layout = packed([0, 3, 5, 9, 9, 30, 33], 8, torch.device("cpu"))
    # 3 + 2 tokens share a chunk; 4 do not fit in what is left; 21 start a chunk, and 3 fit behind them.
    assert layout.place.tolist() == [*range(5), *range(8, 12), *range(16, 40)]
    assert layout.n_chunks == 5
    assert layout.first.flatten()[layout.place].tolist() == [0] * 3 + [1] * 2 + [1] * 4 + [2] * 21 + [5] * 3
    for length in (1, 5, 8, 9, 13):  # however short documents are, at most about half of the places are empty
        bounds = list(range(0, 40 * length, length))
        assert packed(bounds, 8, torch.device("cpu")).n_chunks * 8 <= 2 * bounds[-1] + 8


@SELECTIONS
@pytest.mark.parametrize("packing", [False, True])
def test_memory_grows_as_the_length(selection, packing, monkeypatch):
    monkeypatch.setattr("seqarch_top1.tiles.CPU_SCORES", 1 << 12)
    sizes = []
    for T in (256, 1024):
        cu_seqlens = torch.tensor([0, 100, T], dtype=torch.int32) if packing else None
        q, k, v = heads(1, T, 2, 2, D=16)
        with torch.no_grad():
            k[:, 32:64] += q.mean(1, keepdim=True)
        run = partial(both(selection, chunk_size=32)[0], cu_seqlens=cu_seqlens)
        sizes.append(largest(run, (q, k, v)))
    assert sizes[1] < 4.4 * sizes[0]
    assert sizes[1] <= 1.5 * 1024 * 2 * 16  # T · H · D and some filling up


def test_a_decoded_token_scores_the_mean_keys():
    mixer = Top1Chunk(32, n_heads=4, n_kv_heads=2, chunk_size=C, selection="approx")
    counts = []
    for T in (20 * C, 40 * C):
        state = mixer.init_state(1, T)
        x = torch.randn(1, T, 32)
        with torch.no_grad():
            _, state = mixer(x[:, :-1], state=state)
            with FlopCounterMode(display=False) as counter:
                mixer(x[:, -1:], state=state)
        counts.append(counter.get_total_flops())
    assert counts[1] - counts[0] == 2 * 20 * 4 * 8  # 20 chunks more: one score a head and chunk


@SELECTIONS
def test_the_cache_of_mean_keys(selection):
    mixer = Top1Chunk(32, n_heads=4, n_kv_heads=2, chunk_size=C, selection=selection)
    x = torch.randn(3, 21, 32)
    state = mixer.init_state(3, 21)
    with torch.no_grad():
        for piece in x.split([3, 4, 1, 9, 4], dim=1):
            _, state = mixer(piece, state=state)
    if selection == "exact":
        assert set(state) == {"k", "v", "pos"}
        return
    assert state["means"].shape == (3, 2, 2, 8)
    torch.testing.assert_close(state["means"], state["k"][:, :, : 2 * C].unflatten(2, (2, C)).mean(3))


@SELECTIONS
def test_the_mixer_is_its_formula(selection):
    torch.manual_seed(0)
    options = {"n_heads": 4, "n_kv_heads": 2, "chunk_size": C, "selection": selection, "temperature": 0.25}
    mixer = Top1Chunk(24, position="none", **options).double()
    x = torch.randn(2, 30, 24, dtype=torch.float64)
    q, k, v = (p(x).unflatten(-1, (-1, 6)) for p in (mixer.q_proj, mixer.k_proj, mixer.v_proj))
    expected = mixer.o_proj(reference.chunk(q, k, v, 4 / 6**0.5, C, selection)[0].flatten(2))
    torch.testing.assert_close(mixer(x)[0], expected)
    for change in (
        {"position": "rope"},
        {"temperature": 1.0},
        {"local": False},
        {"select": "element"},
        {"chunk_size": 5},
    ):
        other = Top1Chunk(24, **{"position": "none", **options, **change}).double()
        other.load_state_dict(mixer.state_dict())
        assert (other(x)[0] - expected).abs().max() > 1e-3, change


@pytest.mark.parametrize("T", [3, C, 6 * C + 5])
def test_flops_closed_form(T):
    n = [t // C for t in range(T)]
    projections = 2 * T * (2 * 32 * 32 + 2 * 32 * 16)
    own, selected = sum(t % C + 1 for t in range(T)), sum(C for m in n if m)
    build = partial(Top1Chunk, 32, n_heads=4, n_kv_heads=2, chunk_size=C)
    attention = 4 * (own + selected) * 32
    assert build().flops(T) == projections + attention + 2 * sum(m * C for m in n) * 32
    assert build(selection="approx").flops(T) == projections + attention + 2 * sum(n) * 32 + T * 16


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_heads": 5}, r"n_heads \(5\) must divide d_model \(32\)"),
        ({"n_kv_heads": 3}, r"n_kv_heads \(3\) must divide n_heads \(4\)"),
        ({"head_dim": 7}, "needs an even head_dim"),
        ({"head_dim": 0}, "head_dim must be at least 1"),
        ({"chunk_size": 0}, "chunk_size must be at least 1"),
        ({"temperature": 0.0}, "temperature must be above 0"),
        ({"position": "alibi"}, "position must be one of rope, none, got 'alibi'"),
        ({"selection": "first"}, "selection must be one of exact, approx, got 'first'"),
        ({"select": "token"}, "select must be one of chunk, element, got 'token'"),
        ({"backend": "cuda"}, "backend must be one of auto, triton, torch"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        Top1Chunk(32, **{"n_heads": 4, **options})


@pytest.mark.parametrize("length", [1, 13])
def test_too_many_tokens_name_max_len(length):
    mixer = Top1Chunk(32, n_heads=4, chunk_size=C)
    state = mixer.init_state(1, 12)
    _, state = mixer(torch.randn(1, 12, 32), state=state)
    with pytest.raises(ValueError, match=f"max_len = 12 tokens, not for {12 + length}"):
        mixer(torch.randn(1, length, 32), state=state)
