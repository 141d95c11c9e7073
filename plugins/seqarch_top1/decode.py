"""One token of Top-1 Chunk against its cache: T/C mean keys (or T keys) to select by, and at most 2C keys to attend to.

Shape legend: M batch × key-value heads, R query heads a key-value head, L room of the cache, C tokens a chunk, D head size.
"""

from __future__ import annotations

import torch
from torch import Tensor


def decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    means: Tensor | None,
    length: int,
    *,
    chunk_size: int,
    scale: float,
    local: bool,
    element: bool,
) -> Tensor:
    """The newest token's output; autograd gives the gradient, with the straight-through parts.

    Args:
        q: ``[M, R, D]``, the newest token's queries.
        k: ``[M, L, D]``; the newest token's key is number ``length - 1``.
        v: ``[M, L, D]``.
        means: ``[M, ≥ length/C, D]``, mean keys of the complete chunks, to select by; None for all keys.
        length: Tokens so far, the newest included.
        chunk_size: C.
        scale: Factor of the scores.
        local: See ``chunk_attention``.
        element: See ``chunk_attention``.

    Returns:
        ``[M, R, D]``.
    """
    C = chunk_size
    n = (length - 1) // C  # complete chunks before the own one
    q = q * scale
    own_k, own_v = k[:, n * C : length], v[:, n * C : length]
    own = q @ own_k.mT
    if n == 0:
        return _mix(own, element) @ own_v
    if means is not None:
        logits = q @ means[:, :n].mT
    else:
        logits = (q @ k[:, : n * C].mT).unflatten(-1, (n, C)).logsumexp(-1)
    if not local:
        count = length - n * C
        last = own.logsumexp(-1) if means is None else own.mean(-1) + torch.tensor(count / C).log().to(q)
        logits = torch.cat((logits, last[..., None]), dim=-1)
    index = logits.argmax(-1)
    P = logits.softmax(-1).gather(-1, index[..., None])
    chunk = index.clamp(max=n - 1)
    head = torch.arange(len(k), device=k.device)[:, None]
    k_selected, v_selected = (t[:, : n * C].unflatten(1, (n, C))[head, chunk] for t in (k, v))  # [M, R, C, D]
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
