"""A tiny data module and model, so that training's tests need no corpus."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from seqarch.training.callbacks import run_callbacks
from seqarch.training.metrics import run_loggers
from seqarch.training.module import SequenceModule
from seqarch_attention import Attention

V, T = 32, 16


def sample(n: int, seed: int = 0) -> Tensor:
    """Sample n, ``[T + 1]``: a sequence that counts up by a step of its own, with noise."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + n)
    start, step = torch.randint(0, V, (2,), generator=generator)
    noise = torch.randint(0, V, (T + 1,), generator=generator)
    ids = (start + (1 + step % 3) * torch.arange(T + 1)) % V
    return torch.where(torch.rand(T + 1, generator=generator) < 0.1, noise, ids)


class Stream(IterableDataset):
    """This rank's micro batches from the step where the trainer stands, without end."""

    def __init__(self, data: SyntheticData, rank: int, world_size: int) -> None:
        self.data, self.rank, self.world_size = data, rank, world_size

    def __iter__(self):
        data = self.data
        step = data.trainer.global_step if data.trainer is not None else 0
        while True:
            mine = list(range(data.batch_size))[self.rank :: self.world_size]
            for i in range(0, len(mine), data.micro_batch_size):
                ids = torch.stack([sample(step * data.batch_size + n) for n in mine[i : i + data.micro_batch_size]])
                if step in data.poisoned:
                    yield {"input_ids": ids[:, :-1], "labels": ids[:, 1:], "poison": torch.tensor(True)}
                else:
                    yield {"input_ids": ids[:, :-1], "labels": ids[:, 1:]}
            step += 1


class Windows(Dataset):
    """Four validation batches of one domain, each of another length, dealt to the ranks; last positions are ignored."""

    def __init__(self, domain: int, rank: int, world_size: int) -> None:
        self.domain, self.rank, self.world_size = domain, rank, world_size

    def __len__(self) -> int:
        return 4 // self.world_size

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        n = i * self.world_size + self.rank
        ids = torch.stack([sample(4 * n + k, seed=1 + self.domain) for k in range(4)])[:, : T - n]
        labels = ids[:, 1:].clone()
        labels[:, -1] = -100
        document = torch.arange(4)
        return {
            "input_ids": ids[:, :-1],
            "labels": labels,
            "bytes": torch.full((4,), 3.5, dtype=torch.float64),
            "document": document,
        }


class SyntheticData(L.LightningDataModule):
    """The attributes and loaders that training asks of a data module."""

    def __init__(self, batch_size: int = 8, micro_batch_size: int = 8, poisoned: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.batch_size, self.micro_batch_size, self.poisoned = batch_size, micro_batch_size, poisoned
        self.seq_len, self.vocab_size = T, V
        self.val_domains = ["books", "web", "code"]

    @property
    def tokens_per_step(self) -> int:
        return self.batch_size * self.seq_len

    def in_domain(self, name: str) -> bool:
        return name == "web"

    def _rank(self) -> dict[str, int]:
        strategy = self.trainer.strategy if self.trainer is not None else None
        return getattr(strategy, "distributed_sampler_kwargs", {"num_replicas": 1, "rank": 0})

    def setup(self, stage: str) -> None:
        assert self.trainer is not None
        if stage == "fit":
            self.trainer.accumulate_grad_batches = self.batch_size // (
                self.micro_batch_size * self._rank()["num_replicas"]
            )

    def train_dataloader(self) -> DataLoader:
        rank = self._rank()
        return DataLoader(Stream(self, rank["rank"], rank["num_replicas"]), batch_size=None)

    def val_dataloader(self) -> list[DataLoader]:
        rank = self._rank()
        loaders = []
        for domain in range(len(self.val_domains)):
            windows = Windows(domain, rank["rank"], rank["num_replicas"])
            sampler = DistributedSampler(windows, num_replicas=1, rank=0, shuffle=False)
            loaders.append(DataLoader(windows, batch_size=None, sampler=sampler))
        return loaders


def tiny(seed: int = 1, **options: Any) -> SequenceModule:
    """A module that trains in milliseconds."""
    L.seed_everything(seed, verbose=False)
    options = {"vocab_size": V, "d_model": 16, "n_layers": 2, "mixer": partial(Attention, n_heads=2), **options}
    return SequenceModule(**options)


def trainer(run_dir: Path, *, every_n_steps: int | None = None, **options: Any) -> L.Trainer:
    """A trainer on the CPU with a run folder's loggers and callbacks."""
    defaults = {
        "accelerator": "cpu",
        "devices": 1,
        "logger": run_loggers(run_dir),
        "callbacks": run_callbacks(run_dir, every_n_steps, progress_bar=options.get("enable_progress_bar", True)),
        "max_epochs": -1,
        "log_every_n_steps": 1,
        "num_sanity_val_steps": 0,
        "gradient_clip_val": 1.0,
        "enable_model_summary": False,
        "use_distributed_sampler": False,
        "default_root_dir": run_dir,
    }
    return L.Trainer(**{**defaults, **options})


def rows(run_dir: Path, *, timed: bool = False) -> list[tuple[int, str, str]]:
    """The rows (step, name, value) of metrics.csv, without those that depend on the clock or the machine."""
    lines = (run_dir / "metrics.csv").read_text().splitlines()
    assert lines[0] == "step,tokens,name,value"
    found = [(int(step), name, value) for step, _, name, value in (line.split(",") for line in lines[1:])]
    return found if timed else [r for r in found if r[1] not in ("train/tokens_per_s", "train/peak_memory_bytes")]
