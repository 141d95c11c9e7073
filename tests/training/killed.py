"""A training run in a process of its own, to be killed: python -m tests.training.killed RUN_DIR MICRO_BATCH_SIZE STEPS."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from lightning.pytorch.callbacks import Callback

from tests.training.synthetic import SyntheticData, T, tiny, trainer


class Slow(Callback):
    """Stretches the run, so that a kill can hit anything."""

    def on_train_batch_end(self, *_) -> None:
        time.sleep(0.01)

    def on_validation_batch_end(self, *_) -> None:
        time.sleep(0.01)


def run(run_dir: Path, micro_batch_size: int, steps: int) -> None:
    """Train, or go on from the last checkpoint."""
    torch.set_num_threads(1)
    module = tiny(max_tokens=steps * 8 * T, val_every_n_steps=3)
    last = run_dir / "checkpoints" / "last.ckpt"
    fit = trainer(run_dir, every_n_steps=2, enable_progress_bar=False)
    fit.callbacks.insert(0, Slow())
    data = SyntheticData(micro_batch_size=micro_batch_size)
    fit.fit(module, datamodule=data, ckpt_path=str(last) if last.exists() else None)


if __name__ == "__main__":
    run(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
