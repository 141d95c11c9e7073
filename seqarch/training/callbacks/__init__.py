"""Lightning callbacks: speed, progress, tables by domain, losses by document, checkpoints, a clean stop,
and which process of a job has failed."""

from __future__ import annotations

import os
from pathlib import Path

from lightning.pytorch.callbacks import Callback

from seqarch.training.callbacks.checkpoints import Checkpoints
from seqarch.training.callbacks.documents import DocumentLosses
from seqarch.training.callbacks.liveness import Liveness
from seqarch.training.callbacks.preemption import Preemption
from seqarch.training.callbacks.progress import StepProgress
from seqarch.training.callbacks.table import DomainTable
from seqarch.training.callbacks.throughput import Throughput


def run_callbacks(
    run_dir: str | os.PathLike,
    every_n_steps: int | None = 1000,
    keep: int | None = None,
    *,
    progress_bar: bool = True,
    peak_flops: float | None = None,
) -> list[Callback]:
    """The callbacks of a run folder.

    Args:
        run_dir: Folder of the run; checkpoints go to ``checkpoints`` in it.
        every_n_steps: Steps between two checkpoints; None saves the best and the final one only.
        keep: How many of them to keep besides the best and the last; None keeps all.
        progress_bar: False goes with the trainer's ``enable_progress_bar: false``.
        peak_flops: FLOP/s of one device, for the utilisation; by default from a table of GPUs.
    """
    progress = [StepProgress()] if progress_bar else []
    checkpoints = Checkpoints(Path(run_dir) / "checkpoints", every_n_steps, keep)
    return [
        Throughput(peak_flops),
        *progress,
        DomainTable(),
        DocumentLosses(Path(run_dir)),
        checkpoints,
        Preemption(checkpoints),
        Liveness(),
    ]
