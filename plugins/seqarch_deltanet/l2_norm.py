"""Normalisation of queries and keys to length one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_EPS = 1e-6


def l2_normalize(x: Tensor) -> Tensor:
    """x / √(Σx² + 1e-6) over the last dimension, in the dtype of x; statistics are at least float32."""
    if torch.compiler.is_compiling():
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return (wide * (wide.square().sum(-1, keepdim=True) + _EPS).rsqrt()).to(x.dtype)
    return _L2Normalize.apply(x)


class _L2Normalize(torch.autograd.Function):
    """Keeps its output, which the delta rule keeps anyway, and not its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        root = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().add_(_EPS).rsqrt_()
        y = (wide * root).to(x.dtype)
        ctx.save_for_backward(y, root)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        y, root = ctx.saved_tensors
        grad = grad_outputs[0]
        # dx = r·(dy - y·Σ(y·dy)), with r = 1/√(Σx² + ε)
        along = (y * grad).to(root.dtype).sum(-1, keepdim=True)
        return (grad - y * along).mul_(root).to(y.dtype)
