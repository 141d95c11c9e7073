"""Speed and memory of mixers at a range of lengths: who is measured when, and what becomes of those that cannot be."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from seqarch.evaluation.bench_steps import Phase, Setup
from seqarch.evaluation.bench_worker import START_LIMIT, Failure, Job, Ready, Sample, Worker
from seqarch.mixer_spec import MixerSpec
from seqarch.options import at_least


@dataclass
class Entry:
    """One line of the table: a mixer at a length, training or decoding.

    Attributes:
        mixer: As the user wrote it.
        phase: Training or decoding.
        length: Tokens of a sequence; for decoding, those in the state before the first repetition.
        status: ``ok``, ``out of memory``, ``time limit``, ``error``, ``skipped``, or ``unfinished``.
        reason: Why there are no (or no more) numbers.
        ready: What the worker says about its model.
        tokens_per_s: One value a repetition. The repetitions of all mixers of a length and phase took turns, so equal
            places belong to one round.
        peak_memory: Bytes.
    """

    mixer: str
    phase: Phase
    length: int
    status: str = "unfinished"
    reason: str = ""
    ready: Ready | None = None
    tokens_per_s: list[float] = field(default_factory=list)
    peak_memory: int | None = None

    def end(self, failure: Failure) -> None:
        """Keep the reason; values of earlier rounds are no longer those of an entry that works."""
        self.status, self.reason = failure.status, failure.reason
        self.tokens_per_s, self.peak_memory = [], None


class Process(Protocol):
    """What a ``Worker`` offers."""

    def ready(self, time_limit: float) -> Ready | Failure:
        """See ``Worker``."""
        ...

    def measure(self, time_limit: float) -> Sample | Failure:
        """See ``Worker``."""
        ...

    def stop(self) -> None:
        """See ``Worker``."""
        ...


@dataclass
class Bench:
    """A run of ``seqarch bench``; ``entries`` holds what is known, also while it runs and after it was stopped.

    Attributes:
        specs: The mixers; ratios are to the first.
        lengths: Tokens of a sequence.
        phases: Training, decoding or both.
        setup: Sizes and device.
        repeats: Repetitions that count.
        warmup: Repetitions before them that do not.
        time_limit: Seconds that building a model (with filling its state) or one repetition may take.
        start: Starts a worker.
        entries: In order of length, phase and mixer.
    """

    specs: Sequence[MixerSpec]
    lengths: Sequence[int]
    phases: Sequence[Phase]
    setup: Setup
    repeats: int = 5
    warmup: int = 1
    time_limit: float = 300.0
    start: Callable[[Job], Process] = Worker
    entries: list[Entry] = field(default_factory=list)

    def __post_init__(self) -> None:
        at_least(1, repeats=self.repeats, lengths=min(self.lengths, default=0))
        at_least(0, warmup=self.warmup)
        if not self.specs or not self.phases:
            raise ValueError("there is nothing to measure: name a mixer, and leave training or decoding on")
        labels = [spec.label for spec in self.specs]
        if twice := [label for label in labels if labels.count(label) > 1]:
            raise ValueError(f"{twice[0]} is named twice; to compare it with itself, write the second as {twice[0]}()")
        if self.time_limit <= 0:
            raise ValueError(f"time_limit must be above 0, got {self.time_limit}")
        self.lengths = sorted(set(self.lengths))
        self._slow: dict[tuple[Phase, int], str] = {}

    @property
    def total(self) -> int:
        """Repetitions of all entries, warm-up included."""
        return len(self.lengths) * len(self.phases) * len(self.specs) * (self.warmup + self.repeats)

    def run(self, round_done: Callable[[int], None], entry_done: Callable[[Entry], None]) -> None:
        """Measure.

        Args:
            round_done: Called after each round over the mixers with how many repetitions are done or given up since.
            entry_done: Called with each entry when nothing more will change in it.
        """
        for length in self.lengths:
            for phase in self.phases:
                self._measure(length, phase, round_done, entry_done)

    def _measure(
        self, length: int, phase: Phase, round_done: Callable[[int], None], entry_done: Callable[[Entry], None]
    ) -> None:
        entries = [Entry(spec.label, phase, length) for spec in self.specs]
        self.entries += entries
        working: dict[int, Process] = {}

        def failed(i: int, failure: Failure) -> None:
            entries[i].end(failure)
            if failure.status == "time limit":
                self._slow[phase, i] = f"{failure.reason} at {length:,}"
            if i in working:
                working.pop(i).stop()
            entry_done(entries[i])

        try:
            for i, spec in enumerate(self.specs):
                if (phase, i) in self._slow:
                    entries[i].status, entries[i].reason = "skipped", self._slow[phase, i]
                    entry_done(entries[i])
                    continue
                working[i] = self.start(Job(spec, phase, length, self.setup, self.warmup + self.repeats))
                answer = working[i].ready(self.time_limit)
                if isinstance(answer, Failure):
                    failed(i, answer)
                else:
                    entries[i].ready = answer
            for turn in range(self.warmup + self.repeats):
                for i in list(working):
                    sample = working[i].measure(self.time_limit)
                    if isinstance(sample, Failure):
                        failed(i, sample)
                    else:
                        self._keep(entries[i], sample, counts=turn >= self.warmup)
                round_done(len(entries))
            for i in working:
                entries[i].status = "ok"
                entry_done(entries[i])
        finally:
            for process in working.values():
                process.stop()

    def _keep(self, entry: Entry, sample: Sample, counts: bool) -> None:
        assert entry.ready is not None
        entry.peak_memory = sample.peak_memory
        if counts:
            entry.tokens_per_s.append(entry.ready.tokens * sample.steps / sample.seconds)


def measure_peak(setup: Setup, start: Callable[[Job], Process] = Worker) -> float | None:
    """FLOP/s of a matrix product on the device, the best of several; None where it cannot be had."""
    process = start(Job(None, "training", 0, setup, 5))
    try:
        ready = process.ready(START_LIMIT)
        if isinstance(ready, Failure) or ready.flops is None:
            return None
        samples = [process.measure(START_LIMIT) for _ in range(5)]
        rates = [ready.flops * s.steps / s.seconds for s in samples if isinstance(s, Sample)]
        return max(rates, default=None)
    finally:
        process.stop()


def summarise(entries: Sequence[Entry], peak_flops: float | None) -> list[dict[str, Any]]:
    """The entries as plain data, with what follows from the samples.

    Each gets the median of its ``tokens_per_s``, the quartiles (``spread``), ``ratio``, the median over rounds of its
    speed over that of the first mixer in the same round, and for training ``share_of_peak``: operations by the
    mathematics per second over ``peak_flops``. What is not known is None.
    """
    first: dict[tuple[Phase, int], Entry] = {}
    found = []
    for entry in entries:
        reference = first.setdefault((entry.phase, entry.length), entry).tokens_per_s
        speeds, ready = entry.tokens_per_s, entry.ready
        median = statistics.median(speeds) if speeds else None
        ratios = [a / b for a, b in zip(speeds, reference, strict=False)]
        share = None
        if median is not None and peak_flops is not None and ready is not None and ready.flops is not None:
            share = median * ready.flops / ready.tokens / peak_flops
        found.append(
            {
                "mixer": entry.mixer,
                "phase": entry.phase,
                "length": entry.length,
                "status": entry.status,
                "reason": entry.reason,
                "tokens_per_s": median,
                "spread": quartiles(speeds),
                "ratio": statistics.median(ratios) if ratios else None,
                "peak_memory": entry.peak_memory,
                "share_of_peak": share,
                "batch": None if ready is None else ready.batch,
                "flops_per_token": None if ready is None or ready.flops is None else ready.flops / ready.tokens,
                "parameters": None if ready is None else ready.parameters,
                "backend": None if ready is None else ready.backend,
                "state_bytes": None if ready is None else ready.state_bytes,
                "samples": list(speeds),
            }
        )
    return found


def quartiles(values: Sequence[float]) -> list[float] | None:
    """The first and the third, by linear interpolation; None of nothing."""
    if len(values) < 2:
        return [values[0], values[0]] if values else None
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return [low, high]
