"""RMS normalisation that keeps less for backward than autograd would."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


class RMSNorm(nn.RMSNorm):
    """``torch.nn.RMSNorm`` over the last dimension (Zhang and Sennrich 2019, arXiv 1910.07467) with a lean backward.

    Args:
        dim: Size of the last dimension.
        eps: Added to the mean square.
    """

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__(dim, eps=eps)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[..., dim]`` to the same shape and dtype; statistics are at least float32."""
        if x.device.type != "cpu" or torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return super().forward(x)  # fused there already
        return _RMSNorm.apply(x, self.weight, self.eps)


class _RMSNorm(torch.autograd.Function):
    """Eager autograd keeps the square, the normalised input and the root; x and the root suffice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        root = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, root)
        return (wide * root).mul_(weight).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight, root = ctx.saved_tensors
        normed = x * root
        grad = grad_outputs[0].to(normed.dtype)
        weighted = grad * normed
        grad_weight = weighted.flatten(0, -2).sum(0) if x.ndim > 1 else weighted
        # dx = r·(g·w - n·mean(g·w·n)), with n the normalised input and r the root
        mean = (weighted @ weight.to(weighted.dtype)).div_(x.shape[-1]).unsqueeze(-1)
        grad_x = (grad * weight).addcmul_(normed, mean, value=-1).mul_(root)
        return grad_x.to(x.dtype), grad_weight.to(weight.dtype), None
