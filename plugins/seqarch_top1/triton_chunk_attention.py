"""Top-1 Chunk's attention in Triton: each query over its own chunk and the one that it selected, under one softmax.

Queries are sorted by the chunk that they selected, so that a block of them multiplies one chunk on tensor cores. Memory
is linear in the tokens. The backward pass has no atomic additions: it is deterministic.

Shape legend: B batch, T queries, S keys (the last T are the queries' own), H heads, G key-value heads, R = H/G, D head
size, C tokens a chunk, N chunks of keys.
"""

# pyright: reportCallIssue=false, reportArgumentType=false
# (a launch takes strides as a list, and ints as constants)

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from seqarch_top1.triton_chunk_backward import (
    own_keys_backward,
    own_queries_backward,
    selected_keys_backward,
    selected_queries_backward,
)
from seqarch_top1.triton_chunk_forward import own_forward, selected_forward
from seqarch_top1.triton_sort import SortedQueries, sort_queries

_SPLIT = 512  # queries of one chunk whose sum to its keys one program makes: a chunk that all choose is shared out


def _blocks(C: int, D: int, dtype: torch.dtype) -> tuple[dict[str, int], dict[str, int]]:
    """Constants and options of the kernels that keep a block of queries, and of those that keep a block of keys.

    Chosen from what compiles without spilled registers for sm_80, sm_90, sm_100 and gfx942 (a warp of which is twice as
    wide).
    """
    BLOCK_D = max(16, triton.next_power_of_2(D))
    wide, single, amd = BLOCK_D >= 128, dtype == torch.float32, torch.version.hip is not None
    rows = min(C, (16 if wide else 32) if single else 64)
    half = min(rows, 32)
    shared = {"C": C, "D": D, "BLOCK_D": BLOCK_D, "num_stages": 1 if single else 2}
    shared["num_warps"] = 8 if (wide or single) and not amd else 4
    # With blocks of 64 keys LLVM (Triton 3.9) aborts on own_forward for gfx942 at C = 256, D = 128.
    by_query = {**shared, "BLOCK_M": rows, "BLOCK_N": half if wide and amd else rows}
    return by_query, {**shared, "BLOCK_M": half, "BLOCK_N": rows}


def _strides(*tensors: Tensor) -> list[int]:
    return [stride for x in tensors for stride in x.stride()[:3]]


class _ChunkAttention(torch.autograd.Function):
    """See ``chunk_attention``."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        index: Tensor,
        P: Tensor,
        begin: Tensor,
        scale: float,
        C: int,
        n0: int,
    ) -> Tensor:
        """The own chunk, then the selected one."""
        B, T, H, D = q.shape
        S, G = k.shape[1:3]
        N = len(begin) - 1
        o = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        lse = torch.empty((B, H, T), dtype=torch.float32, device=q.device)
        blocks, strides = _blocks(C, D, q.dtype)[0], _strides(q, k, v)
        queries = sort_queries(index, G, N)
        with torch.cuda.device_of(q):
            own_forward[((N - n0) * (C // blocks["BLOCK_M"]) * B * H,)](
                q, k, v, o, lse, begin, scale, T, S, H, B * H, n0, *strides, R=H // G, **blocks
            )
            parts = queries.blocks(blocks["BLOCK_M"], B * G * (S // C))
            if S >= C:
                selected_forward[(len(parts.chunk),)](
                    q, k, v, o, lse, begin, queries.query, queries.begin, parts.chunk, parts.start,
                    scale, T, H, N, B * G * N, *strides, G=G, **blocks,
                )  # fmt: skip
        ctx.save_for_backward(q, k, v, o, lse, begin, queries.query, queries.begin, parts.chunk, parts.start)
        ctx.scale, ctx.C, ctx.n0 = scale, C, n0
        return o

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        """dq, dk, dv from recomputed weights; dP = do · the selected chunk's part of o."""
        q, k, v, o, lse, begin, query, query_begin, block_chunk, block_start = ctx.saved_tensors
        do = grad_outputs[0].contiguous()
        B, T, H, D = q.shape
        S, G = k.shape[1:3]
        C, N, R = ctx.C, len(begin) - 1, H // G
        delta, dP = torch.empty_like(lse), torch.zeros_like(lse)
        dq = torch.empty_like(o)
        dk, dv = (torch.empty(k.shape, dtype=k.dtype, device=k.device) for _ in range(2))
        (by_query, by_key), strides = _blocks(C, D, q.dtype), _strides(q, k, v)
        splits = SortedQueries(query, query_begin).blocks(_SPLIT, B * G * (S // C))
        parts = torch.empty((2, len(splits.chunk), C, D), dtype=torch.float32, device=q.device)
        sizes = (ctx.scale, T, H, N, B * G * N)
        with torch.cuda.device_of(q):
            own_queries_backward[((N - ctx.n0) * (C // by_query["BLOCK_M"]) * B * H,)](
                q, k, v, o, lse, do, dq, delta, begin, ctx.scale, T, S, H, B * H, ctx.n0, *strides, R=R,
                **by_query,
            )  # fmt: skip
            if S >= C:
                selected_queries_backward[(len(block_chunk),)](
                    q, k, v, lse, do, dq, delta, dP, begin, query, query_begin, block_chunk, block_start,
                    *sizes, *strides, G=G, **by_query,
                )  # fmt: skip
                selected_keys_backward[(len(splits.chunk) * (C // by_key["BLOCK_N"]),)](
                    q, k, v, lse, do, delta, *parts, begin, query, query_begin, splits.chunk, splits.start,
                    *sizes, *strides, G=G, **by_key, SPLIT=_SPLIT,
                )  # fmt: skip
            own_keys_backward[(N * (C // by_key["BLOCK_N"]) * B * G,)](
                q, k, v, lse, do, delta, *parts, dk, dv, begin, splits.first, ctx.scale, T, S, H, N, B * G,
                *strides, G=G, R=R, **{**by_key, "num_stages": 1},  # one loop after the other: two buffers do not fit
            )  # fmt: skip
        return dq, dk, dv, None, dP, None, None, None, None


def chunk_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    index: Tensor,
    P: Tensor,
    *,
    begin: Tensor,
    scale: float,
    chunk_size: int,
    n0: int,
) -> Tensor:
    """Attention over the selected and the own chunk, one softmax; and the straight-through gradient of the selection.

    Args:
        q: ``[B, T, H, D]``, the elements of a head next to each other, as in k and v.
        k: ``[B, S, G, D]``, G divides H, S ≥ T, of q's dtype.
        v: ``[B, S, G, D]``, as k.
        index: int32 ``[B, H, T]``, the complete chunk that each query selected, negative for none.
        P: float32 ``[B, H, T]``, the probability of that chunk: the part of the output that comes from the chunk is
            scaled by 1 + P - sg(P), which shows in the gradient only.
        begin: int32 ``[N + 1]``, where each chunk begins among the keys.
        scale: Factor of the scores q·k.
        chunk_size: C, a power of two from 16 on.
        n0: A chunk before which no query lies.

    Returns:
        ``[B, T, H, D]``, of q's dtype; sums are made in float32.
    """
    return _ChunkAttention.apply(  # pyright: ignore[reportReturnType]
        q, k, v, index, P, begin, scale, chunk_size, n0
    )
