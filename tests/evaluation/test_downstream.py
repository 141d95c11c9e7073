"""Downstream scores: which are compared, and estimates against closed forms."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest

from seqarch.cli import main
from seqarch.evaluation.downstream import match, other_results, read_results
from seqarch.evaluation.downstream_estimates import TaskScores, score_setting
from tests.evaluation.downstream_results import write_scores
from tests.evaluation.folders import write_run
from tests.evaluation.simulated import Truth, simulate

T_975 = {9: 2.262157, 3: 3.182446, 2: 4.302653, 1: 12.706205, 99: 1.984217}
"""Student's t, 97.5% points by degrees of freedom, from a table."""


def runs(tmp_path: Path, *names: str) -> list[Path]:
    for name in names:
        (tmp_path / name).mkdir()
    return [tmp_path / name for name in names]


def score(groups: dict[str, list[Path]], reference: str = "ref") -> tuple[list[TaskScores], list[str]]:
    paths = [path for of in groups.values() for path in of]
    found = [read_results(path) for path in paths]
    assert not any(damaged for _, damaged in found)
    matched, lines = match([r for results, _ in found for r in results], paths, groups[reference])
    return score_setting(matched, groups, reference, level=0.95, seed=0), lines


def test_documents_are_paired(tmp_path):
    """One seed: mean difference ± t·sd(d)/√n, with n - 1 degrees of freedom."""
    a, b = runs(tmp_path, "a", "b")
    reference = np.array([1, 1, 1, 1, 1, 1, 1, 0, 0, 0.0])
    other = np.array([1, 1, 1, 1, 0, 0, 0, 1, 0, 0.0])
    write_scores(a, "quiz", reference)
    write_scores(b, "quiz", other)
    ([task], lines) = score({"ref": [a], "new": [b]})
    assert lines == []
    assert (task.task, task.metric, list(task.scores)) == ("quiz", "acc", ["ref", "new"])
    assert task.scores["ref"].difference is None
    assert (task.scores["ref"].value, task.scores["new"].value) == (0.7, 0.5)
    assert task.scores["new"].stderr == pytest.approx((0.5 * 0.5 / 9) ** 0.5)
    difference = task.scores["new"].difference
    assert difference is not None
    assert (difference.paired, difference.seeds) == (True, False)
    # Of d: three times -1, once 1, six times 0: the mean is -0.2, the sum of squares 4.
    error = ((4 - 10 * 0.04) / 9 / 10) ** 0.5
    assert difference.value == pytest.approx(-0.2)
    assert difference.high - difference.value == pytest.approx(T_975[9] * error, rel=0.02)
    assert difference.high + difference.low == pytest.approx(2 * difference.value)
    # t = -1 on 9 degrees of freedom: p = 0.3434
    assert difference.p == difference.adjusted_p == pytest.approx(0.3434, abs=0.01)


def test_without_documents_standard_errors_are_combined(tmp_path):
    a, b = runs(tmp_path, "a", "b")
    rng = np.random.default_rng(0)
    scores = [(rng.random(100) < p).astype(float) for p in (0.8, 0.4)]
    write_scores(a, "quiz", scores[0])
    write_scores(b, "quiz", scores[1], samples=False)
    ([task], _) = score({"ref": [a], "new": [b]})
    difference = task.scores["new"].difference
    assert difference is not None
    assert not difference.paired
    error = sum(s.var(ddof=1) / 100 for s in scores) ** 0.5
    assert difference.high - difference.value == pytest.approx(T_975[99] * error, rel=0.02)


def test_scores_of_documents_that_are_not_those_of_the_result_are_not_used(tmp_path):
    """As after a call that was killed between its two files, or where a metric is no mean."""
    a, b = runs(tmp_path, "a", "b")
    for run in (a, b):
        write_scores(run, "quiz", np.array([1.0, 0, 1, 0]))
    file = b / "results" / "tasks-step80-samples.json"
    file.write_text(file.read_text().replace("[1.0,", "[0.0,"))
    ([task], _) = score({"ref": [a], "new": [b]})
    assert not task.scores["new"].difference.paired
    file.write_text("{")
    ([task], _) = score({"ref": [a], "new": [b]})
    assert not task.scores["new"].difference.paired


def test_seeds_are_pooled(tmp_path):
    """Where documents say nothing (all differences are the same) the interval is Student's t of the seeds."""
    paths = runs(tmp_path, "a1", "a2", "b1", "b2")
    base = np.linspace(0, 1, 50)
    for path, shift in zip(paths, (0.0, 0.02, 0.1, 0.14), strict=True):
        write_scores(path, "quiz", base + shift)
    ([task], _) = score({"ref": paths[:2], "new": paths[2:]})
    new, difference = task.scores["new"], task.scores["new"].difference
    # Variances of the seeds 0.0002 and 0.0008, pooled on two degrees of freedom 0.0005.
    spread = 0.0005**0.5
    assert new.value == pytest.approx(0.62)
    assert new.stderr == pytest.approx((base.var(ddof=1) / 50 + spread**2 / 2) ** 0.5)
    assert difference.value == pytest.approx(0.11)
    assert (difference.paired, difference.seeds) == (True, True)
    assert difference.high - difference.value == pytest.approx(T_975[2] * spread, rel=0.03)


def test_intervals_hold_the_truth(tmp_path):
    """Scores around an architecture's, a seed's and a document's part: 95% intervals hold the true difference."""
    rng = np.random.default_rng(1)
    paths = runs(tmp_path, "a1", "a2", "b1", "b2", "c1", "c2")
    held = 0
    studies = 60
    for _ in range(studies):
        hard = rng.normal(0, 1, 40)
        for path in paths:
            truth = 0.3 if path.name[0] == "b" else 0.0
            write_scores(path, "quiz", hard + truth + rng.normal(0, 0.1) + rng.normal(0, 0.5, 40))
        ([task], _) = score({"ref": paths[:2], "new": paths[2:4], "third": paths[4:]})
        difference = task.scores["new"].difference
        held += difference.low < 0.3 < difference.high
    # 95% less 2.5 standard errors, and wider by design: the spread of seeds holds part of the documents'
    assert held / studies > 0.88


def test_no_interval_where_every_document_came_out_alike(tmp_path):
    a, b = runs(tmp_path, "a", "b")
    for run in (a, b):
        write_scores(run, "quiz", np.array([1.0, 0, 1, 0]))
    ([task], _) = score({"ref": [a], "new": [b]})
    difference = task.scores["new"].difference
    assert (difference.value, difference.low, difference.high, difference.p) == (0.0, None, None, None)


def test_p_values_are_adjusted_within_an_architecture(tmp_path):
    a, b = runs(tmp_path, "a", "b")
    one, two = np.array([1.0, 0, 1, 0, 1, 1, 0, 1]), np.array([0.0, 0, 1, 0, 0, 1, 0, 1])
    for task in ("first", "second"):
        write_scores(a, task, one)
        write_scores(b, task, two)
    (tasks, _) = score({"ref": [a], "new": [b]})
    for task in tasks:
        difference = task.scores["new"].difference
        assert difference.adjusted_p == pytest.approx(min(1.0, 2 * difference.p))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"num_fewshot": 5}, "evaluated with shots 5 instead of 0"),
        ({"version": 2.0}, "evaluated with version 2.0 instead of 1.0"),
        ({"limit": 10}, "evaluated with limit 10 instead of none"),
        ({"step": 40}, "evaluated with tokens of training 40,000 instead of 80,000"),
        ({"precision": "bf16-mixed"}, "evaluated with precision bf16-mixed instead of 32-true"),
        ({"documents_sha256": "x"}, "evaluated with other documents than most runs"),
        ({"num_fewshot": 5, "max_length": 64}, "evaluated with shots 5 instead of 0, max_length 64 instead of 2,048"),
    ],
)
def test_other_settings_are_named_and_not_mixed(tmp_path, change, reason):
    a, b, c = runs(tmp_path, "a", "b", "c")
    scores = np.array([1.0, 0, 1, 0])
    for run, options in ((a, {}), (b, {}), (c, change)):
        for task in ("quiz", "test"):
            write_scores(run, task, scores, **options)
    (tasks, lines) = score({"ref": [a], "new": [b, c]})
    assert [[r.run for r in task.scores["new"].results] for task in tasks] == [[b], [b]]
    assert lines == [f"{c}: quiz, test not compared: {reason}"]


def test_the_step_that_most_runs_have_is_taken_then_the_references(tmp_path):
    a, b, c = runs(tmp_path, "a", "b", "c")
    scores = np.array([1.0, 0, 1, 0])
    for run, steps in ((a, (40, 80)), (b, (40, 80, 120)), (c, (40,))):
        for step in steps:
            write_scores(run, "quiz", scores, step=step)
    ([task], lines) = score({"ref": [a], "new": [b], "other": [c]})
    assert {r.step for s in task.scores.values() for r in s.results} == {40}
    assert lines == []
    ([task], lines) = score({"ref": [a], "new": [b]})
    assert {r.step for s in task.scores.values() for r in s.results} == {80}
    write_scores(c, "only", scores, step=120)
    write_scores(a, "only", scores, step=80)
    (tasks, lines) = score({"ref": [a], "other": [c]})
    assert [task.scores.keys() for task in tasks] == [{"ref"}, {"ref", "other"}]
    assert lines == [f"{c}: only not compared: evaluated with tokens of training 120,000 instead of 80,000"]


def test_runs_without_results_are_named(tmp_path):
    a, b = runs(tmp_path, "a", "b")
    assert score({"ref": [a], "new": [b]}) == ([], [])
    write_scores(b, "quiz", np.array([1.0, 0, 1, 0]))
    ([task], lines) = score({"ref": [a], "new": [b]})
    assert lines == [f"{a}: no results of quiz"]
    assert task.scores.keys() == {"new"}
    assert task.scores["new"].difference is None


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"model": {}, "tasks": {}}', '{"model": {"tokens": 1}, "tasks": {"a": 1}}']
)
def test_damaged_results_are_named(tmp_path, text):
    (tmp_path / "results").mkdir()
    file = tmp_path / "results" / "tasks-step5.json"
    file.write_text(text)
    results, damaged = read_results(tmp_path)
    if text.endswith('"tasks": {}}'):
        assert (results, damaged) == ([], [])
    else:
        assert results == []
        assert len(damaged) == 1
        assert damaged[0].startswith(f"{file} is damaged (")


def test_what_is_no_number_is_left_out(tmp_path):
    (run,) = runs(tmp_path, "a")
    write_scores(run, "quiz", np.array([1.0, np.nan]))
    write_scores(run, "test", np.array([1.0, 0.0]))
    results, damaged = read_results(run)
    assert [(r.task, list(r.scores)) for r in results] == [("quiz", []), ("test", ["acc"])]
    assert damaged == [f"{run}/results/tasks-step80.json: quiz acc left out: nan is no score"]


def test_in_the_report(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    reference, worse = simulate(np.random.default_rng(0), [0.0, 0.3], [1, 1], Truth(documents=20, validations=3))
    paths = []
    for name, (run,) in (("attention", reference), ("mamba2", worse)):
        mixer = {"attention": "x.Attention", "mamba2": "x.Mamba2"}[name]
        paths.append(write_run(tmp_path / name, run["nats"], run["tokens"], mixer=mixer))
    rng = np.random.default_rng(2)
    for path, p in zip(paths, (0.9, 0.3), strict=True):
        write_scores(path, "sciq", (rng.random(200) < p).astype(float))
        write_scores(path, "arc<i>", (rng.random(200) < 0.5).astype(float), samples=path == paths[0])
    (paths[1] / "results" / "needle-step80.json").write_text("{}")
    assert other_results(paths[1]) == [paths[1] / "results" / "needle-step80.json"]
    main(["compare", *map(str, paths), "--out", str(tmp_path / "report"), "--replicates", "200"])
    printed = capsys.readouterr().out
    assert f"Not compared, but there: {paths[1]}/results/needle-step80.json" in printed
    report = json.loads((tmp_path / "report" / "report.json").read_text())
    arc, sciq = report["settings"][0]["downstream"]
    assert (arc["task"], sciq["task"], sciq["metric"], sciq["higher_is_better"]) == ("arc<i>", "sciq", "acc", True)
    assert sciq["settings"]["num_fewshot"] == 0
    new = sciq["architectures"]["Mamba-2"]
    assert (new["runs"][0]["step"], new["difference"]["paired"], new["difference"]["covers"]) == (80, True, "documents")
    assert new["difference"]["high"] < 0
    shown = f"{new['value']:.3f} ± {new['stderr']:.3f}"
    assert shown in printed
    assert "sciq acc ↑" in printed
    table = list(csv.DictReader((tmp_path / "report" / "downstream.csv").read_text().splitlines()))
    assert [(r["architecture"], r["task"], r["paired"]) for r in table] == [
        ("Transformer++", "arc<i>", ""),
        ("Mamba-2", "arc<i>", "False"),
        ("Transformer++", "sciq", ""),
        ("Mamba-2", "sciq", "True"),
    ]
    assert float(table[3]["difference"]) == pytest.approx(
        new["value"] - sciq["architectures"]["Transformer++"]["value"]
    )
    page = (tmp_path / "report" / "report.html").read_text()
    body = page.split('<script type="application/json"')[0]
    assert "<h2>Downstream tasks: limited to in</h2>" in body
    assert shown in body
    assert "arc&lt;i&gt;" in body
    assert "<i>" not in body
    assert "needle-step80.json: not compared, but there" in body
