"""The short convolution by the CUDA kernel of the package causal-conv1d.

Shape legend: B batch, T tokens, C channels, K kernel size.
"""

from __future__ import annotations

import importlib.util
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from seqarch.ops.documents import document_ids

_READ_BEYOND = 64
"""Up to so many document ids behind the last token may be read: the forward kernel of causal-conv1d up to 1.6.1 checks
no upper bound in its last chunk (its issue 67)."""


def has_kernel(x: Tensor, kernel_size: int) -> bool:
    """Whether causal-conv1d is installed and can serve x ``[B, T, C]``: on CUDA, no float64, K 2 to 4, C in eights."""
    return (
        x.is_cuda
        and x.dtype in (torch.float32, torch.float16, torch.bfloat16)
        and 2 <= kernel_size <= 4
        and x.shape[2] % 8 == 0
        and _installed()
    )


def fused_convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, before: Tensor | None = None, cu_seqlens: Tensor | None = None
) -> Tensor:
    """SiLU of the causal depthwise convolution.

    Args:
        x: ``[B, T, C]``.
        weight: ``[C, K]``.
        bias: ``[C]``.
        before: ``[B, K-1, C]``, the inputs before x, of its dtype.
        cu_seqlens: int32 ``[n+1]``, boundaries of packed documents; not with ``before``.

    Returns:
        ``[B, T, C]``, of x's dtype.
    """
    from causal_conv1d import causal_conv1d_fn

    kernel: Any = causal_conv1d_fn
    if x.stride(2) != 1 or x.stride(1) % 8 or x.stride(0) % 8:  # what its channels-last layout asks for
        x = x.contiguous()
    seq_idx = None
    if cu_seqlens is not None:
        seq_idx = F.pad(document_ids(cu_seqlens, x.shape[1], x.device), (0, _READ_BEYOND))[None, : x.shape[1]]
    return kernel(
        x.mT,
        weight,
        bias,
        seq_idx=seq_idx,
        initial_states=None if before is None else before.contiguous().mT,
        activation="silu",
    ).mT


@cache
def _installed() -> bool:
    return importlib.util.find_spec("causal_conv1d") is not None
