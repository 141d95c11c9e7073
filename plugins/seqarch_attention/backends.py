"""GPU backends of attention: FlashAttention's kernels, and FlexAttention where it is compiled.

Layout ``[B, T, H, D]``; arguments as ``seqarch.ops.attention.causal_attention``, and ALiBi ``slopes``, one a head.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    window: int | None,
    cu_seqlens: Tensor | None,
    slopes: list[float] | None,
) -> Tensor:
    """Dao 2023 (arXiv 2307.08691), package flash-attn; float16 and bfloat16."""
    from flash_attn import flash_attn_func, flash_attn_varlen_func

    options: dict[str, Any] = {
        "softmax_scale": scale,
        "causal": True,
        "window_size": (-1, -1) if window is None else (window - 1, 0),
        "alibi_slopes": None if slopes is None else torch.tensor(slopes, device=q.device, dtype=torch.float32),
    }
    if cu_seqlens is None:
        return flash_attn_func(q, k, v, **options)
    cu = cu_seqlens.to(q.device)
    longest = int(cu_seqlens.diff().max())
    return flash_attn_varlen_func(q[0], k[0], v[0], cu, cu, longest, longest, **options)[None]


def flex_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    window: int | None,
    cu_seqlens: Tensor | None,
    slopes: list[float] | None,
) -> Tensor:
    """Dong et al. 2024 (arXiv 2412.05496), ``torch.nn.attention.flex_attention``."""
    from torch.nn.attention.flex_attention import create_block_mask

    T = q.shape[1]
    document = None
    if cu_seqlens is not None:
        lengths = cu_seqlens.diff().to(q.device)
        document = torch.repeat_interleave(torch.arange(len(lengths), device=q.device), lengths, output_size=T)

    def visible(_b: Tensor, _h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        mask = i >= j
        if window is not None:
            mask = mask & (i - j < window)
        if document is not None:
            mask = mask & (document[i] == document[j])
        return mask

    slope = None if slopes is None else torch.tensor(slopes, device=q.device, dtype=torch.float32)

    def biased(score: Tensor, _b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        assert slope is not None
        return score - slope[h] * (i - j)

    mask = create_block_mask(visible, None, None, T, T, device=q.device)
    out = _flex(q.is_cuda)(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        score_mod=None if slopes is None else biased,
        block_mask=mask,
        scale=scale,
        enable_gqa=q.shape[2] != k.shape[2],
    )
    return out.transpose(1, 2)


@lru_cache
def _flex(compiled: bool) -> Any:
    """Eager FlexAttention writes out all scores; it serves only to test the masks without a GPU."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention) if compiled else flex_attention
