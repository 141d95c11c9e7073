"""A process that makes one measurement of ``seqarch bench``, and the other end of its pipe.

A process of its own has a peak of memory of its own, and takes nothing with it when it dies of it; asked for one
repetition at a time, several of them can take turns.
"""

from __future__ import annotations

import multiprocessing
import resource
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Literal

import torch

from seqarch.evaluation.bench_steps import Decoding, Phase, Product, Setup, Training, Work, timed
from seqarch.mixer_spec import MixerSpec

START_LIMIT = 600.0
"""Seconds for what is not the mixer's own: a process, its libraries, a first touch of the device."""

_GRACE = 2.0  # seconds to clear up in
_SMALL = 64  # tokens of the pass that loads libraries and starts threads
_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "not enough memory", "bad_alloc")


@dataclass(frozen=True)
class Job:
    """What a worker measures: a mixer at a length, or with no mixer the matrix product.

    Attributes:
        spec: The mixer.
        phase: Training or decoding.
        length: Tokens of a sequence.
        setup: What all jobs share.
        repetitions: How often it will be asked, warm-up included.
    """

    spec: MixerSpec | None
    phase: Phase
    length: int
    setup: Setup
    repetitions: int

    def work(self) -> Work:
        """Build what is to be timed."""
        if self.spec is None:
            return Product(self.setup)
        if self.phase == "training":
            return Training(self.spec, self.length, self.setup)
        # One more in each repetition: the untimed one on a GPU.
        return Decoding(self.spec, self.length, self.setup, self.repetitions * (self.setup.decode_tokens + 1))


@dataclass(frozen=True)
class Ready:
    """The worker has built its model: see ``Work`` for the numbers."""

    batch: int
    tokens: int
    flops: int | None
    parameters: int
    backend: str
    state_bytes: int | None


@dataclass(frozen=True)
class Sample:
    """One repetition: steps, their seconds, and the most bytes in use so far."""

    steps: int
    seconds: float
    peak_memory: int


@dataclass(frozen=True)
class Failure:
    """Why there is nothing to report. A worker is gone after one."""

    status: Literal["out of memory", "time limit", "error"]
    reason: str


class Worker:
    """A measurement in a process of its own.

    Args:
        job: What to measure.
    """

    def __init__(self, job: Job) -> None:
        context = multiprocessing.get_context("forkserver")
        # A new worker is a fork of a process that has imported torch, and what a model on the meta device asks for.
        context.set_forkserver_preload([__name__, "torch._dynamo"])
        self._connection, other = context.Pipe()
        self._process = context.Process(target=serve, args=(other, job), daemon=True)
        self._process.start()
        other.close()

    def ready(self, time_limit: float) -> Ready | Failure:
        """Wait until the model is built and, for decoding, its state is filled; the start of the process is extra."""
        started = self._answer(START_LIMIT)
        if isinstance(started, Failure):
            return started
        answer = self._answer(time_limit)
        assert isinstance(answer, (Ready, Failure))
        return answer

    def measure(self, time_limit: float) -> Sample | Failure:
        """One repetition."""
        try:
            self._connection.send("measure")
        except OSError:
            return self._died()
        answer = self._answer(time_limit)
        assert isinstance(answer, (Sample, Failure))
        return answer

    def stop(self) -> None:
        """End the process, whatever it is doing."""
        self._connection.close()
        self._process.join(_GRACE)
        self._process.kill()
        self._process.join()

    def _answer(self, time_limit: float) -> Ready | Sample | Failure | None:
        if not self._connection.poll(time_limit):
            self._process.kill()
            return Failure("time limit", f"> {time_limit:g} s")
        try:
            return self._connection.recv()
        except (EOFError, OSError):
            return self._died()

    def _died(self) -> Failure:
        self._process.join()
        code = self._process.exitcode or 0
        if code == -signal.SIGKILL:
            return Failure("out of memory", "killed (SIGKILL), as the system does with a process that takes too much")
        how = signal.Signals(-code).name if code < 0 else f"exit status {code}"
        return Failure("error", f"the process died: {how}")


def serve(connection: Connection, job: Job) -> None:
    """The worker's side: build, say so, measure when asked, until the other side is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the command's affair, which ends its workers
    try:
        torch.set_num_threads(job.setup.threads)
        device = torch.device(job.setup.device)
        memory = _memory_meter(job, device)
        connection.send(None)  # the clock of the time limit starts here
        work = job.work()
        wait = _nothing if device.type == "cpu" else lambda: torch.cuda.synchronize(device)
        connection.send(Ready(work.batch, work.tokens, work.flops, work.parameters, work.backend, work.state_bytes))
        while True:
            connection.recv()
            if device.type == "cuda":
                work.step()  # takes back from the driver what the last line of this loop has returned
            steps, seconds = timed(work, wait)
            connection.send(Sample(steps, seconds, memory()))
            if device.type == "cuda":
                torch.cuda.empty_cache()  # the others' workers are on this card too
    except EOFError:
        return
    except Exception as error:  # a mixer may be anybody's: whatever it raises is the result
        with suppress(BrokenPipeError):
            connection.send(failure(error))


def failure(error: Exception) -> Failure:
    """Tell a want of memory from other errors."""
    reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
    text = str(error).lower()
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or (
        isinstance(error, RuntimeError) and any(words in text for words in _OUT_OF_MEMORY)
    ):
        return Failure("out of memory", reason)
    return Failure("error", reason)


def _nothing() -> None:
    pass


def _memory_meter(job: Job, device: torch.device) -> Callable[[], int]:
    """Set the limit, and return what reads the peak: allocated by torch on a GPU; resident beyond now on a CPU."""
    limit = job.setup.memory_limit
    if device.type == "cuda":
        if limit is not None:
            total = torch.cuda.get_device_properties(device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total), device)
        return lambda: torch.cuda.max_memory_allocated(device)
    # Libraries and threads are not the measurement's.
    small = replace(job.setup, tokens=_SMALL, vocab_size=_SMALL, n_layers=1, decode_batch=1, compile=False)
    timed(replace(job, length=min(job.length, _SMALL), setup=small, repetitions=1).work())
    if not sys.platform.startswith("linux"):
        start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - start  # bytes on macOS
    before = _status("VmRSS")
    if limit is not None:
        allowed = _status("VmData") + limit  # private memory that can be written, which is what the limit bounds
        resource.setrlimit(resource.RLIMIT_DATA, (allowed, allowed))
    return lambda: _status("VmHWM") - before


def _status(field: str) -> int:
    """A field of this process's /proc/self/status in bytes."""
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(f"{field}:"))
