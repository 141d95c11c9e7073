"""What to do when the cluster asks the job to stop: save at the end of the step, and say that it wants to go on."""

from __future__ import annotations

import logging
import signal
import threading
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback

from seqarch.training.callbacks.checkpoints import Checkpoints
from seqarch.training.loops import at_end_of_step, validation_follows

log = logging.getLogger(__name__)

REQUEUE = 75
"""Exit status of a job that was asked to stop and can go on from its last checkpoint (``EX_TEMPFAIL``, sysexits.h)."""

_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)  # what Slurm, Kubernetes and torchrun send; `sbatch --signal=USR1@300`


class PreemptedError(Exception):
    """The job was asked to stop, and has saved a checkpoint from which it can go on."""


class Preemption(Callback):
    """On SIGTERM or SIGUSR1 to any process, saves a checkpoint at the end of the step and raises ``PreemptedError``.

    All processes stop after the same step. Where a validation follows that step they stop after it, so the time that
    the cluster leaves should cover one. (Lightning's own handlers would save amid an accumulation.)

    Args:
        checkpoints: What saves.
    """

    def __init__(self, checkpoints: Checkpoints) -> None:
        self.checkpoints = checkpoints
        self._asked: signal.Signals | None = None
        self._stopping = False

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Take the signals from Lightning, which gives them back to whom they belonged when training ends."""
        if threading.current_thread() is not threading.main_thread():
            return

        def ask(number: int, _: Any) -> None:
            launcher = trainer.strategy.launcher
            if self._asked is None and launcher is not None:
                launcher.kill(signal.Signals(number))  # the processes that it started
            self._asked = signal.Signals(number)

        for number in _SIGNALS:
            signal.signal(number, ask)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Agree at the end of a step whether to stop."""
        if not at_end_of_step(trainer):
            return
        asked = torch.tensor(float(self._asked is not None), device=trainer.strategy.root_device)
        self._stopping = bool(trainer.strategy.reduce(asked, reduce_op="max"))
        if self._stopping and not validation_follows(trainer):
            self._stop(trainer)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Stop after the validation that belongs to the step."""
        if self._stopping and trainer.state.fn == "fit":
            self._stop(trainer)

    def _stop(self, trainer: L.Trainer) -> None:
        step = trainer.global_step
        if step == trainer.max_steps:  # done anyway
            return
        self.checkpoints.save(trainer)
        name = self._asked.name if self._asked else "a signal to another process"
        raise PreemptedError(
            f"asked to stop ({name}): saved {self.checkpoints.path(step)} after step {step}; "
            f"go on from it with --ckpt_path last (exit status {REQUEUE})"
        )
