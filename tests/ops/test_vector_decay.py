"""The recurrence with a decay per channel against a plain loop, in float64: values and gradients."""

from itertools import pairwise

import pytest
import torch

from seqarch.ops.vector_decay import vector_decay


def recurrence(q, k, v, g, bonus=None, initial_state=None):
    """The formula, token by token."""
    B, T, H, K = q.shape
    S = q.new_zeros(B, H, K, v.shape[-1]) if initial_state is None else initial_state
    out = []
    for t in range(T):
        kv = k[:, t, :, :, None] * v[:, t, :, None, :]
        read = S
        S = g[:, t].exp()[..., None] * S + kv
        read = S if bonus is None else read + bonus[:, :, None] * kv
        out.append((q[:, t, :, :, None] * read).sum(2))
    return torch.stack(out, 1), S


def inputs(T, B=2, H=3, K=5, V=4, decay=1.0, dtype=torch.float64, seed=0):
    """q, k, v, g, bonus, initial state; log decays spread over orders of magnitude around ``decay``."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    g = -decay * normal(B, T, H, K).exp()
    every = [normal(B, T, H, K), normal(B, T, H, K), normal(B, T, H, V), g, normal(H, K), normal(B, H, K, V)]
    return [t.to(dtype).requires_grad_() for t in every]


def both_passes(function, args, grads):
    outputs = function(*args)
    return [*outputs, *torch.autograd.grad(outputs, [a for a in args if a is not None], grads)]


def gradients_like(args, seed=1):
    generator = torch.Generator().manual_seed(seed)
    v, state = args[2], args[5]
    return [torch.randn(t.shape, generator=generator, dtype=t.dtype) for t in (v, state)]


def ours(q, k, v, g, bonus, initial_state):
    return vector_decay(q, k, v, g, bonus=bonus, initial_state=initial_state)


@pytest.mark.parametrize("with_bonus", [False, True])
@pytest.mark.parametrize("decay", [0.01, 1.0, 100.0])
@pytest.mark.parametrize("T", [1, 2, 3, 31, 32, 33, 70])
def test_recurrence(T, decay, with_bonus):
    args = inputs(T, decay=decay)
    grads = gradients_like(args)
    if not with_bonus:
        args[4] = None
    for actual, expected in zip(both_passes(ours, args, grads), both_passes(recurrence, args, grads), strict=True):
        torch.testing.assert_close(actual, expected, atol=1e-11, rtol=1e-9)


@pytest.mark.parametrize("chunk_size", [1, 4, 64])
def test_any_chunk_size(chunk_size):
    q, k, v, g, u, S = inputs(70)
    for bonus in (None, u):
        o, final = vector_decay(q, k, v, g, bonus=bonus, initial_state=S, chunk_size=chunk_size)
        expected, last = recurrence(q, k, v, g, bonus, S)
        torch.testing.assert_close(o, expected, atol=1e-11, rtol=1e-9)
        torch.testing.assert_close(final, last, atol=1e-11, rtol=1e-9)


@pytest.mark.parametrize("with_bonus", [False, True])
def test_packed_documents(with_bonus):
    bounds = [0, 1, 34, 34, 70, 102]  # a document of one token, of more than a chunk, of none, of a whole chunk
    q, k, v, g, u, S = inputs(102, B=1)
    bonus = u if with_bonus else None
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32)

    def packed(q, k, v, g, bonus, initial_state):
        return vector_decay(q, k, v, g, bonus=bonus, initial_state=initial_state, cu_seqlens=cu_seqlens)

    def separate(q, k, v, g, bonus, initial_state):
        out, state = [], initial_state
        for start, end in pairwise(bounds):
            if start < end:
                o, final = recurrence(*(t[:, start:end] for t in (q, k, v, g)), bonus, state)
                out.append(o)
                state = None
        return torch.cat(out, 1), final

    args = [q, k, v, g, bonus, S]
    grads = gradients_like(args)
    for actual, expected in zip(both_passes(packed, args, grads), both_passes(separate, args, grads), strict=True):
        torch.testing.assert_close(actual, expected, atol=1e-11, rtol=1e-9)


@pytest.mark.parametrize("decay", [1e-4, 1.0, 1e4])
def test_float32_over_a_long_sequence(decay):
    """Weak decays add up over the whole sequence, strong ones end in zeros; neither costs precision."""
    args = inputs(1500, B=1, H=1, K=4, V=4, decay=decay, dtype=torch.float32)
    grads = gradients_like(args)
    wide = [t.detach().double().requires_grad_() for t in args]
    expected = both_passes(recurrence, wide, [t.double() for t in grads])
    for actual, e in zip(both_passes(ours, args, grads), expected, strict=True):
        assert actual.isfinite().all()
        assert (actual.double() - e).norm() <= 3e-6 * e.norm() + 1e-30


def test_bfloat16_inputs_are_computed_in_float32():
    args = [t.detach() for t in inputs(70, dtype=torch.bfloat16)]
    o, state = ours(*args)
    assert o.dtype == torch.bfloat16
    assert state.dtype == torch.float32
    expected, last = recurrence(*(t.double() for t in args))
    assert (o.double() - expected).norm() < 3e-3 * expected.norm()
    assert (state.double() - last).norm() < 1e-6 * last.norm()


def test_agrees_with_fla():
    naive = pytest.importorskip("fla.ops.rwkv6.recurrent_naive").naive_recurrent_rwkv6
    args = inputs(70, dtype=torch.float32)
    q, k, v, g, u, S = args
    o, final = naive(*(t.transpose(1, 2) for t in (q, k, v, g)), u, 1.0, S, True)
    theirs = [o.transpose(1, 2), final]
    grads = gradients_like(args)
    expected = [*theirs, *torch.autograd.grad(theirs, args, grads)]
    for actual, e in zip(both_passes(ours, args, grads), expected, strict=True):
        assert (actual - e).norm() < 1e-5 * e.norm()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*Function'> should not be instantiated:DeprecationWarning")  # torch's own
def test_compiles_in_one_graph():
    args = inputs(40, dtype=torch.float32)
    grads = gradients_like(args)
    torch.compiler.reset()
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    for actual, e in zip(both_passes(compiled, args, grads), both_passes(ours, args, grads), strict=True):
        torch.testing.assert_close(actual, e, atol=1e-4, rtol=1e-4)
