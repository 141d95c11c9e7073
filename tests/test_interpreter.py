"""The interpreter harness proves itself: fla's Triton kernels against naive recurrences, float32."""

import pytest
import torch
from torch import Tensor

from tests.interpreter import interpreted

B, T, H, K, V = 1, 20, 2, 16, 16


def naive(module, name, *args, **kwargs):
    """A naive function of fla, which needs no Triton at run time."""
    fla = pytest.importorskip(module)
    return getattr(fla, name)(*args, **kwargs)


def simple_gla(q, k, v, g, initial_state):
    return naive("fla.ops.simple_gla.naive", "naive_recurrent_simple_gla", q, k, v, g, initial_state=initial_state)


def gated_delta_rule(q, k, v, beta, g, initial_state):
    return naive(
        "fla.ops.gated_delta_rule.naive", "naive_recurrent_gated_delta_rule",
        q, k, v, beta, g, initial_state=initial_state, output_final_state=True,
    )  # fmt: skip


def rwkv6(r, k, v, w, u, scale, initial_state):
    r, k, v, w = (x.transpose(1, 2) for x in (r, k, v, w))  # this one has the heads first
    o, state = naive(
        "fla.ops.rwkv6.recurrent_naive", "naive_recurrent_rwkv6",
        r, k, v, w, u, scale=scale, initial_state=initial_state, output_final_state=True,
    )  # fmt: skip
    return o.transpose(1, 2), state


def rwkv7(r, w, k, v, a, b, scale, initial_state):
    """Written from the formula: S = (diag(e^w) + b aᵀ) S + k vᵀ, with S ``[K, V]``."""
    state, outputs = initial_state, []
    for i in range(T):
        erased = (a[:, i, :, :, None] * state).sum(2, keepdim=True)
        state = w[:, i, ..., None].exp() * state + b[:, i, ..., None] * erased + k[:, i, ..., None] * v[:, i, :, None]
        outputs.append(scale * (r[:, i, ..., None] * state).sum(2))
    return torch.stack(outputs, dim=1), state


def inputs(*names):
    generator = torch.Generator().manual_seed(5)
    tensors = {
        **{n: torch.randn(B, T, H, K, generator=generator) for n in "qrkv"},
        "g": -torch.rand(B, T, H, generator=generator),
        "w": -torch.rand(B, T, H, K, generator=generator),
        "u": torch.randn(H, K, generator=generator),
        "beta": torch.rand(B, T, H, generator=generator),
        "initial_state": torch.randn(B, H, K, V, generator=generator),
    }
    tensors["k"] = torch.nn.functional.normalize(tensors["k"], dim=-1)
    tensors["a"] = -tensors["k"]
    tensors["b"] = tensors["k"] * torch.rand(B, T, H, K, generator=generator)
    return {n: tensors[n].detach().requires_grad_() if n in tensors else 1.0 for n in names}


@pytest.mark.parametrize(
    ("function", "reference", "names"),
    [
        ("fla.ops.simple_gla:chunk_simple_gla", simple_gla, ("q", "k", "v", "g", "initial_state")),
        (
            "fla.ops.gated_delta_rule:chunk_gated_delta_rule",
            gated_delta_rule,
            ("q", "k", "v", "beta", "g", "initial_state"),
        ),
        ("fla.ops.rwkv6:chunk_rwkv6", rwkv6, ("r", "k", "v", "w", "u", "scale", "initial_state")),
        ("fla.ops.rwkv7:chunk_rwkv7", rwkv7, ("r", "w", "k", "v", "a", "b", "scale", "initial_state")),
    ],
    ids=lambda x: x.split(":")[1] if isinstance(x, str) else None,
)
def test_triton_kernels_agree_with_the_naive_recurrence(function, reference, names):
    kwargs = inputs(*names)
    tensors = {n: t for n, t in kwargs.items() if isinstance(t, Tensor)}
    expected = reference(**kwargs)
    generator = torch.Generator().manual_seed(6)
    grads = [torch.randn(e.shape, generator=generator) for e in expected]
    wanted = torch.autograd.grad(expected, list(tensors.values()), grads)
    outputs, found = interpreted(function, {**kwargs, "output_final_state": True}, grads)
    assert list(found) == list(tensors)
    for one, other in zip([*outputs, *found.values()], [*expected, *wanted], strict=True):
        assert (one - other).norm() < 1e-5 * other.norm()


def test_a_failure_brings_its_message_and_the_next_call_works():
    x = torch.randn(3, requires_grad=True)
    with pytest.raises(RuntimeError, match="must match the size"):
        interpreted("torch:add", {"input": x, "other": torch.ones(2)})
    outputs, grads = interpreted("torch:add", {"input": x, "other": 2.0}, [torch.ones(3)])
    assert torch.equal(outputs[0], x.detach() + 2)
    assert torch.equal(grads["input"], torch.ones(3))
