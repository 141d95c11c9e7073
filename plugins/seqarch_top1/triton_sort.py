"""Queries sorted by the chunk they selected, and cut into blocks of one chunk each, without a wait for the device.

Shape legend: B batch, H query heads, T queries, G key-value heads, R = H/G, M = B·G, N chunks of keys.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class SortedQueries:
    """Queries in the order of the chunk they selected.

    Attributes:
        query: int32 ``[B·H·T]``, query numbers (of ``[B, H, T]``): by chunk, then by number; last those that selected
            nothing.
        begin: int32 ``[M·N + 1]``, where the queries of each chunk begin in ``query``.
    """

    query: Tensor
    begin: Tensor

    def blocks(self, size: int, complete: int) -> Blocks:
        """Cut the queries of each chunk into blocks of at most ``size``.

        Args:
            size: Queries a block.
            complete: How many chunks can have been selected at most.
        """
        pieces = torch.div(self.begin.diff() + (size - 1), size, rounding_mode="floor")
        last = pieces.cumsum(0, dtype=torch.int32)
        number = torch.arange(len(self.query) // size + complete, dtype=torch.int32, device=last.device)
        chunk = torch.searchsorted(last, number, right=True, out_int32=True)
        first = torch.cat((last.new_zeros(1), last))
        start = self.begin[chunk] + (number - first[chunk]) * size
        return Blocks(chunk, start, first)


@dataclass(frozen=True)
class Blocks:
    """Blocks of queries that selected one chunk.

    Attributes:
        chunk: int32 ``[L]``, the chunk (of M·N) of each block; M·N for a block that only fills up: how many there are
            is known to the device alone, L is a bound.
        start: int32 ``[L]``, where each block begins in ``SortedQueries.query``.
        first: int32 ``[M·N + 1]``, the first block of each chunk.
    """

    chunk: Tensor
    start: Tensor
    first: Tensor


def sort_queries(index: Tensor, G: int, N: int) -> SortedQueries:
    """Sort the queries by the chunk they selected.

    Args:
        index: int32 ``[B, H, T]``, the chunk of each query, negative for none.
        G: Key-value heads.
        N: Chunks of each.
    """
    B, H = index.shape[:2]
    group = torch.arange(B * H, dtype=torch.int32, device=index.device).view(B, H, 1) // (H // G)
    key = torch.where(index >= 0, index + group * N, B * G * N).flatten()
    ordered, order = torch.sort(key, stable=True)
    chunks = torch.arange(B * G * N + 1, dtype=torch.int32, device=index.device)
    return SortedQueries(order.to(torch.int32), torch.searchsorted(ordered, chunks, out_int32=True))
