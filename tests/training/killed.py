"""A training run for a process of its own, to be killed at any moment."""

from __future__ import annotations

import os
import signal
import sys
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback

from tests.training.synthetic import SyntheticData, T, tiny, trainer

STEPS = 12


class Doom(Callback):
    """Counts the function calls from the start of training on, and kills the process at one of them.

    A call may be any: of the model, of a logger, of the file system amid the writing of a checkpoint. Unlike a moment
    in time it comes on a busy machine too.
    """

    def __init__(self, calls: Synchronized[int], kill_at: int | None) -> None:
        self.calls, self.kill_at = calls, kill_at

    def on_train_start(self, *_) -> None:
        count = 0

        def tick(frame: Any, event: str, _: Any) -> None:
            nonlocal count
            if event in ("call", "c_call"):
                count += 1
                if count == self.kill_at:
                    os.kill(os.getpid(), signal.SIGKILL)

        def stop() -> None:
            sys.setprofile(None)
            self.calls.value = count

        self.stop = stop
        sys.setprofile(tick)


def run(run_dir: Path, calls: Synchronized[int], kill_at: int | None) -> None:
    """Train, or go on from the last checkpoint; ``calls`` becomes the number of function calls that it took."""
    torch.set_num_threads(1)
    module = tiny(max_tokens=STEPS * 8 * T, val_every_n_steps=3)
    last = run_dir / "checkpoints" / "last.ckpt"
    fit = trainer(run_dir, every_n_steps=2, enable_progress_bar=False)
    doom = Doom(calls, kill_at)
    fit.callbacks.insert(0, doom)
    data = SyntheticData(micro_batch_size=4)
    fit.fit(module, datamodule=data, ckpt_path=str(last) if last.exists() else None)
    doom.stop()
