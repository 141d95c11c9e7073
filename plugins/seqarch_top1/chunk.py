"""Top-1 Chunk as a function: layout, selection, attention.

Shape legend: B batch, T queries, S keys (the last T are the queries' own), H heads, G key-value heads, D head size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from seqarch_top1.chunk_attention import chunk_attention, hidden
from seqarch_top1.layout import packed, plain
from seqarch_top1.router import own_logit, route
from seqarch_top1.tiles import working


@torch.compiler.disable(recursive=True)
def top1_chunk(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    chunk_size: int,
    exact: bool,
    local: bool = True,
    element: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """Attention of each query to its own chunk and to the one earlier chunk that it selects; see ``Top1Chunk``.

    Memory grows as T + S, forward and backward.

    Args:
        q: ``[B, T, H, D]``.
        k: ``[B, S, G, D]``, G divides H, S ≥ T.
        v: ``[B, S, G, D]``.
        scale: Factor of the scores q·k.
        chunk_size: Tokens a chunk; key j lies in chunk j // chunk_size.
        exact: Select by the log-sum-exp of a chunk's scores, in T·S time; otherwise by its mean key.
        local: The own chunk is always seen; otherwise it is one more candidate.
        element: The value of the token with the largest score instead of a softmax over the tokens.
        cu_seqlens: int32 ``[n+1]``, boundaries of packed documents (B = 1, S = T), each cut into chunks of its own.

    Returns:
        ``[B, T, H, D]``, in at least float32.
    """
    B, T, H, _ = q.shape
    S, G = k.shape[1:3]
    if cu_seqlens is None:
        queries, keys = plain(T, chunk_size, S - T), plain(S, chunk_size)
    else:
        queries = keys = packed(cu_seqlens.tolist(), chunk_size, q.device)
    offset = keys.n_chunks - queries.n_chunks
    q, k, v = queries.split(working(q) * scale, G), keys.split(working(k), G), keys.split(working(v), G)
    first = None if queries.first is None else queries.first.repeat(1, H // G)
    own = None
    if not local:
        visible = ~hidden(queries.segment, 0, queries.n_chunks, q.shape[2], chunk_size, q.device)
        own = own_logit(q, k[:, offset:], exact, visible)
    index, P = route(q, k if exact else k.mean(2, keepdim=True), own, first, offset)
    o = chunk_attention(q, k, v, index, P, segment=queries.segment, offset=offset, local=local, element=element)
    return queries.join(o, B, T)
