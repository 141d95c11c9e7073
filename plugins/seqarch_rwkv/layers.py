"""The small layers that RWKV's mixers share. Parameter names are those of flash-linear-attention."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seqarch.mixer import keep_float32, no_weight_decay


def float32_parameter(*shape: int) -> Any:
    """A parameter without values that is not decayed and stays float32: mixes, decays, bonuses, norms, biases."""
    return no_weight_decay(keep_float32(nn.Parameter(torch.empty(shape))))


class LowRank(nn.Module):
    """W₂ f(W₁ x) + b, through few channels; the result has at least float32.

    Args:
        d_in: Input width.
        d_out: Output width.
        rank: Inner width.
        activation: f.
        bias: Add b.
    """

    def __init__(self, d_in: int, d_out: int, rank: int, activation: nn.Module, *, bias: bool = True) -> None:
        super().__init__()
        second = nn.Linear(rank, d_out, bias=False)
        if bias:
            second.bias = float32_parameter(d_out)
        self.lora = nn.Sequential(nn.Linear(d_in, rank, bias=False), activation, second)

    @property
    def bias(self) -> Tensor:
        """b."""
        return self.lora[2].bias  # pyright: ignore[reportReturnType]

    def reset_parameters(self) -> None:
        """W₁ = 0 and W₂ orthogonal with gain 0.1, as in RWKV-LM, so that b alone counts at first; b = 0."""
        first, second = self.lora[0].weight, self.lora[2].weight
        assert isinstance(first, Tensor)
        assert isinstance(second, Tensor)
        nn.init.zeros_(first)
        nn.init.orthogonal_(second, gain=0.1 * max(1.0, second.shape[1] / second.shape[0]) ** 0.5)
        if self.lora[2].bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[..., d_in]`` to ``[..., d_out]``."""
        second = self.lora[2]
        assert isinstance(second, nn.Linear)
        y = F.linear(self.lora[1](self.lora[0](x)), second.weight)
        y = y.to(torch.promote_types(y.dtype, torch.float32))
        return y if second.bias is None else y + second.bias


class MixedLinear(nn.Module):
    """W (x + μ ⊙ delta).

    Args:
        d_in: Input width.
        d_out: Output width.
    """

    def __init__(self, d_in: int, d_out: int) -> None:
        super().__init__()
        self.linear = nn.Linear(d_in, d_out, bias=False)
        self.mu = float32_parameter(d_in)

    def forward(self, x: Tensor, delta: Tensor) -> Tensor:
        """Map ``[..., d_in]`` to ``[..., d_out]``."""
        return self.linear(torch.addcmul(x, delta, self.mu.to(x.dtype)))


class HeadNorm(nn.Module):
    """Layer norm of each head by itself, with gains and biases for all of them ``[H · V]``: a group norm.

    Args:
        n_heads: H.
        dim: H · V.
        eps: Added to the variance.
    """

    def __init__(self, n_heads: int, dim: int, eps: float) -> None:
        super().__init__()
        self.n_heads, self.eps = n_heads, eps
        self.weight, self.bias = float32_parameter(dim), float32_parameter(dim)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[B, T, H, V]`` to ``[B, T, H · V]``, in at least float32."""
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        normed = F.layer_norm(x, x.shape[-1:], eps=self.eps).flatten(2)
        return torch.addcmul(self.bias, normed, self.weight)
