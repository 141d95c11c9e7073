"""Queries sorted by the chunk they selected, laid out in blocks that batched products can serve.

Slots come in groups of chunks that are chosen about equally often, each padded to the longest of its group: whatever
the queries choose, few slots stay empty, and a chunk that all of them choose is split.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from seqarch_top1.tiles import budget

_LONGEST = 512  # queries of one chunk in one product; a chunk that more have chosen is split


@dataclass(frozen=True)
class Slots:
    """Where the queries that selected something stand.

    Attributes:
        query: int64 ``[S]``, the query in each slot, or M·Q·R·C in a slot that only fills up.
        slot: int64 ``[M·Q·R·C]``, the slot of each query, or S where it selected nothing.
        chunk: int64, the chunk (of M·N) of each piece.
        groups: ``(first piece, pieces, slots a piece, first slot)`` of each group.
    """

    query: Tensor
    slot: Tensor
    chunk: Tensor
    groups: list[tuple[int, int, int, int]]


def arrange(index: Tensor, N: int, C: int) -> Slots:
    """Lay out the queries by the chunk they selected.

    Args:
        index: int64 ``[M, …]``, chunk of each query, negative for none.
        N: Chunks a head.
        C: Tokens a chunk.
    """
    M, device = index.shape[0], index.device
    head = torch.arange(M, device=device).view(-1, *[1] * (index.ndim - 1))
    key = torch.where(index >= 0, index + head * N, M * N).flatten()
    ordered, order = torch.sort(key, stable=True)
    counts = torch.bincount(key, minlength=M * N + 1)[: M * N]
    selected = int(counts.sum())
    ordered, order = ordered[:selected], order[:selected]
    # Pieces of at most _LONGEST queries of one chunk, the longest first.
    split = (counts + _LONGEST - 1) // _LONGEST
    chunk = torch.repeat_interleave(split)
    before = torch.arange(len(chunk), device=device) - (split.cumsum(0) - split)[chunk]
    length = (counts[chunk] - before * _LONGEST).clamp(max=_LONGEST)
    length, rank = torch.sort(length, descending=True, stable=True)
    groups, base, total, lengths = [], [], 0, length.tolist()
    i = 0
    while i < len(lengths):
        longest = lengths[i]
        n = min(len(lengths) - i, max(1, budget(index) // (longest * C)))
        groups.append((i, n, longest, total))
        base.extend(range(total, total + n * longest, longest))
        total += n * longest
        i += n
    piece_base = torch.empty(len(base), dtype=torch.int64, device=device)
    piece_base[rank] = torch.tensor(base, dtype=torch.int64, device=device)
    place = torch.arange(selected, device=device) - (counts.cumsum(0) - counts)[ordered]
    piece = (split.cumsum(0) - split)[ordered] + place // _LONGEST
    at = piece_base[piece] + place % _LONGEST
    query = torch.full((total,), key.numel(), dtype=torch.int64, device=device)
    query[at] = order
    slot = torch.full((key.numel(),), total, dtype=torch.int64, device=device)
    slot[order] = at
    return Slots(query, slot, chunk[rank], groups)
