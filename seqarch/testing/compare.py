"""How the checks compare tensors, and what they raise."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


class ContractError(AssertionError):
    """A mixer breaks a clause of the contract."""


class InapplicableError(Exception):
    """A check found that it has nothing to check on this mixer."""


def worst(actual: Tensor, expected: Tensor) -> float:
    """Largest absolute difference over the largest magnitude expected; infinite where either is not finite."""
    a, e = actual.detach().double(), expected.detach().double()
    if not (a.isfinite().all() and e.isfinite().all()):
        return float("inf")
    if a.numel() == 0:
        return 0.0
    return ((a - e).abs().max() / e.abs().max().clamp(min=1e-300)).item()


def expect_close(actual: Tensor, expected: Tensor, tolerance: float, clause: str, where: str) -> None:
    """Raise ``ContractError`` unless the shapes are equal and ``worst`` is within the tolerance.

    Args:
        actual: What the mixer gave.
        expected: What it should have given; all zeros would compare nothing, so it is an error.
        tolerance: Relative to the largest magnitude expected.
        clause: The clause of the contract that is at stake.
        where: The sizes and options of this comparison.
    """
    if actual.shape != expected.shape:
        raise ContractError(f"{clause}: at {where} the shape is {list(actual.shape)}, not {list(expected.shape)}")
    if expected.numel() and not expected.any():
        raise ContractError(f"{clause}: at {where} the expected tensor is all zeros, so nothing can be compared")
    error = worst(actual, expected)
    if not error <= tolerance:
        raise ContractError(
            f"{clause}: at {where} the largest error is {error:.3g} of the scale, above {tolerance:.3g}"
        )


def expect_identical(actual: Tensor, expected: Tensor, clause: str, where: str) -> None:
    """Raise ``ContractError`` unless both hold the same bits' values (NaN equals NaN)."""
    if actual.shape != expected.shape:
        raise ContractError(f"{clause}: at {where} the shape is {list(actual.shape)}, not {list(expected.shape)}")
    if not torch.equal(actual.nan_to_num(nan=12345.0), expected.nan_to_num(nan=12345.0)):
        differ = int((actual != expected).sum())
        raise ContractError(
            f"{clause}: at {where} {differ} of {actual.numel()} values differ, the largest error is "
            f"{worst(actual, expected):.3g} of the scale"
        )


def expect_gradients_close(
    actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float, clause: str, where: str
) -> None:
    """Compare gradients by name.

    A gradient that is mathematically zero is rounding noise, so that each is compared on its own scale or on 10⁻⁴ of
    the largest of all, whichever is more.
    """
    largest = max((float(g.abs().max()) for g in expected.values() if g.numel()), default=0.0)
    if not largest > 0.0:
        raise ContractError(f"{clause}: at {where} every expected gradient is zero or NaN, so nothing can be compared")
    for name, e in expected.items():
        scale = max(float(e.abs().max()), 1e-4 * largest)
        difference = (actual[name] - e).abs().max().item()
        if not difference <= tolerance * scale:
            raise ContractError(
                f"{clause}: at {where} the gradient of {name} differs by {difference / scale:.3g} of its scale, "
                f"above {tolerance:.3g}"
            )


def relative_rms(actual: Tensor, expected: Tensor) -> float:
    """Root mean square of the error over that of the expected values."""
    a, e = actual.detach().double(), expected.detach().double()
    return ((a - e).square().mean() / e.square().mean()).sqrt().item()


def token_error(actual: Tensor, expected: Tensor, quantile: float = 0.5) -> float:
    """Quantile over the tokens of ``[B, T, D]`` of the relative error of the token's vector: robust to a few."""
    a, e = actual.detach().double(), expected.detach().double()
    return ((a - e).norm(dim=-1) / e.norm(dim=-1)).flatten().quantile(quantile).item()
