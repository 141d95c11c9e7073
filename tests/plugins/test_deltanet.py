"""DeltaNet and Gated DeltaNet: against fla's and transformers' layers, and each option against what it says."""

import inspect
from functools import partial

import pytest
import torch
from torch.nn.functional import silu, softplus

from seqarch_deltanet import DeltaNet, GatedDeltaNet
from seqarch_deltanet.backends import fla_fault, hopper_fault
from tests.ops.test_delta_rule import recurrence
from tests.plugins import peers

NO_TRITON = "ignore:Triton is not supported on current platform"
NO_CONV = "ignore:ShortConvolution is crucial"
X = torch.randn(2, 70, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def build(cls, d_model=32, **options):
    torch.manual_seed(0)
    return cls(d_model, **options).double()


def convolve(conv, x):
    """Of a whole sequence, by torch's own."""
    kernel = conv.weight.shape[-1]
    return silu(
        torch.nn.functional.conv1d(
            torch.nn.functional.pad(x.mT, (kernel - 1, 0)), conv.weight, groups=conv.weight.shape[0]
        ).mT
    )


def reference(mixer, x):
    """The layer's formula, plainly."""
    q, k, v = (getattr(mixer, f"{n}_proj")(x) for n in "qkv")
    if mixer.q_conv1d is None:
        q, k, v = silu(q), silu(k), silu(v)
    else:
        q, k, v = (convolve(getattr(mixer, f"{n}_conv1d"), t) for n, t in zip("qkv", (q, k, v), strict=True))
    H, G, K, V = mixer.n_heads, mixer.n_v_heads, mixer.head_dim, mixer.v_dim
    q, k = (t.unflatten(-1, (H, K)) for t in (q, k))
    q, k = (t / (t.square().sum(-1, keepdim=True) + 1e-6).sqrt() for t in (q, k))
    q, k = (torch.stack([t[:, :, h // (G // H)] for h in range(G)], 2) for t in (q, k))
    g = None
    if mixer.a_proj is not None:
        g = -mixer.A_log.exp() * softplus(mixer.a_proj(x) + mixer.dt_bias)
    S = x.new_zeros(len(x), G, K, V)
    o, _ = recurrence(q, k, v.unflatten(-1, (G, V)), mixer.b_proj(x).sigmoid(), g, S)
    o = o / (o.square().mean(-1, keepdim=True) + 1e-5).sqrt() * mixer.o_norm.weight
    if mixer.g_proj is not None:
        o = o * silu(mixer.g_proj(x).unflatten(-1, (G, V)))
    return mixer.o_proj(o.flatten(2))


@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (DeltaNet, {}),
        (DeltaNet, {"gate": True, "conv": False, "expand_v": 1.5}),
        (GatedDeltaNet, {}),
        (GatedDeltaNet, {"n_heads": 2, "n_v_heads": 6, "head_dim": 5, "conv_kernel": 2}),
        (GatedDeltaNet, {"gate": False, "conv": False, "n_heads": 4}),
    ],
)
def test_formula(cls, options):
    mixer = build(cls, **options)
    torch.nn.init.uniform_(mixer.o_norm.weight)
    torch.testing.assert_close(mixer(X)[0], reference(mixer, X), atol=1e-10, rtol=1e-8)


@pytest.mark.filterwarnings(NO_TRITON, NO_CONV)
@pytest.mark.parametrize("conv", [True, False])
@pytest.mark.parametrize("gate", [True, False])
def test_state_dicts_are_those_of_fla(conv, gate):
    layers = pytest.importorskip("fla.layers")
    shared = {"hidden_size": 32, "num_heads": 2, "use_gate": gate, "use_short_conv": conv}
    options = {"n_heads": 2, "gate": gate, "conv": conv}
    pairs = [
        (layers.DeltaNet(**shared), DeltaNet(32, **options)),
        (layers.GatedDeltaNet(**shared, head_dim=8), GatedDeltaNet(32, **options, head_dim=8)),
        (layers.GatedDeltaNet(**shared, head_dim=8, num_v_heads=4),
         GatedDeltaNet(32, **options, head_dim=8, n_v_heads=4)),
    ]  # fmt: skip
    for theirs, ours in pairs:
        ours.load_state_dict(theirs.state_dict())
        theirs.load_state_dict(ours.state_dict())
        for name, p in theirs.named_parameters():
            assert torch.equal(p, ours.state_dict()[name]), name


def test_default_sizes_are_fla_s():
    mixer = GatedDeltaNet(2048, backend="torch")
    assert (mixer.n_heads, mixer.head_dim, mixer.v_dim) == (6, 256, 512)


@pytest.mark.parametrize(("d_model", "tolerance"), [(64, 0.25), (256, 0.06), (768, 0.02)])
def test_default_sizes_give_the_parameters_of_the_papers(d_model, tolerance):
    for mixer, times in ((GatedDeltaNet(d_model), 6), (GatedDeltaNet(d_model, gate=False), 6), (DeltaNet(d_model), 4)):
        n = sum(p.numel() for p in mixer.parameters())
        assert n == pytest.approx(times * d_model**2, rel=tolerance)


def qwen(sizes, weak):
    """transformers' layer, with weak decays or its own initial ones."""
    torch.manual_seed(0)
    layer = peers.qwen3_next_layer(*sizes)
    with torch.no_grad():
        layer.dt_bias.uniform_(-4, -1) if weak else layer.dt_bias.fill_(1)
        layer.norm.weight.uniform_(0.5, 1.5)
    return layer


def errors_of_both(monkeypatch, sizes, T, weak):
    """Of our float32 layer and transformers': y and the gradients of x, A_log and dt_bias, against float64."""
    modeling = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    for name in ("torch_chunk_gated_delta_rule", "causal_conv1d_fn"):  # not fla's, whose kernels need a GPU
        monkeypatch.setattr(modeling, name, inspect.unwrap(getattr(modeling, name)))
    theirs = qwen(sizes, weak)
    state_dict = peers.from_qwen3_next(theirs.state_dict(), *sizes)
    n_heads, n_v_heads, head_dim, v_dim = sizes
    options = {"n_heads": n_heads, "n_v_heads": n_v_heads, "head_dim": head_dim, "expand_v": v_dim / head_dim}
    ours, plain = (GatedDeltaNet(32, **options, backend="torch") for _ in range(2))
    ours.load_state_dict(state_dict)
    plain.load_state_dict(state_dict)
    results = []
    for layer, function in (
        (plain.double(), partial(reference, plain)),
        (ours, lambda x: ours(x)[0]),
        (theirs, theirs),
    ):
        x = torch.randn(2, T, 32, generator=torch.Generator().manual_seed(1))
        x = x.to(layer.A_log.dtype).requires_grad_()
        y = function(x)
        y.square().sum().backward()
        results.append([t.double() for t in (y.detach(), x.grad, layer.A_log.grad, layer.dt_bias.grad)])
    exact, *both = results
    return [[float((a - e).norm() / e.norm()) for a, e in zip(result, exact, strict=True)] for result in both]


@pytest.mark.filterwarnings(NO_TRITON)
@pytest.mark.parametrize("T", [50, 64, 200])
@pytest.mark.parametrize("sizes", [(2, 2, 16, 16), (2, 4, 8, 16)])
def test_agrees_with_transformers_qwen3_next(monkeypatch, sizes, T):
    ours, theirs = errors_of_both(monkeypatch, sizes, T, weak=True)
    assert max(ours) < 1e-5
    assert max(theirs) < 1e-5


@pytest.mark.filterwarnings(NO_TRITON)
@pytest.mark.parametrize("T", [64, 200])
def test_gradients_of_strong_decays_are_exact(monkeypatch, T):
    """With transformers' own initial decays, its gradients of A_log and dt_bias are off in float32; ours are not."""
    ours, theirs = errors_of_both(monkeypatch, (2, 2, 16, 16), T, weak=False)
    assert max(ours) < 1e-5
    assert max(theirs[:2]) < 1e-5
    assert min(theirs[2:]) > 1e-4


def test_initial_decays():
    mixer = build(GatedDeltaNet, 64, n_heads=4, n_v_heads=2000, head_dim=1, conv=False).float()
    A, dt = mixer.A_log.detach().exp(), softplus(mixer.dt_bias.detach())
    assert A.min() > 0
    assert A.max() <= 16
    assert A.mean() == pytest.approx(8, abs=0.5)
    assert dt.min() > 0.999e-3
    assert dt.max() < 0.1001
    assert dt.log().mean() == pytest.approx(torch.tensor([1e-3, 0.1]).log().mean().item(), abs=0.1)
    for p in (mixer.A_log, mixer.dt_bias):
        assert p._no_weight_decay
        assert p._keep_float32


def test_every_option_changes_the_function():
    for cls, choices in (
        (DeltaNet, [{"conv": False}, {"gate": True}, {"n_heads": 2}, {"head_dim": 4}, {"expand_v": 2.0}]),
        (GatedDeltaNet, [{"conv": False}, {"gate": False}, {"n_heads": 2}, {"n_v_heads": 12}, {"head_dim": 6}]),
    ):
        base = build(cls)(X)[0]
        for options in choices:
            assert (build(cls, **options)(X)[0] - base).abs().max() > 1e-3, options


def test_states_have_closed_form_sizes():
    mixer = DeltaNet(32, n_heads=2)
    assert mixer.state_bytes(10) == mixer.state_bytes(1000) == 4 * (2 * 16 * 16 + 3 * 3 * 32)
    assert mixer.state_bytes(10, torch.bfloat16) == 4 * 2 * 16 * 16 + 2 * 3 * 3 * 32
    assert GatedDeltaNet(32, n_heads=2, head_dim=8, conv=False).state_bytes(10) == 4 * 2 * 8 * 16


def test_flops_closed_form():
    projections = 2 * 10 * (4 * 32 * 32 + 32 * 2)
    assert DeltaNet(32, n_heads=2).flops(10) == projections + 2 * 10 * 4 * 96 + 10 * 6 * 2 * 16 * 16


@pytest.mark.parametrize(
    ("cls", "options", "message"),
    [
        (DeltaNet, {"n_heads": 5}, r"n_heads \(5\) must divide d_model \(32\)"),
        (DeltaNet, {"n_heads": 0}, "n_heads must be at least 1"),
        (GatedDeltaNet, {"n_heads": 0}, "n_heads must be at least 1"),
        (GatedDeltaNet, {"n_heads": 2, "n_v_heads": 3}, r"n_v_heads \(3\) must be a multiple of n_heads \(2\)"),
        (GatedDeltaNet, {"head_dim": 0}, "head_dim must be at least 1"),
        (GatedDeltaNet, {"head_dim": 3, "expand_v": 1.5}, "must be a whole number"),
        (GatedDeltaNet, {"conv_kernel": 1}, "kernel_size must be at least 2"),
        (DeltaNet, {"backend": "triton"}, "backend must be one of auto, fla, torch"),
    ],
)
def test_bad_options_are_named(cls, options, message):
    with pytest.raises(ValueError, match=message):
        cls(32, **options)


def test_fla_is_refused_with_the_reason(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "float16 and bfloat16, not torch.float32" in fla_fault(torch.float32, decay=False, head_dim=64)
    assert fla_fault(torch.float32, decay=True, head_dim=64) is None
    assert "float64" in fla_fault(torch.float64, decay=True, head_dim=64)
    assert "head_dim up to 256, not 300" in fla_fault(torch.bfloat16, decay=True, head_dim=300)
    assert fla_fault(torch.bfloat16, decay=False, head_dim=64) is None
    with pytest.raises(ValueError, match=r"needs a cuda device|is not installed"):
        build(GatedDeltaNet, backend="fla")(X)


def test_versions_with_wrong_gradients_on_hopper_are_refused(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert hopper_fault("3.3.1", "0.4.0", decay=True) is None
    assert "triton>=3.7.1, or tilelang" in hopper_fault("3.4.0", "0.6.0", decay=True)
    assert "triton>=3.7.1, or tilelang" in hopper_fault("3.7.0+git1", "0.6.0", decay=True)
    assert hopper_fault("3.10.0", "0.6.0", decay=True) is None
    assert hopper_fault("3.3.1", "0.5.1", decay=False) is None
    assert "flash-linear-attention>=0.5.2" in hopper_fault("3.7.1", "0.5.1", decay=False)
    assert hopper_fault("3.5.0", "0.5.2", decay=False) is None
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name == "tilelang")
    assert hopper_fault("3.5.0", "0.6.0", decay=True) is None
