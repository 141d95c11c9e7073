"""Multi-query associative recall: key-value pairs, then the keys again, each asking for its value.

The task of Arora et al. 2023 (arXiv 2312.04927, "Zoology"), generated on the fly.

Shape legend: B sequences, T tokens (seq_len), P pairs.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from seqarch.data.eval_batches import loader
from seqarch.data.permutation import derive_key
from seqarch.data.steps import IGNORE, StepBatches, StepDataModule, TrainLoader


class RecallTask:
    """Sequences of the task, each a pure function of its number.

    The lower half of the vocabulary, without 0, are keys, the upper half values. A sequence starts with P pairs
    of a key and a value, all different. Of the places after them, two apart, P are drawn for the keys in random order,
    a place at distance i with weight i^(power - 1): the smaller ``power``, the more queries follow soon. All other
    tokens there are 0, or random. The label at a query is its key's value; all other positions have none.

    Args:
        vocab_size: Number of token ids V.
        seq_len: T.
        n_pairs: P.
        power: Of the law of the queries' distances.
        random_non_queries: Random tokens between the queries, keys and values among them, instead of 0.
        key: Another key is another set of sequences.

    Raises:
        ValueError: If the pairs do not fit in the sequence or in the vocabulary.
    """

    def __init__(
        self, vocab_size: int, seq_len: int, n_pairs: int, power: float, random_non_queries: bool, key: int
    ) -> None:
        if n_pairs < 1:
            raise ValueError(f"n_pairs must be at least 1, got {n_pairs}")
        if 4 * n_pairs > seq_len:
            raise ValueError(
                f"n_pairs {n_pairs} needs {4 * n_pairs} tokens for pairs and queries, but seq_len is {seq_len}: "
                "lower n_pairs or raise seq_len"
            )
        if n_pairs > vocab_size // 2 - 1:
            raise ValueError(
                f"n_pairs {n_pairs} needs as many different keys, but half of vocab_size {vocab_size} without id 0 has "
                f"only {max(0, vocab_size // 2 - 1)}: lower n_pairs or raise vocab_size"
            )
        if power <= 0:
            raise ValueError(f"power must be above 0, got {power}")
        self.vocab_size, self.seq_len, self.n_pairs, self.key = vocab_size, seq_len, n_pairs, key
        self.random_non_queries = random_non_queries
        self._places = (seq_len - 2 * n_pairs) // 2
        self._weights = np.arange(1, self._places + 1) ** (power - 1)
        self._n_keys, self._n_values = vocab_size // 2 - 1, vocab_size - vocab_size // 2

    def __call__(self, samples: np.ndarray) -> dict[str, Tensor]:
        """``input_ids`` and ``labels`` int64 ``[B, T]`` of the sequences numbered ``samples`` (int64 ``[B]``)."""
        P, T = self.n_pairs, self.seq_len
        parts = np.cumsum([self._n_keys, self._n_values, self._places])
        uniform = np.empty((len(samples), parts[-1] + T))
        for row, n in zip(uniform, samples, strict=True):
            np.random.Generator(np.random.Philox(key=[self.key, n])).random(out=row)
        of_keys, of_values, of_places, noise = np.split(uniform, parts, axis=1)
        keys = 1 + _first(of_keys, P)
        values = self.vocab_size // 2 + _first(of_values, P)
        # The order of exponential variables over their weights is that of weighted draws without replacement.
        places = 2 * P + 2 * _first(-np.log1p(-of_places) / self._weights, P)
        input_ids = (noise * self.vocab_size if self.random_non_queries else np.zeros_like(noise)).astype(np.int64)
        labels = np.full_like(input_ids, IGNORE)
        input_ids[:, 0 : 2 * P : 2] = keys
        input_ids[:, 1 : 2 * P : 2] = values
        np.put_along_axis(input_ids, places, keys, axis=1)
        np.put_along_axis(labels, places, values, axis=1)
        return {"input_ids": torch.from_numpy(input_ids), "labels": torch.from_numpy(labels)}


def _first(x: np.ndarray, n: int) -> np.ndarray:
    """Where the ``n`` smallest of each row stand, from the smallest."""
    return np.argsort(x, axis=1)[:, :n]


class RecallBatches(StepBatches):
    """Training batches of the task.

    Args:
        task: The sequences.
        deal: Sizes and ranks, see `StepBatches`.
    """

    def __init__(self, task: RecallTask, **deal: int) -> None:
        super().__init__(**deal)
        self.task = task

    def micro_batch(self, step: int, accumulated: int) -> dict[str, Tensor]:
        """Micro batch ``accumulated`` (from 0) of a step."""
        return self.task(self.samples(step, accumulated))


class RecallValidation(Dataset):
    """Sequences 0 … n-1 of a task, dealt to the ranks in turn; all ranks get the same number of batches.

    Args:
        task: The sequences.
        n: How many, over all ranks.
        batch_size: B; the last batch may be smaller.
        rank: Of this process, among ``world_size``.
        world_size: Number of data-parallel ranks.
    """

    def __init__(self, task: RecallTask, n: int, batch_size: int, rank: int, world_size: int) -> None:
        self.task, self.batch_size = task, batch_size
        self.mine = np.arange(rank, n, world_size)
        self.n_batches = math.ceil(math.ceil(n / world_size) / batch_size)

    def __len__(self) -> int:
        return self.n_batches

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        if not 0 <= i < self.n_batches:
            raise IndexError(i)
        samples = self.mine[i * self.batch_size : (i + 1) * self.batch_size]
        batch = self.task(samples if len(samples) else np.zeros(1, dtype=np.int64))
        if not len(samples):
            batch["labels"].fill_(IGNORE)
        return {**batch, "bytes": torch.zeros(len(batch["labels"]), dtype=torch.float64)}


class MQARDataModule(StepDataModule):
    """Multi-query associative recall (Arora et al. 2023, arXiv 2312.04927), generated on the fly.

    Training never sees a sequence twice. Validation, always on the same sequences, logs the loss and the accuracy at
    the queries: ``val/loss/mqar`` and ``val/accuracy/mqar``.

    Args:
        batch_size: Sequences of an optimiser step, over all ranks.
        micro_batch_size: Sequences of a rank in one forward pass; by default batch_size.
        seq_len: Tokens of a sequence.
        vocab_size: Token ids: the lower half are keys, the upper half values.
        n_pairs: Key-value pairs of a sequence, each asked for once.
        power: Where queries come: at distance i with weight i^(power - 1), so that most come soon.
        random_non_queries: Put random tokens between the queries instead of 0, keys and values among them; harder.
            The authors' code has both, and for the paper's Figure 2 it has 0.
        seed: Another seed is another stream of training sequences.
        val_sequences: Sequences of the validation.
        num_workers: Loader processes of each rank; 0 generates in the training process.
    """

    accuracy = True

    def __init__(
        self,
        batch_size: int,
        micro_batch_size: int | None = None,
        seq_len: int = 64,
        vocab_size: int = 256,
        n_pairs: int = 16,
        power: float = 0.01,
        random_non_queries: bool = False,
        seed: int = 0,
        val_sequences: int = 1000,
        num_workers: int = 0,
    ) -> None:
        micro_batch_size = batch_size if micro_batch_size is None else micro_batch_size
        super().__init__(seq_len, batch_size, micro_batch_size, num_workers=num_workers)
        if val_sequences < 1:
            raise ValueError(f"val_sequences must be at least 1, got {val_sequences}")
        self.vocab_size = vocab_size
        self.n_pairs = n_pairs
        self.power = power
        self.random_non_queries = random_non_queries
        self.seed = seed
        self.val_sequences = val_sequences
        self.val_domains = ["mqar"]
        of_task = (vocab_size, seq_len, n_pairs, power, random_non_queries)
        self.train_task = RecallTask(*of_task, derive_key("mqar train", seed))
        self.val_task = RecallTask(*of_task, derive_key("mqar validation"))

    def in_domain(self, name: str) -> bool:
        """Always true: validation is the task that is trained on."""
        return True

    def setup(self, stage: str = "fit") -> None:
        """Deal the batch to the ranks.

        Raises:
            ValueError: If ``batch_size`` cannot be dealt to them.
        """
        if stage == "fit":
            self._set_accumulation()

    def train_dataloader(self) -> DataLoader:
        """This rank's micro batches, from the optimiser step at which the trainer stands."""
        rank, world_size = self._rank()
        batches = RecallBatches(
            self.train_task,
            batch_size=self.batch_size,
            micro_batch_size=self.micro_batch_size,
            rank=rank,
            world_size=world_size,
        )
        return TrainLoader(
            batches, self._current_step, num_workers=self.num_workers, pin_memory=torch.cuda.is_available()
        )

    def val_dataloader(self) -> list[DataLoader]:
        """The loader of the validation sequences."""
        batches = RecallValidation(self.val_task, self.val_sequences, self.micro_batch_size, *self._rank())
        return [loader(batches, self.num_workers, torch.cuda.is_available())]

    def state_dict(self) -> dict[str, Any]:
        """What decides the training data."""
        names = ("seed", "seq_len", "batch_size", "vocab_size", "n_pairs", "power", "random_non_queries")
        return {"order": {name: getattr(self, name) for name in names}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Compare with the run that wrote the checkpoint; what differs is a warning."""
        self._warn_of_changes(state_dict["order"], self.state_dict()["order"])
