"""One token of Top-1 Chunk against its cache, in Triton, without gradients: the logits of the chunks, then attention.

The logits are spread over the device; one program a head then finds the largest and attends to at most 2·C keys.

Shape legend: B batch, S keys, H heads, G key-value heads, R = H/G, D head size, C tokens a chunk, n complete chunks.
"""

# pyright: reportOperatorIssue=false, reportArgumentType=false, reportCallIssue=false
# (tl's annotations describe what the compiler evaluates, not what a kernel sees; a launch takes strides as a list)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from seqarch_top1.triton_chunk_forward import LOG2E, load_rows

_MEANS = 64  # mean keys a program scores


@triton.jit(do_not_specialize=["n"])
def mean_logits(
    q, means, logits, n, heads, q_batch, q_head, means_batch, means_head,
    G: tl.constexpr, R: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """q·mean for BLOCK_N chunks and the R heads of a key-value head. Grid: blocks of chunks × ``heads`` = B·G."""
    b = (tl.program_id(0) % heads // G).to(tl.int64)
    g = tl.program_id(0) % G
    d = tl.arange(0, BLOCK_D)
    m = tl.program_id(0) // heads * BLOCK_N + tl.arange(0, BLOCK_N)
    x = load_rows(means + b * means_batch + g * means_head, m * D, m < n, D, BLOCK_D).to(tl.float32)
    for r in range(0, R):
        h = g * R + r
        q_row = tl.load(q + b * q_batch + h * q_head + d, mask=d < D, other=0.0).to(tl.float32)
        tl.store(logits + (b * G * R + h) * n + m, tl.sum(x * q_row[None, :], 1), mask=m < n)


@triton.jit(do_not_specialize=["n"])
def exact_logits(
    q, k, logits, n, heads, scale, q_batch, q_head, k_batch, k_token, k_head,
    G: tl.constexpr, R: tl.constexpr, C: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Log-sum-exp (base 2) of a chunk's scores, for the R heads of a key-value head. Grid: n × ``heads`` = B·G."""
    b = (tl.program_id(0) % heads // G).to(tl.int64)
    g = tl.program_id(0) % G
    d = tl.arange(0, BLOCK_D)
    m = tl.program_id(0) // heads
    whole = tl.full([BLOCK_N], 1, tl.int1)
    for r in range(0, R):
        h = g * R + r
        q_row = tl.load(q + b * q_batch + h * q_head + d, mask=d < D, other=0.0).to(tl.float32) * (scale * LOG2E)
        top = -float("inf")
        z = 0.0
        for step in range(0, C, BLOCK_N):
            j = (m * C + step + tl.arange(0, BLOCK_N)).to(tl.int64)
            k_rows = load_rows(k + b * k_batch + g * k_head, j * k_token, whole, D, BLOCK_D).to(tl.float32)
            s = tl.sum(k_rows * q_row[None, :], 1)
            new_top = tl.maximum(top, tl.max(s, 0))
            z = z * tl.exp2(top - new_top) + tl.sum(tl.exp2(s - new_top), 0)
            top = new_top
        tl.store(logits + (b * G * R + h) * n + m, top + tl.log2(z))


@triton.jit(do_not_specialize=["S", "n"])
def attend_token(
    q, k, v, logits, o, S, n, scale, q_batch, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head,
    H: tl.constexpr, R: tl.constexpr, C: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_LOGITS: tl.constexpr,
):  # fmt: skip
    """Attention to the chunk with the largest logit (the first of equals) and to the own one. Grid: B·H."""
    b = (tl.program_id(0) // H).to(tl.int64)
    h = tl.program_id(0) % H
    g = h // R
    d = tl.arange(0, BLOCK_D)
    best = -float("inf")
    chosen = 0
    for first in range(0, n, BLOCK_LOGITS):
        m = first + tl.arange(0, BLOCK_LOGITS)
        x = tl.load(logits + tl.program_id(0).to(tl.int64) * n + m, mask=m < n, other=-float("inf"))
        highest = tl.max(x, 0)
        chosen = tl.where(highest > best, first + tl.argmax(x, 0), chosen)
        best = tl.maximum(best, highest)
    q_row = tl.load(q + b * q_batch + h * q_head + d, mask=d < D, other=0.0).to(tl.float32) * (scale * LOG2E)
    top = -float("inf")
    z = 0.0
    acc = tl.zeros([BLOCK_D], tl.float32)
    own = S - n * C
    selected = tl.where(n > 0, C, 0)
    for step in range(0, selected + own, BLOCK_N):  # BLOCK_N divides C
        place = step + tl.arange(0, BLOCK_N)
        j = (tl.where(place < selected, chosen * C + place, n * C - selected + place)).to(tl.int64)
        inside = j < S
        k_rows = load_rows(k + b * k_batch + g * k_head, j * k_token, inside, D, BLOCK_D).to(tl.float32)
        v_rows = load_rows(v + b * v_batch + g * v_head, j * v_token, inside, D, BLOCK_D).to(tl.float32)
        s = tl.where(inside, tl.sum(k_rows * q_row[None, :], 1), -float("inf"))
        new_top = tl.maximum(top, tl.max(s, 0))
        p = tl.exp2(s - new_top)
        decay = tl.exp2(top - new_top)
        z = z * decay + tl.sum(p, 0)
        acc = acc * decay + tl.sum(p[:, None] * v_rows, 0)
        top = new_top
    tl.store(o + tl.program_id(0).to(tl.int64) * D + d, acc / z, mask=d < D)


def triton_decode(q: Tensor, k: Tensor, v: Tensor, means: Tensor | None, *, scale: float, chunk_size: int) -> Tensor:
    """The newest token's output, without a gradient; see ``decode`` (with ``local`` and without ``element``).

    Args:
        q: ``[B, 1, H, D]``, the elements of a head next to each other, as in k and v.
        k: ``[B, S, G, D]``, the newest token's key is the last.
        v: ``[B, S, G, D]``.
        means: ``[B, G, ≥ S/C, D]``, contiguous mean keys of the complete chunks, to select by; None to select by all
            keys.
        scale: Factor of the scores q·k.
        chunk_size: C, a power of two from 16 on.

    Returns:
        float32 ``[B, 1, H, D]``.
    """
    B, S, G, D = k.shape
    H, C = q.shape[2], chunk_size
    n = (S - 1) // C
    logits = torch.empty((B, H, n), dtype=torch.float32, device=q.device)
    o = torch.empty((B, 1, H, D), dtype=torch.float32, device=q.device)
    BLOCK_D = max(16, triton.next_power_of_2(D))
    q_strides = (q.stride(0), q.stride(2))
    heads, rows = {"R": H // G, "D": D, "BLOCK_D": BLOCK_D}, min(C, 4096 // BLOCK_D)
    with torch.cuda.device_of(q):
        if n and means is None:
            exact_logits[(n * B * G,)](
                q, k, logits, n, B * G, scale, *q_strides, *k.stride()[:3], G=G, C=C, **heads, BLOCK_N=rows
            )
        elif n and means is not None:
            mean_logits[(triton.cdiv(n, _MEANS) * B * G,)](
                q, means, logits, n, B * G, *q_strides, *means.stride()[:2], G=G, **heads, BLOCK_N=_MEANS
            )
        attend_token[(B * H,)](
            q, k, v, logits, o, S, n, scale, *q_strides, *k.stride()[:3], *v.stride()[:3],
            H=H, C=C, **heads, BLOCK_N=rows, BLOCK_LOGITS=1024,
        )  # fmt: skip
    return o
