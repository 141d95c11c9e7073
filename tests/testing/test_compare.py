from __future__ import annotations

import pytest
import torch

from seqarch.testing.compare import (
    ContractError,
    expect_close,
    expect_gradients_close,
    expect_identical,
    relative_rms,
    token_error,
    worst,
)


def test_worst_is_relative_to_the_largest_magnitude() -> None:
    assert worst(torch.tensor([1.0, -3.0]), torch.tensor([1.0, -4.0])) == pytest.approx(0.25)
    assert worst(torch.tensor([float("nan")]), torch.tensor([1.0])) == float("inf")
    assert worst(torch.tensor([1.0]), torch.tensor([float("inf")])) == float("inf")


def test_expect_close() -> None:
    one = torch.ones(2, 3)
    expect_close(one + 1e-4, one, 2e-4, "clause", "here")
    with pytest.raises(ContractError, match=r"^clause: at here the largest error is 0\.01 of the scale, above 0\.001"):
        expect_close(one + 0.01, one, 1e-3, "clause", "here")
    with pytest.raises(ContractError, match=r"shape is \[2, 2\], not \[2, 3\]"):
        expect_close(one[:, :2], one, 1.0, "clause", "here")
    with pytest.raises(ContractError, match="all zeros, so nothing can be compared"):
        expect_close(one * 0, one * 0, 1.0, "clause", "here")
    with pytest.raises(ContractError, match="largest error is inf"):
        expect_close(one * float("nan"), one, 1.0, "clause", "here")


def test_expect_identical() -> None:
    x = torch.tensor([1.0, float("nan")])
    expect_identical(x, x.clone(), "clause", "here")
    for dtype in (torch.bool, torch.int32):
        with pytest.raises(ContractError, match="2 of 3 values differ"):
            expect_identical(torch.ones(3, dtype=dtype), torch.tensor([1, 0, 0]).to(dtype), "clause", "here")
    with pytest.raises(ContractError, match="1 of 1 values differ"):
        expect_identical(torch.tensor([1.0 + 1e-7]), torch.tensor([1.0]), "clause", "here")


def test_gradients_are_compared_on_their_own_scale() -> None:
    expected = {"large": torch.tensor([1.0]), "small": torch.tensor([1e-3]), "noise": torch.tensor([1e-17])}
    expect_gradients_close({**expected, "noise": torch.tensor([-1e-17])}, expected, 1e-9, "clause", "here")
    with pytest.raises(ContractError, match=r"gradient of small differs by 0\.1 of its scale"):
        expect_gradients_close({**expected, "small": torch.tensor([1.1e-3])}, expected, 1e-2, "clause", "here")
    with pytest.raises(ContractError, match="gradient of large differs by nan"):
        expect_gradients_close({**expected, "large": torch.tensor([float("nan")])}, expected, 1e-2, "clause", "here")
    nothing = {"x": torch.zeros(2)}
    with pytest.raises(ContractError, match="every expected gradient is zero"):
        expect_gradients_close(nothing, nothing, 1.0, "clause", "here")


def test_measures_of_reduced_precision() -> None:
    expected = torch.ones(1, 5, 4)
    assert relative_rms(expected * 1.1, expected) == pytest.approx(0.1)
    one_token_off = expected.clone()
    one_token_off[0, 2] = -1.0
    assert relative_rms(one_token_off, expected) == pytest.approx((4 / 5) ** 0.5)
    assert token_error(one_token_off, expected) == 0.0
    assert token_error(expected * 1.1, expected) == pytest.approx(0.1)
    assert token_error(one_token_off, expected, 1.0) > 0.0
