"""The counters that ``check_flops`` and ``check_recurrent`` compare with."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from seqarch.testing.accounting import _count


@pytest.mark.parametrize("backend", [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_attention_is_seen_whole_whatever_serves_it(backend: SDPBackend, dtype: torch.dtype) -> None:
    B, H, T, S, D = 2, 3, 32, 48, 16
    q, k, v = torch.randn(B, H, T, D, dtype=dtype), *torch.randn(2, B, H, S, D, dtype=dtype)
    with sdpa_kernel(backend):
        flops, _ = _count(lambda: F.scaled_dot_product_attention(q, k, v))
    assert flops == 2 * 2 * B * H * T * S * D


def test_linear_layers_and_convolutions() -> None:
    linear, conv = nn.Linear(8, 24), nn.Conv1d(8, 8, 4, groups=8, bias=False)
    x = torch.randn(2, 10, 8)
    assert _count(lambda: linear(x))[0] == 2 * 2 * 10 * 8 * 24
    assert _count(lambda: conv(x.transpose(1, 2)))[0] == 2 * 2 * 7 * 8 * 4


def test_elements_of_elementwise_operators() -> None:
    x, y = torch.randn(4, 6), torch.randn(4, 6)
    assert _count(lambda: x.exp()) == (0, 24)
    assert _count(lambda: x.sum()) == (0, 24)
    assert _count(lambda: x * y) == (0, 48)
    assert _count(lambda: x[:, None] * y) == (0, 96)
    assert _count(lambda: x.t().unsqueeze(0).expand(5, 6, 4)[:, 1:]) == (0, 0)


def test_products_that_add_in_place() -> None:
    a, b = torch.randn(3, 4, 5), torch.randn(3, 5, 6)
    assert _count(lambda: torch.zeros(3, 4, 6).baddbmm_(a, b))[0] == 2 * 3 * 4 * 5 * 6
    assert _count(lambda: torch.zeros(4, 6).addmm_(a[0], b[0]))[0] == 2 * 4 * 5 * 6
