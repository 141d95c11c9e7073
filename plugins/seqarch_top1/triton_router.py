"""Top-1 Chunk's selection in Triton: the chunk that each query selects, and its probability, in one pass over what
chunks are scored by: all their keys (exact), or their mean keys.

Scores are in units of log 2, so that exp2 serves. The backward pass recomputes them, and has no atomic additions: it is
deterministic. Nothing of size T × S or T × N is stored.

Shape legend: B batch, T queries, S keys (the last T are the queries' own), H heads, G key-value heads, R = H/G, D head
size, C tokens a chunk, N chunks; X rows that chunks are scored by, S keys or N means.
"""

# pyright: reportOperatorIssue=false, reportGeneralTypeIssues=false, reportCallIssue=false, reportArgumentType=false
# (tl's annotations describe what the compiler evaluates; a launch takes strides as a list, and ints as constants)

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from seqarch_top1.triton_chunk_forward import LOG2E, load_rows, store_rows
from seqarch_top1.triton_layout import ChunkTable


@triton.jit
def mean_keys(
    k, means, begin, N, heads, k_batch, k_token, k_head,
    G: tl.constexpr, C: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Sum of a chunk's keys over C, float32 ``[B, G, N, D]``. Grid: N × ``heads`` = B·G."""
    m = tl.program_id(0) // heads
    head = tl.program_id(0) % heads
    b = (head // G).to(tl.int64)
    start = tl.load(begin + m)
    end = tl.load(begin + m + 1)
    total = tl.zeros([BLOCK_D], tl.float32)
    for step in range(0, C, BLOCK_N):
        j = start + step + tl.arange(0, BLOCK_N)
        rows = load_rows(k + b * k_batch + head % G * k_head, j.to(tl.int64) * k_token, j < end, D, BLOCK_D)
        total += tl.sum(rows.to(tl.float32), 0)
    d = tl.arange(0, BLOCK_D)
    tl.store(means + (head.to(tl.int64) * N + m) * D + d, total / C, mask=d < D)


@triton.jit
def query_block(of, first, T, S, H, heads, BLOCK_M: tl.constexpr):
    """Of this program: batch, head, queries and which of them there are; the candidates of each are the chunks from
    ``lowest`` on before ``own``, those of any of them from ``lo`` on before ``hi``."""
    t0 = tl.program_id(0) // heads * BLOCK_M
    b = (tl.program_id(0) % heads // H).to(tl.int64)
    h = tl.program_id(0) % H
    t = t0 + tl.arange(0, BLOCK_M)
    valid = t < T
    lowest = tl.load(first + S - T + t, mask=valid, other=0)
    own = tl.load(of + S - T + t, mask=valid, other=0)
    lo = tl.load(first + S - T + t0)
    hi = tl.load(of + S - T + tl.minimum(t0 + BLOCK_M, T) - 1)
    return b, h, t, valid, lowest, own, lo, hi


@triton.jit
def route_forward(
    q, x, index, P, lse, begin, of, first, scale, T, S, N, H, heads,
    q_batch, q_token, q_head, x_batch, x_row, x_head,
    R: tl.constexpr, C: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, EXACT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Arg-max and log-sum-exp over the candidates of BLOCK_M queries. Grid: blocks of queries × ``heads`` = B·H."""
    b, h, t, valid, lowest, own, lo, hi = query_block(of, first, T, S, H, heads, BLOCK_M)
    x += b * x_batch + h // R * x_head
    q_rows = load_rows(q + b * q_batch + h * q_head, t.to(tl.int64) * q_token, valid, D, BLOCK_D)
    q_rows = q_rows.to(x.dtype.element_ty)
    qk_scale = scale * LOG2E
    best = tl.full([BLOCK_M], float("-inf"), tl.float32)
    chosen = tl.full([BLOCK_M], -1, tl.int32)
    z = tl.zeros([BLOCK_M], tl.float32)
    if EXACT:
        for m in range(lo, hi):
            start = tl.load(begin + m)
            end = tl.load(begin + m + 1)
            top = tl.full([BLOCK_M], float("-inf"), tl.float32)
            inner = tl.zeros([BLOCK_M], tl.float32)
            for step in range(0, C, BLOCK_N):
                j = start + step + tl.arange(0, BLOCK_N)
                rows = load_rows(x, j.to(tl.int64) * x_row, j < end, D, BLOCK_D)
                s = tl.dot(q_rows, tl.trans(rows), input_precision=PRECISION) * qk_scale
                s = tl.where((j < end)[None, :], s, float("-inf"))
                new_top = tl.maximum(top, tl.max(s, 1))
                base = tl.where(new_top == float("-inf"), 0.0, new_top)
                inner = inner * tl.exp2(top - base) + tl.sum(tl.exp2(s - base[:, None]), 1)
                top = new_top
            logit = tl.where((lowest <= m) & (m < own), top + tl.log2(inner), float("-inf"))
            new_best = tl.maximum(best, logit)
            base = tl.where(new_best == float("-inf"), 0.0, new_best)
            z = z * tl.exp2(best - base) + tl.exp2(logit - base)
            chosen = tl.where(logit > best, m, chosen)
            best = new_best
    else:
        for n in range(lo, hi, BLOCK_N):
            m = n + tl.arange(0, BLOCK_N)
            rows = load_rows(x, m.to(tl.int64) * x_row, m < N, D, BLOCK_D)
            s = tl.dot(q_rows, tl.trans(rows), input_precision=PRECISION) * qk_scale
            s = tl.where((lowest[:, None] <= m[None, :]) & (m[None, :] < own[:, None]), s, float("-inf"))
            highest = tl.max(s, 1)
            new_best = tl.maximum(best, highest)
            base = tl.where(new_best == float("-inf"), 0.0, new_best)
            z = z * tl.exp2(best - base) + tl.sum(tl.exp2(s - base[:, None]), 1)
            chosen = tl.where(highest > best, n + tl.argmax(s, 1), chosen)
            best = new_best
    row = (b * H + h) * T + t
    tl.store(index + row, chosen, mask=valid)
    tl.store(P + row, tl.where(chosen < 0, 0.0, 1.0 / z), mask=valid)
    tl.store(lse + row, tl.where(chosen < 0, float("inf"), best + tl.log2(z)), mask=valid)


@triton.jit
def score_gradients(
    q_rows, rows, m, seen, qk_scale, lse, dP, P, index, PRECISION: tl.constexpr
):  # fmt: skip
    """Of scores: a logit's gradient is dP·P·([m = m*] - P_m), and a score's share of it its part of exp(logit)."""
    s = tl.dot(q_rows, tl.trans(rows), input_precision=PRECISION) * qk_scale
    part = tl.exp2(tl.where(seen, s, float("-inf")) - lse[:, None])
    return part * (tl.where(m[None, :] == index[:, None], dP[:, None], 0.0) - (dP * P)[:, None])


@triton.jit
def route_queries_backward(
    q, x, dP, P, lse, index, dq, begin, of, first, scale, T, S, N, H, heads,
    q_batch, q_token, q_head, x_batch, x_row, x_head,
    R: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, EXACT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq of BLOCK_M queries. Grid: blocks of queries × ``heads`` = B·H."""
    b, h, t, valid, lowest, own, lo, hi = query_block(of, first, T, S, H, heads, BLOCK_M)
    if EXACT:
        lo = tl.load(begin + lo)
        hi = tl.load(begin + hi)
    x += b * x_batch + h // R * x_head
    q_rows = load_rows(q + b * q_batch + h * q_head, t.to(tl.int64) * q_token, valid, D, BLOCK_D)
    q_rows = q_rows.to(x.dtype.element_ty)
    row = (b * H + h) * T + t
    lse_rows = tl.load(lse + row, mask=valid, other=float("inf"))
    dP_rows = tl.load(dP + row, mask=valid, other=0.0)
    P_rows = tl.load(P + row, mask=valid, other=0.0)
    index_rows = tl.load(index + row, mask=valid, other=-1)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for n in range(lo, hi, BLOCK_N):
        j = n + tl.arange(0, BLOCK_N)
        rows = load_rows(x, j.to(tl.int64) * x_row, j < hi, D, BLOCK_D)
        m = j
        if EXACT:
            m = tl.load(of + j, mask=j < hi, other=-1)
        seen = (j < hi)[None, :] & (lowest[:, None] <= m[None, :]) & (m[None, :] < own[:, None])
        ds = score_gradients(q_rows, rows, m, seen, scale * LOG2E, lse_rows, dP_rows, P_rows, index_rows, PRECISION)
        acc += tl.dot(ds.to(rows.dtype), rows, input_precision=PRECISION)
    store_rows(dq, ((b * T + t) * H + h) * D, valid, acc * scale, D, BLOCK_D)


@triton.jit
def route_keys_backward(
    q, x, dP, P, lse, index, dx, begin, of, first, ends, scale, T, S, N, H, heads, X,
    q_batch, q_token, q_head, x_batch, x_row, x_head, dx_batch, dx_row, dx_head,
    R: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, EXACT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dx of BLOCK_N keys or mean keys, from the queries after them. Grid: blocks of rows × ``heads`` = B·G."""
    j0 = tl.program_id(0) // heads * BLOCK_N
    b = (tl.program_id(0) % heads // G).to(tl.int64)
    g = tl.program_id(0) % G
    j = j0 + tl.arange(0, BLOCK_N)
    there = j < X
    rows = load_rows(x + b * x_batch + g * x_head, j.to(tl.int64) * x_row, there, D, BLOCK_D)
    m = j
    m_first = j0
    m_last = tl.minimum(j0 + BLOCK_N, X) - 1
    if EXACT:
        m = tl.load(of + j, mask=there, other=-1)
        m_first = tl.load(of + m_first)
        m_last = tl.load(of + m_last)
    begin_queries = tl.maximum(tl.load(begin + m_first + 1), S - T)
    end_queries = tl.load(ends + m_last)  # of the document
    acc = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    for r in range(0, R):
        h = g * R + r
        for i0 in range(begin_queries, end_queries, BLOCK_M):
            i = i0 + tl.arange(0, BLOCK_M)
            t = i - (S - T)
            valid = i < end_queries
            lowest = tl.load(first + i, mask=valid, other=0)
            own = tl.load(of + i, mask=valid, other=0)
            q_rows = load_rows(q + b * q_batch + h * q_head, t.to(tl.int64) * q_token, valid, D, BLOCK_D)
            q_rows = q_rows.to(x.dtype.element_ty)
            row = (b * H + h) * T + t
            lse_rows = tl.load(lse + row, mask=valid, other=float("inf"))
            dP_rows = tl.load(dP + row, mask=valid, other=0.0)
            P_rows = tl.load(P + row, mask=valid, other=0.0)
            index_rows = tl.load(index + row, mask=valid, other=-1)
            seen = there[None, :] & (lowest[:, None] <= m[None, :]) & (m[None, :] < own[:, None])
            ds = score_gradients(q_rows, rows, m, seen, scale * LOG2E, lse_rows, dP_rows, P_rows, index_rows, PRECISION)
            acc += tl.dot(tl.trans(ds).to(q_rows.dtype), q_rows, input_precision=PRECISION)
    store_rows(dx + b * dx_batch + g * dx_head, j.to(tl.int64) * dx_row, there, acc * scale, D, BLOCK_D)


class _Route(torch.autograd.Function):
    """See ``triton_route``."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, table: ChunkTable, scale: float, exact: bool) -> tuple[Tensor, Tensor]:
        """Mean keys where they are what counts, then one pass."""
        B, T, H, D = q.shape
        S, G = k.shape[1:3]
        N, C = len(table.begin) - 1, table.chunk_size
        index = torch.empty((B, H, T), dtype=torch.int32, device=q.device)
        P, lse = (torch.empty((B, H, T), dtype=torch.float32, device=q.device) for _ in range(2))
        blocks = _blocks(D, q.dtype, C, exact)
        with torch.cuda.device_of(q):
            x = k
            if not exact:
                x = torch.empty((B, G, N, D), dtype=torch.float32, device=q.device)
                size = {"D": D, "BLOCK_D": blocks["BLOCK_D"], "BLOCK_N": min(C, 32)}
                mean_keys[(N * B * G,)](k, x, table.begin, N, B * G, *k.stride()[:3], G=G, C=C, **size)
                x = x.transpose(1, 2)
            route_forward[(triton.cdiv(T, blocks["BLOCK_M"]) * B * H,)](
                q, x, index, P, lse, table.begin, table.of, table.first, scale, T, S, N, H, B * H,
                *q.stride()[:3], *x.stride()[:3], R=H // G, C=C, **blocks,
            )  # fmt: skip
        ctx.save_for_backward(q, k, x, index, P, lse, table.begin, table.of, table.first)
        ctx.scale, ctx.C, ctx.exact = scale, C, exact
        ctx.mark_non_differentiable(index)
        return index, P

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        """dq from a pass over the candidates, and dk from one over the queries."""
        q, k, x, index, P, lse, begin, of, first = ctx.saved_tensors
        dP = grad_outputs[1].contiguous()
        B, T, H, D = q.shape
        S, G = k.shape[1:3]
        N, X = len(begin) - 1, x.shape[1]
        blocks = _blocks(D, q.dtype, ctx.C, ctx.exact)
        chunk = torch.arange(N, dtype=torch.int32, device=q.device)
        ends = torch.searchsorted(first, chunk, right=True, out_int32=True)  # of each chunk's document
        dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        dx = torch.empty(x.shape, dtype=x.dtype, device=q.device)
        rows = (dP, P, lse, index)
        sizes = (ctx.scale, T, S, N, H)
        with torch.cuda.device_of(q):
            route_queries_backward[(triton.cdiv(T, blocks["BLOCK_M"]) * B * H,)](
                q, x, *rows, dq, begin, of, first, *sizes, B * H, *q.stride()[:3], *x.stride()[:3], R=H // G, **blocks
            )
            route_keys_backward[(triton.cdiv(X, blocks["BLOCK_N"]) * B * G,)](
                q, x, *rows, dx, begin, of, first, ends, *sizes, B * G, X,
                *q.stride()[:3], *x.stride()[:3], *dx.stride()[:3], R=H // G, G=G, **blocks,
            )  # fmt: skip
        dk = dx if ctx.exact else (dx / ctx.C).to(k.dtype).index_select(1, of)
        return dq, dk, None, None, None


def _blocks(D: int, dtype: torch.dtype, C: int, exact: bool) -> dict[str, Any]:
    """Constants and options of a launch. Mean keys are float32: they meet queries of half precision as TF32."""
    BLOCK_D = max(16, triton.next_power_of_2(D))
    single, amd = dtype == torch.float32, torch.version.hip is not None
    wide = BLOCK_D >= 128 or single or not exact
    return {
        "D": D,
        "BLOCK_D": BLOCK_D,
        "BLOCK_M": 32 if wide else 64,
        "BLOCK_N": min(C, 32) if exact else 32,
        "EXACT": exact,
        "PRECISION": "ieee" if single or exact or amd else "tf32",
        "num_warps": 8 if single and BLOCK_D >= 128 and not amd else 4,
        "num_stages": 1 if single or not exact else 2,
    }


def triton_route(q: Tensor, k: Tensor, *, scale: float, table: ChunkTable, exact: bool) -> tuple[Tensor, Tensor]:
    """The chunk that each query selects among the candidates before its own, and the probability of that.

    Args:
        q: ``[B, T, H, D]``, the elements of a head next to each other, as in k.
        k: ``[B, S, G, D]``, G divides H, S ≥ T, of q's dtype.
        scale: Factor of the scores q·k.
        table: The chunks of the S keys.
        exact: Score a chunk by the log-sum-exp of its keys' scores; otherwise by its mean key.

    Returns:
        int32 ``[B, H, T]``, -1 where there is no candidate, the first of equals; and its share of the softmax over the
        candidates' logits, float32, 0 where there is none. Only the latter has a gradient.
    """
    return _Route.apply(q, k, table, scale, exact)  # pyright: ignore[reportReturnType]
