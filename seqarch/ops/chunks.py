"""Cutting a sequence, or packed documents, into chunks that never hold two documents.

Shape legend: B batch, T tokens, N chunks, C chunk size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


class ChunkLayout:
    """Where each token lies when every document is cut into chunks of C tokens, the last one padded.

    Chunked recurrences need no other care for packed documents than this: no chunk holds two documents, and the state
    is set back before the chunks in ``resets``.

    Args:
        T: Tokens.
        chunk_size: C.
        cu_seqlens: int32 ``[n+1]``, boundaries of packed documents; by default all T tokens are one.

    Attributes:
        n_chunks: N.
        resets: The chunks, by index, that begin a document after the first.
    """

    def __init__(self, T: int, chunk_size: int, cu_seqlens: Tensor | None = None) -> None:
        self.T, self.chunk_size = T, chunk_size
        self._token: Tensor | None = None
        if cu_seqlens is None:
            self.n_chunks = -(-T // chunk_size)
            self.resets: frozenset[int] = frozenset()
            return
        lengths = cu_seqlens.diff().cpu().long()
        chunks = -(-lengths // chunk_size)
        first = chunks.cumsum(0) - chunks
        self.n_chunks = int(chunks.sum())
        self.resets = frozenset(first[lengths > 0].tolist()) - {0}
        starts = cu_seqlens[:-1].cpu().long()
        place = torch.arange(T) + torch.repeat_interleave(first * chunk_size - starts, lengths)
        token = torch.full((self.n_chunks * chunk_size,), T)
        token[place] = torch.arange(T)
        self._place, self._token = place.to(cu_seqlens.device), token.to(cu_seqlens.device)

    def split(self, x: Tensor) -> Tensor:
        """``[B, T, …]`` to ``[B, N, C, …]``; places after a document's last token are 0."""
        if self._token is None:
            x = _pad(x, self.n_chunks * self.chunk_size - self.T)
        else:
            x = _pad(x, 1).index_select(1, self._token)
        return x.unflatten(1, (self.n_chunks, self.chunk_size))

    def join(self, x: Tensor) -> Tensor:
        """``[B, N, C, …]`` to ``[B, T, …]``: the reverse of ``split``."""
        x = x.flatten(1, 2)
        return x[:, : self.T] if self._token is None else x.index_select(1, self._place)

    def split_heads(self, x: Tensor) -> Tensor:
        """``[B, T, H, D]`` to ``[N·B·H, C, D]``, chunks first: what batched matrix products and a loop over N want."""
        return self.split(x).permute(1, 0, 3, 2, 4).flatten(0, 2).contiguous()

    def join_heads(self, x: Tensor, n_heads: int) -> Tensor:
        """``[N·B·H, C, D]`` to ``[B, T, H, D]``: the reverse of ``split_heads``."""
        x = x.view(self.n_chunks, -1, n_heads, self.chunk_size, x.shape[-1])
        return self.join(x.permute(1, 0, 3, 2, 4))


def fitting_chunk_size(T: int, chunk_size: int) -> int:
    """The largest useful power of two for T tokens, at most ``chunk_size``."""
    return min(chunk_size, 1 << max(T - 1, 0).bit_length())


def _pad(x: Tensor, n: int) -> Tensor:
    return F.pad(x, (0, 0) * (x.ndim - 2) + (0, n)) if n else x
