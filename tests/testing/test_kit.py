"""Mixers that keep the contract pass every check; each fault is noticed by the check made for it."""

from __future__ import annotations

import inspect
import json
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from seqarch.mixer import State
from seqarch.testing import CHECKS, Subject, check_mixer
from seqarch.testing import kit as kit_module
from seqarch.testing.kit import run_check
from seqarch.testing.subject import MixerFactory
from tests.testing.broken_mixers import BROKEN, BreaksGraph, Broken, CannotBeBuilt, HalfTheBytes
from tests.testing.toy_mixers import ToyAttention, ToyEMA, ToySelection, ToySharing

GOOD: dict[str, MixerFactory] = {
    "attention": ToyAttention,
    "selection": ToySelection,
    "ema": ToyEMA,
    "ema of one-token chunks": partial(ToyEMA, chunk_size=1),
    "sharing, layer 0": ToySharing,
    "sharing, layer 1": partial(ToySharing, layer_idx=1, n_layers=2),
}


@pytest.mark.parametrize("name", GOOD)
def test_conforming_mixer_passes(name: str) -> None:
    report = check_mixer(GOOD[name])
    assert report.ok, str(report)
    assert sum(row.status == "passed" for row in report.rows) >= 25


def test_every_check_applies_to_a_conforming_mixer() -> None:
    tags = [Subject(factory).tags for factory in GOOD.values()]
    assert [check.name for check in CHECKS if all(check.ruled_out(t) is not None for t in tags)] == []


def test_every_function_is_in_the_table() -> None:
    functions = {
        name
        for module in vars(kit_module).values()
        if inspect.ismodule(module) and module.__name__.startswith("seqarch.testing.")
        for name, f in vars(module).items()
        if name.startswith("check_") and inspect.isfunction(f) and f.__module__ == module.__name__
    }
    assert len(functions) > 30
    assert sorted(functions) == sorted(check.name for check in CHECKS)


def test_every_check_has_a_fault_made_for_it() -> None:
    assert {check.name for check in CHECKS} == {broken.noticed_by[0] for broken in BROKEN}


@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: broken.mixer.__name__)
def test_fault_is_noticed(broken: Broken) -> None:
    # Where the fault is for the compiler, tracing stops at it: nothing is compiled, and the check is fast.
    report = check_mixer(broken.mixer, d_model=broken.d_model, slow=broken.mixer is BreaksGraph)
    assert set(report.failed()) == set(broken.noticed_by), str(report)
    assert not report.ok


@pytest.mark.slow
@pytest.mark.parametrize("name", GOOD)
def test_conforming_mixer_compiles(name: str) -> None:
    run_check(next(check for check in CHECKS if check.slow), Subject(GOOD[name]))


class MayBreakGraph(BreaksGraph):
    def __init__(self, d_model: int) -> None:
        super().__init__(d_model)
        self.tags = replace(self.tags, fullgraph=False)


@pytest.mark.slow
def test_mixer_that_claims_no_full_graph_may_break_it() -> None:
    run_check(next(check for check in CHECKS if check.slow), Subject(MayBreakGraph))


@pytest.mark.parametrize("seed", range(20))
def test_constructor_check_raises_no_false_alarm(seed: int) -> None:
    check = next(check for check in CHECKS if check.name == "check_constructor_initialises")
    run_check(check, Subject(ToyEMA, seed=seed))


def test_random_state_of_the_caller_is_kept() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    check_mixer(ToyEMA)
    assert torch.equal(torch.rand(3), expected)


def test_seed_and_width_reach_the_mixer() -> None:
    one, two = Subject(ToyEMA, d_model=8, seed=1), Subject(ToyEMA, d_model=8, seed=2)
    assert one.build().mixer.d_model == 8
    assert not torch.equal(one.noise(1, 2), two.noise(1, 2))
    weights = [s.fresh().get_parameter("out_proj.weight") for s in (one, two)]
    assert not torch.equal(*weights)


def test_expected_failure_is_no_failure() -> None:
    report = check_mixer(HalfTheBytes, expected_failures={"check_state_bytes": "bytes of bfloat16"})
    row = next(row for row in report.rows if row.check == "check_state_bytes")
    assert (row.status, row.message) == ("expected failure", "bytes of bfloat16")
    assert report.ok
    assert report.failed() == []


def test_unexpected_pass_is_reported() -> None:
    report = check_mixer(ToyAttention, expected_failures={"check_batch": "once was broken"})
    row = next(row for row in report.rows if row.check == "check_batch")
    assert row.status == "unexpected pass"
    assert "once was broken" in row.message
    assert not report.ok


def test_unknown_expected_failure_is_an_error() -> None:
    with pytest.raises(ValueError, match="'check_nothing', which is no check; there are check_lengths"):
        check_mixer(ToyAttention, expected_failures={"check_nothing": "?"})


class Raises(ToyEMA):
    def forward(self, x: Tensor, **kwargs: object) -> tuple[Tensor, State | None]:
        raise KeyError("a fault of its own")


def test_exceptions_of_the_mixer_are_findings() -> None:
    report = check_mixer(Raises)
    assert {row.check: row.status for row in report.rows}["check_causality"] == "failed"
    row = next(row for row in report.rows if row.check == "check_causality")
    assert "KeyError: 'a fault of its own'" in row.message
    assert "test_kit.py:" in row.message


def test_mixer_that_cannot_be_built() -> None:
    report = check_mixer(CannotBeBuilt)
    assert [row.check for row in report.rows] == ["construction"]
    assert not report.ok
    assert "KeyError: 'an option'" in report.rows[0].message


def test_factory_must_return_a_mixer() -> None:
    report = check_mixer(torch.nn.Identity)  # pyright: ignore[reportArgumentType]
    assert "must return a TokenMixer, not Identity" in report.rows[0].message


def test_report_as_table_and_as_json() -> None:
    report = check_mixer(HalfTheBytes)
    lines = str(report).splitlines()
    assert lines[0] == "HalfTheBytes: does not conform"
    assert len(lines) == 1 + len(CHECKS)
    line = next(line for line in lines if "check_state_bytes" in line)
    assert "failed" in line
    assert "it claims 512, init_state allocates 1024" in line
    assert "skipped" in next(line for line in lines if "check_compile" in line)
    again = json.loads(json.dumps(report.to_dict()))
    assert again["mixer"] == "HalfTheBytes"
    assert again["ok"] is False
    assert [row["check"] for row in again["rows"]] == [check.name for check in CHECKS]
    assert {row["status"] for row in again["rows"]} == {"passed", "failed", "skipped"}
