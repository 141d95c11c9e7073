"""Tokens in chunks: every document starts in a chunk of its own, unless it is so short that it needs no whole one.

Shape legend: B batch, T tokens, G key-value heads, R query heads a key-value head, D head size, M = B·G, C tokens a
chunk, N chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """Where tokens stand in chunks.

    Attributes:
        chunk_size: C.
        n_chunks: Chunks that tokens were given.
        front: Empty places before the first token.
        place: int64 ``[T]``, the place of each token among N·C; None where they just follow each other.
        first: int64 ``[N, C]``, the first chunk of the document of each place; None where that is chunk 0 for all.
        segment: int64 ``[N, C]``, the document of each place; None where there is one.
    """

    chunk_size: int
    n_chunks: int
    front: int = 0
    place: Tensor | None = None
    first: Tensor | None = None
    segment: Tensor | None = None

    def split(self, x: Tensor, G: int) -> Tensor:
        """``[B, T, G·R, D]`` to ``[B·G, N, R·C, D]``, contiguous; empty places are 0."""
        B, T, H, D = x.shape
        size = self.n_chunks * self.chunk_size
        if self.place is not None:
            x = x.new_zeros(B, size, H, D).index_copy(1, self.place, x)
        elif size != T:
            x = F.pad(x, (0, 0, 0, 0, self.front, size - T - self.front))
        x = x.reshape(B, self.n_chunks, self.chunk_size, G, H // G, D).permute(0, 3, 1, 4, 2, 5)
        return x.reshape(B * G, self.n_chunks, -1, D).contiguous()

    def join(self, x: Tensor, B: int, T: int) -> Tensor:
        """``[B·G, N, R·C, D]`` back to ``[B, T, G·R, D]``."""
        M, N, rows, D = x.shape
        x = x.view(B, M // B, N, rows // self.chunk_size, self.chunk_size, D).permute(0, 2, 4, 1, 3, 5)
        x = x.reshape(B, N * self.chunk_size, -1, D)
        return x[:, self.front : self.front + T] if self.place is None else x.index_select(1, self.place)


def plain(T: int, chunk_size: int, start: int = 0) -> Layout:
    """Tokens ``start`` … ``start + T - 1`` of one document, in the chunks that they lie in."""
    return Layout(chunk_size, -(-(start + T) // chunk_size) - start // chunk_size, start % chunk_size)


def packed(bounds: Sequence[int], chunk_size: int, device: torch.device) -> Layout:
    """Documents between ``bounds``; a chunk may be shared only by documents that do not fill one.

    So at most about half of the places are empty, however short the documents are.
    """
    C = chunk_size
    starts, end = [], 0
    for a, b in pairwise(bounds):
        if end % C and end % C + b - a > C:
            end = -(-end // C) * C
        starts.append(end)
        end += b - a
    n_chunks = max(1, -(-end // C))
    lengths = torch.tensor([b - a for a, b in pairwise(bounds)])
    document = torch.repeat_interleave(lengths)
    start = torch.tensor(starts)
    place = torch.arange(len(document)) - torch.tensor(bounds[:-1])[document] + start[document]
    segment = torch.full((n_chunks * C,), -1)
    segment[place] = document
    # A document that begins inside a chunk ends there too: it has no complete chunk before its own.
    first = torch.arange(n_chunks).repeat_interleave(C)
    first[place] = -(-start // C)[document]
    shape = (n_chunks, C)
    return Layout(C, n_chunks, 0, place.to(device), first.view(shape).to(device), segment.view(shape).to(device))
