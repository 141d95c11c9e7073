"""Short causal depthwise convolution and token shift: what a position sees of the few before it.

Shape legend: B batch, T tokens, C channels, K kernel size.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from seqarch.mixer import no_weight_decay
from seqarch.ops.rotary import positions

_BLOCK = 1 << 16  # numbers


class ShortConvolution(nn.Module):
    """y_t = SiLU(Σ_j w_j ⊙ x_{t-K+1+j} + b), channel by channel, zeros before the first token of a document.

    The parameters are those of ``torch.nn.Conv1d(C, C, K, groups=C)``: ``weight [C, 1, K]`` and perhaps ``bias [C]``.

    Args:
        channels: C.
        kernel_size: K, at least 2.
        bias: Add b.
    """

    def __init__(self, channels: int, kernel_size: int = 4, *, bias: bool = False) -> None:
        super().__init__()
        if kernel_size < 2:
            raise ValueError(f"kernel_size must be at least 2, got {kernel_size}")
        self.channels, self.kernel_size = channels, kernel_size
        self.weight = nn.Parameter(torch.empty(channels, 1, kernel_size))
        self.bias = no_weight_decay(nn.Parameter(torch.empty(channels))) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Uniform in ±1/√K, weight and bias, as ``torch.nn.Conv1d`` does."""
        bound = self.kernel_size**-0.5
        nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.uniform_(self.bias, -bound, bound)

    def forward(
        self, x: Tensor, *, cu_seqlens: Tensor | None = None, state: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Map x ``[B, T, C]`` to the same shape and dtype.

        Args:
            x: The input.
            cu_seqlens: int32 ``[n+1]``, boundaries of packed documents.
            state: ``[B, K-1, C]``, the inputs before x, oldest first.

        Returns:
            The output and the new state, which is None where none was given.
        """
        lags = self.kernel_size - 1
        padded = F.pad(x, (0, 0, lags, 0)) if state is None else torch.cat((state.to(x.dtype), x), dim=1)
        keep = None
        if cu_seqlens is not None:  # which of the K inputs of each token lie in its document, [K, T, 1]
            position = positions(x.shape[1], cu_seqlens=cu_seqlens, device=x.device)
            keep = (position >= torch.arange(lags, -1, -1, device=x.device)[:, None])[..., None]
        weight = self.weight[:, 0].T
        if torch.compiler.is_compiling():
            y = _silu(_convolve(padded, weight, self.bias, keep), x.dtype)
        else:
            y = _ShortConvolution.apply(padded, weight, self.bias, keep)
        # A state has the dtype that it was made with.
        return y, None if state is None else padded[:, padded.shape[1] - lags :].to(state.dtype)

    def init_state(
        self, batch_size: int, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        """Zeros ``[B, K-1, C]``."""
        shape = (batch_size, self.kernel_size - 1, self.channels)
        return torch.zeros(shape, device=device or self.weight.device, dtype=dtype or self.weight.dtype)

    def flops(self, T: int) -> int:
        """A multiply-add for each token, channel and lag."""
        return 2 * T * self.channels * self.kernel_size


def token_shift(
    x: Tensor, *, cu_seqlens: Tensor | None = None, state: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """The token before each one: x_{t-1}, zeros before the first token of a document.

    Args:
        x: ``[B, T, C]``.
        cu_seqlens: int32 ``[n+1]``, boundaries of packed documents.
        state: ``[B, C]``, the token before x.

    Returns:
        ``[B, T, C]`` and the new state, which is None where none was given.
    """
    if state is not None:
        return torch.cat((state.to(x.dtype)[:, None], x[:, :-1]), dim=1), x[:, -1].to(state.dtype)
    shifted = F.pad(x, (0, 0, 1, -1))
    if cu_seqlens is not None:
        position = positions(x.shape[1], cu_seqlens=cu_seqlens, device=x.device)
        shifted = shifted * (position > 0)[:, None]
    return shifted, None


def _silu(z: Tensor, dtype: torch.dtype) -> Tensor:
    return F.silu(z).to(dtype)


def _convolve(padded: Tensor, weight: Tensor, bias: Tensor | None, keep: Tensor | None) -> Tensor:
    """``[B, T, C]`` in at least float32, of padded ``[B, T+K-1, C]`` and weight ``[K, C]``."""
    K = len(weight)
    T = padded.shape[1] - K + 1
    wide = torch.promote_types(padded.dtype, torch.float32)
    weight, padded = weight.to(wide), padded.to(wide)
    last = padded[:, K - 1 :]
    out = last * weight[K - 1] if bias is None else torch.addcmul(bias.to(wide), last, weight[K - 1])
    for j in range(K - 1):
        w = weight[j] if keep is None else weight[j] * keep[j]
        # In place, but not where a compiler has to trace it
        out = torch.addcmul(out, padded[:, j : j + T], w, out=None if torch.compiler.is_compiling() else out)
    return out


class _ShortConvolution(torch.autograd.Function):
    """Keeps the input alone; backward convolves again. Goes through time in blocks that stay in a CPU's cache."""

    @staticmethod
    def forward(ctx: Any, padded: Tensor, weight: Tensor, bias: Tensor | None, keep: Tensor | None) -> Tensor:
        ctx.save_for_backward(padded, weight, bias, keep)
        lags = len(weight) - 1
        y = padded.new_empty(padded.shape[0], padded.shape[1] - lags, padded.shape[2])
        for start, end in _blocks(y):
            z = _convolve(padded[:, start : end + lags], weight, bias, None if keep is None else keep[:, start:end])
            y[:, start:end] = F.silu(z, inplace=True)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        padded, weight, bias, keep = ctx.saved_tensors
        wide = torch.promote_types(padded.dtype, torch.float32)
        K = len(weight)
        weight_ = weight.to(wide)
        grad_padded = torch.zeros_like(padded, dtype=wide, memory_format=torch.contiguous_format)
        grad_weight = torch.zeros_like(weight_)
        grad_bias = torch.zeros_like(weight_[0])
        for start, end in _blocks(grad_outputs[0]):
            part = padded[:, start : end + K - 1].to(wide)
            kept = None if keep is None else keep[:, start:end]
            z = _convolve(part, weight, bias, kept)
            grad = torch.ops.aten.silu_backward.default(grad_outputs[0][:, start:end].to(wide), z)
            if bias is not None:
                grad_bias += grad.sum((0, 1))
            for j in range(K):
                g = grad if kept is None else torch.mul(grad, kept[j], out=z)
                grad_padded[:, start + j : end + j].addcmul_(g, weight_[j])
                grad_weight[j] += torch.mul(g, part[:, j : j + end - start], out=z).sum((0, 1))
        grad_bias = None if bias is None else grad_bias.to(bias.dtype)
        return grad_padded.to(padded.dtype), grad_weight.to(weight.dtype), grad_bias, None


def _blocks(x: Tensor) -> list[tuple[int, int]]:
    """Ranges of time, short enough on a CPU for a few copies of x ``[B, T, C]`` in the cache."""
    T = x.shape[1]
    size = max(1, _BLOCK // (x.shape[0] * x.shape[2])) if x.device.type == "cpu" else T
    return [(start, min(T, start + size)) for start in range(0, T, size)]
