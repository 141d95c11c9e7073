"""Backward kernels of Top-1 Chunk's attention, without atomic additions: the same sums in the same order every time.

Queries: the own chunk's part first (it also leaves δ = Σ do·o), then the selected chunk's is added. Keys and values:
each split of the queries that selected a chunk leaves a partial sum; these are added to that over the own queries.

Conventions and legend as in ``triton_chunk_forward``.
"""

# pyright: reportOperatorIssue=false, reportGeneralTypeIssues=false
# (tl's annotations describe what the compiler evaluates, not what a kernel sees)

from __future__ import annotations

import triton
import triton.language as tl

from seqarch_top1.triton_chunk_forward import LOG2E, load_rows, store_rows


@triton.jit
def weights(q, k, v, do, lse, delta, qk_scale):
    """Softmax weights p, the gradient of the scores ds (both ``[queries, keys]``), and do·v."""
    s = tl.dot(q, tl.trans(k), input_precision="ieee") * qk_scale
    p = tl.exp2(s - lse[:, None])
    dp = tl.dot(do, tl.trans(v), input_precision="ieee")
    return p, p * (dp - delta[:, None]), dp


@triton.jit
def weights_by_key(q, k, v, do, lse, delta, qk_scale):
    """p and ds as in ``weights``, ``[keys, queries]``: as they are multiplied for dv and dk."""
    s = tl.dot(k, tl.trans(q), input_precision="ieee") * qk_scale
    p = tl.exp2(s - lse[None, :])
    dp = tl.dot(v, tl.trans(do), input_precision="ieee")
    return p, p * (dp - delta[None, :])


@triton.jit
def own_queries_backward(
    q, k, v, o, lse, do, dq, delta, begin, scale, T, S, H, heads, n0,
    q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head,
    R: tl.constexpr, C: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """dq from the own chunk, and δ, for BLOCK_M queries. Grid as of ``own_forward``."""
    PER: tl.constexpr = C // BLOCK_M
    piece = tl.program_id(0) // heads
    b = (tl.program_id(0) % heads // H).to(tl.int64)
    h = tl.program_id(0) % H
    g = h // R
    chunk = n0 + piece // PER
    start = tl.load(begin + chunk)
    end = tl.load(begin + chunk + 1)
    i = start + piece % PER * BLOCK_M + tl.arange(0, BLOCK_M)
    t = i - (S - T)
    valid = (i < end) & (t >= 0)
    if tl.max(valid.to(tl.int32), 0) > 0:
        o_row = ((b * T + t) * H + h) * D
        q_rows = load_rows(q + b * q_batch + h * q_head, t.to(tl.int64) * q_token, valid, D, BLOCK_D)
        do_rows = load_rows(do, o_row, valid, D, BLOCK_D)
        o_rows = load_rows(o, o_row, valid, D, BLOCK_D)
        delta_rows = tl.sum(do_rows.to(tl.float32) * o_rows.to(tl.float32), 1)
        row = (b * H + h) * T + t
        tl.store(delta + row, delta_rows, mask=valid)
        lse_rows = tl.load(lse + row, mask=valid, other=float("inf"))
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        for step in range(0, (piece % PER + 1) * BLOCK_M, BLOCK_N):
            j = start + step + tl.arange(0, BLOCK_N)
            inside = j < end
            k_rows = load_rows(k + b * k_batch + g * k_head, j.to(tl.int64) * k_token, inside, D, BLOCK_D)
            v_rows = load_rows(v + b * v_batch + g * v_head, j.to(tl.int64) * v_token, inside, D, BLOCK_D)
            _, ds, _ = weights(q_rows, k_rows, v_rows, do_rows, lse_rows, delta_rows, scale * LOG2E)
            ds = tl.where(j[None, :] <= i[:, None], ds, 0.0)
            acc += tl.dot(ds.to(k_rows.dtype), k_rows, input_precision="ieee")
        store_rows(dq, o_row, valid, acc * scale, D, BLOCK_D)


@triton.jit
def selected_queries_backward(
    q, k, v, lse, do, dq, delta, dP, begin, query, query_begin, block_chunk, block_start, scale, T, H, N, none,
    q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head,
    G: tl.constexpr, C: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Adds the selected chunk's part to dq; dP = do · that chunk's part of o. Grid as of ``selected_forward``."""
    m = tl.load(block_chunk + tl.program_id(0))
    if m < none:
        at = tl.load(block_start + tl.program_id(0)) + tl.arange(0, BLOCK_M)
        valid = at < tl.load(query_begin + m + 1)
        row = tl.load(query + at, mask=valid, other=0)
        t, h, b = row % T, row // T % H, (row // T // H).to(tl.int64)
        g = m // N % G
        kv_batch = (m // N // G).to(tl.int64)
        o_row = ((b * T + t) * H + h) * D
        q_rows = load_rows(q, b * q_batch + t.to(tl.int64) * q_token + h * q_head, valid, D, BLOCK_D)
        do_rows = load_rows(do, o_row, valid, D, BLOCK_D)
        lse_rows = tl.load(lse + row, mask=valid, other=float("inf"))
        delta_rows = tl.load(delta + row, mask=valid, other=0.0)
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        part = tl.zeros([BLOCK_M], tl.float32)
        start = tl.load(begin + m % N)
        whole = tl.full([BLOCK_N], 1, tl.int1)
        for step in range(0, C, BLOCK_N):
            j = (start + step + tl.arange(0, BLOCK_N)).to(tl.int64)
            k_rows = load_rows(k + kv_batch * k_batch + g * k_head, j * k_token, whole, D, BLOCK_D)
            v_rows = load_rows(v + kv_batch * v_batch + g * v_head, j * v_token, whole, D, BLOCK_D)
            p, ds, dp = weights(q_rows, k_rows, v_rows, do_rows, lse_rows, delta_rows, scale * LOG2E)
            part += tl.sum(p * dp, 1)
            acc += tl.dot(ds.to(k_rows.dtype), k_rows, input_precision="ieee")
        dq_own = load_rows(dq, o_row, valid, D, BLOCK_D).to(tl.float32)
        store_rows(dq, o_row, valid, dq_own + acc * scale, D, BLOCK_D)
        tl.store(dP + row, part, mask=valid)


@triton.jit
def selected_keys_backward(
    q, k, v, lse, do, delta, dk_part, dv_part, begin, query, query_begin, split_chunk, split_start,
    scale, T, H, N, none,
    q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head,
    G: tl.constexpr, C: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Sums of at most SPLIT queries to dk (without ``scale``) and dv of BLOCK_N keys of the chunk that they selected.

    Grid: splits × C/BLOCK_N. ``dk_part`` and ``dv_part``: float32 ``[splits, C, D]``.
    """
    PER: tl.constexpr = C // BLOCK_N
    split = tl.program_id(0) // PER
    inner = tl.program_id(0) % PER * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.load(split_chunk + split)
    if m < none:
        g = m // N % G
        kv_batch = (m // N // G).to(tl.int64)
        j = (tl.load(begin + m % N) + inner).to(tl.int64)
        whole = tl.full([BLOCK_N], 1, tl.int1)
        k_rows = load_rows(k + kv_batch * k_batch + g * k_head, j * k_token, whole, D, BLOCK_D)
        v_rows = load_rows(v + kv_batch * v_batch + g * v_head, j * v_token, whole, D, BLOCK_D)
        dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
        dv = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
        start = tl.load(split_start + split)
        end = tl.minimum(start + SPLIT, tl.load(query_begin + m + 1))
        for first in range(start, end, BLOCK_M):
            at = first + tl.arange(0, BLOCK_M)
            valid = at < end
            row = tl.load(query + at, mask=valid, other=0)
            t, h, b = row % T, row // T % H, (row // T // H).to(tl.int64)
            q_rows = load_rows(q, b * q_batch + t.to(tl.int64) * q_token + h * q_head, valid, D, BLOCK_D)
            do_rows = load_rows(do, ((b * T + t) * H + h) * D, valid, D, BLOCK_D)
            lse_rows = tl.load(lse + row, mask=valid, other=float("inf"))
            delta_rows = tl.load(delta + row, mask=valid, other=0.0)
            p, ds = weights_by_key(q_rows, k_rows, v_rows, do_rows, lse_rows, delta_rows, scale * LOG2E)
            dv += tl.dot(p.to(do_rows.dtype), do_rows, input_precision="ieee")
            dk += tl.dot(ds.to(q_rows.dtype), q_rows, input_precision="ieee")
        out = (split.to(tl.int64) * C + inner) * D
        store_rows(dk_part, out, whole, dk, D, BLOCK_D)
        store_rows(dv_part, out, whole, dv, D, BLOCK_D)


@triton.jit
def own_keys_backward(
    q, k, v, lse, do, delta, dk_part, dv_part, dk, dv, begin, split_first, scale, T, S, H, N, heads,
    q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head,
    G: tl.constexpr, R: tl.constexpr, C: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """dk, dv of BLOCK_N keys: queries of their own chunk, then partial sums. Grid: N·C/BLOCK_N × ``heads`` = B·G."""
    PER: tl.constexpr = C // BLOCK_N
    piece = tl.program_id(0) // heads
    chunk = piece // PER
    inner = piece % PER * BLOCK_N + tl.arange(0, BLOCK_N)
    b = (tl.program_id(0) % heads // G).to(tl.int64)
    g = tl.program_id(0) % G
    start = tl.load(begin + chunk)
    end = tl.load(begin + chunk + 1)
    j = start + inner
    inside = j < end
    if tl.max(inside.to(tl.int32), 0) > 0:
        k_rows = load_rows(k + b * k_batch + g * k_head, j.to(tl.int64) * k_token, inside, D, BLOCK_D)
        v_rows = load_rows(v + b * v_batch + g * v_head, j.to(tl.int64) * v_token, inside, D, BLOCK_D)
        dk_rows = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
        dv_rows = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
        for r in range(0, R):
            h = g * R + r
            for step in range(piece % PER * BLOCK_N, C, BLOCK_M):
                i = start + step + tl.arange(0, BLOCK_M)
                t = i - (S - T)
                valid = (i < end) & (t >= 0)
                q_rows = load_rows(q + b * q_batch + h * q_head, t.to(tl.int64) * q_token, valid, D, BLOCK_D)
                do_rows = load_rows(do, ((b * T + t) * H + h) * D, valid, D, BLOCK_D)
                row = (b * H + h) * T + t
                lse_rows = tl.load(lse + row, mask=valid, other=float("inf"))
                delta_rows = tl.load(delta + row, mask=valid, other=0.0)
                p, ds = weights_by_key(q_rows, k_rows, v_rows, do_rows, lse_rows, delta_rows, scale * LOG2E)
                visible = j[:, None] <= i[None, :]
                p = tl.where(visible, p, 0.0)
                ds = tl.where(visible, ds, 0.0)
                dv_rows += tl.dot(p.to(do_rows.dtype), do_rows, input_precision="ieee")
                dk_rows += tl.dot(ds.to(q_rows.dtype), q_rows, input_precision="ieee")
        m = tl.program_id(0) % heads * N + chunk
        first, last = tl.load(split_first + m), tl.load(split_first + m + 1)
        for split in tl.range(first, last, num_stages=1):
            dk_rows += load_rows(dk_part, (split.to(tl.int64) * C + inner) * D, inside, D, BLOCK_D)
        for split in tl.range(first, last, num_stages=1):
            dv_rows += load_rows(dv_part, (split.to(tl.int64) * C + inner) * D, inside, D, BLOCK_D)
        out = ((b * S + j) * G + g) * D
        store_rows(dk, out, inside, dk_rows * scale, D, BLOCK_D)
        store_rows(dv, out, inside, dv_rows, D, BLOCK_D)
