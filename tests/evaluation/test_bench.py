"""Turns, limits and statistics of ``seqarch bench``, with workers that follow a script."""

from __future__ import annotations

import io
import json
import math

import pytest
from rich.console import Console

from seqarch.evaluation.bench import Bench, measure_peak, quartiles, summarise
from seqarch.evaluation.bench_plots import write_plots
from seqarch.evaluation.bench_report import line, reasons, tables, to_plain, write_json
from seqarch.evaluation.bench_steps import Setup, Work, timed
from seqarch.evaluation.bench_worker import Failure, Ready, Sample
from seqarch.mixer_spec import MixerSpec
from tests.testing.toy_mixers import ToyAttention

READY = Ready(batch=2, tokens=100, flops=3_000_000, parameters=7, backend="torch", state_bytes=None)
SLOW = Failure("time limit", "> 7 s")
FULL = Failure("out of memory", "no room")


def spec(label):
    return MixerSpec(label, ToyAttention, {})


class Machine:
    """Starts scripted workers: ``script[mixer, length]`` is what they answer, by default a second for each step."""

    def __init__(self, script=None):
        self.script = script or {}
        self.log, self.running = [], set()

    def start(self, job):
        return Scripted(self, job)


class Scripted:
    def __init__(self, machine, job):
        self.machine, self.job = machine, job
        self.key = (job.spec.label, job.length, job.phase)
        answers = machine.script.get(self.key[:2]) or machine.script.get(self.key) or []
        self.answers = iter(answers)
        machine.running.add(self.key)
        machine.log.append(("start", job.spec.label))

    def ready(self, time_limit):
        assert time_limit == 7
        return next(self.answers, READY)

    def measure(self, time_limit):
        assert time_limit == 7
        self.machine.log.append(("measure", self.job.spec.label))
        answer = next(self.answers, 1.0)
        if isinstance(answer, type):
            raise answer
        return Sample(1, answer, 10 * self.job.length) if isinstance(answer, float) else answer

    def stop(self):
        self.machine.running.remove(self.key)


def run(machine, names="AB", lengths=(10,), phases=("training",), repeats=3, warmup=1):
    bench = Bench(
        [spec(name) for name in names], lengths, phases, Setup(), repeats, warmup, time_limit=7, start=machine.start
    )
    rounds, done = [], []
    try:
        bench.run(rounds.append, lambda entry: done.append((entry.mixer, entry.length, entry.status)))
    except KeyboardInterrupt:
        return bench, None, done
    assert sum(rounds) == bench.total
    assert len(done) == len(bench.entries)
    assert not machine.running
    return bench, summarise(bench.entries, peak_flops=1e7), done


def test_medians_quartiles_ratios_and_share():
    """100 tokens a step: A does 100, 50 and 25 tokens/s, B 50 in each round, after a warm-up that does not count."""
    machine = Machine({("A", 10): [READY, 9.0, 1.0, 2.0, 4.0], ("B", 10): [READY, 0.001, 2.0, 2.0, 2.0]})
    _, (a, b), _ = run(machine)
    assert a["samples"] == [100, 50, 25]
    assert (a["tokens_per_s"], a["spread"]) == (50, [37.5, 75])
    assert (b["tokens_per_s"], b["spread"]) == (50, [50, 50])
    assert (a["ratio"], b["ratio"]) == (1, 1)  # B: 0.5, 1 and 2 of A in the same round
    assert a["share_of_peak"] == pytest.approx(0.5 * 3e6 / 1e7)  # half a step a second
    assert (a["peak_memory"], a["batch"], a["flops_per_token"], a["parameters"]) == (100, 2, 30_000, 7)
    assert a["status"] == b["status"] == "ok"


def test_ratios_are_of_rounds_not_of_medians():
    """The machine slows down from round to round for both: B takes twice A's time in each."""
    machine = Machine({("A", 10): [READY, 1.0, 1.0, 3.0, 5.0], ("B", 10): [READY, 1.0, 2.0, 6.0, 10.0]})
    _, (_, b), _ = run(machine)
    assert b["ratio"] == pytest.approx(0.5)


def test_quartiles():
    assert quartiles([]) is None
    assert quartiles([3.0]) == [3.0, 3.0]
    assert quartiles([4.0, 1.0]) == [1.75, 3.25]
    assert quartiles([5.0, 1.0, 4.0, 2.0, 3.0]) == [2.0, 4.0]


def test_mixers_take_turns_and_lengths_rise():
    machine = Machine()
    bench, _, done = run(machine, lengths=(20, 10, 20), repeats=1, phases=("training", "decoding"))
    turns = [("start", "A"), ("start", "B"), *[("measure", "A"), ("measure", "B")] * 2]
    assert machine.log == turns * 4
    order = [(10, "training"), (10, "decoding"), (20, "training"), (20, "decoding")]
    assert [(e.length, e.phase) for e in bench.entries] == [key for key in order for _ in "AB"]
    assert done == [("A", 10, "ok"), ("B", 10, "ok")] * 2 + [("A", 20, "ok"), ("B", 20, "ok")] * 2


@pytest.mark.parametrize("when", [[SLOW], [READY, SLOW], [READY, 1.0, 1.0, SLOW]], ids=["build", "warm-up", "later"])
def test_a_mixer_beyond_the_time_limit_is_left_out_of_longer_lengths(when):
    machine = Machine({("A", 20, "training"): when})
    _, found, _ = run(machine, lengths=(10, 20, 30, 40), phases=("training", "decoding"))
    by = {(e["mixer"], e["length"], e["phase"]): e for e in found}
    assert (by["A", 20, "training"]["status"], by["A", 20, "training"]["reason"]) == ("time limit", "> 7 s")
    for length in (30, 40):
        skipped = by["A", length, "training"]
        assert (skipped["status"], skipped["reason"]) == ("skipped", "> 7 s at 20")
        assert skipped["samples"] == []
    others = [e for key, e in by.items() if key[0] == "B" or key[2] == "decoding" or key[1] == 10]
    assert len(others) == 13
    assert all(e["status"] == "ok" and len(e["samples"]) == 3 for e in others)
    assert by["B", 20, "training"]["ratio"] is None  # there is nothing to compare with


def test_out_of_memory_and_errors_do_not_stop_longer_lengths():
    error = Failure("error", "ValueError: no")
    machine = Machine({("A", 10): [READY, 1.0, 1.0, FULL], ("B", 10): [error]})
    bench, found, done = run(machine, lengths=(10, 20))
    assert [e["status"] for e in found] == ["out of memory", "error", "ok", "ok"]
    assert found[0]["samples"] == []
    assert found[0]["tokens_per_s"] is found[0]["peak_memory"] is None
    assert done[:2] == [("B", 10, "error"), ("A", 10, "out of memory")]
    plain = to_plain(bench, ["seqarch", "bench"], None, "unknown")
    assert reasons(plain) == ["A, training at 10: out of memory: no room", "B, training at 10: error: ValueError: no"]
    assert line(found[0]) == "training at 10: A: out of memory"
    assert line(found[1]) == "training at 10: B: error (ValueError: no)"


def test_an_interrupted_run_keeps_its_samples_and_ends_its_workers(tmp_path):
    machine = Machine({("B", 20): [READY, 1.0, 2.0, KeyboardInterrupt]})
    bench, found, done = run(machine, lengths=(10, 20, 30))
    assert found is None
    assert not machine.running
    assert done == [("A", 10, "ok"), ("B", 10, "ok")]
    plain = to_plain(bench, ["seqarch", "bench"], 1e7, "given")
    assert [(e["status"], e["samples"]) for e in plain["entries"][2:]] == [
        ("unfinished", [100, 100]),
        ("unfinished", [50]),
    ]
    write_json(plain, tmp_path / "results.json")
    assert json.loads((tmp_path / "results.json").read_text()) == plain
    assert "100 (2 of 3)" in shown(plain)


def shown(plain):
    console = Console(file=io.StringIO(), width=200)
    for table in tables(plain, terminal=False):
        console.print(table)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def rows(text):
    cells = [[c.strip() for c in row.split("|")[1:-1]] for row in text.splitlines() if row.startswith("|")]
    return [row for row in cells if not set("".join(row)) <= set("-:")]


def test_the_table_in_markdown():
    machine = Machine({("A", 2000): [READY, 1.0, 0.001, 0.001, 0.004], ("B[x=1]", 2000): [SLOW]})
    bench, _, _ = run(machine, names=["A", "B[x=1]"], lengths=(1000, 2000))
    header, *body = rows(shown(to_plain(bench, [], 1e7, "given")))
    assert header == [
        "length", "mixer", "batch", "tokens/s", "quartiles", "to the first", "peak memory", "of peak FLOP/s"
    ]  # fmt: skip
    assert body == [
        ["1,000", "A", "2", "100", "100 … 100", "1.00×", "9.77 KiB", "30.0%"],
        ["1,000", "B[x=1]", "2", "100", "100 … 100", "1.00×", "9.77 KiB", "30.0%"],
        ["2,000", "A", "2", "100,000", "62,500 … 100,000", "1.00×", "19.5 KiB", "30000.0%"],
        ["2,000", "B[x=1]", "–", "> 7 s", "–", "–", "–", "–"],
    ]


def test_the_decoding_table_shows_the_state():
    ready = Ready(1, 1, None, 7, "torch", state_bytes=3 * 2**20)
    machine = Machine({("A", 10): [ready]})
    bench, (entry,), _ = run(machine, names="A", phases=("decoding",))
    assert entry["share_of_peak"] is entry["flops_per_token"] is None
    header, row = rows(shown(to_plain(bench, [], 1e7, "given")))
    assert dict(zip(header, row, strict=True))["state"] == "3 MiB"
    assert dict(zip(header, row, strict=True))["tokens/s"] == "1"


def test_a_plot_for_each_phase_with_something_to_show(tmp_path):
    machine = Machine({("A", 10, "decoding"): [FULL], ("B", 20): [FULL]})
    bench, _, _ = run(machine, lengths=(10, 20), phases=("training", "decoding"))
    written = write_plots(to_plain(bench, [], None, "unknown"), tmp_path)
    assert written == [tmp_path / "training.png", tmp_path / "decoding.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in written)
    bench, _, _ = run(Machine({("A", 10): [FULL]}), names="A")
    assert write_plots(to_plain(bench, [], None, "unknown"), tmp_path / "none") == []


def test_the_peak_is_the_best_of_the_products():
    class Products:
        def __init__(self, job):
            assert job.spec is None
            self.seconds = iter([4.0, 2.0, 8.0, 2.5, 3.0])

        def ready(self, time_limit):
            return READY

        def measure(self, time_limit):
            return Sample(2, next(self.seconds), 0)

        def stop(self):
            pass

    assert measure_peak(Setup(), Products) == 3_000_000


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lengths": ()}, "lengths must be at least 1"),
        ({"lengths": (5, 0)}, "lengths must be at least 1, got 0"),
        ({"repeats": 0}, "repeats must be at least 1"),
        ({"warmup": -1}, "warmup must be at least 0"),
        ({"time_limit": 0}, "time_limit must be above 0"),
        ({"phases": ()}, "there is nothing to measure"),
        ({"specs": [spec("A"), spec("A")]}, "A is named twice"),
    ],
)
def test_what_cannot_be_measured_is_refused(change, message):
    options = {"specs": [spec("A")], "lengths": (10,), "phases": ("training",), "setup": Setup(), **change}
    with pytest.raises(ValueError, match=message):
        Bench(**options)


@pytest.mark.parametrize("option", ["tokens", "decode_batch", "decode_tokens", "threads", "n_layers", "vocab_size"])
def test_sizes_are_positive(option):
    with pytest.raises(ValueError, match=f"{option} must be at least 1, got 0"):
        Setup(**{option: 0})


class Counting(Work):
    """Takes a tenth of a second on the clock that it carries."""

    def __init__(self, steps, seconds):
        self.steps, self.seconds, self.now, self.waits = steps, seconds, 0.0, 0

    def step(self):
        self.now += 0.1

    def wait(self):
        self.waits += 1
        self.now += 1 / 1024


@pytest.mark.parametrize(("steps", "seconds", "expected"), [(4, 0.0, 4), (1, 0.35, 4), (1, 0.0, 1), (2, 0.05, 2)])
def test_a_repetition_has_steps_enough_and_lasts_long_enough(steps, seconds, expected):
    work = Counting(steps, seconds)
    done, elapsed = timed(work, work.wait, lambda: work.now)
    assert done == expected
    checks = expected - steps + 1  # once there are steps enough, every one is waited for
    assert math.isclose(elapsed, 0.1 * expected + checks / 1024)
    assert work.waits == checks + 1
