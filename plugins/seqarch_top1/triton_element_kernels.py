"""Kernels of Top-1 Element: arg-max and log-sum-exp in one pass over the keys, and the straight-through gradient.

Weights are onehot(j*) + p - sg(p): the values get the gradient of the hard selection, the scores that of softmax,
ds = p·(dp - δ) with dp = do·v and δ = Σ p·dp. Softmax's own output, of which δ is usually made, is neither computed nor
stored, so that the forward pass is one product and reads no values. The pass that makes dq sums e = p·(dp - c) instead,
with c = do·v[j*] = do·o: δ = c + Σ e, and dq = Σ e·k - (Σ e)·Σ p·k. As softmax comes near to one-hot, c comes near to
δ, so that nothing large cancels.

Products q·k are compared as they are; scores are in units of log 2 in the exponentials, so that exp2 serves. Tensors
``[B, T, H, D]`` come with strides, elements of a head next to each other; ``o``, ``do`` and the gradients are
contiguous, and numbers of a query ``[B, H, T]``. ``first`` and ``end``, int32 ``[S]``, are the document of each key,
None for one document.

Shape legend: B batch, T queries, S keys (the last T are the queries' own), H heads, G key-value heads, R = H/G, D head
size.
"""

# pyright: reportOperatorIssue=false, reportGeneralTypeIssues=false, reportCallIssue=false, reportArgumentType=false
# (tl's annotations describe what the compiler evaluates, not what a kernel sees)

from __future__ import annotations

import triton
import triton.language as tl

from seqarch_top1.triton_chunk_forward import LOG2E, load_rows, store_rows


@triton.jit
def query_block(first, T, S, H, heads, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Of this program, long passes first: batch, head, queries, their places among the keys and which there are; the
    first key of each, and the keys of any of them: ``lo`` … ``hi - 1``, in blocks from ``lo`` on, of which those before
    ``full`` are past to all."""
    block = tl.num_programs(0) // heads - 1 - tl.program_id(0) // heads
    b = (tl.program_id(0) % heads // H).to(tl.int64)
    h = tl.program_id(0) % H
    t = block * BLOCK_M + tl.arange(0, BLOCK_M)
    i = t + (S - T)
    valid = t < T
    lowest = tl.zeros([BLOCK_M], tl.int32)
    lo = 0
    if first is not None:
        lowest = tl.load(first + i, mask=valid, other=0)
        lo = tl.load(first + S - T + block * BLOCK_M)
    hi = tl.minimum(S - T + (block + 1) * BLOCK_M, S)
    full = lo + (S - T + block * BLOCK_M + 1 - lo) // BLOCK_N * BLOCK_N
    return b, h, t, i, valid, lowest, lo, full, hi


@triton.jit
def select(
    top, chosen, z, q_rows, k, k_token, n, hi, i, lowest, qk_scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr, SOFT: tl.constexpr,
):  # fmt: skip
    """Add the keys n … n + BLOCK_N - 1: largest product, its first place, and with SOFT the sum of weights."""
    j = n + tl.arange(0, BLOCK_N)
    k_rows = load_rows(k, j.to(tl.int64) * k_token, j < hi, D, BLOCK_D)
    s = tl.dot(q_rows, tl.trans(k_rows), input_precision="ieee")
    if MASKED:
        s = tl.where((lowest[:, None] <= j[None, :]) & (j[None, :] <= i[:, None]), s, float("-inf"))
    highest = tl.max(s, 1)
    place = tl.min(tl.where(s == highest[:, None], j[None, :], n + BLOCK_N), 1)
    chosen = tl.where(highest > top, place, chosen)
    new_top = tl.maximum(top, highest)
    if SOFT:
        base = new_top
        if MASKED:
            base = tl.where(new_top == float("-inf"), 0.0, new_top)
        shift = base * qk_scale
        z = z * tl.exp2(top * qk_scale - shift) + tl.sum(tl.exp2(s * qk_scale - shift[:, None]), 1)
    return new_top, chosen, z


@triton.jit
def element_forward(
    q, k, v, o, pick, lse, first, scale, T, S, H, heads,
    q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head,
    R: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SOFT: tl.constexpr,
):  # fmt: skip
    """The value of the best key of BLOCK_M queries; with SOFT also which, and log-sum-exp (base 2).

    Grid: blocks of queries × ``heads`` = B·H.
    """
    b, h, t, i, valid, lowest, lo, full, hi = query_block(first, T, S, H, heads, BLOCK_M, BLOCK_N)
    k += b * k_batch + h // R * k_head
    q_rows = load_rows(q + b * q_batch + h * q_head, t.to(tl.int64) * q_token, valid, D, BLOCK_D)
    qk_scale = scale * LOG2E
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    chosen = tl.zeros([BLOCK_M], tl.int32)
    z = tl.zeros([BLOCK_M], tl.float32)
    for n in range(lo, full, BLOCK_N):
        top, chosen, z = select(
            top, chosen, z, q_rows, k, k_token, n, hi, i, lowest, qk_scale, D, BLOCK_D, BLOCK_N, first is not None, SOFT
        )
    for n in tl.range(full, hi, BLOCK_N, num_stages=1):  # a few blocks: not worth registers for loads ahead
        top, chosen, z = select(
            top, chosen, z, q_rows, k, k_token, n, hi, i, lowest, qk_scale, D, BLOCK_D, BLOCK_N, True, SOFT
        )
    values = load_rows(v + b * v_batch + h // R * v_head, chosen.to(tl.int64) * v_token, valid, D, BLOCK_D)
    store_rows(o, ((b * T + t) * H + h) * D, valid, values, D, BLOCK_D)
    if SOFT:
        row = (b * H + h) * T + t
        tl.store(pick + row, chosen, mask=valid)
        tl.store(lse + row, top * qk_scale + tl.log2(z), mask=valid)


@triton.jit
def query_gradients(
    acc, mean, shift, q_rows, do_rows, lse, c, k, v, k_token, v_token, n, hi, i, lowest, qk_scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add the keys n … n + BLOCK_N - 1 to Σ e·k, Σ p·k and Σ e."""
    j = n + tl.arange(0, BLOCK_N)
    there = j < hi
    k_rows = load_rows(k, j.to(tl.int64) * k_token, there, D, BLOCK_D)
    v_rows = load_rows(v, j.to(tl.int64) * v_token, there, D, BLOCK_D)
    s = tl.dot(q_rows, tl.trans(k_rows), input_precision="ieee") * qk_scale
    if MASKED:
        s = tl.where((lowest[:, None] <= j[None, :]) & (j[None, :] <= i[:, None]), s, float("-inf"))
    p = tl.exp2(s - lse[:, None])
    e = p * (tl.dot(do_rows, tl.trans(v_rows), input_precision="ieee") - c[:, None])
    acc += tl.dot(e.to(k_rows.dtype), k_rows, input_precision="ieee")
    mean += tl.dot(p.to(k_rows.dtype), k_rows, input_precision="ieee")
    return acc, mean, shift + tl.sum(e, 1)


@triton.jit
def element_queries_backward(
    q, k, v, o, lse, do, dq, delta, first, scale, T, S, H, heads,
    q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head,
    R: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """dq and δ of BLOCK_M queries. Grid as of ``element_forward``."""
    b, h, t, i, valid, lowest, lo, full, hi = query_block(first, T, S, H, heads, BLOCK_M, BLOCK_N)
    k += b * k_batch + h // R * k_head
    v += b * v_batch + h // R * v_head
    o_row = ((b * T + t) * H + h) * D
    row = (b * H + h) * T + t
    q_rows = load_rows(q + b * q_batch + h * q_head, t.to(tl.int64) * q_token, valid, D, BLOCK_D)
    do_rows = load_rows(do, o_row, valid, D, BLOCK_D)
    c = tl.sum(do_rows.to(tl.float32) * load_rows(o, o_row, valid, D, BLOCK_D).to(tl.float32), 1)
    lse_rows = tl.load(lse + row, mask=valid, other=float("inf"))
    qk_scale = scale * LOG2E
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    mean = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    shift = tl.zeros([BLOCK_M], tl.float32)
    for n in range(lo, full, BLOCK_N):
        acc, mean, shift = query_gradients(
            acc, mean, shift, q_rows, do_rows, lse_rows, c, k, v, k_token, v_token, n, hi, i, lowest, qk_scale,
            D, BLOCK_D, BLOCK_N, first is not None,
        )  # fmt: skip
    for n in tl.range(full, hi, BLOCK_N, num_stages=1):
        acc, mean, shift = query_gradients(
            acc, mean, shift, q_rows, do_rows, lse_rows, c, k, v, k_token, v_token, n, hi, i, lowest, qk_scale,
            D, BLOCK_D, BLOCK_N, True,
        )  # fmt: skip
    store_rows(dq, o_row, valid, (acc - shift[:, None] * mean) * scale, D, BLOCK_D)
    tl.store(delta + row, c + shift, mask=valid)


@triton.jit
def key_block(end, T, S, G, heads, BLOCK_N: tl.constexpr):
    """Of this program: batch, key-value head, keys, and the first and last place + 1 of queries that may see any."""
    j0 = tl.program_id(0) // heads * BLOCK_N
    b = (tl.program_id(0) % heads // G).to(tl.int64)
    g = tl.program_id(0) % G
    last = S
    if end is not None:
        last = tl.load(end + tl.minimum(j0 + BLOCK_N, S) - 1)
    return b, g, j0, tl.maximum(j0, S - T), last


@triton.jit
def key_gradients(
    dk, k_rows, v_rows, q, do, lse, delta, first, q_token, do_token, n, j, T, S, qk_scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add BLOCK_M queries, from place n among the keys on, to dk."""
    i = n + tl.arange(0, BLOCK_M)
    t = i - (S - T)
    valid = i < S
    q_rows = load_rows(q, t.to(tl.int64) * q_token, valid, D, BLOCK_D)
    do_rows = load_rows(do, t.to(tl.int64) * do_token, valid, D, BLOCK_D)
    lse_rows = tl.load(lse + t, mask=valid, other=float("inf"))
    delta_rows = tl.load(delta + t, mask=valid, other=0.0)
    s = tl.dot(k_rows, tl.trans(q_rows), input_precision="ieee") * qk_scale
    if MASKED:
        visible = j[:, None] <= i[None, :]
        if first is not None:
            visible = visible & (tl.load(first + i, mask=valid, other=0)[None, :] <= j[:, None])
        s = tl.where(visible, s, float("-inf"))
    p = tl.exp2(s - lse_rows[None, :])
    ds = p * (tl.dot(v_rows, tl.trans(do_rows), input_precision="ieee") - delta_rows[None, :])
    return dk + tl.dot(ds.to(q_rows.dtype), q_rows, input_precision="ieee")


@triton.jit
def element_keys_backward(
    q, k, v, lse, do, delta, dk, first, end, scale, T, S, H, heads,
    q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head,
    G: tl.constexpr, R: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """dk of BLOCK_N keys, from the queries after them. Grid: blocks of keys × ``heads`` = B·G."""
    b, g, j0, begin, last = key_block(end, T, S, G, heads, BLOCK_N)
    j = j0 + tl.arange(0, BLOCK_N)
    there = j < S
    k_rows = load_rows(k + b * k_batch + g * k_head, j.to(tl.int64) * k_token, there, D, BLOCK_D)
    v_rows = load_rows(v + b * v_batch + g * v_head, j.to(tl.int64) * v_token, there, D, BLOCK_D)
    # From here on, queries come after all of the keys.
    full = begin + tl.cdiv(tl.maximum(j0 + BLOCK_N - 1 - begin, 0), BLOCK_M) * BLOCK_M
    acc = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    for r in range(0, R):
        h = g * R + r
        q_rows = q + b * q_batch + h * q_head
        do_rows = do + (b * T * H + h) * D
        row = (b * H + h) * T
        for n in tl.range(begin, tl.minimum(full, last), BLOCK_M, num_stages=1):
            acc = key_gradients(
                acc, k_rows, v_rows, q_rows, do_rows, lse + row, delta + row, first, q_token, H * D, n, j, T, S,
                scale * LOG2E, D, BLOCK_D, BLOCK_M, True,
            )  # fmt: skip
        for n in range(full, last, BLOCK_M):
            acc = key_gradients(
                acc, k_rows, v_rows, q_rows, do_rows, lse + row, delta + row, first, q_token, H * D, n, j, T, S,
                scale * LOG2E, D, BLOCK_D, BLOCK_M, first is not None,
            )  # fmt: skip
    store_rows(dk, ((b * S + j) * G + g) * D, there, acc * scale, D, BLOCK_D)


@triton.jit
def element_values_backward(
    do, pick, dv, end, T, S, H, heads,
    G: tl.constexpr, R: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """dv of BLOCK_N values: the sum of do over the queries that chose each.

    Every program reads what all later queries chose, 4 bytes each; where any of BLOCK_M chose one of its values, it
    multiplies their do with a matrix of zeros and ones. Grid: blocks of values × ``heads`` = B·G.
    """
    b, g, j0, begin, last = key_block(end, T, S, G, heads, BLOCK_N)
    j = j0 + tl.arange(0, BLOCK_N)
    acc = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    for r in range(0, R):
        h = g * R + r
        for n in range(begin, last, BLOCK_M):
            i = n + tl.arange(0, BLOCK_M)
            t = i - (S - T)
            chosen = tl.load(pick + (b * H + h) * T + t, mask=i < last, other=-1)
            hits = (chosen >= j0) & (chosen < j0 + BLOCK_N)
            if tl.max(hits.to(tl.int32), 0) > 0:
                do_rows = load_rows(do, ((b * T + t) * H + h) * D, hits, D, BLOCK_D)
                one_hot = tl.where(chosen[None, :] == j[:, None], 1.0, 0.0).to(do_rows.dtype)
                acc += tl.dot(one_hot, do_rows, input_precision="ieee")
    store_rows(dv, ((b * S + j) * G + g) * D, j < S, acc, D, BLOCK_D)
