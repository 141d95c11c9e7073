from __future__ import annotations

import numpy as np
import pytest

from seqarch.data.permutation import KeyedPermutation, derive_key


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 7, 16, 17, 63, 64, 65, 1000, 4096, 4097, 65537])
def test_is_a_bijection(n: int) -> None:
    for key in (0, 1, 2**64 - 1):
        assert np.array_equal(np.sort(KeyedPermutation(n, key)(np.arange(n))), np.arange(n))


def test_is_injective_on_a_huge_range() -> None:
    n = (1 << 40) + 12345
    index = np.concatenate([np.arange(5000), np.arange(n - 5000, n)])
    out = KeyedPermutation(n, 3)(index)
    assert len(np.unique(out)) == len(index)
    assert out.min() >= 0
    assert out.max() < n
    assert abs(out.mean() / n - 0.5) < 0.02


def test_keys_give_different_and_scattered_orders() -> None:
    n = 10007
    a, b = KeyedPermutation(n, 1)(np.arange(n)), KeyedPermutation(n, 2)(np.arange(n))
    assert (a == b).mean() < 0.01
    for order in (a, b):
        assert abs(np.corrcoef(np.arange(n), order)[0, 1]) < 0.05
        assert (np.diff(order) == 1).mean() < 0.01


def test_values_are_fixed() -> None:
    # A change here changes the data order of every run that is resumed.
    assert KeyedPermutation(1000, 42)(np.arange(8)).tolist() == FIXED
    assert derive_key(0, "window", "cc", 1) == FIXED_KEY


def test_shape_is_kept_and_the_range_checked() -> None:
    permutation = KeyedPermutation(10, 0)
    assert permutation(np.arange(6).reshape(2, 3)).shape == (2, 3)
    with pytest.raises(ValueError, match="index must be in 0 … 9"):
        permutation(np.array([10]))
    with pytest.raises(ValueError, match="n must be between"):
        KeyedPermutation(0, 0)


FIXED = [814, 210, 657, 217, 161, 455, 7, 593]
FIXED_KEY = 6903127855375420729
