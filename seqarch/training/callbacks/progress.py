"""The progress bar, in optimiser steps."""

from __future__ import annotations

import math
import sys
import time
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import TQDMProgressBar


class StepProgress(TQDMProgressBar):
    """Steps done of all, loss, tokens per second, and the time that is left.

    Lightning's bar counts micro batches, of which an endless loader has no number. Where the output is no terminal, a
    line is printed now and then instead.

    Args:
        seconds_between_lines: How often, where the output is no terminal.
    """

    def __init__(self, seconds_between_lines: float = 30.0) -> None:
        super().__init__()
        self.seconds_between_lines = seconds_between_lines
        self._start = self._line = (0, 0.0)  # step and time: where this run started, and of the last line

    @property
    def is_disabled(self) -> bool:
        """Whether no bar is drawn."""
        return super().is_disabled or not sys.stdout.isatty()

    def on_train_start(self, *_: Any) -> None:
        """The bar runs over all of training, and starts at the step of the checkpoint."""
        super().on_train_start()
        trainer, bar = self.trainer, self.train_progress_bar
        bar.total, bar.n, bar.initial = trainer.max_steps, trainer.global_step, trainer.global_step
        bar.set_description("Training")
        self._start = (trainer.global_step, time.monotonic())
        self._line = (trainer.global_step, -math.inf)

    def on_train_epoch_start(self, trainer: L.Trainer, *_: Any) -> None:
        """Nothing: all of training is one bar."""

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Show the step that was completed."""
        step = trainer.global_step
        bar = self.train_progress_bar
        if bar.disable:
            now = time.monotonic()
            rest = step == trainer.max_steps or now - self._line[1] >= self.seconds_between_lines
            if self.is_enabled and trainer.is_global_zero and step != self._line[0] and rest:
                self._line = (step, now)
                print(self._describe(trainer, pl_module), flush=True)
        elif step != bar.n:
            bar.set_postfix(self.get_metrics(trainer, pl_module), refresh=False)
            bar.update(step - bar.n)  # draws when it is time to

    def _describe(self, trainer: L.Trainer, pl_module: L.LightningModule) -> str:
        step = trainer.global_step
        left = (time.monotonic() - self._start[1]) / (step - self._start[0]) * (trainer.max_steps - step)
        hours, minutes, seconds = int(left) // 3600, int(left) // 60 % 60, int(left) % 60
        metrics = "  ".join(f"{name} {value}" for name, value in self.get_metrics(trainer, pl_module).items())
        return f"step {step}/{trainer.max_steps}  {metrics}  left {hours}:{minutes:02}:{seconds:02}"

    def get_metrics(self, trainer: L.Trainer, pl_module: L.LightningModule) -> dict[str, Any]:
        """The loss and the speed, in a form to read."""
        metrics = trainer.progress_bar_metrics
        shown = {}
        if "train/loss" in metrics:
            shown["loss"] = f"{metrics['train/loss']:.4f}"
        if "train/tokens_per_s" in metrics:
            shown["tokens/s"] = f"{metrics['train/tokens_per_s']:,.0f}"
        return shown

    def print(self, *args: Any, sep: str = " ", **kwargs: Any) -> None:
        """Print above the bar, or plainly where none is drawn."""
        if self.is_disabled:
            print(*args, sep=sep, **kwargs)
        else:
            super().print(*args, sep=sep, **kwargs)
