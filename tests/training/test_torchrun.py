"""torchrun with the commands of docs/scaling.md: a worker that is killed, and two hosts with a link that is cut."""

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.training.synthetic import rows

pytestmark = pytest.mark.slow
SMALL = """--model.d_model 32 --model.n_layers 1 --data.seq_len 32 --data.batch_size 4 --data.micro_batch_size 2
--trainer.max_steps 40
--model.val_every_n_steps 20 --data.max_val_tokens 2000 --checkpoint_every_n_steps 5 --trainer.log_every_n_steps 1"""


def command(start: str, run_dir: Path, *more: str) -> list[str]:
    """The command of docs/scaling.md that starts so, made small."""
    (line,) = re.findall(rf"^ {{4}}({start}.*)$", Path("docs/scaling.md").read_text(), flags=re.M)
    before, _, after = line.partition("torchrun ")
    variables, words = shlex.split(before), shlex.split(after)
    torchrun = [sys.executable, "-m", "torch.distributed.run"]
    return ["env", *variables, *torchrun, *words, *shlex.split(SMALL), "--run_dir", str(run_dir), *more]


@contextmanager
def started(arguments, log: Path, **options):
    with log.open("w") as file:
        process = subprocess.Popen(arguments, stdout=file, stderr=subprocess.STDOUT, start_new_session=True, **options)
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


def wait_for_step(run_dir: Path, step: int, process: subprocess.Popen, log: Path) -> None:
    """Wait until a step is recorded."""
    metrics = run_dir / "metrics.csv"
    while not (metrics.exists() and f"\n{step}," in metrics.read_text()):
        assert process.poll() is None, log.read_text()
        time.sleep(0.05)


def worker(rank: int, run_dir: Path) -> int:
    """The process of a rank."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                environment = (entry / "environ").read_bytes().split(b"\0")
                line = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            # a loader's process has inherited the rank, but not the command
            if f"RANK={rank}".encode() in environment and str(run_dir).encode() in line:
                return int(entry.name)
    raise AssertionError(f"no process has rank {rank}")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The record of two processes that nothing befell."""
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    subprocess.run(command("torchrun --nproc-per-node 2 -m", run_dir), check=True, capture_output=True)
    return rows(run_dir)


def test_torchrun_starts_a_killed_job_again_by_itself(tmp_path, whole):
    run_dir, log = tmp_path / "run", tmp_path / "log"
    with started(command("TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun", run_dir), log) as process:
        wait_for_step(run_dir, 12, process, log)
        os.kill(worker(1, run_dir), signal.SIGKILL)
        assert process.wait(timeout=300) == 0, log.read_text()
    text = log.read_text()
    assert "continuing" in text, text
    assert "last.ckpt" in text
    assert rows(run_dir) == whole
