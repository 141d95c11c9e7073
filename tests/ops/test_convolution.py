"""The short convolution against torch's, and what a token sees of the ones before it."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from seqarch.ops.convolution import ShortConvolution, token_shift


def build(channels=6, kernel_size=4, bias=True):
    torch.manual_seed(0)
    return ShortConvolution(channels, kernel_size, bias=bias).double()


def reference(conv, x):
    K = conv.kernel_size
    y = F.conv1d(F.pad(x.mT, (K - 1, 0)), conv.weight, conv.bias, groups=conv.channels)
    return F.silu(y.mT)


def grads(y, x, conv):
    weight = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=y.dtype)
    return torch.autograd.grad(y, [x, *conv.parameters()], weight)


@pytest.mark.parametrize("T", [1, 2, 3, 4, 9, 300])
@pytest.mark.parametrize("kernel_size", [2, 4, 5])
@pytest.mark.parametrize("bias", [True, False])
def test_values_and_gradients(T, kernel_size, bias):
    conv = build(kernel_size=kernel_size, bias=bias)
    x = torch.randn(2, T, 6, dtype=torch.float64, requires_grad=True)
    y, state = conv(x)
    assert state is None
    want = reference(conv, x)
    torch.testing.assert_close(y, want)
    for a, b in zip(grads(y, x, conv), grads(want, x, conv), strict=True):
        torch.testing.assert_close(a, b)


def test_it_is_depthwise_conv1d():
    conv, theirs = build(), nn.Conv1d(6, 6, 4, groups=6, padding=3).double()
    theirs.load_state_dict(conv.state_dict())
    x = torch.randn(2, 9, 6, dtype=torch.float64)
    torch.testing.assert_close(conv(x)[0], F.silu(theirs(x.mT)[..., :9].mT))


@pytest.mark.parametrize("bounds", [(0, 12), (0, 1, 12), (0, 2, 4, 6, 12), (0, 5, 5, 12)])
def test_packed_documents_are_separate_ones(bounds):
    conv = build()
    x = torch.randn(1, 12, 6, dtype=torch.float64, requires_grad=True)
    y, _ = conv(x, cu_seqlens=torch.tensor(bounds, dtype=torch.int32))
    want = torch.cat([reference(conv, x[:, a:b]) for a, b in pairwise(bounds) if a < b], 1)
    torch.testing.assert_close(y, want)
    for a, b in zip(grads(y, x, conv), grads(want, x, conv), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("cut", [1, 2, 7])
def test_two_calls_are_one(cut):
    conv = build()
    x = torch.randn(2, 9, 6, dtype=torch.float64, requires_grad=True)
    first, state = conv(x[:, :cut], state=conv.init_state(2))
    second, state = conv(x[:, cut:], state=state)
    y = torch.cat((first, second), 1)
    want = reference(conv, x)
    torch.testing.assert_close(y, want)
    torch.testing.assert_close(state, x[:, -3:])
    for a, b in zip(grads(y, x, conv), grads(want, x, conv), strict=True):
        torch.testing.assert_close(a, b)


def test_non_contiguous_input():
    conv = build()
    wide = torch.randn(2, 9, 20, dtype=torch.float64)
    torch.testing.assert_close(conv(wide[..., 3:9])[0], reference(conv, wide[..., 3:9]))


def test_half_precision_is_wide_inside():
    conv = build().bfloat16()
    x = torch.randn(1, 9, 6).bfloat16()
    y, _ = conv(x)
    assert y.dtype == torch.bfloat16
    want = reference(conv.double(), x.double())
    torch.testing.assert_close(y.double(), want, atol=0, rtol=2**-8)


def test_kernel_size_is_checked():
    with pytest.raises(ValueError, match="kernel_size must be at least 2, got 1"):
        ShortConvolution(4, 1)


def test_token_shift():
    x = torch.arange(1.0, 7).view(1, 6, 1)
    assert token_shift(x)[0].flatten().tolist() == [0, 1, 2, 3, 4, 5]
    cu_seqlens = torch.tensor([0, 2, 3, 6], dtype=torch.int32)
    assert token_shift(x, cu_seqlens=cu_seqlens)[0].flatten().tolist() == [0, 1, 0, 0, 4, 5]
    shifted, state = token_shift(x, state=torch.full((1, 1), 9.0))
    assert shifted.flatten().tolist() == [9, 1, 2, 3, 4, 5]
    assert state.tolist() == [[6]]


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(("T", "kernel_size"), [(1, 4), (2, 4), (300, 4), (70, 2)])
def test_float32_in_several_blocks(batch, T, kernel_size):
    conv = build(600, kernel_size)
    x = torch.randn(batch, T, 620, dtype=torch.float64)[..., 7:607].requires_grad_()
    want = reference(conv, x)
    wanted = grads(want, x, conv)
    conv.float()
    short = x.detach().float().requires_grad_()
    y, _ = conv(short)
    for a, b in zip((y, *grads(y.double(), short, conv)), (want, *wanted), strict=True):
        assert (a.double() - b).norm() < 1e-6 * b.norm()
