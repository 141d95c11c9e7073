"""Mixers that end a measurement in every way there is, once the sequence is longer than the warm-up's."""

from __future__ import annotations

import os
import signal
import threading

from torch import Tensor

from seqarch.mixer import State
from tests.testing.toy_mixers import ToyAttention


class Raises(ToyAttention):
    def forward(
        self, x: Tensor, *, cu_seqlens: Tensor | None = None, state: State | None = None
    ) -> tuple[Tensor, State | None]:
        if x.shape[1] > 64:
            self.go_wrong()
        return super().forward(x, cu_seqlens=cu_seqlens, state=state)

    def go_wrong(self) -> None:
        raise KeyError("no such\nthing")


class Killed(Raises):
    def go_wrong(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class Exits(Raises):
    def go_wrong(self) -> None:
        os._exit(3)


class Terminated(Raises):
    def go_wrong(self) -> None:
        os.kill(os.getpid(), signal.SIGTERM)


class Hangs(Raises):
    def go_wrong(self) -> None:
        threading.Event().wait()
