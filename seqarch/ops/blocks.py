"""Going through rows of memory in pieces that stay in a CPU's cache."""

from __future__ import annotations

import torch

_NUMBERS = 1 << 15


def cache_blocks(rows: int, width: int, device: torch.device) -> list[tuple[int, int]]:
    """Ranges of rows of ``width`` numbers, short enough on a CPU for a few copies in the cache; elsewhere one range."""
    size = max(1, _NUMBERS // max(width, 1)) if device.type == "cpu" else max(rows, 1)
    return [(start, min(rows, start + size)) for start in range(0, rows, size)]
