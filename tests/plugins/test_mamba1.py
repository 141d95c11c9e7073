"""Mamba-1: against transformers' layer, its step written out, and each ablation against what it says."""

import pytest
import torch
import torch.nn.functional as F

from seqarch_mamba import Mamba1
from tests.plugins import peers


def build(d_model=32, **options):
    torch.manual_seed(0)
    return Mamba1(d_model, **{"state_dim": 4, **options}).double()


def noise(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def written_out(mixer, x, decay="data"):
    """One document, step by step, by the formulas."""
    u, z = mixer.in_proj(x).chunk(2, -1)
    if mixer.conv1d is not None:
        K = mixer.conv1d.kernel_size
        u = F.conv1d(F.pad(u.mT, (K - 1, 0)), mixer.conv1d.weight, mixer.conv1d.bias, groups=mixer.d_inner).mT
    u = F.silu(u)
    dt, b, c = mixer.x_proj(u).split([mixer.dt_rank, mixer.state_dim, mixer.state_dim], -1)
    delta = F.softplus(mixer.dt_proj(dt))
    h, ys = 0.0, []
    for t in range(x.shape[1]):
        if decay == "none":
            factor = 1.0
        else:
            step = delta[:, t] if decay == "data" else F.softplus(mixer.dt_proj.bias).expand_as(delta[:, t])
            factor = (step[..., None] * -mixer.A_log.exp()).exp()
        h = factor * h + (delta[:, t] * u[:, t])[..., None] * b[:, t, None]
        ys.append((h * c[:, t, None]).sum(-1) + mixer.D * u[:, t])
    return mixer.out_proj(torch.stack(ys, 1) * F.silu(z))


@pytest.mark.parametrize(
    ("d_model", "expand", "state_dim", "dt_rank", "conv_kernel", "T"), [(32, 2, 16, 2, 4, 33), (48, 1, 8, 5, 3, 70)]
)
def test_agrees_with_transformers(d_model, expand, state_dim, dt_rank, conv_kernel, T):
    options = {"expand": expand, "state_dim": state_dim, "dt_rank": dt_rank, "conv_kernel": conv_kernel}
    ours = build(d_model, **options).float()
    theirs = peers.mamba1_layer(d_model, **options)
    theirs.load_state_dict(ours.state_dict())  # the parameter names are mamba-ssm's, there and here
    x = noise(2, T, d_model).float()
    a, b = ours(x)[0], theirs(x)
    assert (a - b).norm() < 1e-5 * b.norm()
    theirs = peers.mamba1_layer(d_model, **options)
    ours.load_state_dict(theirs.state_dict())
    a, b = ours(x)[0], theirs(x)
    assert (a - b).norm() < 1e-5 * b.norm()


@pytest.mark.filterwarnings("ignore:Triton is not supported on current platform")
def test_state_dicts_are_those_of_fla():
    layers = pytest.importorskip("fla.layers")
    theirs, ours = layers.Mamba(hidden_size=32, intermediate_size=64), Mamba1(32)
    ours.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())


@pytest.mark.parametrize("decay", ["data", "shared", "none"])
@pytest.mark.parametrize("conv", [True, False])
def test_formula(decay, conv):
    mixer = build(decay=decay, conv=conv)
    x = noise(2, 21, 32)
    torch.testing.assert_close(mixer(x)[0], written_out(mixer, x, decay))


def test_packed_documents_start_from_nothing():
    # fla's and transformers' layers carry state from one packed document into the next.
    mixer = build()
    x = noise(1, 30, 32)
    bounds = [0, 7, 8, 30]
    y, _ = mixer(x, cu_seqlens=torch.tensor(bounds, dtype=torch.int32))
    for a, b in ((0, 7), (7, 8), (8, 30)):
        torch.testing.assert_close(y[:, a:b], written_out(mixer, x[:, a:b]))
    assert (mixer(x)[0] - y)[:, 7:].abs().max() > 1e-3


def test_every_ablation_changes_the_function():
    x = noise(2, 13, 32)
    base = build()(x)[0]
    for options in ({"decay": "shared"}, {"decay": "none"}, {"conv": False}):
        mixer = build(**options)
        mixer.load_state_dict({n: p for n, p in build().state_dict().items() if n in mixer.state_dict()})
        assert (mixer(x)[0] - base).norm() > 1e-3 * base.norm(), options


@pytest.mark.parametrize(("decay", "lives"), [("data", False), ("shared", False), ("none", True)])
def test_without_decay_an_impulse_keeps_its_weight(decay, lives):
    mixer = build(decay=decay, conv=False)
    with torch.no_grad():
        mixer.dt_proj.bias.fill_(2.0)
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
    mixer = Mamba1(64)
    shapes = {n: tuple(p.shape) for n, p in mixer.named_parameters()}
    assert shapes == {
        "in_proj.weight": (256, 64), "conv1d.weight": (128, 1, 4), "conv1d.bias": (128,), "x_proj.weight": (36, 128),
        "dt_proj.weight": (128, 4), "dt_proj.bias": (128,), "A_log": (128, 16), "D": (128,),
        "out_proj.weight": (64, 128),
    }  # fmt: skip
    delta = F.softplus(mixer.dt_proj.bias)
    assert delta.min() >= 0.99e-3
    assert delta.max() <= 0.101
    torch.testing.assert_close(mixer.A_log.exp(), torch.arange(1.0, 17).expand(128, -1))
    assert torch.equal(mixer.D, torch.ones(128))
    decayed = {n for n, p in mixer.named_parameters() if not hasattr(p, "_no_weight_decay")}
    assert decayed == {"in_proj.weight", "conv1d.weight", "x_proj.weight", "dt_proj.weight", "out_proj.weight"}
    wide = {n for n, p in mixer.named_parameters() if hasattr(p, "_keep_float32")}
    assert wide == {"dt_proj.bias", "A_log", "D"}


def test_state():
    mixer = build().bfloat16()
    state = mixer.init_state(3, 100)
    assert {n: (tuple(t.shape), t.dtype) for n, t in state.items()} == {
        "conv": ((3, 3, 64), torch.bfloat16),
        "ssm": ((3, 64, 4), torch.float32),
    }
    assert set(build(conv=False).init_state(3, 100)) == {"ssm"}


def test_flops_closed_form():
    assert Mamba1(64).flops(10) == 10 * (2 * (256 * 64 + 36 * 128 + 128 * 4 + 64 * 128) + 2 * 128 * 4 + 6 * 128 * 16)
    assert Mamba1(64).flops(10) - Mamba1(64, decay="none").flops(10) == 10 * 2 * 128 * 16


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"expand": 0}, "expand must be at least 1"),
        ({"state_dim": 0}, "state_dim must be at least 1"),
        ({"dt_rank": 0}, "dt_rank must be at least 1"),
        ({"dt_rank": "full"}, "dt_rank must be a number or auto, got 'full'"),
        ({"conv_kernel": 1}, "conv_kernel must be at least 2, got 1; for no convolution give conv=False"),
        ({"decay": "some"}, "decay must be one of data, shared, none, got 'some'"),
        ({"backend": "fla"}, "backend must be one of auto, mamba_ssm, torch"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        Mamba1(32, **options)
