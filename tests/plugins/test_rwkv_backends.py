"""RWKV's fla backend: the real Triton kernels, in Triton's interpreter, against the torch backend."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from seqarch.ops.diagonal_low_rank import diagonal_low_rank
from seqarch.ops.vector_decay import vector_decay
from seqarch_rwkv import RWKV6
from tests.interpreter import interpreted

H, K, V = 2, 16, 16


def inputs(T, B, *, last):
    """Arguments of both recurrences by name; g within the bounds of RWKV-7."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    kk = F.normalize(normal(B, T, H, K), dim=-1)
    every = {
        "q": normal(B, T, H, K),
        "k": normal(B, T, H, K),
        "v": normal(B, T, H, V),
        "a": -kk,
        "b": kk * torch.rand(B, T, H, K, generator=generator),
        "g": -0.6 * torch.rand(B, T, H, K, generator=generator),
        "bonus": normal(H, K),
        "initial_state": normal(B, H, K, V),
    }
    return {name: every[name].requires_grad_() for name in (*"qkvg", *last)}


def assert_agreement(adapter, function, kwargs):
    tensors = {n: t for n, t in kwargs.items() if isinstance(t, Tensor) and t.requires_grad}
    expected = function(**kwargs)
    generator = torch.Generator().manual_seed(1)
    grads = [torch.randn(t.shape, generator=generator) for t in expected]
    wanted = torch.autograd.grad(expected, list(tensors.values()), grads)
    outputs, found = interpreted(f"seqarch_rwkv.backends:{adapter}", kwargs, grads)
    assert found.keys() == tensors.keys()
    results = zip(["o", "state", *tensors], [*outputs, *found.values()], [*expected, *wanted], strict=True)
    for name, one, other in results:
        assert (one - other).norm() < 1e-4 * other.norm(), name


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("adapter", "function", "last"),
    [
        ("fla_vector_decay", vector_decay, ("bonus",)),
        ("fla_diagonal_low_rank", diagonal_low_rank, ("a", "b")),
    ],
)
def test_kernels_agree_with_torch(adapter, function, last, packed):
    if packed:
        kwargs = inputs(37, 1, last=last)
        kwargs["cu_seqlens"] = torch.tensor([0, 20, 37], dtype=torch.int32)
    else:
        kwargs = inputs(37, 2, last=(*last, "initial_state"))
    assert_agreement(adapter, function, kwargs)


def official_rwkv7(r, w, k, v, a, b, state):
    """RWKV-LM's step, from the paper (arXiv 2503.14456): a state ``[V, K]``, S = S (diag(w) + a bᵀ) + v kᵀ, o = S r."""
    out = []
    for t in range(r.shape[1]):
        written = v[:, t, :, :, None] * k[:, t, :, None, :]
        erased = (state @ a[:, t, :, :, None]) @ b[:, t, :, None, :]
        state = state * w[:, t, :, None, :].exp() + erased + written
        out.append((state @ r[:, t, :, :, None])[..., 0])
    return torch.stack(out, 1), state


def test_flas_rwkv7_takes_the_official_state_transposed():
    """Given an initial state as the official kernel lays it out, fla differs: it holds the transposed one."""
    kwargs = {n: t.detach() for n, t in inputs(9, 1, last=("a", "b", "initial_state")).items()}
    state = kwargs.pop("initial_state")
    q, k, v, g, a, b = (kwargs[n] for n in "qkvgab")
    expected, final = official_rwkv7(q, g, k, v, a, b, state)

    as_it_is, _ = interpreted("seqarch_rwkv.backends:fla_diagonal_low_rank", {**kwargs, "initial_state": state})
    assert (as_it_is[0] - expected).norm() > 0.1 * expected.norm()
    turned = {**kwargs, "initial_state": state.mT.contiguous()}
    transposed, _ = interpreted("seqarch_rwkv.backends:fla_diagonal_low_rank", turned)
    for o, s in (transposed, diagonal_low_rank(**turned)):
        assert (o - expected).norm() < 1e-4 * expected.norm()
        assert (s.mT - final).norm() < 1e-4 * final.norm()


def test_float64_and_the_cpu_are_refused_with_a_reason():
    mixer = RWKV6(32, n_heads=2, backend="fla")
    with pytest.raises(ValueError, match=r"backend='fla' cannot be used: (needs a cuda device|package fla)"):
        mixer(torch.zeros(1, 4, 32))
    assert "float64" in str(mixer.refuses("fla", "cuda", torch.float64))
