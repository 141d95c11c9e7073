"""A process that dies, hangs or fails: the others end too and name it, and the job goes on as if nothing had been."""

import os
import random
import re
import signal
import threading
from dataclasses import replace

import pytest
from lightning.pytorch.callbacks import Callback

from seqarch.training.checkpoint import read_checkpoint
from tests.training.killed import Doom
from tests.training.ranks import Ranks, shared_integer
from tests.training.sharded import Job
from tests.training.synthetic import rows


class At(Callback):
    """Something befalls one rank before the first micro batch of a step."""

    def __init__(self, step: int, rank: int) -> None:
        self.step, self.rank = step, rank

    def on_train_batch_start(self, trainer, module, batch, batch_idx) -> None:
        if trainer.global_step == self.step and trainer.global_rank == self.rank:
            self.befall()

    def befall(self) -> None:
        raise NotImplementedError


class Hangs(At):
    def befall(self) -> None:
        threading.Event().wait()


class Stops(At):
    def befall(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)


class Dies(At):
    def befall(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class Fails(At):
    def befall(self) -> None:
        raise ValueError("the data of this rank are bad")


class DoomOf(Doom):
    """``Doom`` for one of the ranks."""

    def __init__(self, calls, kill_at, rank: int) -> None:
        super().__init__(calls, kill_at)
        self.rank = rank

    def stop(self) -> None:
        """Nothing has begun yet."""

    def on_train_start(self, trainer, module) -> None:
        if trainer.global_rank == self.rank:
            super().on_train_start()

    def on_train_end(self, trainer, module) -> None:
        self.stop()


class DoomWhileSaving(DoomOf):
    """``Doom`` that counts calls of the third save only."""

    saves = 0

    def on_train_start(self, trainer, module) -> None:
        pass

    def on_save_checkpoint(self, trainer, module, checkpoint) -> None:
        self.saves += 1
        if self.saves == 3:
            super().on_train_start(trainer, module)

    def on_train_batch_start(self, trainer, module, batch, batch_idx) -> None:
        self.stop()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The record of two processes that nothing befell."""
    job = Job(tmp_path_factory.mktemp("whole"), every_n_steps=2)
    job.on(2)
    return rows(job.run_dir)


def goes_on(job: Job, world_size: int = 2, nodes: int = 1) -> list:
    """The record after a resume from the last checkpoint, if there is one; every checkpoint there is whole."""
    folder = job.run_dir / "checkpoints"
    for path in folder.glob("step-*.ckpt"):
        read_checkpoint(path)
    resume = "last.ckpt" if (folder / "last.ckpt").exists() else None
    replace(job, callbacks=(), resume=resume).on(world_size, nodes=nodes)
    assert not list(folder.glob(".*"))
    return rows(job.run_dir)


def ended(ranks: Ranks, *, but: int | None = None) -> list[int | None]:
    """The exit codes, once every rank but one that would not end has ended by itself."""
    for rank, process in enumerate(ranks.processes):
        if rank != but:
            process.join(timeout=120)
    codes = [process.exitcode for process in ranks.processes]
    for process in ranks.processes:
        process.kill()
    ranks.wait()
    return codes


@pytest.mark.parametrize(
    ("kind", "account"),
    [
        (Hangs, r"lives, for \d+ s in step 6, at wait \(threading.py:"),
        (Stops, r"has been silent for \d+ s, since step [1-6]\n"),
    ],
)
def test_a_rank_that_hangs_is_named(tmp_path, whole, kind, account):
    job = Job(tmp_path, every_n_steps=2, strategy={"timeout_s": 6.0}, callbacks=(kind(5, rank=1),))
    ranks = Ranks(2, tmp_path / "logs", job.run)
    assert ended(ranks, but=1) == [1, None]
    named = rf"  rank 1 \(host \S+, process {ranks.processes[1].pid}\) {account}"
    text = ranks.logs[0].read_text()
    before, after = text.split("A process can no longer be reached, or does not answer.\n")
    assert "No step has ended in" in before
    for part in (before, after):
        assert re.search(named, part), text
    assert goes_on(job) == whole


@pytest.mark.slow
def test_in_a_hybrid_mesh_too(tmp_path):
    job = Job(tmp_path / "whole", every_n_steps=2)
    job.on(4, nodes=2)
    hanging = replace(job, run_dir=tmp_path / "run", strategy={"timeout_s": 6.0}, callbacks=(Hangs(5, rank=2),))
    ranks = Ranks(4, tmp_path / "logs", hanging.run, nodes=2)
    assert ended(ranks, but=2) == [1, 1, None, 1]
    assert ranks.output().count("A process can no longer be reached, or does not answer.\n  rank 2 (host") == 1
    assert goes_on(hanging, 4, nodes=2) == rows(job.run_dir)


def test_a_rank_that_fails_is_quoted_by_the_others(tmp_path):
    job = Job(tmp_path, callbacks=(Fails(5, rank=1),))
    ranks = Ranks(2, tmp_path / "logs", job.run)
    assert ended(ranks) == [1, 1]
    assert "failed in step 6, at " in ranks.logs[0].read_text()
    assert "ValueError: the data of this rank are bad" in ranks.logs[0].read_text()


def test_a_rank_that_dies_is_named(tmp_path, whole):
    job = Job(tmp_path, every_n_steps=2, callbacks=(Dies(5, rank=0),))
    ranks = Ranks(2, tmp_path / "logs", job.run)
    assert ended(ranks) == [-signal.SIGKILL, 1]
    assert (
        f"rank 0 (host {os.uname().nodename}, process {ranks.processes[0].pid}) has been silent for" in ranks.output()
    )
    assert goes_on(job) == whole


@pytest.fixture(scope="module")
def calls(tmp_path_factory):
    """How many function calls a rank makes in training."""
    found = []
    for rank in (0, 1):
        count = shared_integer()
        Job(tmp_path_factory.mktemp("calls"), every_n_steps=2, callbacks=(DoomOf(count, None, rank),)).on(2)
        found.append(count.value)
    assert min(found) > 1000
    return found


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_a_rank_that_is_killed_at_any_moment(tmp_path, whole, calls, seed):
    rank = seed % 2
    doom = DoomOf(shared_integer(), random.Random(seed).randrange(calls[rank]), rank)
    job = Job(tmp_path, every_n_steps=2, callbacks=(doom,))
    ranks = Ranks(2, tmp_path / "logs", job.run)
    codes = ended(ranks)
    assert codes[rank] == -signal.SIGKILL
    assert codes[1 - rank] != 0
    assert goes_on(job) == whole


@pytest.fixture(scope="module")
def calls_of_a_save(tmp_path_factory):
    count = shared_integer()
    Job(tmp_path_factory.mktemp("calls"), every_n_steps=2, callbacks=(DoomWhileSaving(count, None, 0),)).on(2)
    assert count.value > 1000
    return count.value


@pytest.mark.slow
@pytest.mark.parametrize("part", [0.02, 0.2, 0.4, 0.6, 0.75, 0.85, 0.9, 0.95, 0.98])
def test_a_job_that_is_killed_while_it_saves(tmp_path, whole, calls_of_a_save, part):
    doom = DoomWhileSaving(shared_integer(), int(part * calls_of_a_save), 0)
    job = Job(tmp_path, every_n_steps=2, callbacks=(doom,))
    ranks = Ranks(2, tmp_path / "logs", job.run)
    ranks.processes[0].join(timeout=120)
    ranks.processes[1].kill()  # as when the whole node goes
    assert ranks.wait() == [-signal.SIGKILL, -signal.SIGKILL]
    assert goes_on(job) == whole
