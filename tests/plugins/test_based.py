"""Based: against fla's layer, the formula, and what its options say."""

import pytest
import torch

from seqarch_linear import Based
from tests.ops.test_taylor_attention import dense

NO_TRITON = "ignore:Triton is not supported on current platform"
X = torch.randn(2, 70, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def build(**options):
    torch.manual_seed(0)
    return Based(32, **options).double()


@pytest.mark.parametrize("options", [{}, {"n_heads": 4, "feature_dim": 5}, {"n_heads": 3, "head_dim": 7}])
def test_formula(options):
    mixer = build(**options)
    q, k, v = (p(X).unflatten(-1, (mixer.n_heads, -1)) for p in (mixer.q_proj, mixer.k_proj, mixer.v_proj))
    torch.testing.assert_close(mixer(X)[0], mixer.o_proj(dense(q, k, v).flatten(2)), atol=1e-10, rtol=1e-8)


@pytest.mark.filterwarnings(NO_TRITON, "ignore:torch.utils.checkpoint")
@pytest.mark.parametrize(("n_heads", "feature_dim"), [(4, 8), (4, 16), (2, 6)])
def test_agrees_with_fla_s_layer(monkeypatch, n_heads, feature_dim):
    """Parameters load both ways; outputs are those of both its forms, also where head and feature sizes differ."""
    layers = pytest.importorskip("fla.layers")
    theirs = layers.BasedLinearAttention(32, feature_dim=feature_dim, num_heads=n_heads, num_key_value_heads=n_heads)
    ours = Based(32, n_heads=n_heads, feature_dim=feature_dim)
    ours.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())
    y = ours(X.float())[0]
    # Its forward with the formula in place of the kernel.
    monkeypatch.setattr("fla.layers.based.parallel_based", lambda q, k, v, scale, use_norm: dense(q, k, v))
    for expected in (theirs.forward_reference(X.float()), theirs(X.float())):
        assert (y - expected).norm() / expected.norm() < 1e-5


def test_every_option_changes_the_function():
    base = build()(X)[0]
    for options in ({"n_heads": 4}, {"head_dim": 3}, {"feature_dim": 8}):
        assert (build(**options)(X)[0] - base).abs().max() > 1e-3, options


def test_state_and_flops_closed_form():
    mixer = build(n_heads=2).float()
    assert mixer.state_bytes(10) == mixer.state_bytes(1000) == 4 * 2 * 153 * 17
    assert mixer.flops(10) == 2 * 10 * (2 * 32 * 32 + 2 * 32 * 32) + 10 * 2 * (2 * 153 + 4 * 153 * 17)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_heads": 5}, r"n_heads \(5\) must divide d_model \(32\)"),
        ({"n_heads": 0}, "n_heads must be at least 1"),
        ({"head_dim": 0}, "head_dim must be at least 1"),
        ({"feature_dim": 0}, "feature_dim must be at least 1"),
        ({"backend": "fla"}, "backend must be one of auto, torch"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        Based(32, **options)
