"""When to save checkpoints, and which to keep."""

from __future__ import annotations

import math
import os
import socket
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Checkpoint

from seqarch.options import at_least
from seqarch.training.checkpoint import CHECKPOINT_NAME, AtomicCheckpointIO
from seqarch.training.loops import at_end_of_step, validation_follows
from seqarch.training.together import together


class Checkpoints(Checkpoint):
    """Saves ``step-<n>.ckpt`` every n steps, at each best validation and at the end.

    ``last.ckpt`` and ``best.ckpt`` are links to the newest and to the best; they are moved when a new file is complete.
    A checkpoint always stands at the end of an optimiser step, and after the validation that belongs to it, so that a
    resumed run repeats and misses nothing.

    Args:
        folder: Where they go.
        every_n_steps: Steps between two checkpoints; None saves the best and the final one only.
        keep: How many of the regular ones to keep besides best and last; None keeps all.
        monitor: The metric of which the lowest is best.
    """

    def __init__(
        self,
        folder: str | os.PathLike,
        every_n_steps: int | None = 1000,
        keep: int | None = None,
        monitor: str = "val/loss/id",
    ) -> None:
        at_least(1, every_n_steps=every_n_steps)
        at_least(0, keep=keep)
        self.folder = Path(folder)
        self.every_n_steps = every_n_steps
        self.keep = keep
        self.monitor = monitor
        self.best_score = math.inf
        self.best_step = 0
        self._saved_step = 0

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Have checkpoints written atomically.

        Raises:
            ValueError: If the processes do not all see the same checkpoints in the folder.
        """
        trainer.strategy.checkpoint_io = AtomicCheckpointIO()
        found = together(lambda: (self._steps(), socket.gethostname()))
        expected, first_host = found[0]
        for rank, (steps, host) in enumerate(found):
            if steps != expected:
                raise ValueError(
                    f"rank 0 on {first_host} sees checkpoints of the steps {expected} in {self.folder}, but rank "
                    f"{rank} on {host} sees {steps}: run_dir must lie on a disk that all nodes share"
                )

    def state_dict(self) -> dict[str, Any]:
        """The best so far."""
        return {"best_score": self.best_score, "best_step": self.best_step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the best so far."""
        self.best_score, self.best_step = state_dict["best_score"], state_dict["best_step"]

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """The checkpoint that was resumed from exists; what a killed write left does not count."""
        self._saved_step = trainer.global_step
        if trainer.is_global_zero:
            for left in (*self.folder.glob(".step-*.tmp"), *self.folder.glob(".step-*.old")):
                AtomicCheckpointIO().remove_checkpoint(left)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save at the end of a step, unless validation follows, which saves then."""
        if at_end_of_step(trainer) and self._due(trainer) and not validation_follows(trainer):
            self.save(trainer)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Save the best, and what was put off until after validation."""
        if trainer.sanity_checking or trainer.state.fn != "fit":
            return
        score = float(trainer.callback_metrics.get(self.monitor, math.nan))
        best = score < self.best_score
        if best:
            self.best_score, self.best_step = score, trainer.global_step
        if best or self._due(trainer):
            self.save(trainer)

    def _due(self, trainer: L.Trainer) -> bool:
        step = trainer.global_step
        regular = self.every_n_steps is not None and step % self.every_n_steps == 0
        # While steps are being skipped nothing new is learnt, and a save would push a good checkpoint out.
        regular = regular and not getattr(trainer.lightning_module, "skipped_in_a_row", 0)
        return step != self._saved_step and (regular or step == trainer.max_steps or trainer.should_stop)

    def save(self, trainer: L.Trainer) -> None:
        """Save where training stands, at the end of a step, unless that is done."""
        step = trainer.global_step
        if step == self._saved_step:
            return
        trainer.save_checkpoint(self.path(step), weights_only=False)
        self._saved_step = step
        if trainer.is_global_zero:
            self._link("last.ckpt", step)
            if self.best_step == step:
                self._link("best.ckpt", step)
            self._prune(step)
        trainer.strategy.barrier("checkpoint")

    def path(self, step: int) -> Path:
        """Where the checkpoint of a step lies."""
        return self.folder / f"step-{step:08d}.ckpt"

    def _steps(self) -> list[int]:
        """The steps of the checkpoints in the folder."""
        return sorted(int(m[1]) for p in self.folder.glob("*.ckpt") if (m := CHECKPOINT_NAME.fullmatch(p.name)))

    def _link(self, name: str, step: int) -> None:
        temporary = self.folder / f".{name}.tmp"
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(self.path(step).name)
        os.replace(temporary, self.folder / name)

    def _prune(self, step: int) -> None:
        """Remove regular checkpoints beyond ``keep``, and former bests."""
        found = self._steps()
        regular = [s for s in found if self.every_n_steps is not None and s % self.every_n_steps == 0 and s <= step]
        kept = set(regular if self.keep is None else regular[len(regular) - min(self.keep, len(regular)) :])
        for s in found:
            if s < step and s not in kept and s != self.best_step:
                AtomicCheckpointIO().remove_checkpoint(self.path(s))
