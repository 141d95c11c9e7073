"""The record of a run's metrics: metrics.csv in long form, and TensorBoard.

Both are continued by a resumed run without gaps or doubles: what was recorded after the step of the checkpoint is
dropped first.
"""

from __future__ import annotations

import csv
import io
import os
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.loggers import Logger, TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only

HEADER = "step,tokens,name,value\n"


class MetricsFile(Logger):
    """Appends to ``<run_dir>/metrics.csv``, one row for each value: step, tokens seen, name, value.

    Values are written so that they read back exactly, and are in the file when ``log_metrics`` returns.

    Args:
        run_dir: Folder of the run.
    """

    def __init__(self, run_dir: str | os.PathLike) -> None:
        super().__init__()
        self._run_dir = Path(run_dir)

    @property
    def path(self) -> Path:
        """The file."""
        return self._run_dir / "metrics.csv"

    @property
    def name(self) -> str:
        """Lightning's name of this logger: empty, the run folder is its own."""
        return ""

    @property
    def version(self) -> str:
        """Lightning's version of this logger: empty."""
        return ""

    @property
    def save_dir(self) -> str:
        """The run folder."""
        return str(self._run_dir)

    @property
    def log_dir(self) -> str:
        """The run folder."""
        return str(self._run_dir)

    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """Nothing: the run folder's config.yaml and the checkpoints hold them."""

    @rank_zero_only
    def resume(self, step: int) -> None:
        """Keep what was recorded up to ``step``; 0 starts anew."""
        self._run_dir.mkdir(parents=True, exist_ok=True)
        kept = [HEADER]
        if step > 0 and self.path.exists():
            with self.path.open(newline="") as file:
                # A line without its end was being written when the run was killed.
                kept += [line for line in file if line != HEADER and line.endswith("\n") and int(_step(line)) <= step]
        temporary = self.path.with_name(".metrics.csv.tmp")
        temporary.write_text("".join(kept), newline="")
        os.replace(temporary, self.path)

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Append one row for each metric; ``train/tokens`` fills the column of tokens."""
        values = dict(metrics)
        tokens = values.pop("train/tokens", None)
        rows = io.StringIO()
        writer = csv.writer(rows, lineterminator="\n")
        for name, value in values.items():
            count = "" if tokens is None else int(tokens)
            writer.writerow([step, count, name, repr(value) if isinstance(value, int) else repr(float(value))])
        self._run_dir.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", newline="") as file:
            if file.tell() == 0:
                file.write(HEADER)
            file.write(rows.getvalue())


def _step(line: str) -> str:
    return line.split(",", 1)[0]


class TensorBoard(TensorBoardLogger):
    """Lightning's logger, in ``<run_dir>/tensorboard``, that hides what a killed run recorded after its checkpoint.

    Args:
        run_dir: Folder of the run.
    """

    def __init__(self, run_dir: str | os.PathLike) -> None:
        super().__init__(save_dir=str(run_dir), name="tensorboard", version="", default_hp_metric=False)

    @rank_zero_only
    def resume(self, step: int) -> None:
        """Have TensorBoard leave out what was recorded after ``step``."""
        from tensorboard.compat.proto import event_pb2

        if step > 0:
            # What SummaryWriter(purge_step=...) writes; by now the writer exists.
            event: Any = event_pb2.Event(step=step + 1)  # pyright: ignore[reportAttributeAccessIssue]  (generated)
            event.session_log.status = event.session_log.START
            self.experiment._get_file_writer().add_event(event, step + 1)


def run_loggers(run_dir: str | os.PathLike) -> list[Logger]:
    """The loggers of a run folder: metrics.csv and TensorBoard."""
    return [MetricsFile(run_dir), TensorBoard(run_dir)]


def resume_loggers(trainer: L.Trainer) -> None:
    """Tell the loggers at which step the run goes on."""
    for logger in trainer.loggers:
        if isinstance(logger, (MetricsFile, TensorBoard)):
            logger.resume(trainer.global_step)


def record(trainer: L.Trainer, step: int, tokens: int, values: Mapping[str, float]) -> None:
    """Write values of an optimiser step to every logger.

    Lightning's own way (``self.log``) rounds to float32 and takes the step from a counter that is not exact after a
    resume, so that values are handed to the loggers here.
    """
    for logger in trainer.loggers:
        logger.log_metrics({**values, "train/tokens": tokens}, step=step)
