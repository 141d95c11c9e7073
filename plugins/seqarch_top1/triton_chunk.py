"""Top-1 Chunk as a function of Triton kernels: chunk table, selection, attention.

Shape legend: B batch, T queries, S keys (the last T are the queries' own), H heads, G key-value heads, D head size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from seqarch_top1.triton_chunk_attention import chunk_attention
from seqarch_top1.triton_layout import chunk_table
from seqarch_top1.triton_router import triton_route


@torch.compiler.disable(recursive=True)
def triton_chunk(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    chunk_size: int,
    exact: bool,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """``top1_chunk`` with ``local`` and without ``element``, on a GPU; the host never waits for it.

    The gradient is deterministic where that of ``triton_route`` is.

    Args:
        q: ``[B, T, H, D]``, float32, float16 or bfloat16.
        k: ``[B, S, G, D]``, G divides H, S ≥ T.
        v: ``[B, S, G, D]``.
        scale: Factor of the scores q·k.
        chunk_size: Tokens a chunk, a power of two from 16 to 256.
        exact: Select by the log-sum-exp of a chunk's scores, in T·S time; otherwise by its mean key.
        cu_seqlens: int32 ``[n+1]``, boundaries of packed documents (B = 1, S = T), each cut into chunks of its own.

    Returns:
        ``[B, T, H, D]``, of q's dtype; sums are made in float32.

    Raises:
        ValueError: For 2³¹ or more queries, B·T·H.
    """
    if q[..., 0].numel() >= 1 << 31:
        raise ValueError(f"the Triton kernels number queries in 31 bits, q of {list(q.shape)} has more")
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k.to(q.dtype), v.to(q.dtype)))
    table = chunk_table(k.shape[1], chunk_size, cu_seqlens, q.device)
    index, P = triton_route(q, k, scale=scale, table=table, exact=exact)
    n0 = (k.shape[1] - q.shape[1]) // chunk_size if cu_seqlens is None else 0
    return chunk_attention(q, k, v, index, P, begin=table.begin, scale=scale, chunk_size=chunk_size, n0=n0)
