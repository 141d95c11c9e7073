"""Top-1 Element and Top-1 Chunk: the smallest architectures with full-sequence arbitrary selection."""

from seqarch_top1.layers import Top1Chunk, Top1Element

__all__ = ["Top1Chunk", "Top1Element"]
