"""The base-capability gap: out-of-domain loss at equal pre-training loss, with its interval and a verdict.

Shape legend: B replicates (one more row in front holds what was observed), K validations, P points of a curve, G
losses that are compared (the mean out of domain and each domain), S seeds.

A run's curve is its loss on a target against its pre-training loss, over its validations. Where the pre-training loss
went up for a while, neighbouring validations are averaged until it falls (pool adjacent violators; Ayer et al. 1955),
and between points the curve is straight. Two architectures are compared at the lowest pre-training loss that all runs
of both have reached; there one run is at its end, and the others were a while before. Losses by document are kept for
every validation, so that a replicate of the test documents (`bootstrap`) gives every run a whole curve of its own,
pre-training loss included, and the point of comparison is found anew in each: document noise of both axes, and what of
it cancels between runs, is carried to the gap without an assumption about how it changes during training.

Seeds: runs of one architecture that differ in the seed alone. Two or three cannot be resampled (the variance of a
bootstrap of S values is (S - 1)/S of what it should be, half with two), so their spread is taken to be normal with one
variance for all architectures, estimated from all that have several seeds, on ν degrees of freedom; each replicate adds
s·√(1/S_A + 1/S_R)·t_ν. The spread of seeds holds part of the document noise too, which makes the interval a little too
wide rather than too narrow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from seqarch.evaluation.bootstrap import holm, interval, p_value

DEGRADED, EQUAL, BETTER, OPEN = "degraded", "equal", "better", "not decidable"
GRID = 15
"""Points of the shared range at which a gap is drawn."""


class Curve:
    """One run's targets against its pre-training loss.

    Args:
        x: Pre-training loss, ``[B + 1, K]``.
        y: Losses on the targets, ``[B + 1, K, G]``.
    """

    def __init__(self, x: np.ndarray, y: np.ndarray) -> None:
        starts = _falling_blocks(x[0])
        counts = np.diff([*starts, x.shape[1]])
        x = np.add.reduceat(x, starts, axis=1) / counts
        y = np.add.reduceat(y, starts, axis=1) / counts[:, None]
        order = np.argsort(-x, axis=1, kind="stable")  # a replicate may order close neighbours otherwise
        self.x = np.take_along_axis(x, order, axis=1)
        self.y = np.take_along_axis(y, order[:, :, None], axis=1)

    @property
    def first(self) -> np.ndarray:
        """Highest pre-training loss, ``[B + 1]``."""
        return self.x[:, 0]

    @property
    def last(self) -> np.ndarray:
        """Lowest pre-training loss, ``[B + 1]``."""
        return self.x[:, -1]

    def at(self, x: np.ndarray) -> np.ndarray:
        """Targets ``[B + 1, G]`` at pre-training losses ``[B + 1]`` within the curve."""
        rows = np.arange(len(x))
        right = np.clip((self.x > x[:, None]).sum(axis=1), 1, self.x.shape[1] - 1)
        left = right - 1
        high, low = self.x[rows, left], self.x[rows, right]
        share = np.divide(high - x, high - low, out=np.zeros_like(x), where=high > low).clip(0.0, 1.0)[:, None]
        return (1.0 - share) * self.y[rows, left] + share * self.y[rows, right]


def _falling_blocks(x: np.ndarray) -> list[int]:
    """Starts of the blocks of neighbours whose means fall strictly, with as few joined as possible."""
    blocks: list[tuple[float, int]] = []  # sum and length
    for value in x.tolist():
        blocks.append((value, 1))
        while len(blocks) > 1 and blocks[-1][0] / blocks[-1][1] >= blocks[-2][0] / blocks[-2][1]:
            total, length = blocks.pop()
            blocks[-1] = (blocks[-1][0] + total, blocks[-1][1] + length)
    lengths = [length for _, length in blocks]
    return [sum(lengths[:i]) for i in range(len(lengths))]


@dataclass(frozen=True)
class Estimate:
    """A difference to the reference, with its interval.

    Attributes:
        value: As observed.
        low: Lower end of the interval.
        high: Upper end of the interval.
        p: Two-sided p-value of no difference.
        documents: Half the width of an interval that covers the documents alone.
    """

    value: float
    low: float
    high: float
    p: float
    documents: float


@dataclass(frozen=True)
class Gap:
    """How an architecture compares with the reference.

    Attributes:
        at: Pre-training loss at which the targets are compared; NaN if no loss is shared.
        start: Highest pre-training loss that all runs share.
        targets: For each target the gap at equal pre-training loss.
        curve: Over the shared range, of the first target: pre-training loss, gap, low, high.
        final: Difference of the last pre-training losses (at equal tokens).
        seeds: Number of the architecture's and of the reference's runs.
        seed_deviation: Estimated standard deviation between seeds of the first target at equal pre-training loss; None
            where no architecture has two.
        verdict: In one word or two.
        adjusted_p: p-value of the first target, adjusted for the number of architectures.
    """

    at: float
    start: float
    targets: list[Estimate]
    curve: list[tuple[float, float, float, float]]
    final: Estimate
    seeds: tuple[int, int]
    seed_deviation: float | None
    verdict: str
    adjusted_p: float


def compare_architectures(
    reference: Sequence[Curve],
    others: Sequence[Sequence[Curve]],
    finals: Sequence[Sequence[np.ndarray]],
    *,
    margin: float,
    level: float,
    seed: int,
) -> list[Gap]:
    """Compare each of ``others`` with the reference.

    Args:
        reference: The reference's curves, one a seed.
        others: The same of each other architecture.
        finals: Last pre-training loss ``[B + 1]`` of each run, the reference's first, then those of each of the others.
        margin: Differences below it count as none.
        level: Coverage of the intervals.
        seed: Of the random numbers that stand for seeds.
    """
    rng = np.random.default_rng(seed)
    pairs = [_Pair(reference, curves) for curves in others]
    at_end = [(np.stack(mine)[:, :, None], np.stack(finals[0])[:, :, None]) for mine in finals[1:]]
    estimates = []
    for i, pair in enumerate(pairs):
        spread = _Spread([p.values[0] for p in pairs if p.shared], pair.values[1]) if pair.shared else None
        targets, curve = [], []
        if spread is not None:
            targets, replicates = spread.estimates(*pair.values, level=level, rng=rng)
            curve = pair.curve(replicates[:, 0] - _difference(*pair.values)[:, 0], level)
        final, _ = _Spread([mine for mine, _ in at_end], at_end[i][1]).estimates(*at_end[i], level=level, rng=rng)
        estimates.append((pair, targets, curve, final[0], None if spread is None else spread.deviation))
    known = [i for i, (pair, *_) in enumerate(estimates) if pair.shared]
    adjusted = dict(zip(known, holm([estimates[i][1][0].p for i in known]), strict=True))
    return [
        Gap(
            at=float(pair.low[0]) if pair.shared else float("nan"),
            start=float(pair.high[0]),
            targets=targets,
            curve=curve,
            final=final,
            seeds=(len(others[i]), len(reference)),
            seed_deviation=None if deviation is None else float(deviation[0]),
            verdict=verdict(targets[0], adjusted[i], margin, level) if pair.shared else OPEN,
            adjusted_p=adjusted.get(i, float("nan")),
        )
        for i, (pair, targets, curve, final, deviation) in enumerate(estimates)
    ]


def verdict(gap: Estimate, adjusted_p: float, margin: float, level: float) -> str:
    """``equal`` if the interval lies within ±margin; else ``degraded`` or ``better`` if the interval and the adjusted
    p-value exclude 0; else not decidable."""
    if -margin < gap.low and gap.high < margin:
        return EQUAL
    if adjusted_p < 1.0 - level and gap.low > 0:
        return DEGRADED
    if adjusted_p < 1.0 - level and gap.high < 0:
        return BETTER
    return OPEN


def _difference(mine: np.ndarray, reference: np.ndarray) -> np.ndarray:
    return mine.mean(axis=0) - reference.mean(axis=0)


class _Pair:
    """An architecture and the reference over the pre-training losses that all their runs share."""

    def __init__(self, reference: Sequence[Curve], mine: Sequence[Curve]) -> None:
        self.reference, self.mine = reference, mine
        both = [*reference, *mine]
        self.low = np.max([c.last for c in both], axis=0)
        self.high = np.min([c.first for c in both], axis=0)
        self.shared = bool(self.low[0] < self.high[0])
        self.values = self._at(self.low)  # [S, B + 1, G] each

    def _at(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return np.stack([c.at(x) for c in self.mine]), np.stack([c.at(x) for c in self.reference])

    def curve(self, seed_noise: np.ndarray, level: float) -> list[tuple[float, float, float, float]]:
        """The first target's gap over the shared range; ``seed_noise`` ``[B + 1]`` is what seeds add at its low end."""
        points = []
        for share in np.linspace(0.0, 1.0, GRID):
            x = self.low + share * (self.high - self.low)
            gap = _difference(*self._at(x))[:, 0]
            low, high = interval((gap + seed_noise)[1:], level)
            points.append((float(x[0]), float(gap[0]), low, high))
        return points


class _Spread:
    """The standard deviation between seeds, pooled over architectures.

    Args:
        architectures: Values ``[S, B + 1, G]`` of each but the reference.
        reference: Values of the reference.
    """

    def __init__(self, architectures: Sequence[np.ndarray], reference: np.ndarray) -> None:
        groups = [*architectures, reference]
        self.freedom = sum(len(values) - 1 for values in groups)
        squares = sum(np.square(v[:, 0] - v[:, 0].mean(axis=0)).sum(axis=0) for v in groups)
        self.deviation = np.sqrt(squares / self.freedom) if self.freedom else None  # [G]

    def estimates(
        self, mine: np.ndarray, reference: np.ndarray, *, level: float, rng: np.random.Generator
    ) -> tuple[list[Estimate], np.ndarray]:
        """Estimates of the difference for each target, and its replicates ``[B + 1, G]`` with the seeds' noise."""
        by_document = _difference(mine, reference)
        replicates = by_document.copy()
        if self.deviation is not None:
            draws = rng.standard_t(self.freedom, size=(len(replicates) - 1, 1))
            replicates[1:] += draws * self.deviation * np.sqrt(1 / len(mine) + 1 / len(reference))
        found = []
        for g in range(replicates.shape[1]):
            low, high = interval(replicates[1:, g], level)
            narrow = interval(by_document[1:, g], level)
            value = float(replicates[0, g])
            found.append(Estimate(value, low, high, p_value(replicates[1:, g]), (narrow[1] - narrow[0]) / 2))
        return found, replicates
