"""Going through rows of memory in pieces that stay in a CPU's cache."""

from __future__ import annotations

import torch


def cache_blocks(rows: int, width: int, device: torch.device, numbers: int = 1 << 16) -> list[tuple[int, int]]:
    """Ranges of rows of ``width`` numbers, on a CPU with ``numbers`` in all so that a few copies fit; elsewhere one."""
    size = max(1, numbers // max(width, 1)) if device.type == "cpu" else max(rows, 1)
    return [(start, min(rows, start + size)) for start in range(0, rows, size)]
