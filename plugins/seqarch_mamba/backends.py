"""GPU backends of the Mamba mixers: kernels of flash-linear-attention and of mamba-ssm.

Layout ``[B, T, H, D]``. Those of ``seqarch.ops.scalar_decay`` and ``seqarch.ops.selective_scan`` say what is computed.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from seqarch.ops.documents import document_ids


def kernel_fault(backend: str, dtype: torch.dtype) -> str | None:
    """Why the kernels of a backend do not take this dtype, or None."""
    if backend != "torch" and dtype == torch.float64:
        return f"{backend}'s kernels work in float32, float16 and bfloat16, not {dtype}"
    return None


def fla_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    *,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    output_final_state: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """``chunk_simple_gla`` of flash-linear-attention, which wants q and k for every head of v, in one dtype."""
    from fla.ops.simple_gla import chunk_simple_gla

    kernel: Any = chunk_simple_gla
    share = v.shape[2] // q.shape[2]
    o, state = kernel(
        q.repeat_interleave(share, 2),
        k.repeat_interleave(share, 2),
        v.to(q.dtype),
        g,
        scale=1.0,
        initial_state=initial_state,
        output_final_state=output_final_state,
        cu_seqlens=None if cu_seqlens is None else cu_seqlens.to(device=q.device, dtype=torch.int64),
    )
    return o.to(v.dtype), state


def mamba_ssd(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    chunk_size: int,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """``mamba_chunk_scan_combined`` of mamba-ssm, with ``seq_idx`` for packed documents.

    Args:
        x: ``[B, T, H, P]``.
        dt: Δ ``[B, T, H]``.
        A: ``[H]``, at most 0.
        B: ``[B, T, G, N]``.
        C: As B.
        chunk_size: Tokens in a chunk.
        initial_state: ``[B, H, P, N]``.
        cu_seqlens: int32 ``[n+1]``.

    Returns:
        y ``[B, T, H, P]`` and the final state ``[B, H, P, N]`` where an initial one was given.
    """
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

    result = mamba_chunk_scan_combined(
        x.to(B.dtype),
        dt,
        A,
        B,
        C,
        chunk_size,
        initial_states=initial_state,
        seq_idx=None if cu_seqlens is None else document_ids(cu_seqlens, x.shape[1], x.device)[None],
        return_final_states=initial_state is not None,
    )
    return result if initial_state is not None else (result, None)


def mamba_scan(
    x: Tensor,
    delta: Tensor,
    A: Tensor | None,
    B: Tensor,
    C: Tensor,
    *,
    decay_by_delta: bool = True,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """``selective_scan_fn`` of mamba-ssm, from zero; arguments as ``seqarch.ops.selective_scan.selective_scan``.

    The kernel knows no document boundaries: packed documents are scanned one by one.
    """
    from mamba_ssm.ops.selective_scan_interface import selective_scan_fn

    if A is None or not decay_by_delta:  # the kernel's Δ scales the input and the decay alike
        x, delta = x * delta, torch.ones_like(delta)
    if A is None:
        A = delta.new_zeros(x.shape[2], B.shape[2])
    bounds = [0, x.shape[1]] if cu_seqlens is None else cu_seqlens.tolist()
    u, delta, B, C = (t.mT.contiguous() for t in (x, delta.to(x.dtype), B.to(x.dtype), C.to(x.dtype)))
    parts = [
        selective_scan_fn(*(t[..., a:b].contiguous() for t in (u, delta)), A.float(), B[..., a:b], C[..., a:b])
        for a, b in pairwise(bounds)
        if a < b
    ]
    return torch.cat(parts, dim=2).mT
