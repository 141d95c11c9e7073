"""How much of a score matrix is held at a time, and in what precision."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

CPU_SCORES = 1 << 19  # 2 MiB of float32: stays in the caches while several passes go over it
GPU_SCORES = 1 << 25  # 128 MiB: enough work for one launch


def budget(like: Tensor) -> int:
    """Scores in one block on the device of ``like``."""
    return CPU_SCORES if like.device.type == "cpu" else GPU_SCORES


def tiles(M: int, N: int, scores: int, like: Tensor) -> Iterator[tuple[slice, int, int]]:
    """Cut M heads × N chunks into blocks: heads, and the chunks [n0, n1), as many as the budget allows.

    Args:
        M: Heads.
        N: Chunks of each.
        scores: How many scores one chunk of one head needs.
        like: A tensor on the device.
    """
    cells = max(1, budget(like) // scores)
    heads = min(M, max(1, cells // N))  # long sequences go head by head, short ones several heads at once
    chunks = min(N, max(1, cells // heads))
    for m in range(0, M, heads):
        for n in range(0, N, chunks):
            yield slice(m, min(m + heads, M)), n, min(n + chunks, N)


def working(x: Tensor) -> Tensor:
    """``x`` in at least float32: selection and sums are not done in less."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
