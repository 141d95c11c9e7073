"""RMS normalisation with a SiLU gate, before or after it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from seqarch.mixer import no_weight_decay


class GatedRMSNorm(nn.Module):
    """RMS(x ⊙ SiLU(z)) ⊙ w with the gate first (Mamba-2), or RMS(x) ⊙ w ⊙ SiLU(z) (Gated DeltaNet).

    RMS(u) = u / √(mean(u²) + eps) over the last dimension. Backward keeps x, z and one number a row.

    Args:
        dim: Size of the last dimension.
        eps: Added to the mean square.
        gate_first: Gate before the norm.
        n_groups: Equal parts of the last dimension that are normalised each by itself.
    """

    def __init__(self, dim: int, eps: float = 1e-5, *, gate_first: bool, n_groups: int = 1) -> None:
        super().__init__()
        if dim % n_groups:
            raise ValueError(f"n_groups ({n_groups}) must divide dim ({dim})")
        self.dim, self.eps, self.gate_first, self.n_groups = dim, eps, gate_first, n_groups
        self.weight = no_weight_decay(nn.Parameter(torch.empty(dim)))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """All ones."""
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """Map x and gate ``[..., dim]`` to the same shape and x's dtype; at least float32 inside."""
        parts = (self.n_groups, -1)
        x, gate = x.unflatten(-1, parts), gate.unflatten(-1, parts)
        return gated_rms_norm(x, gate, self.weight.view(parts), self.eps, gate_first=self.gate_first).flatten(-2)

    def extra_repr(self) -> str:
        """Options."""
        return f"{self.dim}, eps={self.eps}, gate_first={self.gate_first}, n_groups={self.n_groups}"


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, *, gate_first: bool) -> Tensor:
    """``GatedRMSNorm`` as a function: x, gate ``[..., D]``, weight ``[D]``; or ``[..., G, D]`` and ``[G, D]``."""
    if torch.compiler.is_compiling():
        wide = torch.promote_types(x.dtype, torch.float32)
        u, silu = x.to(wide), F.silu(gate.to(wide))
        u = u * silu if gate_first else u
        y = u * torch.rsqrt(u.square().mean(-1, keepdim=True) + eps) * weight
        return (y if gate_first else y * silu).to(x.dtype)
    return _GatedRMSNorm.apply(x, gate, weight, eps, gate_first)


class _GatedRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, weight: Tensor, eps: float, gate_first: bool) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        silu = F.silu(gate.to(wide))
        u = silu * x if gate_first else x.to(wide)
        root = torch.linalg.vector_norm(u, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, gate, weight, root)
        ctx.gate_first = gate_first
        y = u.mul_(root) if gate_first else u * root
        y = y.mul_(weight)
        return (y if gate_first else y.mul_(silu)).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, gate, weight, root = ctx.saved_tensors
        wide = root.dtype
        grad, z = grad_outputs[0].to(wide), gate.to(wide)
        sigmoid = z.sigmoid()
        silu = z * sigmoid
        # SiLU'(z) = σ(z) + SiLU(z)·(1 - σ(z))
        slope = torch.addcmul(silu, silu, sigmoid, value=-1).add_(sigmoid)
        del z, sigmoid
        normed = silu * x if ctx.gate_first else x.to(wide, copy=True)
        normed.mul_(root)
        if ctx.gate_first:
            scaled = grad * weight
            grad_gate = slope.mul_(x)
        else:
            grad_gate = slope.mul_(normed).mul_(weight).mul_(grad)
            grad = silu.mul_(grad)
            scaled = grad * weight
        weighted = grad * normed
        rows = x.ndim - weight.ndim
        grad_weight = weighted.flatten(0, rows - 1).sum(0) if rows else weighted
        # du = r·(g·w - n·mean(g·w·n)), with n = r·u
        mean = torch.einsum("...d,...d->...", weighted, weight.to(wide)).div_(x.shape[-1]).unsqueeze(-1)
        grad_x = scaled.addcmul_(normed, mean, value=-1).mul_(root)
        if ctx.gate_first:
            grad_gate.mul_(grad_x)
            grad_x.mul_(silu)
        return grad_x.to(x.dtype), grad_gate.to(gate.dtype), grad_weight.to(weight.dtype), None, None
