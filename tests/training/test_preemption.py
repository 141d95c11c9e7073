"""A job that is asked to stop saves at the end of its step, says so by its exit status, and goes on exactly."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch
from lightning.pytorch.callbacks import Callback

from seqarch.training.callbacks.preemption import REQUEUE, PreemptedError
from tests.training.ranks import Ranks
from tests.training.sharded import Job
from tests.training.synthetic import SyntheticData, T, rows, tiny, trainer


class Ask(Callback):
    """Sends this process a signal after so many micro batches, on one rank."""

    def __init__(self, batch: int, number: signal.Signals, rank: int = 0) -> None:
        self.batch, self.number, self.rank = batch, number, rank

    def on_train_batch_start(self, trainer, module, batch, batch_idx) -> None:
        if batch_idx == self.batch and trainer.global_rank == self.rank:
            os.kill(os.getpid(), self.number)


def fit(run_dir, *callbacks, resume=False):
    module = tiny(max_tokens=8 * 8 * T, val_every_n_steps=3)
    fitting = trainer(run_dir, every_n_steps=None, enable_progress_bar=False)
    fitting.callbacks[:0] = callbacks
    path = str(run_dir / "checkpoints" / "last.ckpt") if resume else None
    fitting.fit(module, datamodule=SyntheticData(micro_batch_size=4), ckpt_path=path)
    return module


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
@pytest.mark.parametrize(
    ("batch", "step"),
    [
        (0, 1),
        (6, 4),  # before the first micro batch of a step
        (9, 5),  # amid an accumulation
        (11, 6),  # a validation follows the step, and then the stop
    ],
)
def test_a_signal_stops_after_the_step_and_the_resumed_run_is_the_same(tmp_path, number, batch, step):
    before = signal.getsignal(number)
    whole = fit(tmp_path / "whole")
    message = rf"{number.name}\): saved .*step-{step:08d}.ckpt after step {step}; go on"
    with pytest.raises(PreemptedError, match=message):
        fit(tmp_path / "run", Ask(batch, number))
    assert signal.getsignal(number) == before
    assert (tmp_path / "run" / "checkpoints" / "last.ckpt").resolve().name == f"step-{step:08d}.ckpt"
    module = fit(tmp_path / "run", resume=True)
    assert rows(tmp_path / "run") == rows(tmp_path / "whole")
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), whole.parameters(), strict=True))


def test_a_signal_in_the_last_step_is_no_reason_to_run_again(tmp_path):
    fit(tmp_path, Ask(15, signal.SIGTERM))
    assert (tmp_path / "checkpoints" / "last.ckpt").resolve().name == "step-00000008.ckpt"


def test_all_ranks_stop_when_one_is_asked_to(tmp_path):
    job = Job(tmp_path / "whole")
    job.on(2)
    asked = replace(job, run_dir=tmp_path / "run", callbacks=(Ask(8, signal.SIGTERM, rank=1),))
    ranks = Ranks(2, asked.run_dir / "logs", asked.run)
    assert ranks.wait() == [1, 1]  # an error that fit makes the exit status below
    for log, name in zip(ranks.logs, ("a signal to another process", "SIGTERM"), strict=True):
        assert f"asked to stop ({name}): saved" in log.read_text()
    replace(job, run_dir=asked.run_dir, resume="last.ckpt").on(2)
    assert rows(asked.run_dir) == rows(job.run_dir)


def test_fit_exits_with_the_status_that_asks_to_be_queued_again(tmp_path):
    fitting = [sys.executable, "-m", "seqarch", "fit", "--config", "recipes/quickstart.yaml"]
    small = [
        "--run_dir",
        str(tmp_path),
        "--model.d_model",
        "32",
        "--model.n_layers",
        "1",
        "--trainer.max_steps",
        "100000",
    ]
    process = subprocess.Popen([*fitting, *small], stderr=subprocess.PIPE, text=True)
    metrics = tmp_path / "metrics.csv"
    while process.poll() is None and not (metrics.exists() and ",train/loss," in metrics.read_text()):
        time.sleep(0.1)
    process.terminate()
    _, err = process.communicate()
    assert process.returncode == REQUEUE == 75, err
    assert "asked to stop (SIGTERM): saved" in err
    assert "go on from it with --ckpt_path last (exit status 75)" in err
    assert (tmp_path / "checkpoints" / "last.ckpt").is_file()
