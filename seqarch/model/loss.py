"""Cross-entropy of a linear head, computed a chunk of tokens at a time: logits ``[N, V]`` are never held.

Shape legend: N tokens, D model width, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

IGNORE_INDEX = -100
_LOGITS = 1 << 22  # elements of one chunk of logits; 16 MiB in float32 stay close to the cores


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, z_loss: float = 0.0, ignore_index: int = IGNORE_INDEX
) -> tuple[Tensor, Tensor]:
    """Summed loss of the softmax over ``hidden @ weight.T``.

    The gradients are computed along with the loss, chunk by chunk, so that backward only scales them; the second
    result carries no gradient.

    Args:
        hidden: ``[N, D]``.
        weight: ``[V, D]``.
        labels: int64 ``[N]``; ``ignore_index`` leaves a token out.
        z_loss: Weight of the squared log-normaliser (Chowdhery et al. 2022, arXiv 2204.02311, section 5).

    Returns:
        The sum over tokens of nll + z_loss · logsumexp², and the sum of nll alone; float32 (float64 for float64 input).
    """
    return _LinearCrossEntropy.apply(hidden, weight, labels, z_loss, ignore_index)


def token_nll(hidden: Tensor, weight: Tensor, labels: Tensor, *, ignore_index: int = IGNORE_INDEX) -> Tensor:
    """Negative log-likelihood of each label in nats, ``[N]``, without gradient; 0 where ignored."""
    with torch.no_grad():
        out = []
        for h, y in zip(*_chunks(hidden, labels, len(weight)), strict=True):
            logits = _logits(h, weight)
            out.append(F.cross_entropy(logits, y, ignore_index=ignore_index, reduction="none"))
        return torch.cat(out)


def _chunks(hidden: Tensor, labels: Tensor, vocab_size: int) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    size = max(64, _LOGITS // vocab_size)
    return hidden.split(size), labels.split(size)


def _logits(h: Tensor, weight: Tensor) -> Tensor:
    logits = F.linear(h, weight)
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, z_loss: float, ignore_index: int
    ) -> tuple[Tensor, Tensor]:
        device = hidden.device.type
        if torch.is_autocast_enabled(device):
            compute = torch.get_autocast_dtype(device)
            hidden_c, weight_c = hidden.to(compute), weight.to(compute)
        else:
            hidden_c, weight_c = hidden, weight
        accumulate = torch.promote_types(weight.dtype, torch.float32)
        total = nll = torch.zeros((), dtype=accumulate, device=hidden.device)
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(weight, dtype=accumulate) if ctx.needs_input_grad[1] else None
        start = 0
        with torch.autocast(device, enabled=False):
            for h, y in zip(*_chunks(hidden_c, labels, len(weight)), strict=True):
                valid = y != ignore_index
                target = torch.where(valid, y, 0)[:, None]
                # From here on the memory of the logits is reused: exponentials, then their gradient.
                p = _logits(h, weight_c)
                score = p.gather(-1, target)[:, 0]
                top = p.amax(dim=-1)
                total_p = p.sub_(top[:, None]).exp_().sum(dim=-1)
                lse = total_p.log() + top
                per_token = torch.where(valid, lse - score, 0.0)
                nll = nll + per_token.sum()
                if z_loss:
                    total = total + z_loss * torch.where(valid, lse.square(), 0.0).sum()
                if grad_hidden is None and grad_weight is None:
                    continue
                # d/dlogits: (1 + 2·z·lse)·softmax - onehot
                factor = valid * (1.0 + 2.0 * z_loss * lse) / total_p
                grad = p.mul_(factor[:, None]).scatter_add_(-1, target, -valid[:, None].to(p.dtype)).to(h.dtype)
                if grad_hidden is not None:
                    grad_hidden[start : start + len(h)] = grad @ weight_c
                if grad_weight is not None:
                    if grad_weight.dtype == grad.dtype:
                        grad_weight.addmm_(grad.T, h)
                    else:
                        grad_weight += grad.T @ h
                start += len(h)
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.weight_dtype = weight.dtype
        ctx.mark_non_differentiable(nll)
        return total + nll, nll

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        grad_output, _ = grad_outputs
        grad_hidden, grad_weight = ctx.saved_tensors
        if grad_hidden is not None:
            grad_hidden = grad_hidden * grad_output.to(grad_hidden.dtype)
        if grad_weight is not None:
            grad_weight = (grad_weight * grad_output).to(ctx.weight_dtype)
        return grad_hidden, grad_weight, None, None, None
