"""Downstream scores that `seqarch eval` has left in run folders, and which of them can stand side by side."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from seqarch.training.runs import RESULTS

_TASKS = re.compile(r"tasks-step(\d+)\.json")
_OTHERS = re.compile(r"(needle|position)-step\d+\.json")
_SETTINGS = {
    "version": "version",
    "num_fewshot": "shots",
    "limit": "limit",
    "documents": "documents",
    "documents_sha256": "documents' hash",
    "max_length": "max_length",
    "add_bos_token": "add_bos_token",
    "precision": "precision",
    "tokens": "tokens of training",
}
"""What must be the same for two scores to be compared, and what a reader calls it."""


@dataclass(frozen=True)
class Result:
    """What one checkpoint of one run scored on one task.

    Attributes:
        run: Folder of the run.
        step: Optimiser steps of the checkpoint.
        settings: Version of the task, shots and whatever else the scores depend on.
        scores: By metric: the value, and its standard error where there is one.
        higher_is_better: By metric, where it is known.
        samples_file: Where the scores of each document are kept, if they are.
        task: Name of the task.
    """

    run: Path
    task: str
    step: int
    settings: dict[str, Any]
    scores: dict[str, tuple[float, float | None]]
    higher_is_better: dict[str, bool]
    samples_file: Path

    @cached_property
    def samples(self) -> dict[str, np.ndarray]:
        """By metric the score of each document, ``[n]``: of metrics that are a mean over documents, where kept."""
        try:
            kept = json.loads(self.samples_file.read_text(encoding="utf-8"))["tasks"][self.task]["scores"]
            values = {metric: np.asarray(kept[metric], dtype=np.float64) for metric in self.scores if metric in kept}
        except (OSError, ValueError, KeyError, TypeError):
            return {}
        return {
            metric: v
            for metric, v in values.items()
            if v.ndim == 1 and len(v) and abs(v.mean() - self.scores[metric][0]) < 1e-6
        }


def read_results(run: Path) -> tuple[list[Result], list[str]]:
    """The results of a run folder, of all steps; and what cannot be read, a line each."""
    found, damaged = [], []
    for file in sorted((run / RESULTS).glob("*.json")):
        if _TASKS.fullmatch(file.name):
            try:
                results, strange = _results(run, file)
                found += results
                damaged += strange
            except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
                damaged.append(f"{file} is damaged ({type(error).__name__}: {error}): run `seqarch eval` again")
    return found, damaged


def _results(run: Path, file: Path) -> tuple[list[Result], list[str]]:
    content = json.loads(file.read_text(encoding="utf-8"))
    model = content["model"]
    results, strange = [], []
    for task, entry in content["tasks"].items():
        settings = {name: entry.get(name) for name in _SETTINGS} | {
            "tokens": int(model["tokens"]),
            "documents": int(entry["documents"]),
        }
        scores = {metric: (float(s["value"]), _finite(s["stderr"])) for metric, s in entry["scores"].items()}
        for metric in [m for m, (value, _) in scores.items() if not math.isfinite(value)]:
            strange.append(f"{file}: {task} {metric} left out: {scores.pop(metric)[0]} is no score")
        samples = file.with_name(f"{file.stem}-samples.json")
        better = entry.get("higher_is_better", {})
        results.append(Result(run, task, int(model["step"]), settings, scores, better, samples))
    return results, strange


def _finite(value: Any) -> float | None:
    return None if value is None or not math.isfinite(value) else float(value)


def other_results(run: Path) -> list[Path]:
    """Results of `seqarch needle` and `seqarch position` in a run folder."""
    return [file for file in sorted((run / RESULTS).glob("*.json")) if _OTHERS.fullmatch(file.name)]


def match(
    results: Iterable[Result], runs: Sequence[Path], preferred: Collection[Path]
) -> tuple[dict[str, dict[Path, Result]], list[str]]:
    """For each task the results that came about in one way, and what takes no part, a line each.

    The way in which most runs were evaluated is taken; where several are as frequent, that of more of ``preferred``,
    then that of the later checkpoint.

    Args:
        results: Of all runs, tasks and steps.
        runs: All that are compared.
        preferred: Runs of the reference.
    """
    by_task: dict[str, dict[Path, list[Result]]] = {}
    for result in results:
        by_task.setdefault(result.task, {}).setdefault(result.run, []).append(result)
    matched: dict[str, dict[Path, Result]] = {}
    reasons: dict[tuple[Path, str], list[str]] = {}
    for task, by_run in by_task.items():
        ways: dict[str, dict[Path, Result]] = {}
        for run, several in by_run.items():
            for result in several:
                ways.setdefault(_key(result.settings), {})[run] = result
        usual = max(
            ways.values(),
            key=lambda way: (
                len(way),
                len(way.keys() & set(preferred)),
                max(r.settings["tokens"] for r in way.values()),
            ),
        )
        matched[task] = usual
        settings = next(iter(usual.values())).settings
        for run in runs:
            if run in by_run and run not in usual:
                last = max(by_run[run], key=lambda r: r.step)
                reasons.setdefault((run, _difference(last.settings, settings)), []).append(task)
            elif run not in by_run:
                reasons.setdefault((run, ""), []).append(task)
    lines = [
        f"{run}: {', '.join(tasks)} not compared: evaluated with {reason}"
        if reason
        else f"{run}: no results of {', '.join(tasks)}"
        for (run, reason), tasks in reasons.items()
    ]
    return matched, lines


def _key(settings: Mapping[str, Any]) -> str:
    return json.dumps(settings, sort_keys=True)


def _difference(settings: Mapping[str, Any], usual: Mapping[str, Any]) -> str:
    differing = [name for name in _SETTINGS if _key({"": settings[name]}) != _key({"": usual[name]})]
    if differing == ["documents_sha256"]:
        return "other documents than most runs"
    return ", ".join(
        f"{_SETTINGS[name]} {_said(settings[name])} instead of {_said(usual[name])}"
        for name in differing
        if name != "documents_sha256"
    )


def _said(value: Any) -> str:
    return (
        "none"
        if value is None
        else f"{value:,}"
        if isinstance(value, int) and not isinstance(value, bool)
        else str(value)
    )
