"""Scores of architectures on a task: seeds pooled, and the difference to the reference with its interval.

The error of a difference has two parts, taken as independent. **Documents**: where the score of each document is kept
for all runs of both architectures, documents are paired: with d the differences of the documents' scores, each averaged
over seeds, it is sd(d)/√n. Otherwise it is √(SE_A² + SE_R²) of two independent samples, which is too wide where the
same documents are hard for both. All seeds answer the same documents, so without documents' scores an architecture's SE
is the mean of its runs' and not smaller by √S. **Seeds**: their spread s is pooled over all architectures that have
several, on ν degrees of freedom, and adds s·√(1/S_A + 1/S_R). It holds part of what documents do in one run, which
makes intervals a little too wide. The interval is that of the sum of two Student's t with n - 1 and ν degrees.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from seqarch.evaluation.bootstrap import holm
from seqarch.evaluation.downstream import Result

_DRAWS = 40_000


@dataclass(frozen=True)
class Difference:
    """An architecture's score minus the reference's.

    Attributes:
        value: As observed.
        low: Lower end of the interval; None where no error is known, or no document was answered differently.
        high: Upper end.
        p: Two-sided p-value of no difference; None without an interval.
        adjusted_p: The same, adjusted for the number of scores of the architecture (Holm).
        paired: Whether documents are paired.
        seeds: Whether the interval covers other seeds.
    """

    value: float
    low: float | None
    high: float | None
    p: float | None
    adjusted_p: float | None
    paired: bool
    seeds: bool


@dataclass(frozen=True)
class Score:
    """What an architecture scored, as a mean over its runs.

    Attributes:
        value: The mean.
        stderr: Its standard error, over documents and, where known, seeds; None if it is not known.
        results: Of its runs.
        difference: To the reference; None for the reference itself, or where that has no result.
    """

    value: float
    stderr: float | None
    results: list[Result]
    difference: Difference | None


@dataclass(frozen=True)
class TaskScores:
    """All architectures on one metric of one task, the reference first."""

    task: str
    metric: str
    scores: dict[str, Score]

    @property
    def first(self) -> Result:
        """One of the results, for what they share."""
        return next(iter(self.scores.values())).results[0]


def score_setting(
    matched: Mapping[str, Mapping[Path, Result]],
    groups: Mapping[str, Sequence[Path]],
    reference: str,
    *,
    level: float,
    seed: int,
) -> list[TaskScores]:
    """Every metric of every task for the architectures of a setting.

    Args:
        matched: By task, the comparable results by run (`downstream.match`).
        groups: Runs by architecture.
        reference: The architecture that others are compared with.
        level: Coverage of the intervals.
        seed: Of the draws for intervals.
    """
    found = []
    for task, by_run in sorted(matched.items()):
        results = {name: [by_run[run] for run in runs if run in by_run] for name, runs in groups.items()}
        metrics = dict.fromkeys(m for of_name in results.values() for r in of_name for m in r.scores)
        for metric in metrics:
            having = {name: [r for r in of if metric in r.scores] for name, of in results.items()}
            having = {name: of for name, of in having.items() if of}
            found.append(TaskScores(task, metric, _scores(having, metric, reference, level, seed)))
    return _adjusted(found)


def _scores(
    results: Mapping[str, list[Result]], metric: str, reference: str, level: float, seed: int
) -> dict[str, Score]:
    values = {name: np.array([r.scores[metric][0] for r in of]) for name, of in results.items()}
    freedom = sum(len(v) - 1 for v in values.values())
    squares = sum(float(np.square(v - v.mean()).sum()) for v in values.values())
    spread = (squares / freedom) ** 0.5 if freedom else None
    errors = {name: _document_error(of, metric) for name, of in results.items()}
    scores = {}
    for name, of in results.items():
        error = errors[name]
        if error is not None and spread is not None:
            error = float(np.hypot(error, spread / len(of) ** 0.5))
        difference = None
        if name != reference and reference in results:
            value = float(values[name].mean() - values[reference].mean())
            paired = _paired(of, results[reference], metric)
            documents = int(of[0].settings["documents"] or 0)
            if paired is not None:
                by_documents: float | None = paired
            else:
                mine, theirs = error_pair = errors[name], errors[reference]
                by_documents = None if None in error_pair else float(np.hypot(mine or 0.0, theirs or 0.0))
            by_seeds = None if spread is None else spread * (1 / len(of) + 1 / len(results[reference])) ** 0.5
            low, high, p = _interval(value, by_documents, documents - 1, by_seeds, freedom, level, seed)
            difference = Difference(value, low, high, p, None, paired is not None, spread is not None)
        scores[name] = Score(float(values[name].mean()), error, of, difference)
    return scores


def _by_document(results: Sequence[Result], metric: str) -> np.ndarray | None:
    """Scores of documents, averaged over runs, ``[n]``; None where they are not kept for all."""
    samples = [r.samples.get(metric) for r in results]
    known = [s for s in samples if s is not None]
    if len(known) < len(samples) or len({len(s) for s in known}) != 1 or len(known[0]) < 2:
        return None
    return np.mean(known, axis=0)


def _document_error(results: Sequence[Result], metric: str) -> float | None:
    scores = _by_document(results, metric)
    if scores is not None:
        return _standard_error(scores)
    errors = [r.scores[metric][1] for r in results]
    known = [e for e in errors if e is not None]
    return float(np.mean(known)) if len(known) == len(errors) else None


def _paired(mine: Sequence[Result], reference: Sequence[Result], metric: str) -> float | None:
    """Standard error of the mean difference over paired documents; None where they cannot be paired."""
    a, b = _by_document(mine, metric), _by_document(reference, metric)
    if a is None or b is None or len(a) != len(b) or mine[0].settings["documents_sha256"] is None:
        return None
    return _standard_error(a - b)


def _standard_error(values: np.ndarray) -> float:
    return float(values.std(ddof=1) / len(values) ** 0.5)


def _interval(
    value: float, documents: float | None, n: int, seeds: float | None, freedom: int, level: float, seed: int
) -> tuple[float | None, float | None, float | None]:
    """Both ends and the p-value, from the standard errors by documents and by seeds and their degrees of freedom."""
    if documents is None or (documents == 0 and not seeds):
        return None, None, None
    rng = np.random.default_rng(seed)
    noise = documents * rng.standard_t(max(n, 1), _DRAWS)
    if seeds:
        noise = noise + seeds * rng.standard_t(freedom, _DRAWS)
    size = np.abs(noise)  # the sum is symmetric about 0
    half = float(np.quantile(size, level))
    return value - half, value + half, (int((size >= abs(value)).sum()) + 1) / (_DRAWS + 1)


def _adjusted(tasks: list[TaskScores]) -> list[TaskScores]:
    """With each architecture's p-values adjusted for their number."""
    keys = [
        (i, name, s.difference.p)
        for i, task in enumerate(tasks)
        for name, s in task.scores.items()
        if s.difference is not None and s.difference.p is not None
    ]
    adjusted: dict[tuple[int, str], float] = {}
    for name in dict.fromkeys(name for _, name, _ in keys):
        mine = [(i, p) for i, other, p in keys if other == name]
        adjusted |= {(i, name): p for (i, _), p in zip(mine, holm([p for _, p in mine]), strict=True)}
    return [
        replace(
            task,
            scores={
                name: replace(s, difference=replace(s.difference, adjusted_p=adjusted.get((i, name))))
                if s.difference is not None
                else s
                for name, s in task.scores.items()
            },
        )
        for i, task in enumerate(tasks)
    ]
