"""RWKV-7's recurrence in chunks against a plain loop, in float64: values and gradients."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

from seqarch.ops.diagonal_low_rank import diagonal_low_rank


def recurrence(q, k, v, a, b, g, initial_state=None):
    """The formula, token by token."""
    B, T, H, K = q.shape
    S = q.new_zeros(B, H, K, v.shape[-1]) if initial_state is None else initial_state
    out = []
    for t in range(T):
        read = torch.einsum("bhk,bhkv->bhv", a[:, t], S)
        S = g[:, t].exp()[..., None] * S + b[:, t, :, :, None] * read[:, :, None]
        S = S + k[:, t, :, :, None] * v[:, t, :, None, :]
        out.append(torch.einsum("bhk,bhkv->bhv", q[:, t], S))
    return torch.stack(out, 1), S


def inputs(T, B=2, H=3, K=5, V=4, decay=1.0, dtype=torch.float64, seed=0):
    """q, k, v, a, b, g and an initial state, a and b as RWKV-7 makes them, so that the state stays bounded."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    kk = F.normalize(normal(B, T, H, K), dim=-1)
    b = kk * normal(B, T, H, K).sigmoid()
    g = -decay * normal(B, T, H, K).exp()
    every = [normal(B, T, H, K), normal(B, T, H, K), normal(B, T, H, V), -kk, b, g, normal(B, H, K, V)]
    return [t.to(dtype).requires_grad_() for t in every]


def both_passes(function, args):
    outputs = function(*args)
    generator = torch.Generator().manual_seed(1)
    grads = [torch.randn(t.shape, generator=generator, dtype=torch.float64).to(t.dtype) for t in outputs]
    return [*outputs, *torch.autograd.grad(outputs, args, grads)]


def ours(q, k, v, a, b, g, initial_state):
    return diagonal_low_rank(q, k, v, a, b, g, initial_state=initial_state)


@pytest.mark.parametrize("decay", [0.01, 1.0, 100.0])
@pytest.mark.parametrize("T", [1, 2, 3, 31, 32, 33, 70])
def test_recurrence(T, decay):
    args = inputs(T, decay=decay)
    for actual, expected in zip(both_passes(ours, args), both_passes(recurrence, args), strict=True):
        torch.testing.assert_close(actual, expected, atol=1e-10, rtol=1e-9)


@pytest.mark.parametrize("chunk_size", [1, 4, 64])
def test_any_chunk_size(chunk_size):
    *args, S = inputs(70)
    actual = diagonal_low_rank(*args, initial_state=S, chunk_size=chunk_size)
    for one, other in zip(actual, recurrence(*args, S), strict=True):
        torch.testing.assert_close(one, other, atol=1e-10, rtol=1e-9)


def test_packed_documents():
    bounds = [0, 1, 34, 34, 70, 102]  # a document of one token, of more than a chunk, of none, of a whole chunk
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32)

    def packed(*args):
        return diagonal_low_rank(*args[:-1], initial_state=args[-1], cu_seqlens=cu_seqlens)

    def separate(*args):
        out, state = [], args[-1]
        for start, end in pairwise(bounds):
            if start < end:
                o, final = recurrence(*(t[:, start:end] for t in args[:-1]), state)
                out.append(o)
                state = None
        return torch.cat(out, 1), final

    args = inputs(102, B=1)
    for actual, expected in zip(both_passes(packed, args), both_passes(separate, args), strict=True):
        torch.testing.assert_close(actual, expected, atol=1e-10, rtol=1e-9)


@pytest.mark.parametrize("decay", [1e-4, 1.0, 1e4])
def test_float32_over_a_long_sequence(decay):
    args = inputs(1000, B=1, H=1, K=4, V=4, decay=decay, dtype=torch.float32)
    wide = [t.detach().double().requires_grad_() for t in args]
    for actual, e in zip(both_passes(ours, args), both_passes(recurrence, wide), strict=True):
        assert actual.isfinite().all()
        assert (actual.double() - e).norm() <= 1e-5 * e.norm() + 1e-30


def test_agrees_with_fla():
    dplr_recurrence = pytest.importorskip("fla.ops.generalized_delta_rule.dplr.naive").dplr_recurrence
    args = inputs(40, dtype=torch.float32)

    def theirs(q, k, v, a, b, g, initial_state):
        heads_first = [t.transpose(1, 2) for t in (q, k, v, a, b, g)]
        o, final = dplr_recurrence(*heads_first, initial_state)
        return o.transpose(1, 2) * q.shape[-1] ** 0.5, final  # it scales q

    for actual, e in zip(both_passes(ours, args), both_passes(theirs, args), strict=True):
        assert (actual - e).norm() < 1e-5 * e.norm()


def test_bfloat16_inputs_are_computed_in_float32():
    args = [t.detach() for t in inputs(70, dtype=torch.bfloat16)]
    o, state = ours(*args)
    assert o.dtype == torch.bfloat16
    assert state.dtype == torch.float32
    expected, last = recurrence(*(t.double() for t in args))
    assert (o.double() - expected).norm() < 3e-3 * expected.norm()
    assert (state.double() - last).norm() < 1e-5 * last.norm()
