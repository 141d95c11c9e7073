"""Forward kernels of Top-1 Chunk's attention: the own chunk, then the selected one into the same softmax.

Scores are in units of log 2, so that exp2 serves. Tensors ``[B, T, H, D]`` come with strides, elements of a head next
to each other; ``o`` and ``lse`` are contiguous, ``[B, T, H, D]`` and ``[B, H, T]``.

Shape legend: B batch, T queries, S keys (the last T are the queries' own), H heads, G key-value heads, R = H/G, D head
size, C tokens a chunk, N chunks.
"""

# pyright: reportOperatorIssue=false, reportGeneralTypeIssues=false
# (tl's annotations describe what the compiler evaluates, not what a kernel sees)

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def load_rows(x, row, valid, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """``x[row[i] + d]``, 0 where a row is not valid or d ≥ D."""
    d = tl.arange(0, BLOCK_D)
    mask = valid[:, None]
    if BLOCK_D > D:
        mask = mask & (d < D)[None, :]
    return tl.load(x + row[:, None] + d[None, :], mask=mask, other=0.0)


@triton.jit
def store_rows(x, row, valid, value, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """``x[row[i] + d] = value[i, d]`` where a row is valid and d < D."""
    d = tl.arange(0, BLOCK_D)
    mask = valid[:, None]
    if BLOCK_D > D:
        mask = mask & (d < D)[None, :]
    tl.store(x + row[:, None] + d[None, :], value.to(x.dtype.element_ty), mask=mask)


@triton.jit
def attend(o, top, z, q, k, v, qk_scale, visible):
    """Add a block of keys to a running softmax: ``o`` unnormalised, ``top`` largest score, ``z`` sum of weights."""
    s = tl.dot(q, tl.trans(k), input_precision="ieee") * qk_scale
    s = tl.where(visible, s, float("-inf"))
    new_top = tl.maximum(top, tl.max(s, 1))
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    p = tl.exp2(s - base[:, None])
    decay = tl.exp2(top - base)
    z = z * decay + tl.sum(p, 1)
    o = o * decay[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
    return o, new_top, z


@triton.jit
def own_forward(
    q, k, v, o, lse, begin, scale, T, S, H, heads, n0,
    q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head,
    R: tl.constexpr, C: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Attention of BLOCK_M queries within their own chunk. Grid: blocks of chunks n0 … × ``heads`` = B·H."""
    PER: tl.constexpr = C // BLOCK_M
    piece = tl.program_id(0) // heads
    b = (tl.program_id(0) % heads // H).to(tl.int64)
    h = tl.program_id(0) % H
    g = h // R
    chunk = n0 + piece // PER
    start = tl.load(begin + chunk)
    end = tl.load(begin + chunk + 1)
    i = start + piece % PER * BLOCK_M + tl.arange(0, BLOCK_M)  # places among the keys
    t = i - (S - T)
    valid = (i < end) & (t >= 0)
    if tl.max(valid.to(tl.int32), 0) > 0:
        qk_scale = scale * LOG2E
        q_rows = load_rows(q + b * q_batch + h * q_head, t.to(tl.int64) * q_token, valid, D, BLOCK_D)
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        top = tl.full([BLOCK_M], float("-inf"), tl.float32)
        z = tl.zeros([BLOCK_M], tl.float32)
        for step in range(0, (piece % PER + 1) * BLOCK_M, BLOCK_N):
            j = start + step + tl.arange(0, BLOCK_N)
            inside = j < end
            k_rows = load_rows(k + b * k_batch + g * k_head, j.to(tl.int64) * k_token, inside, D, BLOCK_D)
            v_rows = load_rows(v + b * v_batch + g * v_head, j.to(tl.int64) * v_token, inside, D, BLOCK_D)
            visible = j[None, :] <= i[:, None]
            acc, top, z = attend(acc, top, z, q_rows, k_rows, v_rows, qk_scale, visible)
        tl.store(lse + (b * H + h) * T + t, top + tl.log2(z), mask=valid)
        store_rows(o, ((b * T + t) * H + h) * D, valid, acc / z[:, None], D, BLOCK_D)


@triton.jit
def selected_forward(
    q, k, v, o, lse, begin, query, query_begin, block_chunk, block_start, scale, T, H, N, none,
    q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head,
    G: tl.constexpr, C: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Attention of BLOCK_M queries to the chunk that all of them selected, joined to what ``own_forward`` left."""
    m = tl.load(block_chunk + tl.program_id(0))
    if m < none:
        at = tl.load(block_start + tl.program_id(0)) + tl.arange(0, BLOCK_M)
        valid = at < tl.load(query_begin + m + 1)
        row = tl.load(query + at, mask=valid, other=0)
        t, h, b = row % T, row // T % H, (row // T // H).to(tl.int64)
        g = m // N % G
        kv_batch = (m // N // G).to(tl.int64)
        qk_scale = scale * LOG2E
        q_rows = load_rows(q, b * q_batch + t.to(tl.int64) * q_token + h * q_head, valid, D, BLOCK_D)
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        top = tl.full([BLOCK_M], float("-inf"), tl.float32)
        z = tl.zeros([BLOCK_M], tl.float32)
        start = tl.load(begin + m % N)
        whole = tl.full([BLOCK_N], 1, tl.int1)
        for step in range(0, C, BLOCK_N):
            j = (start + step + tl.arange(0, BLOCK_N)).to(tl.int64)
            k_rows = load_rows(k + kv_batch * k_batch + g * k_head, j * k_token, whole, D, BLOCK_D)
            v_rows = load_rows(v + kv_batch * v_batch + g * v_head, j * v_token, whole, D, BLOCK_D)
            acc, top, z = attend(acc, top, z, q_rows, k_rows, v_rows, qk_scale, whole[None, :])
        lse_selected = top + tl.log2(z)
        lse_own = tl.load(lse + row, mask=valid, other=0.0)
        high = tl.maximum(lse_own, lse_selected)
        both = high + tl.log2(tl.exp2(lse_own - high) + tl.exp2(lse_selected - high))
        o_row = ((b * T + t) * H + h) * D
        o_own = load_rows(o, o_row, valid, D, BLOCK_D).to(tl.float32)
        own_share = tl.exp2(lse_own - both)[:, None]
        selected_share = tl.exp2(lse_selected - both)[:, None]
        store_rows(o, o_row, valid, own_share * o_own + selected_share * (acc / z[:, None]), D, BLOCK_D)
        tl.store(lse + row, both, mask=valid)
