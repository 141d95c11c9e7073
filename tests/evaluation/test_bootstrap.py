from __future__ import annotations

import numpy as np
import pytest

from seqarch.evaluation.bootstrap import draw_documents, holm, interval, p_value


def test_replicates_are_quotients_of_drawn_documents():
    size = np.array([10.0, 20.0, 30.0, 40.0, 50.0])
    nats = np.array([[10.0, 50.0, 60.0, 120.0, 75.0], [5.0, 25.0, 30.0, 60.0, 37.5]])
    draws = draw_documents("cc", size, 50, seed=3)
    losses = draws.losses(nats)
    assert losses[0] == pytest.approx([315 / 150, 157.5 / 150])
    assert (draws.weights.sum(axis=1) == 5).all()
    for b in range(50):
        drawn = np.repeat(np.arange(5), draws.weights[b].astype(int))
        plain = nats[0, drawn].sum() / size[drawn].sum()
        assert losses[1 + b, 0] == pytest.approx(2.1 + (plain - 2.1) * draws.stretch[b])
    assert losses[1:, 1] == pytest.approx(losses[1:, 0] / 2)  # the same draws for every validation
    assert draws.effective == pytest.approx(150**2 / 5500)


def test_draws_depend_on_domain_and_seed_alone():
    size = np.arange(1.0, 9.0)
    first = draw_documents("cc", size, 20, seed=0)
    assert np.array_equal(first.weights, draw_documents("cc", size * 2, 20, seed=0).weights)
    assert not np.array_equal(first.weights, draw_documents("c4", size, 20, seed=0).weights)
    assert not np.array_equal(first.weights, draw_documents("cc", size, 20, seed=1).weights)


def test_the_interval_of_a_mean_is_student_s():
    """Documents of equal length: the half width is 2.365 · s / √8, with the quantile of t on 7 degrees."""
    values = np.array([1.0, 2.0, 4.0, 4.5, 5.0, 6.0, 7.5, 8.0])
    draws = draw_documents("x", np.ones(8), 60_000, seed=0)
    low, high = interval(draws.losses(values[None])[1:, 0], 0.95)
    assert (high - low) / 2 == pytest.approx(2.365 * values.std(ddof=1) / np.sqrt(8), rel=0.03)


def test_p_values():
    values = np.concatenate([np.full(30, -1.0), np.full(970, 1.0)])
    assert p_value(values) == pytest.approx(2 * 31 / 1001)
    assert p_value(np.ones(999)) == pytest.approx(0.002)
    assert p_value(np.zeros(9)) == 1.0


def test_holm_by_hand():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.6, 0.9]) == [1.0, 1.0]
    assert holm([]) == []
