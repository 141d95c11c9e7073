"""One token of Top-1 Chunk against its cache: T/C mean keys (or T keys) to select by, at most 2C keys to attend to.

Shape legend: M batch × key-value heads, R query heads a key-value head, S keys, C tokens a chunk, D head size.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from seqarch_top1.tiles import working


def decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    means: Tensor | None,
    *,
    scale: float,
    chunk_size: int,
    local: bool,
    element: bool,
) -> Tensor:
    """The newest token's output; autograd gives the gradient, with the straight-through parts.

    Args:
        q: ``[B, 1, H, D]``, the newest token's queries.
        k: ``[B, S, G, D]``, the newest token's key is the last.
        v: ``[B, S, G, D]``.
        means: ``[B, G, ≥ S/C, D]``, mean keys of the complete chunks, to select by; None to select by all keys.
        scale: Factor of the scores q·k.
        chunk_size: C.
        local: See ``top1_chunk``.
        element: See ``top1_chunk``.

    Returns:
        ``[B, 1, H, D]``, in at least float32.
    """
    B, _, G, D = k.shape
    q = (working(q) * scale).view(B * G, -1, D)
    k, v = (t.transpose(1, 2).flatten(0, 1) for t in (k, v))
    means = None if means is None else means.flatten(0, 1)
    return _decode(q, k, v, means, chunk_size, local, element).view(B, 1, -1, D)


def _decode(
    q: Tensor, k: Tensor, v: Tensor, means: Tensor | None, chunk_size: int, local: bool, element: bool
) -> Tensor:
    """``decode`` for q ``[M, R, D]``, scaled, k and v ``[M, S, D]``, means ``[M, N, D]``."""
    length = k.shape[1]
    C = chunk_size
    n = (length - 1) // C  # complete chunks before the own one
    own_k, own_v = working(k[:, n * C :]), working(v[:, n * C :])
    own = q @ own_k.mT
    if n == 0:
        return _mix(own, element) @ own_v
    if means is None:
        logits = (q @ working(k[:, : n * C]).mT).unflatten(-1, (n, C)).logsumexp(-1)
        last = own.logsumexp(-1)
    else:
        logits = q @ means[:, :n].mT
        last = own.mean(-1) + math.log((length - n * C) / C)
    if not local:
        logits = torch.cat((logits, last[..., None]), dim=-1)
    index = logits.argmax(-1)
    P = logits.softmax(-1).gather(-1, index[..., None])
    chunk = index.clamp(max=n - 1)
    head = torch.arange(len(k), device=k.device)[:, None]
    k_selected, v_selected = (working(t[:, : n * C].unflatten(1, (n, C))[head, chunk]) for t in (k, v))  # [M, R, C, D]
    scores = torch.cat(((k_selected @ q[..., None]).squeeze(-1), own), dim=-1)
    is_own = (index == n)[..., None]
    if not local:
        side = torch.arange(scores.shape[-1], device=k.device) >= C
        scores = scores.masked_fill(side != is_own, -torch.inf)
    weights = _mix(scores, element)
    gain = 1 + P - P.detach()
    selected, rest = weights[..., :C] * gain, weights[..., C:]
    if not local:
        rest = rest * gain
    return (selected[..., None, :] @ v_selected).squeeze(-2) + rest @ own_v


def _mix(scores: Tensor, element: bool) -> Tensor:
    """Softmax, or one-hot with softmax's gradient."""
    p = scores.softmax(-1)
    if not element:
        return p
    hard = torch.zeros_like(p).scatter_(-1, scores.argmax(-1, keepdim=True), 1.0)
    return hard + (p - p.detach())
