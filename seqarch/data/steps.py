"""What every data module has in common: batches by optimiser step, for any number of ranks, workers and accumulations.

Shape legend: B sequences of a micro batch, T tokens (seq_len).
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from seqarch.options import at_least

IGNORE = -100
"""The label of a position that has none."""

log = logging.getLogger(__name__)


class StepBatches(IterableDataset):
    """The endless stream of one rank's micro batches, a pure function of the samples' numbers.

    Sequence i of micro batch a of a step is sample
    ``step * batch_size + (a * world_size + rank) * micro_batch_size + i``.

    Args:
        batch_size: Sequences of a step, over all ranks.
        micro_batch_size: B.
        rank: Of this process, among ``world_size``.
        world_size: Number of data-parallel ranks.
    """

    def __init__(self, *, batch_size: int, micro_batch_size: int, rank: int, world_size: int) -> None:
        self.batch_size = batch_size
        self.micro_batch_size = micro_batch_size
        self.rank = rank
        self.world_size = world_size
        self.accumulation = batch_size // (micro_batch_size * world_size)
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

    @abstractmethod
    def micro_batch(self, step: int, accumulated: int) -> dict[str, Tensor]:
        """Micro batch ``accumulated`` (from 0) of a step: ``input_ids``, ``labels``, and ``cu_seqlens`` if packed."""


class TrainLoader(DataLoader):
    """A loader that starts where ``current_step`` stands when it is iterated, so that a restored trainer goes on.

    Args:
        batches: The dataset.
        current_step: Number of optimiser steps that have been taken.
        num_workers: Worker processes.
        pin_memory: For faster copies to a GPU.
    """

    def __init__(
        self, batches: StepBatches, current_step: Callable[[], int], *, num_workers: int, pin_memory: bool
    ) -> None:
        super().__init__(batches, batch_size=None, num_workers=num_workers, pin_memory=pin_memory)
        self.batches = batches
        self.current_step = current_step

    def __iter__(self):  # the type is torch's private iterator
        self.batches.first_step = self.current_step()
        return super().__iter__()


class StepDataModule(L.LightningDataModule):
    """What training asks of a data module. Batches are counted in optimiser steps, so that resuming is exact.

    A subclass also has ``vocab_size`` and ``val_domains`` (names, in the order of the validation loaders), both by
    ``setup``; a validation batch is ``input_ids`` and ``labels``, with ``bytes``, the text's length of each sequence.

    Args:
        seq_len: Tokens of a sequence.
        batch_size: Sequences of an optimiser step, over all ranks.
        micro_batch_size: Sequences of a rank in one forward pass; the rest of batch_size is accumulated.
        num_workers: Loader processes of each rank; 0 loads in the training process.
    """

    val_domains: list[str]
    accuracy: bool = False
    """Whether validation also logs ``val/accuracy/<domain>``: the share of labels that are the most probable token."""

    def __init__(self, seq_len: int, batch_size: int, micro_batch_size: int, *, num_workers: int = 0) -> None:
        super().__init__()
        at_least(2, seq_len=seq_len)
        at_least(1, batch_size=batch_size, micro_batch_size=micro_batch_size)
        at_least(0, num_workers=num_workers)
        if batch_size % micro_batch_size:
            raise ValueError(f"batch_size {batch_size} must be a multiple of micro_batch_size {micro_batch_size}")
        self.seq_len = seq_len
        self.batch_size = batch_size
        self.micro_batch_size = micro_batch_size
        self.num_workers = num_workers

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one optimiser step, over all ranks."""
        return self.batch_size * self.seq_len

    @property
    def tokenizer_path(self) -> Path | None:
        """The ``tokenizer.json`` that made the tokens; None where they stand for no text."""
        return None

    @abstractmethod
    def in_domain(self, name: str) -> bool:
        """Whether a validation domain is one that is trained on. There after ``setup``."""

    def _rank(self) -> tuple[int, int]:
        """This process's place among the data-parallel ranks, and their number."""
        if self.trainer is None:
            return 0, 1
        dealt = getattr(self.trainer.strategy, "distributed_sampler_kwargs", None)
        if dealt is None:
            return 0, 1
        return dealt["rank"], dealt["num_replicas"]

    def _set_accumulation(self) -> None:
        world_size = self._rank()[1]
        together = self.micro_batch_size * world_size
        if self.batch_size % together:
            raise ValueError(
                f"batch_size {self.batch_size} must be a multiple of micro_batch_size x ranks = "
                f"{self.micro_batch_size} x {world_size} = {together}"
            )
        if self.trainer is None:
            return
        accumulation = self.batch_size // together
        if self.trainer.accumulate_grad_batches not in (1, accumulation):
            raise ValueError(
                f"trainer.accumulate_grad_batches is {self.trainer.accumulate_grad_batches}, but batch_size, "
                f"micro_batch_size and {world_size} ranks make it {accumulation}: leave it out"
            )
        self.trainer.accumulate_grad_batches = accumulation

    def _current_step(self) -> int:
        """The optimiser step to go on with, its first micro batch next."""
        if self.trainer is None:
            return 0
        # A checkpoint may come from another number of ranks, or from inside an accumulation. Lightning counts micro
        # batches to know when a step is full: put its count back to the start of a step, which is where we go on.
        current: Any = self.trainer.fit_loop.epoch_loop.batch_progress.current
        first = current.ready - current.ready % self.trainer.accumulate_grad_batches
        # A checkpoint written at the end of a batch counts it as not completed; Lightning adds one on restarting.
        pending = current.processed == current.ready and current.completed == current.ready - 1
        current.ready = current.started = current.processed = first
        current.completed = first - pending
        return self.trainer.global_step

    def test_dataloader(self) -> Any:
        """The same as ``val_dataloader``."""
        return self.val_dataloader()

    def _warn_of_changes(self, saved: dict[str, Any], own: dict[str, Any]) -> None:
        """Compare what decides the training data, by option, with that of the run that wrote a checkpoint."""
        changed = [name for name, value in saved.items() if own[name] != value]
        if changed:
            log.warning(
                "the data differs from the checkpoint's in %s: its order does not go on exactly", ", ".join(changed)
            )
