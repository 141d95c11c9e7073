"""Training batches: a pure function of (seed, step), the same for any number of ranks, workers and accumulation steps.

Shape legend: B sequences of a micro batch, T tokens (seq_len).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from seqarch.data.corpus import TokenStream
from seqarch.data.mixture import SampleOrder
from seqarch.data.steps import IGNORE, StepBatches


class TrainBatches(StepBatches):
    """The endless stream of one rank's micro batches of text; see `StepBatches` for which samples they are.

    Args:
        order: Which window a sample is.
        streams: Tokens of each of ``order.domains``.
        seq_len: T.
        batch_size: Sequences of a step, over all ranks.
        micro_batch_size: B.
        rank: Of this process, among ``world_size``.
        world_size: Number of data-parallel ranks.
        document_mask: Flatten the batch and give the documents' bounds.
    """

    def __init__(
        self,
        order: SampleOrder,
        streams: dict[str, TokenStream],
        *,
        seq_len: int,
        batch_size: int,
        micro_batch_size: int,
        rank: int,
        world_size: int,
        document_mask: bool,
    ) -> None:
        super().__init__(batch_size=batch_size, micro_batch_size=micro_batch_size, rank=rank, world_size=world_size)
        self.order = order
        self.streams = [streams[d] for d in order.domains]
        self.seq_len = seq_len
        self.document_mask = document_mask

    def micro_batch(self, step: int, accumulated: int) -> dict[str, Tensor]:
        """Micro batch ``accumulated`` (from 0) of a step.

        ``input_ids`` and ``labels`` int64 ``[B, T]``. With ``document_mask`` both are ``[1, B*T]``, labels across the
        end of a document are -100, and ``cu_seqlens`` (int32 ``[n+1]``) has every start of a sequence or document.
        """
        T = self.seq_len
        windows = np.empty((self.micro_batch_size, T + 1), dtype=np.int64)
        starts: list[int] = []
        last_labels: list[int] = []
        for b, (domain, window) in enumerate(zip(*self.order(self.samples(step, accumulated)), strict=True)):
            stream, first = self.streams[domain], int(window) * T
            windows[b] = stream.tokens(first, first + T + 1)
            if self.document_mask:
                bounds = [t - first for t in stream.document_bounds(first, first + T + 1)]
                starts += [b * T, *(b * T + t for t in bounds if t < T)]
                last_labels += [b * T + t - 1 for t in bounds]
        input_ids, labels = torch.from_numpy(windows[:, :-1].copy()), torch.from_numpy(windows[:, 1:].copy())
        if not self.document_mask:
            return {"input_ids": input_ids, "labels": labels}
        input_ids, labels = input_ids.view(1, -1), labels.view(1, -1)
        labels[0, last_labels] = IGNORE
        cu_seqlens = torch.tensor([*starts, self.micro_batch_size * T], dtype=torch.int32)
        return {"input_ids": input_ids, "labels": labels, "cu_seqlens": cu_seqlens}
