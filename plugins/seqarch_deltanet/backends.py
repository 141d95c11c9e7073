"""The GPU backend of the delta rule: flash-linear-attention's chunked Triton kernels.

Layout ``[B, T, H, D]``; arguments as ``seqarch.ops.delta_rule.delta_rule``.
"""

from __future__ import annotations

import importlib.util
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor
from torch.torch_version import TorchVersion

_LARGEST_HEAD = 256


def fla_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor | None = None,
    *,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``chunk_gated_delta_rule``, or ``chunk_delta_rule`` where there is no decay (float16 and bfloat16 only).

    With ``cu_seqlens`` there is a final state for each document; the last one is returned.
    """
    from fla.ops.delta_rule import chunk_delta_rule
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    kernel: Any = chunk_delta_rule if g is None else chunk_gated_delta_rule
    inputs: dict[str, Any] = {"q": q, "k": k, "v": v, "initial_state": initial_state, "output_final_state": True}
    inputs |= {"beta": beta.to(q.dtype)} if g is None else {"beta": beta, "g": g}
    if cu_seqlens is not None:
        inputs["cu_seqlens"] = cu_seqlens.to(q.device, torch.int64)
    o, state = kernel(**inputs)
    return o, state if cu_seqlens is None else state[-1:]


def fla_fault(dtype: torch.dtype, *, decay: bool, head_dim: int) -> str | None:
    """Why fla's kernels cannot be used for this dtype, or not with the versions that are installed, or None."""
    if dtype == torch.float64 or (dtype == torch.float32 and not decay):
        return f"fla's chunk kernel works in {'float32, ' if decay else ''}float16 and bfloat16, not {dtype}"
    if head_dim > _LARGEST_HEAD:
        return f"fla's kernels take head_dim up to {_LARGEST_HEAD}, not {head_dim}"
    if torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0):
        return hopper_fault(version("triton"), version("flash-linear-attention"), decay=decay)
    return None


def hopper_fault(triton: str, fla: str, *, decay: bool) -> str | None:
    """Known wrong gradients on Hopper for versions of Triton and flash-linear-attention, or None.

    Triton from 3.4 miscompiles two backward kernels there. The gated one (wrong gradients of beta and g, fla issue
    640) is right again from Triton 3.7.1, and with tilelang, which fla then takes instead. The plain one (wrong
    gradients of k and beta, fla issue 984) is compiled in a way that avoids the fault from fla 0.5.2.
    """
    if TorchVersion(triton) < "3.4":
        return None
    if decay and TorchVersion(triton) < "3.7.1" and importlib.util.find_spec("tilelang") is None:
        return (
            f"triton {triton} gives wrong gradients of the gated delta rule on Hopper: "
            "install triton>=3.7.1, or tilelang"
        )
    if not decay and TorchVersion(fla) < "0.5.2":
        return (
            f"flash-linear-attention {fla} with triton {triton} gives wrong gradients of the delta rule on Hopper: "
            "install flash-linear-attention>=0.5.2"
        )
    return None
