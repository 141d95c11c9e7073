"""Top-1 Element as a function of Triton kernels; memory is linear in the tokens.

The backward pass recomputes the scores, and has no atomic additions: it is deterministic.

Shape legend: B batch, T queries, S keys (the last T are the queries' own), H heads, G key-value heads, R = H/G, D head
size.
"""

# pyright: reportCallIssue=false, reportArgumentType=false
# (a launch takes strides as a list, and ints as constants)

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from seqarch_top1.triton_element_kernels import (
    element_forward,
    element_keys_backward,
    element_queries_backward,
    element_values_backward,
)


def _blocks(D: int, dtype: torch.dtype) -> dict[str, dict[str, int]]:
    """Constants and options of each kernel: the largest blocks whose sums sm_80, sm_90, sm_100 and gfx942 keep in
    registers. The more rows a program keeps, the fewer programs read the others again."""
    BLOCK_D = max(16, triton.next_power_of_2(D))
    wide, single, amd = BLOCK_D >= 128, dtype == torch.float32, torch.version.hip is not None
    if single:
        rows = 16 if wide else 32
        sizes = {"forward": (32, 32), "by_query": (rows, rows), "by_key": (rows, rows), "by_value": (64, 32)}
    elif amd:
        sizes = {"forward": (64, 64), "by_query": (64, 32), "by_key": (32, 64), "by_value": (64, 64)}
    else:
        rows = 64 if wide else 128
        sizes = {"forward": (128, 64), "by_query": (rows, 32), "by_key": (32, 128), "by_value": (64, 64)}
    options = {"D": D, "BLOCK_D": BLOCK_D, "num_stages": 1 if single else 2, "num_warps": 4 if amd else 8}
    return {name: {**options, "BLOCK_M": M, "BLOCK_N": N} for name, (M, N) in sizes.items()}


class _Element(torch.autograd.Function):
    """See ``triton_element``."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, first: Tensor | None, end: Tensor | None, scale: float, soft: bool
    ) -> Tensor:
        """One pass over the keys; what the gradient needs with ``soft`` only."""
        B, T, H, D = q.shape
        S, G = k.shape[1:3]
        o = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        pick = torch.empty((B, H, T) if soft else 0, dtype=torch.int32, device=q.device)
        lse = torch.empty(pick.shape, dtype=torch.float32, device=q.device)
        blocks = _blocks(D, q.dtype)["forward"]
        with torch.cuda.device_of(q):
            element_forward[(triton.cdiv(T, blocks["BLOCK_M"]) * B * H,)](
                q, k, v, o, pick, lse, first, scale, T, S, H, B * H, *_strides(q, k, v), R=H // G, SOFT=soft, **blocks
            )
        ctx.save_for_backward(q, k, v, o, pick, lse, first, end)
        ctx.scale = scale
        return o

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        """dq and δ from a pass over the keys, dk from one over the queries, dv from what these chose."""
        q, k, v, o, pick, lse, first, end = ctx.saved_tensors
        do = grad_outputs[0].contiguous()
        B, T, H, D = q.shape
        S, G = k.shape[1:3]
        delta, dq = torch.empty_like(lse), torch.empty_like(o)
        dk, dv = (torch.empty(k.shape, dtype=k.dtype, device=k.device) for _ in range(2))
        blocks, strides = _blocks(D, q.dtype), _strides(q, k, v)
        sizes = (ctx.scale, T, S, H)
        with torch.cuda.device_of(q):
            element_queries_backward[(triton.cdiv(T, blocks["by_query"]["BLOCK_M"]) * B * H,)](
                q, k, v, o, lse, do, dq, delta, first, *sizes, B * H, *strides, R=H // G, **blocks["by_query"]
            )
            element_keys_backward[(triton.cdiv(S, blocks["by_key"]["BLOCK_N"]) * B * G,)](
                q, k, v, lse, do, delta, dk, first, end, *sizes, B * G, *strides, G=G, R=H // G, **blocks["by_key"]
            )
            element_values_backward[(triton.cdiv(S, blocks["by_value"]["BLOCK_N"]) * B * G,)](
                do, pick, dv, end, T, S, H, B * G, G=G, R=H // G, **blocks["by_value"]
            )
        return dq, dk, dv, None, None, None, None


def _strides(*tensors: Tensor) -> list[int]:
    return [stride for x in tensors for stride in x.stride()[:3]]


@torch.compiler.disable(recursive=True)
def triton_element(q: Tensor, k: Tensor, v: Tensor, *, scale: float, cu_seqlens: Tensor | None = None) -> Tensor:
    """``top1_element`` on a GPU; the host never waits for it. The gradient is deterministic.

    Args:
        q: ``[B, T, H, D]``, float32, float16 or bfloat16.
        k: ``[B, S, G, D]``, G divides H, S ≥ T; the last T are the queries' own.
        v: ``[B, S, G, D]``.
        scale: Factor of the scores q·k, above 0: the largest product is the largest score.
        cu_seqlens: int32 ``[n+1]``, boundaries of packed documents (B = 1, S = T).

    Returns:
        ``[B, T, H, D]``, of q's dtype; products are compared and sums are made in float32.
    """
    soft = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k.to(q.dtype), v.to(q.dtype)))
    first = end = None
    if cu_seqlens is not None:
        bounds = cu_seqlens.to(q.device)
        key = torch.arange(k.shape[1], dtype=torch.int32, device=q.device)
        document = torch.searchsorted(bounds[1:].contiguous(), key, right=True)
        first, end = bounds[document], bounds[document + 1]
    return _Element.apply(q, k, v, first, end, scale, soft)  # pyright: ignore[reportReturnType]
