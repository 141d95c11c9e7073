"""From run folders to curves, gaps and verdicts, one setting at a time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import numpy as np

from seqarch.evaluation.architectures import find_reference, name_architectures
from seqarch.evaluation.bootstrap import MIN_DOCUMENTS, Draws, draw_documents
from seqarch.evaluation.comparability import common_unit, read_runs, select
from seqarch.evaluation.downstream import match, other_results, read_results
from seqarch.evaluation.downstream_estimates import TaskScores, score_setting
from seqarch.evaluation.gap import Curve, Gap, compare_architectures
from seqarch.evaluation.runs import Run

Axis = Literal["held-out", "train"]


@dataclass(frozen=True)
class Points:
    """One run at its validations, as observed.

    Attributes:
        run: The run.
        x: Pre-training loss, ``[K]``.
        losses: By domain, ``[K]``.
        out: Mean over the domains that are compared, ``[K]``.
    """

    run: Run
    x: np.ndarray
    losses: dict[str, np.ndarray]
    out: np.ndarray


@dataclass(frozen=True)
class Setting:
    """All runs that were trained on the same domains.

    Attributes:
        mixed: Whether all test domains are trained on.
        trained: The domains that are.
        targets: The domains whose loss is compared at equal pre-training loss.
        points: Runs by architecture, the reference's first.
        gaps: By architecture, but for the reference.
        downstream: Scores on tasks, where the runs have any.
    """

    mixed: bool
    trained: tuple[str, ...]
    targets: tuple[str, ...]
    points: dict[str, list[Points]]
    gaps: dict[str, Gap]
    downstream: list[TaskScores] = field(default_factory=list)

    @property
    def title(self) -> str:
        """In words."""
        return "mixed" if self.mixed else f"limited to {', '.join(self.trained)}"


@dataclass(frozen=True)
class Comparison:
    """What ``seqarch compare`` has found.

    Attributes:
        reference: Name of the architecture that others are compared with.
        axis: What stands for the pre-training loss.
        unit: Losses are nats per ``token`` or bits per ``byte``.
        margin: Differences below it count as none.
        level: Coverage of the intervals.
        replicates: Number of resampled test sets.
        settings: Limited ones first.
        documents: By domain: number of test documents, and the effective number.
        refused: Runs that take no part, and why.
        notes: What else a reader must know, a line each.
        other_results: Files of results in the run folders that are not compared.
    """

    reference: str
    axis: Axis
    unit: str
    margin: float
    level: float
    replicates: int
    settings: list[Setting]
    documents: dict[str, tuple[int, float]]
    refused: dict[Path, str]
    notes: list[str]
    other_results: list[Path]

    @property
    def unit_name(self) -> str:
        """Of losses, in words."""
        return "nats per token" if self.unit == "token" else "bits per byte"


def compare_runs(
    paths: Sequence[Path],
    *,
    reference: str = "transformer",
    names: Mapping[str, str] | None = None,
    axis: Axis = "held-out",
    margin: float = 0.02,
    level: float = 0.95,
    replicates: int = 2000,
    keep_all: bool = False,
    seed: int = 0,
) -> Comparison:
    """Compare the architectures of run folders.

    Args:
        paths: Run folders.
        reference: Name of an architecture, or its beginning.
        names: Other names for architectures.
        axis: What stands for the pre-training loss: the loss on held-out text of the training domains, or the smoothed
            training loss.
        margin: Differences below it count as none.
        level: Coverage of the intervals.
        replicates: Number of resampled test sets.
        keep_all: Keep unfinished runs and those of other lengths.
        seed: Of the resampling.

    Raises:
        ValueError: If an option is out of its range, or what is left of the runs is no comparison: why.
    """
    if margin <= 0:
        raise ValueError(f"margin must be above 0, got {margin}")
    if not 0.5 <= level < 1:
        raise ValueError(f"level must be at least 0.5 and below 1, got {level}")
    if replicates < 200:
        raise ValueError(f"replicates must be at least 200, got {replicates}: an interval rests on their tails")
    read, refused = read_runs(paths)
    runs, others, notes = select(read, keep_all=keep_all)
    refused |= others
    why = "; ".join(f"{path}: {reason}" for path, reason in refused.items())
    if not runs:
        raise ValueError(f"no run can be compared ({why})")
    unit, reason = common_unit(runs)
    notes = [*([reason] if reason else []), *notes]
    if axis == "train" and (unit == "byte" or any(not np.isfinite(r.smoothed).all() for r in runs)):
        raise ValueError("x: the smoothed training loss is not there for all runs in one unit; use held-out")
    names_of = dict(zip((r.path for r in runs), name_architectures(runs, names or {}), strict=True))
    without = f" (left out: {why})" if why else ""
    try:
        chosen = find_reference(reference, list(names_of.values()))
    except ValueError as error:
        raise ValueError(f"{error}{without}") from error
    if len(set(names_of.values())) == 1:
        raise ValueError(f"all runs that can be compared are of one architecture, {chosen}{without}")
    draws = {
        d.name: draw_documents(d.name, d.tokens if unit == "token" else d.bytes * math.log(2), replicates, seed)
        for d in runs[0].documents
        if len(d.ids) >= MIN_DOCUMENTS
    }
    notes += [
        f"domain {d.name}: left out everywhere, for it has {len(d.ids)} test documents, fewer than {MIN_DOCUMENTS}; "
        "raise data.max_val_tokens"
        for d in runs[0].documents
        if d.name not in draws
    ]
    by_setting: dict[tuple[str, ...], list[Run]] = {}
    for run in runs:
        by_setting.setdefault(tuple(sorted(set(run.setting) & draws.keys())), []).append(run)
    everything = set(draws)
    outside = {d for trained in by_setting for d in everything - set(trained)}
    if not outside:
        few = "; ".join(note for note in notes if note.startswith("domain "))
        raise ValueError(
            f"no test domain is out of domain for any run{f' ({few})' if few else ': add runs of the limited setting'}"
        )
    settings = []
    for trained, members in sorted(by_setting.items(), key=lambda item: len(item[0])):
        mixed = set(trained) == everything
        targets = tuple(d for d in sorted(everything) if d in (outside if mixed else everything - set(trained)))
        groups: dict[str, list[Run]] = {}
        for run in sorted(members, key=lambda r: (names_of[r.path] != chosen, names_of[r.path], r.seed)):
            groups.setdefault(names_of[run.path], []).append(run)
        if chosen not in groups or len(groups) == 1:
            title = "mixed" if mixed else f"limited to {', '.join(trained)}"
            lacking = f"another architecture than {chosen}" if chosen in groups else f"the reference, {chosen}"
            notes.append(f"setting {title}: left out, for it has no run of {lacking}")
            continue
        points, gaps = _compare_setting(groups, chosen, trained, targets, draws, axis, margin, level, seed)
        settings.append(Setting(mixed, trained, targets, points, gaps))
    if not settings:
        raise ValueError(f"there is nothing to compare: {'; '.join(notes)}{without}")
    settings, lacking = _with_downstream(settings, chosen, level, seed)
    return Comparison(
        reference=chosen,
        axis=axis,
        unit=unit,
        margin=margin,
        level=level,
        replicates=replicates,
        settings=settings,
        documents={name: (len(d.size), d.effective) for name, d in draws.items()},
        refused=refused,
        notes=[*notes, *lacking],
        other_results=[file for path in _paths(settings) for file in other_results(path)],
    )


def _paths(settings: Sequence[Setting]) -> list[Path]:
    return [p.run.path for setting in settings for points in setting.points.values() for p in points]


def _with_downstream(
    settings: Sequence[Setting], reference: str, level: float, seed: int
) -> tuple[list[Setting], list[str]]:
    """Settings with their scores on tasks, and which results take no part."""
    paths = _paths(settings)
    results, notes = [], []
    for path in paths:
        found, damaged = read_results(path)
        results += found
        notes += damaged
    of_reference = {p.run.path for setting in settings for p in setting.points[reference]}
    matched, lacking = match(results, paths, of_reference)
    scored = []
    for setting in settings:
        groups = {name: [p.run.path for p in points] for name, points in setting.points.items()}
        scores = score_setting(matched, groups, reference, level=level, seed=seed)
        scored.append(replace(setting, downstream=scores))
    return scored, [*notes, *lacking]


def _compare_setting(
    groups: Mapping[str, Sequence[Run]],
    reference: str,
    trained: Sequence[str],
    targets: Sequence[str],
    draws: Mapping[str, Draws],
    axis: Axis,
    margin: float,
    level: float,
    seed: int,
) -> tuple[dict[str, list[Points]], dict[str, Gap]]:
    points: dict[str, list[Points]] = {}
    curves: dict[str, list[Curve]] = {}
    finals: dict[str, list[np.ndarray]] = {}
    for name, runs in groups.items():
        for run in runs:
            losses = {d: draw.losses(run.nats_of(d)) for d, draw in draws.items()}  # [B + 1, K]
            held_out = np.mean([losses[d] for d in trained], axis=0)
            x = held_out if axis == "held-out" else np.broadcast_to(run.smoothed, held_out.shape)
            out = np.mean([losses[d] for d in targets], axis=0)
            y = np.stack([out, *(losses[d] for d in targets)], axis=2)
            points.setdefault(name, []).append(Points(run, x[0], {d: v[0] for d, v in losses.items()}, out[0]))
            curves.setdefault(name, []).append(Curve(x, y))
            finals.setdefault(name, []).append(x[:, -1])
    others = [name for name in groups if name != reference]
    gaps = compare_architectures(
        curves[reference],
        [curves[name] for name in others],
        [finals[reference], *(finals[name] for name in others)],
        margin=margin,
        level=level,
        seed=seed,
    )
    return points, dict(zip(others, gaps, strict=True))
