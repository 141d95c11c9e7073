"""A sharded run, started by each of its processes: python -m tests.training.two_processes DIR STEPS [CKPT]."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from seqarch.training.strategy import FSDP2Strategy
from tests.training.synthetic import SyntheticData, T, tiny, trainer


def main(run_dir: Path, steps: int, ckpt_path: str | None) -> None:
    """Train on two processes."""
    torch.set_num_threads(1)
    run = trainer(run_dir, devices=2, strategy=FSDP2Strategy(), enable_progress_bar=False)
    module = tiny(max_tokens=8 * 8 * T, val_every_n_steps=3)
    run.fit_loop.epoch_loop.max_steps = steps
    run.fit(module, datamodule=SyntheticData(micro_batch_size=2), ckpt_path=ckpt_path)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else None)
