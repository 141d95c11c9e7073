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
from seqarch.ops.blocks import cache_blocks
from seqarch.ops.fused_convolution import fused_convolution, has_kernel
from seqarch.ops.rotary import positions
from seqarch.options import at_least


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
        at_least(2, kernel_size=kernel_size)
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
        self, x: Tensor, *, cu_seqlens: Tensor | None = None, state: Tensor | None = None, fused: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Map x ``[B, T, C]`` to the same shape and dtype.

        Args:
            x: The input.
            cu_seqlens: int32 ``[n+1]``, boundaries of packed documents.
            state: ``[B, K-1, C]``, the inputs before x, oldest first.
            fused: Use causal-conv1d's kernel where it can serve x. A compiler fuses torch's operations by itself.

        Returns:
            The output and the new state, which is None where none was given.
        """
        lags = self.kernel_size - 1
        before = None if state is None else state.to(x.dtype)
        fused = fused and x.shape[1] > 1 and not torch.compiler.is_compiling() and has_kernel(x, self.kernel_size)
        keep = None
        if cu_seqlens is not None and not fused:  # which of the K inputs of each token lie in its document, [K, T, 1]
            position = positions(x.shape[1], cu_seqlens=cu_seqlens, device=x.device)
            keep = (position >= torch.arange(lags, -1, -1, device=x.device)[:, None])[..., None]
        weight = self.weight[:, 0].T
        if fused:
            y = fused_convolution(x, self.weight[:, 0], self.bias, before=before, cu_seqlens=cu_seqlens)
        elif torch.compiler.is_compiling():
            y = _silu(_convolve(_window(x, before, lags, 0, x.shape[1]), weight, self.bias, keep), x.dtype)
        else:
            y = _ShortConvolution.apply(x, before, weight, self.bias, keep)
        if state is None:
            return y, None
        # A state has the dtype that it was made with, and does not hold on to x.
        last = x[:, -lags:] if x.shape[1] >= lags else torch.cat((state[:, x.shape[1] :], x.to(state.dtype)), dim=1)
        return y, last.to(state.dtype, copy=True)

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


def _window(x: Tensor, before: Tensor | None, lags: int, start: int, end: int) -> Tensor:
    """Tokens start - lags … end - 1 of x ``[B, T, C]``, of which ``before``, or zeros, holds those under 0."""
    if start >= lags:
        return x[:, start - lags : end]
    x = x[:, :end]
    return (F.pad(x, (0, 0, lags, 0)) if before is None else torch.cat((before, x), dim=1))[:, start:]


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


def _block_convolve(part: Tensor, weight: Tensor, bias: Tensor | None, keep: Tensor | None) -> Tensor:
    """``_convolve`` without a graph, by a library where it has a kernel."""
    if keep is None and _has_depthwise(part):
        return _depthwise(part, weight, bias)
    return _convolve(part, weight, bias, keep)


def _has_depthwise(x: Tensor) -> bool:
    return x.device.type == "cpu" and x.dtype == torch.float32 and torch.backends.mkldnn.is_available()


def _depthwise(x: Tensor, weight: Tensor, bias: Tensor | None, padding: int = 0) -> Tensor:
    """Of x ``[B, T, C]`` and weight ``[K, C]``: as an image of height 1, channels last, it needs no transposition."""
    kernel = weight.to(x.dtype).T[:, None, None]
    bias = None if bias is None else bias.to(x.dtype)
    return F.conv2d(x.mT[:, :, None], kernel, bias, padding=(0, padding), groups=x.shape[2])[:, :, 0].mT


def _spread(grad_x: Tensor, grad_before: Tensor | None, g: Tensor, weight: Tensor, start: int) -> None:
    """Add g ⊙ weight to the gradient of the tokens from ``start`` on, which are ``before``'s where under 0."""
    end = start + g.shape[1]
    earlier = min(max(0, -start), g.shape[1])
    grad_x[:, max(0, start) : max(0, end)].addcmul_(g[:, earlier:], weight)
    if grad_before is not None and earlier:
        first = grad_before.shape[1] + start
        grad_before[:, first : first + earlier].addcmul_(g[:, :earlier], weight)


class _ShortConvolution(torch.autograd.Function):
    """Keeps the input alone; backward convolves again. Goes through time in blocks that stay in a CPU's cache."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, before: Tensor | None, weight: Tensor, bias: Tensor | None, keep: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(x, before, weight, bias, keep)
        lags = len(weight) - 1
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        for start, end in _blocks(x, keep):
            part = _window(x, before, lags, start, end)
            z = _block_convolve(part, weight, bias, None if keep is None else keep[:, start:end])
            y[:, start:end] = F.silu(z, inplace=True)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, before, weight, bias, keep = ctx.saved_tensors
        wide = torch.promote_types(x.dtype, torch.float32)
        K, lags = len(weight), len(weight) - 1
        weight_ = weight.to(wide)
        grad_x = torch.empty_like(x, dtype=wide, memory_format=torch.contiguous_format)
        grad_before = None if before is None else torch.zeros_like(before, dtype=wide)
        grad_weight = torch.zeros_like(weight_)
        grad_bias = torch.zeros_like(weight_[0])
        for start, end in _blocks(x, keep):
            part = _window(x, before, lags, start, end).to(wide)
            kept = None if keep is None else keep[:, start:end]
            z = _block_convolve(part, weight, bias, kept)
            grad = torch.ops.aten.silu_backward.default(grad_outputs[0][:, start:end].to(wide), z)
            if bias is not None:
                grad_bias += grad.sum((0, 1))
            fast = kept is None and before is None and _has_depthwise(grad)
            if fast:
                spread = _depthwise(grad, weight_.flip(0), None, padding=lags)
                grad_x[:, start:end] = spread[:, lags:]
                earlier = min(start, lags)
                grad_x[:, start - earlier : start] += spread[:, lags - earlier : lags]
            else:
                grad_x[:, start:end] = 0
            for j in range(K):
                g = grad if kept is None else torch.mul(grad, kept[j], out=z)
                if not fast:
                    _spread(grad_x, grad_before, g, weight_[j], start + j - lags)
                grad_weight[j] += torch.mul(g, part[:, j : j + end - start], out=z).sum((0, 1))
        return (
            grad_x.to(x.dtype),
            None if grad_before is None else grad_before.to(x.dtype),
            grad_weight.to(weight.dtype),
            None if bias is None else grad_bias.to(bias.dtype),
            None,
        )


def _blocks(x: Tensor, keep: Tensor | None) -> list[tuple[int, int]]:
    """Ranges of time of ``[B, T, C]``; longer where a library convolves, each call of which costs some time."""
    numbers = 1 << 19 if keep is None and _has_depthwise(x) else 1 << 16
    return cache_blocks(x.shape[1], x.shape[0] * x.shape[2], x.device, numbers)
