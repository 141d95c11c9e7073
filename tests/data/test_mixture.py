from __future__ import annotations

import pickle

import numpy as np
import pytest

from seqarch.data.mixture import BLOCK, SampleOrder, check_weights, largest_remainder

WINDOWS = {"cc": 700, "c4": 450, "book": 90}


def test_each_block_has_the_shares_by_largest_remainder() -> None:
    weights = {"cc": 0.5, "c4": 1 / 3, "book": 1 / 6}
    order = SampleOrder(WINDOWS, weights, seed=0)
    for block in range(3):
        domain, _ = order(np.arange(block * BLOCK, (block + 1) * BLOCK))
        counts = np.bincount(domain, minlength=3)
        # 4096/3 = 1365.33 and 4096/6 = 682.67: the one place that is left goes to the larger remainder.
        assert counts.tolist() == [2048, 1365, 683]


def test_largest_remainder() -> None:
    assert largest_remainder([0.5, 0.5], 3) == [2, 1]
    assert largest_remainder([0.47, 0.16, 0.158, 0.12, 0.061, 0.031], 100) == [47, 16, 16, 12, 6, 3]


def test_every_window_once_an_epoch_in_another_order_each_time() -> None:
    order = SampleOrder(WINDOWS, {"cc": 2, "c4": 1, "book": 1}, seed=5)
    domain, window = order(np.arange(40 * BLOCK))
    for d, n in enumerate(WINDOWS.values()):
        # The place inside a block is permuted, so the epochs are those of the counter, which a block holds whole.
        count = order.counts[d]
        blocks = np.repeat(np.arange(40), BLOCK)[domain == d]
        assert np.array_equal(np.bincount(blocks), np.full(40, count))
        seen = np.bincount(window[domain == d], minlength=n)
        epochs = 40 * count // n
        assert seen.min() >= epochs
        assert seen.max() <= epochs + 1
    first = order(np.arange(BLOCK))
    second = order(np.arange(BLOCK, 2 * BLOCK))
    assert (first[0] != second[0]).any()


def test_single_domain_epochs_are_permutations() -> None:
    n = BLOCK // 4  # so that a block is four whole epochs
    order = SampleOrder({"cc": n}, {"cc": 1.0}, seed=1)
    _, window = order(np.arange(BLOCK))
    assert np.array_equal(np.bincount(window), np.full(n, 4))


def test_does_not_depend_on_how_it_is_asked() -> None:
    order = SampleOrder(WINDOWS, {"cc": 1, "c4": 1, "book": 0.1}, seed=9)
    whole = np.stack(order(np.arange(BLOCK - 50, BLOCK + 50)))
    single = np.stack([np.concatenate(order(np.array([i]))) for i in range(BLOCK - 50, BLOCK + 50)], axis=1)
    again = np.stack(pickle.loads(pickle.dumps(order))(np.arange(BLOCK - 50, BLOCK + 50)))
    assert np.array_equal(whole, single)
    assert np.array_equal(whole, again)
    other = np.stack(SampleOrder(WINDOWS, {"cc": 1, "c4": 1, "book": 0.1}, seed=10)(np.arange(100)))
    assert not np.array_equal(np.stack(order(np.arange(100))), other)


def test_weight_zero_leaves_a_domain_out() -> None:
    order = SampleOrder(WINDOWS, {"cc": 1, "c4": 0, "book": 1}, seed=0)
    assert order.domains == ["cc", "book"]


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"cc": -1.0, "c4": 2.0}, "cc has weight -1"),
        ({"cc": float("nan"), "c4": 2.0}, "cc has weight nan"),
        ({"cc": 0.0, "c4": 0.0}, "all are zero"),
        ({"cc": 1.0, "c4": 1.0, "wiki": 1.0}, "wiki is no training domain"),
        ({"cc": 1.0}, "no weight for c4"),
    ],
)
def test_bad_weights(weights: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=f"weights: .*{message}"):
        check_weights(weights, ["cc", "c4"])


def test_a_share_too_small_for_a_block_is_an_error() -> None:
    with pytest.raises(ValueError, match="share of book"):
        SampleOrder(WINDOWS, {"cc": 1, "c4": 1, "book": 1e-6}, seed=0)
