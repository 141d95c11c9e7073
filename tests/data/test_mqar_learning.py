"""What the mixers can recall, trained by the recipes."""

import os
from pathlib import Path

import pytest

from seqarch.training.sweep import read_sweep, run_members
from tests.training.synthetic import rows

SWEEP = Path(__file__).parents[2] / "recipes" / "mqar" / "sweep.yaml"


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_attention_and_top1_element_recall_all_and_the_delta_rule_more_than_other_recurrences(tmp_path):
    members = [m for m in read_sweep(SWEEP, tmp_path) if m.name.endswith("-1")]
    run_members(members, 2, {**os.environ, "OMP_NUM_THREADS": "1"}, lambda *_: None)
    assert {m.name: m.last_line() for m in members if m.state() != "done"} == {}
    accuracy = {}
    for member in members:
        found = [float(value) for _, name, value in rows(member.run_dir) if name == "val/accuracy/mqar"]
        accuracy[member.name.removesuffix("-1")] = found[-1]
    assert accuracy["attention"] >= 0.99
    assert accuracy["top1element"] >= 0.95
    assert accuracy["deltanet"] > max(accuracy["mamba2"], accuracy["linear"]) + 0.05
