"""A pool of tokenising processes.

Plain child processes on pipes instead of `multiprocessing`: they do not import the main module again (nor torch), need
no ``if __name__ == "__main__"`` in a caller's script, and end by themselves when the parent is killed.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue

from seqarch.data.records import Block
from seqarch.data.worker import BlockTokens, Task, receive, send


class WorkerPool:
    """``processes`` workers that each tokenise a block at a time. Use as a context manager.

    Raises:
        RuntimeError: From a future, if a worker died.
    """

    def __init__(self, processes: int, task: Task) -> None:
        environment = {
            **os.environ,
            "TOKENIZERS_PARALLELISM": "false",  # the processes are the parallelism
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "PYTHONSAFEPATH": "1",  # modules in the current folder are not ours
        }
        command = [sys.executable, "-c", "from seqarch.data.worker import main; main()"]
        self._children: list[subprocess.Popen] = []
        self._idle: SimpleQueue[subprocess.Popen] = SimpleQueue()
        for _ in range(processes):
            child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
            self._children.append(child)
            assert child.stdin is not None
            send(child.stdin, task)
            self._idle.put(child)
        self._threads = ThreadPoolExecutor(processes)

    def submit(self, block: Block) -> Future[BlockTokens]:
        """Tokenise a block in a worker that is free, or will be."""
        return self._threads.submit(self._call, block)

    def _call(self, block: Block) -> BlockTokens:
        child = self._idle.get()
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            send(child.stdin, block)
            answer = receive(child.stdout)
        except (EOFError, OSError) as error:
            raise RuntimeError(
                f"a tokenising process ended while reading {block.source} (exit status {child.wait()}); "
                "if memory ran out, lower --processes. What was committed is kept: run the same command again"
            ) from error
        finally:
            self._idle.put(child)
        if isinstance(answer, ValueError):
            raise answer
        assert isinstance(answer, BlockTokens)
        return answer

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *exc: object) -> None:
        if exc[0] is not None:
            for child in self._children:
                child.kill()
        self._threads.shutdown(wait=True, cancel_futures=True)
        for child in self._children:
            assert child.stdin is not None
            assert child.stdout is not None
            with contextlib.suppress(BrokenPipeError):
                child.stdin.close()
            child.wait()
            child.stdout.close()
