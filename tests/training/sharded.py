"""A sharded run: what each of its processes does."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from lightning.pytorch.callbacks import Callback

from seqarch.discovery import find
from seqarch.training.module import SequenceModule
from seqarch.training.strategy import FSDP2Strategy
from tests.training.ranks import run_ranks
from tests.training.synthetic import SyntheticData, T, tiny, trainer

MIXERS: dict[str, dict[str, Any]] = {
    "Attention": {"n_heads": 2},
    "Top1Chunk": {"n_heads": 2, "chunk_size": 4},
    "Mamba2": {"head_dim": 8, "state_dim": 8, "chunk_size": 8},
    "RWKV7": {"n_heads": 2},
    "GatedDeltaNet": {"n_heads": 2},
}
"""The mixers that are compared, with small options."""


@dataclass(frozen=True)
class Job:
    """What to train; the length of training is always that of ``of_steps``, of which ``steps`` are taken."""

    run_dir: Path
    steps: int = 8
    of_steps: int = 8
    mixer: str = "Attention"
    strategy: dict[str, Any] | None = field(default_factory=dict)
    """None trains in a single process without one."""
    model: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)
    every_n_steps: int | None = None
    resume: str | None = None
    """Name of a checkpoint in ``checkpoints``."""
    blind: int | None = None
    """A rank that sees another disk."""
    callbacks: tuple[Callback, ...] = ()

    def run(self) -> SequenceModule:
        """Train in this process, which is the only one or one of the ranks that the environment tells of."""
        find(self.mixer)
        options: dict[str, Any] = {"enable_progress_bar": False, **self.trainer}
        run_dir = self.run_dir
        if self.blind is not None and int(os.environ["RANK"]) == self.blind:
            run_dir = run_dir / "elsewhere"
        if self.strategy is not None:
            per_node = int(os.environ["LOCAL_WORLD_SIZE"])
            nodes = int(os.environ["WORLD_SIZE"]) // per_node
            options = {"devices": per_node, "num_nodes": nodes, "strategy": FSDP2Strategy(**self.strategy), **options}
        fitting = trainer(run_dir, every_n_steps=self.every_n_steps, **options)
        fitting.callbacks[:0] = self.callbacks
        mixer = partial(find(self.mixer), **MIXERS[self.mixer])
        module = tiny(mixer=mixer, max_tokens=self.of_steps * 8 * T, **{"val_every_n_steps": 3, **self.model})
        fitting.fit_loop.epoch_loop.max_steps = self.steps
        path = None if self.resume is None else str(self.run_dir / "checkpoints" / self.resume)
        fitting.fit(module, datamodule=SyntheticData(micro_batch_size=2), ckpt_path=path)
        return module

    def on(self, world_size: int, *, nodes: int = 1) -> None:
        """Train in so many processes."""
        run_ranks(world_size, self.run_dir / "logs", self.run, nodes=nodes)
