"""Starts the processes of a distributed job as torchrun does, but as forks of one that has imported everything."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.training.sharded"])


class Ranks:
    """A running job.

    Args:
        world_size: How many processes.
        log_dir: Folder of their output, ``rank<r>.log``.
        function: Called in each process with ``arguments``.
        arguments: Its arguments.
        nodes: How many nodes the processes pretend to be on.
    """

    def __init__(
        self, world_size: int, log_dir: Path, function: Callable[..., Any], *arguments: Any, nodes: int = 1
    ) -> None:
        log_dir.mkdir(parents=True, exist_ok=True)
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.logs = [log_dir / f"rank{rank}.log" for rank in range(world_size)]
        per_node = world_size // nodes
        self.processes = []
        for rank, log in enumerate(self.logs):
            environment = {
                "RANK": rank,
                "WORLD_SIZE": world_size,
                "LOCAL_RANK": rank % per_node,
                "LOCAL_WORLD_SIZE": per_node,
                "GROUP_RANK": rank // per_node,
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": self._store.port,
                "TORCHELASTIC_RUN_ID": "test",
                "TORCHELASTIC_RESTART_COUNT": 0,
                "TORCHELASTIC_USE_AGENT_STORE": True,
            }
            names = {name: str(value) for name, value in environment.items()}
            process = _context.Process(target=_run, args=(names, log, function, arguments))
            process.start()
            self.processes.append(process)

    def wait(self) -> list[int | None]:
        """The exit codes of all ranks; negative for a signal."""
        for process in self.processes:
            process.join()
        return [process.exitcode for process in self.processes]

    def output(self) -> str:
        """What all ranks have written."""
        return "\n".join(f"--- {log.name}\n{log.read_text()}" for log in self.logs)


def run_ranks(world_size: int, log_dir: Path, function: Callable[..., Any], *arguments: Any, nodes: int = 1) -> None:
    """Run ``function`` on all ranks to its end."""
    ranks = Ranks(world_size, log_dir, function, *arguments, nodes=nodes)
    codes = ranks.wait()
    assert codes == [0] * world_size, f"exit codes {codes}\n{ranks.output()}"


def _run(environment: dict[str, str], log: Path, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    os.environ.update(environment)
    with log.open("a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    torch.set_num_threads(1)
    try:
        function(*arguments)
    except Exception:
        traceback.print_exc()
        os._exit(1)


def shared_integer() -> Synchronized[int]:
    """An integer that all ranks can set."""
    return _context.Value("q", 0)
