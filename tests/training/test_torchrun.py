"""torchrun with the commands of docs/scaling.md: a worker that is killed, and two hosts with a link that is cut."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
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


class Host:
    """A network namespace with a name and an address of its own, joined to the other one by a pair of interfaces."""

    def __init__(self, number: int) -> None:
        self.name, self.space, self.device = f"node{number}", f"seqarch-{os.getpid()}-{number}", f"veth{number}"
        self.address = f"10.231.77.{number + 1}"

    def ip(self, *words: str) -> None:
        subprocess.run(["ip", "-n", self.space, *words], check=True, capture_output=True, text=True)

    def run(self, arguments: list[str]) -> list[str]:
        """The command that runs another on this host."""
        script = 'hostname "$0" && exec "$@"'
        return ["ip", "netns", "exec", self.space, "unshare", "--uts", "sh", "-c", script, self.name, *arguments]


@pytest.fixture
def hosts():
    """Two hosts on a link."""
    if os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("unshare") is None:
        pytest.skip("network namespaces need root, iproute2 and unshare")
    first, second = Host(0), Host(1)
    try:
        try:
            for host in (first, second):
                subprocess.run(["ip", "netns", "add", host.space], check=True, capture_output=True, text=True)
            first.ip("link", "add", first.device, "type", "veth", "peer", second.device, "netns", second.space)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces here: {error.stderr}")
        for host in (first, second):
            host.ip("addr", "add", f"{host.address}/24", "dev", host.device)
            host.ip("link", "set", "lo", "up")
            host.ip("link", "set", host.device, "up")
        yield first, second
    finally:
        for host in (first, second):
            subprocess.run(["ip", "netns", "del", host.space], capture_output=True)


@contextmanager
def started_on(hosts, run_dir: Path, logs: list[Path]):
    """A process of the job on each host."""
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                started(
                    host.run(command(f"torchrun --nnodes 2 --node-rank {rank}", run_dir)),
                    log,
                    env={**os.environ, "GLOO_SOCKET_IFNAME": host.device},
                )
            )
            for rank, (host, log) in enumerate(zip(hosts, logs, strict=True))
        ]


def test_two_hosts_notice_that_their_link_is_cut_and_go_on_when_it_is_mended(tmp_path, whole, hosts):
    run_dir, logs = tmp_path / "run", [tmp_path / "log0", tmp_path / "log1"]
    with started_on(hosts, run_dir, logs) as processes:
        wait_for_step(run_dir, 12, processes[0], logs[0])
        hosts[0].ip("link", "set", hosts[0].device, "down")
        assert all(process.wait(timeout=120) != 0 for process in processes)
    texts = [log.read_text() for log in logs]
    assert re.search(r"rank 1 \(host node1, process \d+\) has been silent for \d+ s, since step \d+", texts[0]), texts[
        0
    ]
    assert f"rank 1 (host node1) cannot reach the store at {hosts[0].address}:29500 either" in texts[1], texts[1]
    hosts[0].ip("link", "set", hosts[0].device, "up")
    with started_on(hosts, run_dir, logs) as processes:
        assert [process.wait(timeout=300) for process in processes] == [0, 0], logs[0].read_text() + logs[1].read_text()
    assert "continuing" in logs[0].read_text()
    assert rows(run_dir) == whole
