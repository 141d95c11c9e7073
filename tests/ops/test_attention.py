"""Linear-memory attention against the formula with all scores written out."""

import pytest
import torch

from seqarch.ops.attention import add_alibi, alibi_slopes, causal_attention
from seqarch.ops.cache import append


def dense(q, k, v, scale, window=None, cu_seqlens=None, slopes=None):
    """softmax over visible keys, straight from the definition."""
    T, S, group = q.shape[1], k.shape[1], q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
    scores = torch.einsum("bthd,bshd->bhts", q, k) * scale
    i, j = torch.arange(S - T, S)[:, None], torch.arange(S)
    visible = j <= i
    if window is not None:
        visible &= i - j < window
    if cu_seqlens is not None:
        document = torch.bucketize(torch.arange(S), cu_seqlens[1:].long(), right=True)
        visible &= document[i] == document
    if slopes is not None:
        scores = scores - torch.tensor(slopes, dtype=q.dtype)[:, None, None] * (i - j)
    return torch.einsum("bhts,bshd->bthd", scores.masked_fill(~visible, -torch.inf).softmax(-1), v)


def heads(B, T, S, H, G, D=8):
    g = torch.Generator().manual_seed(T * S + H)
    shapes = ((B, T, H, D), (B, S, G, D), (B, S, G, D))
    return [torch.randn(s, generator=g, dtype=torch.float64, requires_grad=True) for s in shapes]


@pytest.mark.parametrize("window", [None, 1, 3, 8, 40])
@pytest.mark.parametrize(("T", "S"), [(1, 1), (7, 7), (8, 8), (25, 25), (1, 9), (5, 21), (17, 18)])
def test_values_and_gradients(T, S, window):
    q, k, v = heads(2, T, S, 4, 2)
    ours, expected = causal_attention(q, k, v, scale=0.3, window=window), dense(q, k, v, 0.3, window)
    torch.testing.assert_close(ours, expected)
    dy = torch.randn_like(ours)
    torch.testing.assert_close(
        torch.autograd.grad(ours, (q, k, v), dy), torch.autograd.grad(expected, (q, k, v), dy), atol=1e-12, rtol=1e-9
    )


def test_continued_queries_come_in_blocks(monkeypatch):
    monkeypatch.setattr("seqarch.ops.attention._ROWS", 4)
    q, k, v = heads(1, 11, 30, 2, 1)
    torch.testing.assert_close(causal_attention(q, k, v, scale=1.0), dense(q, k, v, 1.0))


@pytest.mark.parametrize("window", [None, 4])
def test_documents_do_not_see_each_other(window):
    q, k, v = heads(1, 20, 20, 2, 2)
    cu_seqlens = torch.tensor([0, 1, 9, 9, 20], dtype=torch.int32)  # one of them empty
    ours = causal_attention(q, k, v, scale=0.5, window=window, cu_seqlens=cu_seqlens)
    torch.testing.assert_close(ours, dense(q, k, v, 0.5, window, cu_seqlens))


@pytest.mark.parametrize("window", [None, 5])
def test_alibi_is_the_bias(window):
    q, k, v = heads(2, 30, 30, 6, 6)
    slopes = alibi_slopes(6)
    features = add_alibi(q, k, v, torch.tensor(slopes), 0.3)
    assert {t.shape[-1] for t in features} == {16}
    ours = causal_attention(*features, scale=0.3, window=window)[..., :8]
    torch.testing.assert_close(ours, dense(q, k, v, 0.3, window, slopes=slopes), atol=1e-6, rtol=1e-6)


def test_alibi_positions_are_exact_in_bfloat16():
    """Positions far beyond bfloat16's 256: the digits carry them."""
    S = 70_000
    k = torch.zeros(1, S, 1, 5, dtype=torch.bfloat16)
    q, k, _ = add_alibi(k[:, :1], k, k, torch.tensor([0.5]), 1.0)
    torch.testing.assert_close((k.float() @ q[0, 0, 0].float()).flatten(), 0.5 * torch.arange(S).float())


def test_alibi_slopes_as_published():
    assert alibi_slopes(8) == [1 / 2**i for i in range(1, 9)]
    assert alibi_slopes(3) == [2**-4.0, 2**-8.0, 2**-2.0]  # the official code's rule beside powers of two


def test_memory_of_a_window_grows_as_the_length():
    """The largest tensor of windowed attention has T · 2W scores' mask, or T · 2D features; never T · T."""
    from torch.utils._python_dispatch import TorchDispatchMode

    sizes = []

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            sizes.extend(t.numel() for t in (out if isinstance(out, tuple) else [out]) if isinstance(t, torch.Tensor))
            return out

    T, W = 4096, 16
    q, k, v = (torch.randn(1, T, 1, 8) for _ in range(3))
    with Record():
        causal_attention(q, k, v, scale=1.0, window=W)
    assert max(sizes) <= T * 2 * W


def test_append_in_place_without_gradient_and_as_a_copy_with_it():
    cache, x = torch.zeros(1, 5, 2), torch.ones(1, 2, 2)
    assert append(cache, x, 1) is cache
    assert cache[0, :, 0].tolist() == [0, 1, 1, 0, 0]
    y = (2 * x).requires_grad_()
    new = append(cache, y, 3)
    assert cache[0, :, 0].tolist() == [0, 1, 1, 0, 0]
    assert new[0, :, 0].tolist() == [0, 1, 1, 2, 2]
    (grad,) = torch.autograd.grad(new.sum(), y)
    assert torch.equal(grad, torch.ones_like(y))
