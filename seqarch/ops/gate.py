"""Gates."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


def gated_silu(gate: Tensor, x: Tensor) -> Tensor:
    """SiLU(gate) ⊙ x, both of one shape; backward recomputes SiLU instead of keeping it."""
    if torch.compiler.is_compiling():
        return F.silu(gate) * x
    return _GatedSiLU.apply(gate, x)


class _GatedSiLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, x: Tensor) -> Tensor:
        ctx.save_for_backward(gate, x)
        return F.silu(gate).mul_(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        gate, x = ctx.saved_tensors
        grad = grad_outputs[0]
        sigmoid = gate.sigmoid()
        silu = gate * sigmoid
        grad_x = grad * silu
        # SiLU'(g) = σ(g) + SiLU(g)·(1 - σ(g))
        slope = torch.addcmul(silu, silu, sigmoid, value=-1).add_(sigmoid)
        return slope.mul_(x).mul_(grad), grad_x
