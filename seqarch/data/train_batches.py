"""Training batches: a pure function of (seed, step), the same for any number of ranks, workers and accumulation steps.

Shape legend: B sequences of a micro batch, T tokens (seq_len).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from seqarch.data.corpus import TokenStream
from seqarch.data.mixture import SampleOrder

IGNORE = -100
"""The label of a position that has none."""


class TrainBatches(IterableDataset):
    """The endless stream of one rank's micro batches.

    Sequence i of micro batch a of a step is sample
    ``step * batch_size + (a * world_size + rank) * micro_batch_size + i``.

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
        self.order = order
        self.streams = [streams[d] for d in order.domains]
        self.seq_len = seq_len
        self.batch_size = batch_size
        self.micro_batch_size = micro_batch_size
        self.rank = rank
        self.world_size = world_size
        self.accumulation = batch_size // (micro_batch_size * world_size)
        self.document_mask = document_mask
        self.first_step = 0

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        info = get_worker_info()
        micro, stride = (0, 1) if info is None else (info.id, info.num_workers)
        while True:
            yield self.micro_batch(self.first_step + micro // self.accumulation, micro % self.accumulation)
            micro += stride

    def samples(self, step: int, accumulated: int) -> np.ndarray:
        """Numbers of the samples of one micro batch, int64 ``[B]``."""
        first = step * self.batch_size + (accumulated * self.world_size + self.rank) * self.micro_batch_size
        return np.arange(first, first + self.micro_batch_size, dtype=np.int64)

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


class TrainLoader(DataLoader):
    """A loader that starts where ``current_step`` stands when it is iterated, so that a restored trainer goes on.

    Args:
        batches: The dataset.
        current_step: Number of optimiser steps that have been taken.
        num_workers: Worker processes.
        pin_memory: For faster copies to a GPU.
    """

    def __init__(
        self, batches: TrainBatches, current_step: Callable[[], int], *, num_workers: int, pin_memory: bool
    ) -> None:
        super().__init__(batches, batch_size=None, num_workers=num_workers, pin_memory=pin_memory)
        self.batches = batches
        self.current_step = current_step

    def __iter__(self):  # the type is torch's private iterator
        self.batches.first_step = self.current_step()
        return super().__iter__()
