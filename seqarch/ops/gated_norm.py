"""RMS normalisation with a SiLU gate, before or after it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from seqarch.mixer import no_weight_decay
from seqarch.ops.blocks import cache_blocks


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
    """Goes through rows in blocks that stay in a CPU's cache."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, weight: Tensor, eps: float, gate_first: bool) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        root = x.new_empty((*x.shape[:-1], 1), dtype=wide)
        for x_, gate_, y_, root_ in _blocks(weight, x, gate, y, root):
            silu = F.silu(gate_.to(wide))
            u = silu * x_ if gate_first else x_.to(wide)
            norm = torch.linalg.vector_norm(u, dim=-1, keepdim=True)
            r = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
            root_.copy_(r)
            u = u.mul_(r) if gate_first else (u * r).mul_(silu)
            torch.mul(u, weight, out=y_)
        ctx.save_for_backward(x, gate, weight, root)
        ctx.gate_first = gate_first
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, gate, weight, root = ctx.saved_tensors
        wide, gate_first = root.dtype, ctx.gate_first
        silu_backward = torch.ops.aten.silu_backward.default
        grad_x, grad_gate = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (x, gate))
        weight_ = weight.to(wide)
        grad_weight = torch.zeros_like(weight_)
        for x_, z, r, grad, dx, dz in _blocks(weight, x, gate, root, grad_outputs[0], grad_x, grad_gate):
            grad, z = grad.to(wide), z.to(wide)
            silu = F.silu(z)
            normed = (silu if gate_first else r) * x_
            if gate_first:
                normed.mul_(r)
            else:
                dz.copy_(silu_backward((normed * weight_).mul_(grad), z))
                grad = silu.mul_(grad)
            scaled = grad * weight_
            grad_weight += (normed * grad).flatten(0, x_.ndim - weight.ndim - 1).sum(0)
            # du = r·(g·w - n·mean(g·w·n)), with n = r·u
            mean = (scaled * normed).sum(-1, keepdim=True).div_(x.shape[-1])
            du = scaled.addcmul_(normed, mean, value=-1)
            if gate_first:
                du.mul_(r)
                dz.copy_(silu_backward(du * x_, z))
            torch.mul(du, silu if gate_first else r, out=dx)
        return grad_x, grad_gate, grad_weight.to(weight.dtype), None, None


def _blocks(weight: Tensor, *tensors: Tensor) -> Iterator[list[Tensor]]:
    """Tensors ``[..., D]`` or ``[..., G, D]`` in pieces of the same rows, with one leading dimension or more."""
    rows = tensors[0].ndim - weight.ndim
    # More than two dimensions might not merge without a copy.
    flat = [t[None] if rows == 0 else t.flatten(0, 1) if rows > 1 else t for t in tensors]
    for start, end in cache_blocks(flat[0].shape[0], flat[0][:1].numel(), flat[0].device):
        yield [t[start:end] for t in flat]
