"""Where chunks lie among the keys, as the Triton kernels read it; made without a wait for the device.

Shape legend: S keys, C tokens a chunk, N chunks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class ChunkTable:
    """Chunks of a sequence, or of packed documents, each of which is cut on its own.

    Attributes:
        chunk_size: C.
        begin: int32 ``[N + 1]``: chunk n holds the keys ``begin[n]`` … ``begin[n + 1] - 1``, at most C. With documents
            N is a bound: chunks past the last one are empty, at S.
        of: int32 ``[S]``, the chunk of each key.
        first: int32 ``[S]``, the first chunk of each key's document: the candidates of a query that stands at key s are
            the chunks ``first[s]`` … ``of[s] - 1``, all of them complete.
    """

    chunk_size: int
    begin: Tensor
    of: Tensor
    first: Tensor


def chunk_table(n_keys: int, chunk_size: int, cu_seqlens: Tensor | None, device: torch.device) -> ChunkTable:
    """The chunks of ``n_keys`` keys.

    Args:
        n_keys: S.
        chunk_size: C.
        cu_seqlens: int32 ``[n+1]``, boundaries of packed documents; None for one.
        device: Where the table is to be.
    """
    S, C = n_keys, chunk_size
    key = torch.arange(S, dtype=torch.int32, device=device)
    if cu_seqlens is None:
        begin = torch.arange(-(-S // C) + 1, dtype=torch.int32, device=device) * C
        return ChunkTable(C, begin.clamp_(max=S), key // C, torch.zeros_like(key))
    bounds = cu_seqlens.to(device)
    last = torch.div(bounds.diff() + (C - 1), C, rounding_mode="floor").cumsum(0, dtype=torch.int32)
    first = torch.cat((last.new_zeros(1), last))  # of each document, and how many chunks there are
    document = torch.searchsorted(bounds[1:].contiguous(), key, right=True)
    chunk = torch.arange(S // C + len(last) + 1, dtype=torch.int32, device=device)
    owner = torch.searchsorted(last, chunk, right=True)  # of an empty chunk: the end of all documents
    begin = bounds[owner] + (chunk - first[owner]) * C
    first_of_key = first[document]
    of = first_of_key + torch.div(key - bounds[document], C, rounding_mode="floor")
    return ChunkTable(C, begin.clamp(max=S), of, first_of_key)
