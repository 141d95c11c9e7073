"""Positions as rotations and as sinusoids."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def positions(
    T: int, *, start: int = 0, cu_seqlens: Tensor | None = None, device: torch.device | None = None
) -> Tensor:
    """Position of each of T tokens in its document, int64 ``[T]``: counted from ``start``, or from each boundary."""
    if cu_seqlens is None:
        return torch.arange(start, start + T, device=device)
    starts = cu_seqlens[:-1].long().to(device)
    lengths = cu_seqlens.diff().to(device)
    return torch.arange(T, device=device) - torch.repeat_interleave(starts, lengths, output_size=T)


def _angles(position: Tensor, dim: int, base: float) -> Tensor:
    """float32 (or float64) ``[T, dim/2]``: position · base^(-2i/dim)."""
    exponent = torch.arange(0, dim, 2, device=position.device, dtype=torch.float64) / dim
    return position.double()[:, None] * base**-exponent


def rotary(x: Tensor, position: Tensor, base: float = 10000.0) -> Tensor:
    """Rotary position embedding (Su et al. 2021, arXiv 2104.09864), halves convention as in Llama and GPT-NeoX.

    Args:
        x: ``[B, T, H, D]``, D even.
        position: int64 ``[T]``.
        base: The longest wavelength is 2π · base.

    Returns:
        ``[B, T, H, D]`` in the dtype of x; the rotation itself is at least float32.
    """
    cos, sin = rotation(position, x.shape[-1], base, torch.promote_types(x.dtype, torch.float32))
    return rotate(x, cos, sin)


def rotation(position: Tensor, dim: int, base: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine ``[T, 1, dim/2]`` for ``rotate``; the angles are float64, so that late positions are exact."""
    return _rotation(position, dim, base, dtype)


# Opaque to torch.compile, which would otherwise take float64 cosines again for every batch and head.
@torch.library.custom_op(
    "seqarch::rotation",
    mutates_args=(),
    schema="(Tensor position, int dim, float base, ScalarType dtype) -> (Tensor, Tensor)",
)
def _rotation(position: Tensor, dim: int, base: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    angle = _angles(position, dim, base)[:, None]
    return angle.cos().to(dtype), angle.sin().to(dtype)


@_rotation.register_fake
def _(position: Tensor, dim: int, base: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    shape = (position.shape[0], 1, dim // 2)
    return position.new_empty(shape, dtype=dtype), position.new_empty(shape, dtype=dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (x_i, x_{i + D/2}) of ``[B, T, H, D]`` by the angles of ``rotation``."""
    if torch.compiler.is_compiling():
        return _rotated(x, cos, sin)
    return _Rotate.apply(x, cos, sin)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.to(cos.dtype).chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


class _Rotate(torch.autograd.Function):
    """The gradient of a rotation is the rotation back: nothing of x is kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        cos, sin = ctx.saved_tensors
        return _rotated(grad_outputs[0], cos, -sin), None, None


def sinusoid(position: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """Sinusoidal absolute positions (Vaswani et al. 2017, section 3.5) ``[T, dim]``: sines, then cosines; dim even."""
    angle = _angles(position, dim, 10000.0)
    return torch.cat((angle.sin(), angle.cos()), dim=-1).to(dtype)
