"""One token of Top-1 Element against its cache, in Triton, without gradients: the best key of each span of the cache,
spread over the device, then the best of these, whose value is fetched.

Shape legend: B batch, S keys, H heads, G key-value heads, R = H/G, D head size.
"""

# pyright: reportOperatorIssue=false, reportArgumentType=false, reportCallIssue=false
# (tl's annotations describe what the compiler evaluates, not what a kernel sees; a launch takes strides as a list)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from seqarch_top1.triton_chunk_forward import load_rows

_SPAN = 256  # keys a program compares


@triton.jit(do_not_specialize=["S", "spans"])
def best_of_spans(
    q, k, top, pick, S, spans, heads, q_batch, q_head, k_batch, k_token, k_head,
    G: tl.constexpr, R: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
    SPAN: tl.constexpr,
):  # fmt: skip
    """Largest product q·k of SPAN keys and its first place, for the R heads of a key-value head.

    Grid: ``spans`` × ``heads`` = B·G. ``top`` and ``pick``: ``[B, H, spans]``.
    """
    b = (tl.program_id(0) % heads // G).to(tl.int64)
    g = tl.program_id(0) % G
    span = tl.program_id(0) // heads
    d = tl.arange(0, BLOCK_D)
    for r in range(0, R):
        h = g * R + r
        q_row = tl.load(q + b * q_batch + h * q_head + d, mask=d < D, other=0.0).to(tl.float32)
        best = -float("inf")
        chosen = span * SPAN
        for n in range(span * SPAN, (span + 1) * SPAN, BLOCK_N):
            j = n + tl.arange(0, BLOCK_N)
            k_rows = load_rows(k + b * k_batch + g * k_head, j.to(tl.int64) * k_token, j < S, D, BLOCK_D)
            s = tl.where(j < S, tl.sum(k_rows.to(tl.float32) * q_row[None, :], 1), -float("inf"))
            highest = tl.max(s, 0)
            chosen = tl.where(highest > best, n + tl.argmax(s, 0), chosen)
            best = tl.maximum(best, highest)
        tl.store(top + (b * G * R + h) * spans + span, best)
        tl.store(pick + (b * G * R + h) * spans + span, chosen)


@triton.jit(do_not_specialize=["spans"])
def fetch_best(
    v, top, pick, o, spans, v_batch, v_token, v_head,
    H: tl.constexpr, R: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_SPANS: tl.constexpr,
):  # fmt: skip
    """The value of the best key of all spans, the first of equals. Grid: B·H."""
    b = (tl.program_id(0) // H).to(tl.int64)
    h = tl.program_id(0) % H
    row = tl.program_id(0).to(tl.int64) * spans
    best = -float("inf")
    at = 0
    for first in range(0, spans, BLOCK_SPANS):
        m = first + tl.arange(0, BLOCK_SPANS)
        x = tl.load(top + row + m, mask=m < spans, other=-float("inf"))
        highest = tl.max(x, 0)
        at = tl.where(highest > best, first + tl.argmax(x, 0), at)
        best = tl.maximum(best, highest)
    chosen = tl.load(pick + row + at).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    value = tl.load(v + b * v_batch + h // R * v_head + chosen * v_token + d, mask=d < D)
    tl.store(o + tl.program_id(0).to(tl.int64) * D + d, value, mask=d < D)


def triton_element_token(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The newest token's output, without a gradient: ``top1_element`` for T = 1 and a scale above 0.

    Args:
        q: ``[B, 1, H, D]``, the elements of a head next to each other, as in k and v.
        k: ``[B, S, G, D]``, the newest token's key is the last.
        v: ``[B, S, G, D]``.

    Returns:
        ``[B, 1, H, D]``, of v's dtype.
    """
    B, S, G, D = k.shape
    H, spans = q.shape[2], triton.cdiv(S, _SPAN)
    top = torch.empty((B, H, spans), dtype=torch.float32, device=q.device)
    pick = torch.empty((B, H, spans), dtype=torch.int32, device=q.device)
    o = torch.empty((B, 1, H, D), dtype=v.dtype, device=q.device)
    BLOCK_D = max(16, triton.next_power_of_2(D))
    sizes = {"R": H // G, "D": D, "BLOCK_D": BLOCK_D}
    with torch.cuda.device_of(q):
        best_of_spans[(spans * B * G,)](
            q, k, top, pick, S, spans, B * G, q.stride(0), q.stride(2), *k.stride()[:3],
            G=G, **sizes, BLOCK_N=min(_SPAN, 4096 // BLOCK_D), SPAN=_SPAN,
        )  # fmt: skip
        fetch_best[(B * H,)](v, top, pick, o, spans, *v.stride()[:3], H=H, **sizes, BLOCK_SPANS=128)
    return o
