"""Mamba-2: against transformers' layer, its step written out, and each ablation against what it says."""

import pytest
import torch
import torch.nn.functional as F

from seqarch_mamba import Mamba2
from tests.plugins import peers


def build(d_model=32, **options):
    torch.manual_seed(0)
    return Mamba2(d_model, **{"head_dim": 16, "state_dim": 8, "chunk_size": 16, **options}).double()


def noise(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def written_out(mixer, x, decay="data"):
    """One document, step by step, by the formulas."""
    H, P, G, N = mixer.n_heads, mixer.head_dim, mixer.n_groups, mixer.state_dim
    inner = H * P
    z, xbc, dt = mixer.in_proj(x).split([inner, inner + 2 * G * N, H], -1)
    if mixer.conv1d is not None:
        K = mixer.conv1d.kernel_size
        xbc = F.conv1d(F.pad(xbc.mT, (K - 1, 0)), mixer.conv1d.weight, mixer.conv1d.bias, groups=xbc.shape[2]).mT
    u, b, c = F.silu(xbc).split([inner, G * N, G * N], -1)
    u = u.unflatten(-1, (H, P))
    b, c = (t.unflatten(-1, (G, N)).repeat_interleave(H // G, 2) for t in (b, c))
    dt = F.softplus(dt + mixer.dt_bias)
    S, ys = 0.0, []
    for t in range(x.shape[1]):
        if decay == "none":
            factor = 1.0
        else:
            step = dt[:, t] if decay == "data" else F.softplus(mixer.dt_bias).expand_as(dt[:, t])
            factor = (-mixer.A_log.exp() * step).exp()[..., None, None]
        S = factor * S + (dt[:, t, :, None] * u[:, t])[..., None] * b[:, t, :, None]
        ys.append((S * c[:, t, :, None]).sum(-1) + mixer.D[:, None] * u[:, t])
    y = torch.stack(ys, 1).flatten(2) * F.silu(z)
    if mixer.norm is not None:
        y = y.unflatten(-1, (G, -1))
        y = (y / (y.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()).flatten(-2) * mixer.norm.weight
    return mixer.out_proj(y)


@pytest.mark.parametrize(
    ("d_model", "head_dim", "state_dim", "n_groups", "conv_kernel", "T"),
    [(32, 16, 8, 1, 4, 33), (64, 32, 16, 2, 4, 70), (48, 8, 4, 1, 3, 130)],
)
def test_agrees_with_transformers(d_model, head_dim, state_dim, n_groups, conv_kernel, T):
    options = {"head_dim": head_dim, "state_dim": state_dim, "n_groups": n_groups, "conv_kernel": conv_kernel}
    ours = build(d_model, **options).float()
    with torch.no_grad():
        ours.norm.weight.uniform_(0.5, 1.5)
    theirs = peers.mamba2_layer(d_model, **options)
    theirs.load_state_dict(ours.state_dict())  # the parameter names are mamba-ssm's, there and here
    x = noise(2, T, d_model).float()
    a, b = ours(x)[0], theirs(x)
    assert (a - b).norm() < 1e-5 * b.norm()
    ours.load_state_dict(theirs.state_dict())


@pytest.mark.filterwarnings("ignore:Triton is not supported on current platform")
def test_state_dicts_are_those_of_fla():
    layers = pytest.importorskip("fla.layers")
    theirs = layers.Mamba2(hidden_size=32, num_heads=4, head_dim=16, state_size=16, n_groups=2)
    ours = Mamba2(32, head_dim=16, state_dim=16, n_groups=2)
    ours.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())


@pytest.mark.parametrize("decay", ["data", "shared", "none"])
@pytest.mark.parametrize("options", [{}, {"conv": False}, {"norm": False}, {"n_groups": 2}])
def test_formula(decay, options):
    mixer = build(decay=decay, **options)
    x = noise(2, 37, 32)
    torch.testing.assert_close(mixer(x)[0], written_out(mixer, x, decay))


def test_packed_documents_start_from_nothing():
    # fla's and transformers' layers carry state from one packed document into the next.
    mixer = build()
    x = noise(1, 50, 32)
    y, _ = mixer(x, cu_seqlens=torch.tensor([0, 7, 8, 50], dtype=torch.int32))
    for a, b in ((0, 7), (7, 8), (8, 50)):
        torch.testing.assert_close(y[:, a:b], written_out(mixer, x[:, a:b]))
    assert (mixer(x)[0] - y)[:, 7:].abs().max() > 1e-3


def test_the_result_does_not_depend_on_the_chunk():
    x = noise(2, 70, 32)
    base = build()(x)[0]
    for chunk_size in (1, 8, 64):
        torch.testing.assert_close(build(chunk_size=chunk_size)(x)[0], base)


def test_every_ablation_changes_the_function():
    x = noise(2, 13, 32)
    base = build()(x)[0]
    for options in ({"decay": "shared"}, {"decay": "none"}, {"conv": False}, {"norm": False}):
        mixer = build(**options)
        mixer.load_state_dict({n: p for n, p in build().state_dict().items() if n in mixer.state_dict()})
        assert (mixer(x)[0] - base).norm() > 1e-3 * base.norm(), options


@pytest.mark.parametrize(("decay", "lives"), [("data", False), ("shared", False), ("none", True)])
def test_without_decay_an_impulse_keeps_its_weight(decay, lives):
    mixer = build(decay=decay, conv=False)
    with torch.no_grad():
        mixer.dt_bias.fill_(2.0)
    x = torch.zeros(1, 200, 32, dtype=torch.float64)
    x[:, 0] = noise(32)
    _, first = mixer(x[:, :1], state=mixer.init_state(1, 200, dtype=torch.float64))
    _, last = mixer(x, state=mixer.init_state(1, 200, dtype=torch.float64))
    if lives:  # zero inputs write nothing
        torch.testing.assert_close(last["ssm"], first["ssm"])
        assert "A_log" not in dict(mixer.named_parameters())
    else:
        assert last["ssm"].abs().max() < 1e-6 * first["ssm"].abs().max()


def test_parameters_and_their_first_values():
    mixer = Mamba2(64, state_dim=16)
    assert {n: tuple(p.shape) for n, p in mixer.named_parameters()} == {
        "in_proj.weight": (128 + 160 + 2, 64), "conv1d.weight": (160, 1, 4), "conv1d.bias": (160,), "dt_bias": (2,),
        "A_log": (2,), "D": (2,), "norm.weight": (128,), "out_proj.weight": (64, 128),
    }  # fmt: skip
    mixer = Mamba2(64, head_dim=1)
    delta, A = F.softplus(mixer.dt_bias), mixer.A_log.exp()
    assert delta.min() >= 0.99e-3
    assert delta.max() <= 0.101
    assert 1 <= A.min() < 3 < 14 < A.max() <= 16
    decayed = {n for n, p in mixer.named_parameters() if not hasattr(p, "_no_weight_decay")}
    assert decayed == {"in_proj.weight", "conv1d.weight", "out_proj.weight"}
    wide = {n for n, p in mixer.named_parameters() if hasattr(p, "_keep_float32")}
    assert wide == {"dt_bias", "A_log", "D"}


def test_state():
    state = build().bfloat16().init_state(3, 100)
    assert {n: (tuple(t.shape), t.dtype) for n, t in state.items()} == {
        "conv": ((3, 3, 80), torch.bfloat16),
        "ssm": ((3, 4, 16, 8), torch.float32),
    }
    assert set(build(conv=False).init_state(3, 100)) == {"ssm"}


def test_flops_closed_form():
    # in_proj 64 to 128 + 160 + 2, out_proj 128 to 64, 4 taps of 160 channels, 128 channels of 16 states
    assert Mamba2(64, state_dim=16).flops(10) == 10 * (2 * (64 * 290 + 128 * 64) + 2 * 4 * 160 + 4 * 128 * 16)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"expand": 0}, "expand must be at least 1"),
        ({"head_dim": 24}, r"head_dim \(24\) must divide expand · d_model \(64\)"),
        ({"state_dim": 0}, "state_dim must be at least 1"),
        ({"n_groups": 3}, r"n_groups \(3\) must divide the heads, expand · d_model / head_dim = 4"),
        ({"conv_kernel": 1}, "conv_kernel must be at least 2, got 1; for no convolution give conv=False"),
        ({"chunk_size": 48}, "chunk_size must be a power of two, got 48"),
        ({"decay": "some"}, "decay must be one of data, shared, none, got 'some'"),
        ({"backend": "triton"}, "backend must be one of auto, mamba_ssm, fla, torch"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        build(**options)
