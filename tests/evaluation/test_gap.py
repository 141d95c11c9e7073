"""The statistics on simulated runs whose gap is known."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from seqarch.evaluation import gap as gap_module
from seqarch.evaluation.gap import BETTER, DEGRADED, EQUAL, OPEN, Curve, Estimate, Gap, compare_architectures, verdict
from tests.evaluation.simulated import Truth, gaps_of, simulate


@pytest.fixture(autouse=True)
def _coarse(monkeypatch):
    """Half of the time would go into points that are only drawn."""
    monkeypatch.setattr(gap_module, "GRID", 3)


def simulated(
    count: int, gaps: list[float], seeds: list[int], truth: Truth, *, margin: float = 0.02, seed: int = 0
) -> list[list[Gap]]:
    """The comparisons of ``count`` simulated studies."""
    rng = np.random.default_rng(seed)
    return [gaps_of(simulate(rng, gaps, seeds, truth), replicates=300, seed=i, margin=margin) for i in range(count)]


def coverage(found: list[list[Gap]], truth: float, target: int = 0) -> float:
    return float(np.mean([f[0].targets[target].low <= truth <= f[0].targets[target].high for f in found]))


@pytest.mark.parametrize(("documents", "gap"), [(10, 0.0), (40, 0.1)])
def test_an_interval_over_documents_covers_the_true_gap(documents, gap):
    """One seed each, no noise of seeds: 95% of 200 intervals, within three standard errors of a binomial count, or a
    little more where documents are few."""
    found = simulated(200, [0.0, gap], [1, 1], Truth(documents=documents))
    for target in range(3):
        assert 0.904 <= coverage(found, gap, target) <= 0.995
    assert all(f[0].seed_deviation is None for f in found)


def test_an_interval_over_documents_and_seeds_covers_the_true_gap():
    """Seeds shift the out-of-domain loss by 0.05, more than the documents' noise; three architectures, two seeds."""
    truth = Truth(documents=160, seeds=0.05)
    found = simulated(100, [0.0, 0.05, 0.0], [2, 2, 2], truth, seed=1)
    assert 0.885 <= coverage(found, 0.05) <= 0.999
    spread = np.sqrt(np.mean([np.square(f[0].seed_deviation) for f in found]))
    assert spread == pytest.approx(0.05 / np.sqrt(2), rel=0.3)  # the mean of two domains, each with noise of its own
    # An interval over the documents alone would be too sure of itself.
    inner = [abs(f[0].targets[0].value - 0.05) <= f[0].targets[0].documents for f in found]
    assert np.mean(inner) < 0.9


def test_a_gap_is_found_and_a_null_is_not():
    large = Truth(documents=160)
    assert sum(f[0].verdict == DEGRADED for f in simulated(20, [0.0, 0.15], [1, 1], large)) >= 19
    assert sum(f[0].verdict == BETTER for f in simulated(20, [0.0, -0.15], [1, 1], large)) >= 19
    null = [f[0].verdict for f in simulated(100, [0.0, 0.0], [1, 1], Truth(documents=40), seed=3)]
    assert sum(v in (DEGRADED, BETTER) for v in null) <= 12  # 5 expected


def test_many_architectures_without_a_gap_seldom_yield_one():
    """Holm: of 40 studies of six null architectures, about 5% have one or more verdicts; of plain intervals many do."""
    found = simulated(40, [0.0] * 7, [1] * 7, Truth(documents=40), seed=2)
    wrong = [any(gap.verdict in (DEGRADED, BETTER) for gap in study) for study in found]
    plain = [any(gap.targets[0].low > 0 or gap.targets[0].high < 0 for gap in study) for study in found]
    assert sum(wrong) <= 7
    assert sum(plain) > sum(wrong)


def test_equal_is_found_with_enough_documents():
    found = simulated(10, [0.0, 0.0], [1, 1], Truth(documents=400), margin=0.12)
    assert all(f[0].verdict == EQUAL for f in found)


def test_the_gap_does_not_depend_on_how_fast_an_architecture_learns():
    """The same line, reached at other losses at other times, and a noiseless test set: the gap is exact."""
    quiet = Truth(documents=30, interaction=0.0, run_interaction=0.0, slope=0.0)
    gap = simulated(1, [0.0, 0.07], [1, 1], quiet)[0][0]
    assert gap.targets[0].value == pytest.approx(0.07, abs=0.01)
    assert gap.at < gap.start
    assert gap.final.value < -0.2  # it learns faster
    assert gap.curve[0][:2] == (gap.at, gap.targets[0].value)
    assert all(a[0] < b[0] for a, b in pairwise(gap.curve))


def curve(x, y):
    return Curve(np.array([x, x]), np.array([y, y])[:, :, None])


def test_between_validations_a_curve_is_straight():
    c = curve([4.0, 3.0, 2.5], [6.0, 5.0, 4.8])
    for x, y in ((4.0, 6.0), (3.25, 5.25), (3.0, 5.0), (2.6, 4.84), (2.5, 4.8)):
        assert c.at(np.array([x, x]))[:, 0] == pytest.approx([y, y])


def test_where_the_loss_rises_neighbours_are_averaged():
    """4, 3, 3.2, 2: the middle two become 3.1; 4, 3, 2, 2.5, 3.1 become 4, 3, and then 2.53 of the last three."""
    c = curve([4.0, 3.0, 3.2, 2.0], [6.0, 5.0, 5.4, 4.0])
    assert c.x[0] == pytest.approx([4.0, 3.1, 2.0])
    assert c.y[0, :, 0] == pytest.approx([6.0, 5.2, 4.0])
    assert curve([4.0, 3.0, 2.0, 2.5, 3.1], [0.0] * 5).x[0] == pytest.approx([4.0, 3.0, 7.6 / 3])


def test_a_gap_by_hand():
    """At 3.0, which the reference has reached: 5.1 against 5.0; at the end 2.0 against 3.0."""
    reference, other = curve([4.0, 3.0], [6.0, 5.0]), curve([4.0, 2.0], [6.2, 4.0])
    ends = [[np.array([3.0, 3.0])], [np.array([2.0, 2.0])]]
    (gap,) = compare_architectures([reference], [[other]], ends, margin=0.02, level=0.95, seed=0)
    assert (gap.at, gap.start) == (3.0, 4.0)
    assert gap.targets[0].value == pytest.approx(0.1)
    assert gap.final.value == -1.0
    assert gap.curve[-1][1] == pytest.approx(0.2)


def test_runs_that_share_no_loss_are_not_decidable():
    reference, other = curve([4.0, 3.0], [6.0, 5.0]), curve([2.9, 2.0], [4.0, 3.0])
    ends = [[np.array([3.0, 3.0])], [np.array([2.0, 2.0])]]
    (gap,) = compare_architectures([reference], [[other]], ends, margin=0.02, level=0.95, seed=0)
    assert (gap.verdict, gap.targets, gap.curve) == (OPEN, [], [])
    assert np.isnan(gap.at)


@pytest.mark.parametrize(
    ("low", "high", "p", "expected"),
    [
        (-0.01, 0.015, 0.5, EQUAL),
        (0.005, 0.015, 0.001, EQUAL),  # different from 0, but not by as much as matters
        (0.01, 0.05, 0.01, DEGRADED),
        (0.01, 0.05, 0.06, OPEN),  # one of many architectures
        (-0.05, -0.01, 0.01, BETTER),
        (-0.05, 0.05, 0.9, OPEN),
        (-0.01, 0.03, 0.2, OPEN),
    ],
)
def test_the_rule_of_verdicts(low, high, p, expected):
    assert verdict(Estimate((low + high) / 2, low, high, p, 0.0), p, 0.02, 0.95) == expected
