"""When to save checkpoints, and which to keep."""

from __future__ import annotations

import math
import os
import re
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Checkpoint

from seqarch.options import at_least
from seqarch.training.checkpoint import AtomicCheckpointIO
from seqarch.training.loops import at_end_of_step, validation_follows

_NAME = re.compile(r"step-(\d+)\.ckpt")


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
        """Have checkpoints written atomically."""
        trainer.strategy.checkpoint_io = AtomicCheckpointIO()

    def state_dict(self) -> dict[str, Any]:
        """The best so far."""
        return {"best_score": self.best_score, "best_step": self.best_step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the best so far."""
        self.best_score, self.best_step = state_dict["best_score"], state_dict["best_step"]

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """The checkpoint that was resumed from exists."""
        self._saved_step = trainer.global_step

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

    def _link(self, name: str, step: int) -> None:
        temporary = self.folder / f".{name}.tmp"
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(self.path(step).name)
        os.replace(temporary, self.folder / name)

    def _prune(self, step: int) -> None:
        """Remove regular checkpoints beyond ``keep``, and former bests."""
        found = sorted(int(m[1]) for p in self.folder.iterdir() if (m := _NAME.fullmatch(p.name)))
        regular = [s for s in found if self.every_n_steps is not None and s % self.every_n_steps == 0 and s <= step]
        kept = set(regular if self.keep is None else regular[len(regular) - min(self.keep, len(regular)) :])
        for s in found:
            if s < step and s not in kept and s != self.best_step:
                AtomicCheckpointIO().remove_checkpoint(self.path(s))
