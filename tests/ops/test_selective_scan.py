"""Mamba-1's scan against the recurrence in float64, values and every gradient."""

from itertools import pairwise

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from seqarch.ops import selective_scan as module
from seqarch.ops.selective_scan import selective_scan, selective_scan_flops


def recurrence(x, delta, A, B, C, initial_state=None, decay_by_delta=True):
    h = torch.zeros(*x.shape[::2], B.shape[2], dtype=x.dtype) if initial_state is None else initial_state
    ys = []
    for t in range(x.shape[1]):
        if A is not None:
            h = h * ((delta[:, t, :, None] * A).exp() if decay_by_delta else A.exp())
        h = h + (delta[:, t] * x[:, t])[:, :, None] * B[:, t, None]
        ys.append((h * C[:, t, None]).sum(2))
    return torch.stack(ys, 1), h


def inputs(batch, T, D=6, N=3, *, decay=True, strength=1.0, state=True):
    r = torch.Generator().manual_seed(0)

    def noise(*shape):
        return torch.randn(*shape, generator=r, dtype=torch.float64)

    delta = torch.rand(batch, T, D, generator=r, dtype=torch.float64)
    A = -strength * torch.rand(D, N, generator=r, dtype=torch.float64)
    return [
        noise(batch, T, D),
        delta,
        A if decay else None,
        noise(batch, T, N),
        noise(batch, T, N),
        noise(batch, D, N) if state else None,
    ]


def run(function, tensors, dtype, **options):
    leaves = [None if t is None else t.detach().to(dtype).requires_grad_() for t in tensors]
    outputs = function(*leaves[:5], initial_state=leaves[5], **options)
    r = torch.Generator().manual_seed(1)
    weights = [torch.randn(o.shape, generator=r, dtype=torch.float64).to(dtype) for o in outputs]
    # Without any decay the last state does not read C, the first state none of the rest: all are used all the same.
    return [*outputs, *torch.autograd.grad(outputs, [t for t in leaves if t is not None], weights)]


def compare(tensors, dtype, tolerance, **options):
    for a, b in zip(
        run(selective_scan, tensors, dtype, **options),
        run(recurrence, tensors, torch.float64, **options),
        strict=True,
    ):
        assert (a.double() - b).norm() <= tolerance * b.norm()


@pytest.mark.parametrize("T", [1, 2, 15, 63, 64, 65, 130])
@pytest.mark.parametrize("state", [False, True])
def test_lengths_around_the_block(T, state):
    compare(inputs(2, T, state=state), torch.float64, 1e-12)


@pytest.mark.parametrize("options", [{"decay": True}, {"decay": False}, {"strength": 50.0}, {"strength": 0.0}])
@pytest.mark.parametrize("by_delta", [True, False])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-6)])
def test_decays(options, by_delta, dtype, tolerance):
    compare(inputs(2, 70, **options), dtype, tolerance, decay_by_delta=by_delta)


def test_long_sequences_in_float32():
    compare(inputs(1, 4096, 3, 2, strength=0.01), torch.float32, 1e-5)


def test_wide_states_take_smaller_blocks():
    tensors = inputs(4, 40, 512, 16, state=False)
    assert module._block_size(40, 4 * 512 * 16) == 16
    compare(tensors, torch.float32, 2e-6)


@pytest.mark.parametrize("decay", [True, False])
@pytest.mark.parametrize("by_delta", [True, False])
def test_packed_documents_are_separate_ones(decay, by_delta):
    bounds = [0, 1, 17, 17, 64, 70, 128, 140]
    leaves = [None if t is None else t.requires_grad_() for t in inputs(1, 140, decay=decay, state=False)[:5]]
    x, delta, A, B, C = leaves
    y, _ = selective_scan(*leaves, decay_by_delta=by_delta, cu_seqlens=torch.tensor(bounds, dtype=torch.int32))
    parts = [
        recurrence(x[:, a:b], delta[:, a:b], A, B[:, a:b], C[:, a:b], decay_by_delta=by_delta)[0]
        for a, b in pairwise(bounds)
        if a < b
    ]
    separate = torch.cat(parts, 1)
    torch.testing.assert_close(y, separate)
    weight = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=y.dtype)
    used = [t for t in leaves if t is not None]
    for a, b in zip(torch.autograd.grad(y, used, weight), torch.autograd.grad(separate, used, weight), strict=True):
        torch.testing.assert_close(a, b)


def test_two_calls_are_one():
    x, delta, A, B, C, _ = inputs(2, 100)
    whole, end = selective_scan(x, delta, A, B, C)
    first, state = selective_scan(x[:, :33], delta[:, :33], A, B[:, :33], C[:, :33])
    second, last = selective_scan(x[:, 33:], delta[:, 33:], A, B[:, 33:], C[:, 33:], initial_state=state)
    torch.testing.assert_close(torch.cat((first, second), 1), whole)
    torch.testing.assert_close(last, end)


def test_half_precision_keeps_its_dtype_and_a_wide_state():
    tensors = [None if t is None else t.bfloat16() for t in inputs(1, 20, state=False)]
    y, state = selective_scan(*tensors[:5])
    assert (y.dtype, state.dtype) == (torch.bfloat16, torch.float32)
    want, _ = recurrence(*(t.double() for t in tensors[:5]))
    assert (y.double() - want).norm() < 4e-3 * want.norm()


def test_nothing_of_size_btdn_is_kept():
    saved = []
    leaves = [t.float().requires_grad_() for t in inputs(1, 512, 32, 16, state=False)[:5]]
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        selective_scan(*leaves)
    states = 512 // 64 * 32 * 16
    assert sum(t.numel() for t in saved) <= sum(t.numel() for t in leaves) + states


@pytest.mark.parametrize("packed", [False, True])
def test_compiles_to_the_same(packed):
    leaves = [t.float().requires_grad_() for t in inputs(1, 70, state=False)[:5]]
    cu_seqlens = torch.tensor([0, 30, 70], dtype=torch.int32) if packed else None

    def function(*args):
        return selective_scan(*args, cu_seqlens=cu_seqlens)[0]

    y = torch.compile(function, backend="aot_eager", fullgraph=True)(*leaves)
    want = function(*leaves)
    torch.testing.assert_close(y, want)
    for a, b in zip(
        torch.autograd.grad(y.square().sum(), leaves), torch.autograd.grad(want.square().sum(), leaves), strict=True
    ):
        torch.testing.assert_close(a, b)


def test_flops_are_known_to_the_counter():
    x, delta, A, B, C, _ = inputs(2, 10)
    with FlopCounterMode(display=False) as counter:
        selective_scan(x, delta, A, B, C)
    assert counter.get_total_flops() == selective_scan_flops(20, 6, 3) == 20 * 6 * 3 * 6


def test_errors():
    x, delta, A, B, C, state = inputs(1, 8)
    with pytest.raises(ValueError, match="cu_seqlens and initial_state"):
        selective_scan(x, delta, A, B, C, initial_state=state, cu_seqlens=torch.tensor([0, 8], dtype=torch.int32))
