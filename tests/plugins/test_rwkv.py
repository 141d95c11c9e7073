"""RWKV-5, 6 and 7 against flash-linear-attention's parameters and naive recurrences, and against their formulas."""

from functools import partial

import pytest
import torch

from seqarch.model import SequenceModel, SwiGLU
from seqarch_attention import Attention
from seqarch_rwkv import RWKV5, RWKV6, RWKV7
from tests.plugins import peers

D, H, B, T = 32, 2, 2, 41
RANKS = {"decay_rank": 8, "a_rank": 6, "v_rank": 4, "gate_rank": 10}


def noise(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def perturbed(module):
    """Initial values of zero would hide faults."""
    with torch.no_grad():
        for i, p in enumerate(module.parameters()):
            p.add_(0.2 * noise(*p.shape, seed=i))
    return module


def fla_rwkv6():
    pytest.importorskip("fla.layers")
    return peers.rwkv6_layer(D, H, mix_rank=4, decay_rank=8)


def fla_rwkv7(layer_idx):
    pytest.importorskip("fla.layers")
    return peers.rwkv7_layer(D, H, layer_idx, 3, **RANKS)


def our_rwkv6():
    return RWKV6(D, n_heads=H, mix_rank=4, decay_rank=8)


def our_rwkv7(layer_idx, **options):
    return RWKV7(D, n_heads=H, layer_idx=layer_idx, n_layers=3, **RANKS, **options)


FLA_WARNS = pytest.mark.filterwarnings("ignore:According to Bo:UserWarning")


@FLA_WARNS
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [(our_rwkv6, fla_rwkv6), *((partial(our_rwkv7, i), partial(fla_rwkv7, i)) for i in (0, 1))],
    ids=["rwkv6", "rwkv7-0", "rwkv7-1"],
)
def test_state_dicts_load_both_ways(ours, theirs):
    theirs, ours = perturbed(theirs()), ours()
    ours.load_state_dict(theirs.state_dict(), strict=True)
    theirs.load_state_dict(perturbed(ours).state_dict(), strict=True)
    for (name, one), (other_name, other) in zip(
        sorted(ours.state_dict().items()), sorted(theirs.state_dict().items()), strict=True
    ):
        assert name == other_name
        assert torch.equal(one, other)


@FLA_WARNS
@pytest.mark.parametrize("layer_idx", [0, 2])
def test_initial_values_of_rwkv7_are_flas(layer_idx):
    """Where they are not random; at this commit of fla, layer_idx and depth decide."""
    ours, theirs = our_rwkv7(layer_idx).state_dict(), fla_rwkv7(layer_idx).state_dict()
    random = {"r_proj.weight", "k_proj.weight", "v_proj.weight"} | {n for n in ours if n.endswith("lora.2.weight")}
    for name in ours.keys() - random:
        torch.testing.assert_close(ours[name], theirs[name], atol=1e-6, rtol=1e-6, msg=name)
    for name in random:
        assert abs(ours[name].norm() / theirs[name].norm() - 1) < 1e-4, name


def relative(one, other):
    return ((one - other).norm() / other.norm()).item()


@FLA_WARNS
def test_rwkv6_agrees_with_flas_recurrence():
    theirs, ours = perturbed(fla_rwkv6()), our_rwkv6()
    ours.load_state_dict(theirs.state_dict())
    x = noise(B, T, D).requires_grad_()
    assert_agreement(ours, theirs, x, peers.rwkv6_output(theirs, x))


def assert_agreement(ours, theirs, x, expected, context=None):
    """Outputs and all gradients within 1e-4."""
    y = ours(x)[0] if context is None else ours(x, context=context)[0]
    dy = noise(*y.shape, seed=9)
    names = [n for n, _ in theirs.named_parameters()]
    wanted = torch.autograd.grad(expected, [x, *(theirs.get_parameter(n) for n in names)], dy)
    found = torch.autograd.grad(y, [x, *(ours.get_parameter(n) for n in names)], dy)
    assert relative(y, expected) < 1e-5
    for name, one, other in zip(["x", *names], found, wanted, strict=True):
        assert relative(one, other) < 1e-4, name


@FLA_WARNS
@pytest.mark.parametrize("layer_idx", [0, 2])
def test_rwkv7_agrees_with_flas_recurrence(layer_idx):
    theirs, ours = perturbed(fla_rwkv7(layer_idx)), our_rwkv7(layer_idx)
    ours.load_state_dict(theirs.state_dict())
    x, v_first = noise(B, T, D).requires_grad_(), noise(B, T, D, seed=3)
    shared = {"v_first": v_first} if layer_idx else {}
    assert_agreement(ours, theirs, x, peers.rwkv7_output(theirs, x, **shared), shared)


def test_rwkv5_is_rwkv6_with_constant_decays_and_mixes():
    five, six = perturbed(RWKV5(D, n_heads=H)), our_rwkv6()
    six.load_state_dict(peers.rwkv5_as_rwkv6(five.state_dict(), mix_rank=4, decay_rank=8))
    x = noise(B, T, D)
    assert relative(five(x)[0], six(x)[0]) < 1e-5


def test_initial_decays_of_rwkv6_depend_on_depth():
    first = RWKV6(D, layer_idx=0, n_layers=4).w_proj.linear.bias
    last = RWKV6(D, layer_idx=3, n_layers=4).w_proj.linear.bias
    for decay in (first, last):
        assert decay[0] == -6.0
        assert abs(decay[-1] + 1.0) < 1e-6
        assert (decay.diff() > 0).all()
    assert (first[1:-1] > last[1:-1]).all()


@pytest.mark.parametrize("mixer", [RWKV5, RWKV6, partial(RWKV7, n_heads=4)])
def test_decays_mixes_and_norms_are_marked(mixer):
    mixer = mixer(D)
    for name, p in mixer.named_parameters():
        matrix = p.ndim == 2 and name.endswith("weight")
        assert getattr(p, "_no_weight_decay", False) is not matrix, name
        assert getattr(p, "_keep_float32", False) is not matrix, name


# --- the context that layers of RWKV-7 share --------------------------------------------------------------------------


def model(mixers, **options):
    with torch.device("meta"):
        made = SequenceModel(50, D, 3, mixers, SwiGLU, **options)
    made.materialise("cpu", seed=0)
    return perturbed(made)


@pytest.mark.parametrize(
    "mixers",
    [partial(RWKV7, n_heads=H), [partial(Attention, n_heads=H), partial(RWKV7, n_heads=H), partial(RWKV7, n_heads=H)]],
    ids=["rwkv7", "hybrid"],
)
def test_activation_checkpointing_changes_nothing(mixers):
    """Also the gradient that reaches the first layer's values from later ones."""
    ids = torch.randint(50, (2, 12), generator=torch.Generator().manual_seed(0))
    results = []
    for flag in (False, True):
        made = model(mixers, activation_checkpointing=flag)
        loss = made(ids, labels=ids)
        loss.objective.backward()
        results.append({n: p.grad for n, p in made.named_parameters()})
    for name, grad in results[0].items():
        assert grad is not None, name
        assert torch.equal(grad, results[1][name]), name


def test_later_layers_depend_on_the_first_layers_values():
    made = model(partial(RWKV7, n_heads=H))
    ids = torch.randint(50, (2, 12), generator=torch.Generator().manual_seed(0))
    first, later = made.mixers[0], made.mixers[2]
    seen = {}

    def capture(module, args, kwargs):
        seen["v_first"] = kwargs["context"]["v_first"]

    later.register_forward_pre_hook(capture, with_kwargs=True)
    loss = made(ids, labels=ids)
    gradient = torch.autograd.grad(loss.objective, [seen["v_first"], first.v_proj.weight])
    assert all(g.abs().max() > 0 for g in gradient)


@pytest.mark.parametrize(
    ("mixer", "message"),
    [
        (partial(RWKV6, n_heads=3), r"n_heads \(3\) must divide expand_k · d_model \(16\)"),
        (partial(RWKV6, expand_k=0.3), r"expand_k \(0.3\) times d_model \(32\) must be a whole number"),
        (partial(RWKV6, mix_rank=0), "mix_rank must be at least 1"),
        (partial(RWKV5, n_heads=0), "n_heads must be at least 1"),
        (RWKV7, r"head_dim \(64\) must divide d_model \(32\), or give n_heads"),
        (partial(RWKV7, n_heads=5), r"n_heads \(5\) must divide d_model \(32\)"),
        (partial(RWKV7, n_heads=2, head_dim=8), r"n_heads \(2\) times head_dim \(8\) must be d_model \(32\)"),
        (partial(RWKV7, n_heads=2, gate_rank=0), "gate_rank must be at least 1"),
        (partial(RWKV7, n_heads=2, backend="triton"), "backend must be one of auto, fla, torch"),
    ],
)
def test_bad_options_are_named(mixer, message):
    with pytest.raises(ValueError, match=message):
        mixer(D)
