"""The chunked delta rule against a plain loop, in float64: values and gradients; and against fla's naive functions."""

from itertools import pairwise

import pytest
import torch
from torch.nn.functional import normalize

from seqarch.ops.delta_rule import delta_rule

C = 32


def recurrence(q, k, v, beta, g, initial_state, scale=None):
    """The formula, token by token."""
    S, out = initial_state, []
    for t in range(q.shape[1]):
        if g is not None:
            S = g[:, t].exp()[..., None, None] * S
        written = beta[:, t, :, None] * (v[:, t] - torch.einsum("bhkv,bhk->bhv", S, k[:, t]))
        S = S + k[:, t, :, :, None] * written[:, :, None]
        out.append(torch.einsum("bhkv,bhk->bhv", S, q[:, t]) * (q.shape[-1] ** -0.5 if scale is None else scale))
    return torch.stack(out, 1), S


def inputs(T, B=2, H=3, K=6, V=5, decay: float | None = 1.0, dtype=torch.float64, seed=0):
    """q, k, v, beta (0 to 2, both reached), g (uniform in ±decay around -decay), initial state."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    beta = 2 * torch.rand(B, T, H, generator=generator, dtype=torch.float64)
    beta[:, ::5], beta[:, 1::5], beta[:, 2::5] = 0, 1, 2
    g = None if decay is None else -decay * 2 * torch.rand(B, T, H, generator=generator, dtype=torch.float64)
    every = [normal(B, T, H, K), normalize(normal(B, T, H, K), dim=-1), normal(B, T, H, V), beta, g, normal(B, H, K, V)]
    return [None if t is None else t.to(dtype).requires_grad_() for t in every]


def chunked(q, k, v, beta, g, initial_state, **options):
    return delta_rule(q, k, v, beta, g, initial_state=initial_state, **options)


def both_passes(function, args, grads):
    outputs = function(*args)
    return [*outputs, *torch.autograd.grad(outputs, [a for a in args if a is not None], grads)]


def grads_for(args, seed=9):
    """Gradients for o and for the final state."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(t.shape, generator=generator, dtype=t.dtype) for t in (args[2], args[5])]


def assert_all_close(actual, expected, tolerance):
    """Relative to the largest value of each tensor."""
    for i, (a, e) in enumerate(zip(actual, expected, strict=True)):
        error = (a.double() - e.double()).abs().max() / e.abs().max().clamp(min=1e-3)
        assert error < tolerance, f"tensor {i}: {error:.3g}"


@pytest.mark.parametrize("decay", [None, 0.01, 1.0, 25.0])
@pytest.mark.parametrize("T", [1, 2, 5, C - 1, C, C + 1, 2 * C, 2 * C + 40])
def test_agrees_with_the_recurrence(T, decay):
    args = inputs(T, decay=decay)
    grads = grads_for(args)
    assert_all_close(both_passes(chunked, args, grads), both_passes(recurrence, args, grads), 1e-10)


@pytest.mark.parametrize("chunk_size", [16, 64, 128])
def test_chunk_size_changes_nothing(chunk_size):
    args = inputs(150)
    grads = grads_for(args)
    other = both_passes(lambda *a: chunked(*a, chunk_size=chunk_size), args, grads)
    assert_all_close(other, both_passes(chunked, args, grads), 1e-12)


def test_scale_and_missing_initial_state():
    q, k, v, beta, g, S = inputs(70)
    o, state = delta_rule(q, k, v, beta, g, scale=0.3)
    expected = recurrence(q, k, v, beta, g, torch.zeros_like(S), scale=0.3)
    assert_all_close((o, state), expected, 1e-12)


def test_gradient_of_either_output_alone():
    args = inputs(C + 7)
    for i in (0, 1):
        ours, theirs = (
            torch.autograd.grad(f(*args)[i].square().sum(), args, allow_unused=True) for f in (chunked, recurrence)
        )
        assert (ours[0] is None or not ours[0].any()) == (i == 1)  # the state does not depend on q
        assert_all_close(ours[1:], theirs[1:], 1e-10)


@pytest.mark.parametrize("decay", [None, 1.0])
def test_packed_documents_are_separate_ones(decay):
    bounds = [0, 1, 1, 34, 66, 67, 140]  # one token, none, a chunk and one, a whole chunk, one token, the rest
    args = inputs(bounds[-1], B=1, decay=decay)
    sequences = [a for a in args[:5] if a is not None]
    generator = torch.Generator().manual_seed(3)
    do = torch.randn(args[2].shape, generator=generator, dtype=torch.float64)
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32)
    packed = delta_rule(*args[:5], cu_seqlens=cu_seqlens)[0]
    pieces = []
    for a, b in pairwise(bounds):
        if a < b:
            piece = [None if x is None else x[:, a:b] for x in args[:5]]
            pieces.append(recurrence(*piece, torch.zeros_like(args[5]))[0])
    separate = torch.cat(pieces, dim=1)
    assert_all_close([packed], [separate], 1e-12)
    ours, theirs = (torch.autograd.grad(o, sequences, do) for o in (packed, separate))
    assert_all_close(ours, theirs, 1e-10)


def test_a_state_continues_the_sequence():
    args = inputs(150)
    whole = chunked(*args)
    state, out = args[5], []
    for a, b in pairwise([0, 1, 2, 70, 149, 150]):
        o, state = chunked(*(x[:, a:b] for x in args[:5]), state)
        out.append(o)
    assert_all_close((torch.cat(out, 1), state), whole, 1e-12)


def test_equal_keys_do_not_spoil_float32():
    """The triangular system is as badly conditioned as it gets: every token overwrites the one before."""
    q, k, v, beta, _, S = inputs(2 * C, dtype=torch.float32)
    k = k[:, :1].expand_as(k)
    beta = torch.ones_like(beta)
    o, state = delta_rule(q, k, v, beta, initial_state=S)
    expected = recurrence(*(x.double() for x in (q, k, v, beta)), None, S.double())
    assert_all_close((o, state), expected, 1e-5)


@pytest.mark.parametrize("decay", [None, 0.003, 1.0, 25.0])
def test_long_sequences_in_float32(decay):
    args = inputs(4000, B=1, H=2, K=16, V=16, decay=decay, dtype=torch.float32)
    grads = grads_for(args)
    wide = [None if a is None else a.detach().double().requires_grad_() for a in args]
    errors = zip(
        both_passes(chunked, args, grads), both_passes(chunked, wide, [g.double() for g in grads]), strict=True
    )
    for a, e in errors:
        assert ((a - e).norm() / e.norm().clamp(min=1e-3)) < 1e-5


def test_low_precision_is_computed_in_float32():
    args = [a.detach() for a in inputs(100, dtype=torch.float32)]
    low = [a.bfloat16() for a in args]
    o, state = chunked(*low)
    assert (o.dtype, state.dtype) == (torch.bfloat16, torch.float32)
    exact, exact_state = chunked(*(a.float() for a in low))
    torch.testing.assert_close(o, exact.bfloat16(), rtol=0, atol=0)
    torch.testing.assert_close(state, exact_state, rtol=0, atol=0)


def test_what_backward_keeps_grows_with_the_sequence_only():
    def kept(T):
        args = inputs(T, B=1, H=1, K=16, V=16, dtype=torch.float32)
        total = 0

        def pack(t):
            nonlocal total
            total += t.numel()
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            chunked(*args)
        return total

    # q, k and what is written, beta and g, C numbers of the inverse, and K·V / C of the states; a final state.
    assert kept(1024) <= 1024 * (3 * 16 + 2 + C + 16 * 16 // C) + 16 * 16
    assert kept(2048) <= 2 * kept(1024)


SHAPES = [(1, 64, 1, 8, 8), (2, 96, 2, 16, 8), (1, 160, 3, 8, 16)]


@pytest.mark.filterwarnings("ignore:Triton is not supported on current platform")
@pytest.mark.parametrize("shape", SHAPES)
def test_agrees_with_fla_plain(shape):
    naive = pytest.importorskip("fla.ops.delta_rule.naive")
    B, T, H, K, V = shape
    q, k, v, beta, _, S = (x.detach() for x in inputs(T, B, H, K, V, dtype=torch.float32))
    first = [x.transpose(1, 2) for x in (q, k, v, beta)]
    o, state = naive.delta_rule_recurrence(*first, initial_state=S)
    assert_all_close(delta_rule(q, k, v, beta, initial_state=S), (o.transpose(1, 2), state), 1e-5)
    o, state = naive.delta_rule_chunkwise(*first)
    assert_all_close(delta_rule(q, k, v, beta), (o.transpose(1, 2), state), 1e-5)


@pytest.mark.filterwarnings("ignore:Triton is not supported on current platform")
@pytest.mark.parametrize("shape", [*SHAPES, (2, 77, 2, 8, 8)])
def test_agrees_with_fla_gated(shape):
    naive = pytest.importorskip("fla.ops.gated_delta_rule.naive")
    B, T, H, K, V = shape
    q, k, v, beta, g, S = (x.detach() for x in inputs(T, B, H, K, V, dtype=torch.float32))
    ours = delta_rule(q, k, v, beta, g, initial_state=S)
    for function in (naive.naive_recurrent_gated_delta_rule, naive.naive_chunk_gated_delta_rule):
        theirs = function(q=q, k=k, v=v, beta=beta, g=g, initial_state=S, output_final_state=True)
        assert_all_close(ours, theirs, 1e-5)
