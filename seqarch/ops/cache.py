"""Preallocated caches."""

from __future__ import annotations

import torch
from torch import Tensor


def append(cache: Tensor, x: Tensor, start: int) -> Tensor:
    """``cache`` ``[B, max_len, …]`` with ``x`` ``[B, T, …]`` at positions ``start`` … ``start + T - 1``.

    In place where no gradient can flow; otherwise a copy, so that what autograd saved of the old cache stays valid.
    """
    end = start + x.shape[1]
    if torch.is_grad_enabled() and (x.requires_grad or cache.requires_grad):
        return cache.slice_scatter(x.to(cache.dtype), dim=1, start=start, end=end)
    cache[:, start:end] = x
    return cache
