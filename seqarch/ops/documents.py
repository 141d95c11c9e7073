"""Which document of a packed batch a token belongs to."""

from __future__ import annotations

import torch
from torch import Tensor


def document_ids(cu_seqlens: Tensor, T: int, device: torch.device) -> Tensor:
    """The document of each token, from 0, int32 ``[T]``; nothing waits for the device.

    Args:
        cu_seqlens: int32 ``[n+1]``, boundaries of the documents.
        T: Tokens.
        device: Of the result.
    """
    lengths = cu_seqlens.diff().to(device)
    documents = torch.arange(len(lengths), dtype=torch.int32, device=device)
    return torch.repeat_interleave(documents, lengths, output_size=T)
