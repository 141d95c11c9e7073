"""The GPU backend of RWKV's recurrences: flash-linear-attention's chunked Triton kernels.

Layout ``[B, T, H, D]``; arguments as the functions in ``seqarch.ops`` take. With ``cu_seqlens`` fla has a final state
for each document; the last one is returned.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

STRONGEST_DECAY = -0.6065306597126334
"""-e^-½, below which no log decay of RWKV-7 goes; fla's kernel may then use tensor cores inside its chunks."""


def fla_vector_decay(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    *,
    bonus: Tensor,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``chunk_rwkv6``, as ``seqarch.ops.vector_decay.vector_decay`` with a bonus."""
    from fla.ops.rwkv6 import chunk_rwkv6

    kernel: Any = chunk_rwkv6  # its decorator's type says one argument
    o, state = kernel(q, k, v, g.contiguous(), bonus, scale=1.0, **_state_options(q, initial_state, cu_seqlens))
    return o, state if cu_seqlens is None else state[-1:]


def fla_diagonal_low_rank(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    g: Tensor,
    *,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``chunk_rwkv7``, as ``seqarch.ops.diagonal_low_rank.diagonal_low_rank`` for g above ``STRONGEST_DECAY``."""
    from fla.ops.rwkv7 import chunk_rwkv7

    o, state = chunk_rwkv7(
        q,
        g,
        k,
        v,
        a,
        b,
        scale=1.0,
        safe_gate=True,
        lower_bound=STRONGEST_DECAY,
        chunk_size=64,
        **_state_options(q, initial_state, cu_seqlens),
    )
    return o, state if cu_seqlens is None else state[-1:]


def _state_options(q: Tensor, initial_state: Tensor | None, cu_seqlens: Tensor | None) -> dict[str, Any]:
    options: dict[str, Any] = {"initial_state": initial_state, "output_final_state": True}
    if cu_seqlens is not None:
        options["cu_seqlens"] = cu_seqlens.to(q.device, torch.int64)
    return options
