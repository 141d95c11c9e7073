"""Which process of a job has died or hangs: each tells of itself through the store by which all found each other."""

from __future__ import annotations

import json
import logging
import os
import re
import socket
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback

log = logging.getLogger(__name__)

BEAT_S = 1.0
SILENT_S = 4.0
"""A process that has said nothing for so long is counted as gone."""
STORE_S = 10.0
"""After which the store is counted as gone."""
_LOST = "A process can no longer be reached, or does not answer"
_IDLE = "No step has ended in"
_CONNECTION = re.compile(r"gloo|nccl|connection (closed|reset|refused)|timed out|socket", re.I)


class Liveness(Callback):
    """Names the processes at fault when the others can no longer reach them, or wait for them in vain.

    A thread of each process writes every second at which step it is, since when, and in which line of code. When a
    collective operation fails, or no step has ended in four fifths of the strategy's time-out, the first of the
    processes that still speak logs those that do not, those that have failed by themselves and, since it is the others
    that give up, those that have not given up.

    Args:
        beat_s: Seconds between two signs of life.
    """

    def __init__(self, beat_s: float = BEAT_S) -> None:
        self.beat_s = beat_s
        self._thread: threading.Thread | None = None
        self._wake, self._end, self._told = threading.Event(), threading.Event(), threading.Event()
        self._gave_up_at: float | None = None
        self._own_error: str | None = None
        self._step, self._since = 0, time.monotonic()

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start to speak, where there is someone to listen."""
        if self._thread is not None or not (dist.is_available() and dist.is_initialized()):
            return
        store = dist.distributed_c10d._get_default_store()
        # a connection of its own: another's wait must not keep it from speaking
        clone = getattr(store, "clone", None)
        self._store = store if clone is None else clone()
        if clone is not None:
            self._store.set_timeout(timedelta(seconds=STORE_S))
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        timeout = getattr(trainer.strategy, "_timeout", None)
        self._patience = 0.8 * (timeout.total_seconds() if timeout is not None else 1800.0)
        self._main = threading.get_ident()
        self._gave_up_at, self._own_error = None, None
        self._trainer = trainer
        for event in (self._wake, self._end, self._told):
            event.clear()
        self._thread = threading.Thread(target=self._run, name="liveness", daemon=True)
        self._progress()
        self._thread.start()

    def on_train_batch_start(self, *args: Any, **kwargs: Any) -> None:
        """A sign of progress."""
        self._progress()

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        """A sign of progress."""
        self._progress()

    def on_validation_batch_start(self, *args: Any, **kwargs: Any) -> None:
        """A sign of progress."""
        self._progress()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Say who is at fault, if the error is that of a connection; else tell the others that it is this process."""
        if self._thread is None:
            return
        if isinstance(exception, RuntimeError) and _CONNECTION.search(str(exception)) is not None:
            patience = SILENT_S + 2 * self.beat_s + STORE_S
        else:
            self._own_error = f"{type(exception).__name__}: {exception}".splitlines()[0]
            patience = 2 * self.beat_s
        self._gave_up_at = time.monotonic()
        self._wake.set()
        # the thread alone uses the store, which may be what is gone
        if not self._told.wait(patience) and self._own_error is None:
            self._without_store("it does not answer")
        self._stop()

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Stop to speak."""
        self._stop()

    def _progress(self) -> None:
        if self._thread is not None:
            before, self._step, self._since = self._step, self._trainer.global_step + 1, time.monotonic()
            if self._step != before:
                self._wake.set()

    def _stop(self) -> None:
        self._end.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join(timeout=self.beat_s)
        self._thread = None

    def _run(self) -> None:
        reported = False
        while not self._end.is_set():
            given_up_at = self._gave_up_at
            self._speak()
            if given_up_at is None:
                idle = time.monotonic() - self._since
                if idle < self._patience:
                    reported = False
                elif not reported:
                    reported = True
                    self._report(f"{_IDLE} {idle:.0f} s", among_failed=False)
            elif self._own_error is not None:
                self._told.set()
            # all wait equally long, or the first to end would have the launcher end the others
            elif not self._told.is_set() and time.monotonic() > given_up_at + SILENT_S + self.beat_s:
                self._report(_LOST, among_failed=True)
                self._told.set()
            self._wake.wait(self.beat_s)
            self._wake.clear()

    def _speak(self) -> None:
        sign = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "at": time.time(),
            "step": self._step,
            "idle": time.monotonic() - self._since,
            "where": _where(self._main),
            "gave_up": self._gave_up_at is not None,
            "own_error": self._own_error,
        }
        try:
            self._store.set(_key(self._rank), json.dumps(sign))
        except Exception:  # whatever the store raises; if it is what is gone, the report says so
            log.debug("no sign of life could be written", exc_info=True)

    def _report(self, what: str, *, among_failed: bool) -> None:
        """Log what is known of all processes, on the first of those that speak, or of those that have given up."""
        try:
            signs = {rank: json.loads(self._store.get(_key(rank))) for rank in range(self._world_size)}
        except Exception as error:  # whatever the store raises
            self._without_store(str(error).splitlines()[0])
            return
        now = time.time()
        gone = {rank for rank, sign in signs.items() if now - sign["at"] > max(SILENT_S, 2 * self.beat_s)}
        speakers = [r for r, sign in signs.items() if r not in gone and (sign["gave_up"] or not among_failed)]
        if speakers and self._rank == min(speakers):
            log.error("%s.\n%s", what, "\n".join(_lines(signs, gone, now)))

    def _without_store(self, error: str) -> None:
        """Log that nothing can be known of the others."""
        log.error(
            "%s.\n  rank %d (host %s) cannot reach the store at %s:%s either, which the first process or its launcher "
            "keeps: %s",
            *(_LOST, self._rank, socket.gethostname()),
            *(os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT"), error),
        )


def _lines(signs: dict[int, dict[str, Any]], gone: set[int], now: float) -> list[str]:
    """A line for each process that may be at fault; those that live and are at the same place share one."""
    lines: list[str] = []
    living: dict[str, list[int]] = {}
    for rank, sign in signs.items():
        place = f"step {sign['step']}, at {sign['where']}"
        if sign["own_error"] is not None:
            lines.append(f"{_name(rank, sign)} failed in {place}: {sign['own_error']}")
        elif rank in gone:
            lines.append(f"{_name(rank, sign)} has been silent for {now - sign['at']:.0f} s, since step {sign['step']}")
        elif not sign["gave_up"]:
            living.setdefault(place, []).append(rank)
    for place, ranks in sorted(living.items(), key=lambda found: len(found[1])):
        first = signs[ranks[0]]
        name = f"{_name(ranks[0], first)} lives" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} live"
        lines.append(f"{name}, for {first['idle']:.0f} s in {place}")
    if not lines:
        lines = ["every process lives and has lost a connection: look at the network between the hosts"]
    return [f"  {line}" for line in lines]


def _name(rank: int, sign: dict[str, Any]) -> str:
    return f"rank {rank} (host {sign['host']}, process {sign['pid']})"


def _key(rank: int) -> str:
    return f"seqarch/liveness/{rank}"


def _where(thread: int) -> str:
    """The line of code in which a thread is."""
    frame = sys._current_frames().get(thread)
    if frame is None:
        return "its end"
    return f"{frame.f_code.co_name} ({Path(frame.f_code.co_filename).name}:{frame.f_lineno})"
