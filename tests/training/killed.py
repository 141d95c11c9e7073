"""A training run for a process of its own, to be killed at any moment."""

from __future__ import annotations

import time
from multiprocessing.synchronize import Event
from pathlib import Path

import torch
from lightning.pytorch.callbacks import Callback

from tests.training.synthetic import SyntheticData, T, tiny, trainer

STEPS = 12


class Slow(Callback):
    """Tells when training starts, and stretches it, so that a kill can hit anything."""

    def __init__(self, started: Event) -> None:
        self.started = started

    def on_train_start(self, *_) -> None:
        self.started.set()

    def on_train_batch_end(self, *_) -> None:
        time.sleep(0.01)

    def on_validation_batch_end(self, *_) -> None:
        time.sleep(0.01)


def run(run_dir: Path, started: Event) -> None:
    """Train, or go on from the last checkpoint."""
    torch.set_num_threads(1)
    module = tiny(max_tokens=STEPS * 8 * T, val_every_n_steps=3)
    last = run_dir / "checkpoints" / "last.ckpt"
    fit = trainer(run_dir, every_n_steps=2, enable_progress_bar=False)
    fit.callbacks.insert(0, Slow(started))
    data = SyntheticData(micro_batch_size=4)
    fit.fit(module, datamodule=data, ckpt_path=str(last) if last.exists() else None)
