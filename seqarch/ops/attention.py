"""Causal softmax attention in plain PyTorch: linear memory, windows, packed documents, more keys than queries.

Shape legend: B batch, T queries, S keys (S ≥ T; the last T keys are the queries' own), H heads, G key-value heads,
D head size.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

_ROWS = 512  # queries a block where a mask has to be written out: the mask stays [_ROWS, S]


def causal_attention(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None = None, cu_seqlens: Tensor | None = None
) -> Tensor:
    """Softmax attention of each query over the keys up to its own position.

    Args:
        q: ``[B, T, H, D]``.
        k: ``[B, S, G, D]``, G divides H; query head h reads key head h·G/H.
        v: ``[B, S, G, D]``.
        scale: Factor of the scores q·k.
        window: Each query sees its own key and the ``window - 1`` before it; None for all.
        cu_seqlens: int32 ``[n+1]``, boundaries of packed documents (B = 1, S = T).

    Returns:
        ``[B, T, H, D]``.
    """
    if cu_seqlens is not None:
        bounds = cu_seqlens.tolist()
        parts = [
            causal_attention(q[:, a:b], k[:, a:b], v[:, a:b], scale=scale, window=window)
            for a, b in pairwise(bounds)
            if b > a
        ]
        return torch.cat(parts, dim=1)
    repeats = q.shape[2] // k.shape[2]
    if repeats > 1:
        k, v = k.repeat_interleave(repeats, dim=2), v.repeat_interleave(repeats, dim=2)
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    T, S = q.shape[2], k.shape[2]
    if window is not None and window < S:
        out = _windowed(q, k, v, scale, window)
    elif T == S:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=T > 1, scale=scale)
    else:
        out = _continued(q, k, v, scale)
    return out.transpose(1, 2)


def _continued(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """The queries are the last of more keys: masks are written out for a block of queries at a time."""
    T, S = q.shape[2], k.shape[2]
    out = []
    for start in range(0, T, _ROWS):
        end = min(start + _ROWS, T)
        last = S - T + end
        mask = None
        if end - start > 1:
            rows = torch.arange(S - T + start, last, device=q.device)
            mask = torch.arange(last, device=q.device) <= rows[:, None]
        out.append(
            F.scaled_dot_product_attention(q[:, :, start:end], k[:, :, :last], v[:, :, :last], mask, scale=scale)
        )
    return torch.cat(out, dim=2)


def _windowed(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int) -> Tensor:
    """Blocks of ``window`` queries against their own block of keys and the one before: T · 2W scores, not T · S."""
    B, H, T, D = q.shape
    S = k.shape[2]
    if S > T + window - 1:  # keys that no query sees
        k, v = k[:, :, S - T - window + 1 :], v[:, :, S - T - window + 1 :]
        S = T + window - 1
    # Align queries with keys, then fill up to whole blocks with one empty block in front.
    front, n = S - T, -(-S // window)
    back = n * window - S
    q = F.pad(q, (0, 0, front, back)).view(B, H, n, window, D)
    k = F.pad(k, (0, 0, window, back)).view(B, H, n + 1, window, D)
    v = F.pad(v, (0, 0, window, back)).view(B, H, n + 1, window, D)
    k = torch.cat((k[:, :, :-1], k[:, :, 1:]), dim=3).flatten(1, 2)
    v = torch.cat((v[:, :, :-1], v[:, :, 1:]), dim=3).flatten(1, 2)
    i = torch.arange(window, device=q.device)[:, None]
    j = torch.arange(2 * window, device=q.device)
    inside = (j > i) & (j <= i + window)  # key j of the pair of blocks lies 0 … W-1 before query i
    first = inside & (j >= window)
    mask = torch.cat((first[None], inside.expand(n - 1, -1, -1))).repeat(H, 1, 1)
    out = F.scaled_dot_product_attention(q.flatten(1, 2), k, v, mask, scale=scale)
    return out.view(B, H, n * window, D)[:, :, front : front + T]


def alibi_slopes(n_heads: int) -> list[float]:
    """Slopes of ALiBi (Press et al. 2021, arXiv 2108.12409), a geometric sequence from 2^(-8/n) down to 2^-8."""
    if n_heads & (n_heads - 1) == 0:
        return [2.0 ** (-8.0 * (h + 1) / n_heads) for h in range(n_heads)]
    power = 1 << (n_heads.bit_length() - 1)
    return alibi_slopes(power) + alibi_slopes(2 * power)[::2][: n_heads - power]


def add_alibi(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Append features to q and k whose product is the ALiBi bias, so that no bias matrix is ever written out.

    Softmax ignores what is constant over keys, so -slope · (i - j) may be replaced by slope · j. The key position j is
    written in base 256, three digits, each exact in bfloat16. v is padded alike, since fused kernels want equal sizes.

    Args:
        q: ``[B, T, H, D]``.
        k: ``[B, S, H, D]`` (already one key head a query head).
        v: ``[B, S, H, D]``.
        slopes: ``[H]``.
        scale: The factor that the scores will get.

    Returns:
        q, k, v with D rounded up to a multiple of 8 that has room for three features.
    """
    D, S = q.shape[-1], k.shape[1]
    padding = -(-(D + 3) // 8) * 8 - D
    j = torch.arange(S, device=k.device)
    digits = torch.stack((j % 256, j // 256 % 256, j // 65536), dim=-1).to(k.dtype)
    weights = (slopes.double()[:, None] * torch.tensor([1.0, 256.0, 65536.0], device=q.device).double() / scale).to(
        q.dtype
    )
    q = torch.cat((q, F.pad(weights, (0, padding - 3)).expand(*q.shape[:2], -1, -1)), dim=-1)
    k = torch.cat((k, F.pad(digits, (0, padding - 3))[None, :, None].expand(k.shape[0], -1, k.shape[2], -1)), dim=-1)
    return q, k, F.pad(v, (0, padding))
