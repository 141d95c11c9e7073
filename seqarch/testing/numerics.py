"""Gradients against finite differences, and low precision against float64."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.gradcheck import GradcheckError, gradcheck
from torch.func import functional_call

from seqarch.testing.compare import ContractError, expect_gradients_close, relative_rms, token_error
from seqarch.testing.subject import Stack, Subject, gradients, run_pieces

# Determinism has a check of its own, and autograd never asks a mixer for the gradient of nothing.
_GRADCHECK: dict[str, Any] = {
    "eps": 1e-6,
    "atol": 1e-6,
    "rtol": 1e-5,
    "nondet_tol": 1e-9,
    "check_undefined_grad": False,
}


def check_gradcheck(subject: Subject) -> None:
    """Gradients of inputs and parameters agree with finite differences, on both sides of a small chunk's end."""
    stack = subject.build(torch.float64)
    named = {name: p.detach().clone().requires_grad_() for name, p in stack.named_parameters()}

    def function(x: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        return functional_call(stack, dict(zip(named, parameters, strict=True)), (x,))[0]

    for T in sorted({6, subject.C + 2}):
        x = subject.noise(1, T, dtype=torch.float64).requires_grad_()
        try:
            if T == 6:  # every entry of the Jacobian; the parameters' would take minutes
                gradcheck(lambda x: stack(x)[0], (x,), **_GRADCHECK)
            # One random direction for each pair of an input and the output.
            gradcheck(function, (x, *named.values()), fast_mode=True, **_GRADCHECK)
        except GradcheckError as e:
            first = " ".join(str(e).split())[:300]
            raise ContractError(f"gradient: at T = {T} it is not the derivative of forward: {first}") from e


def check_straight_through(subject: Subject) -> None:
    """A gradient that is no derivative is still finite and linear in the output's gradient."""
    stack = subject.build()
    x = subject.noise(2, subject.T).requires_grad_()
    y = stack(x)[0]
    one, two = subject.noise(2, subject.T, seed=4), subject.noise(2, subject.T, seed=5)
    first, second, mixed = [_retained(stack, y, dy, x) for dy in (one, two, 2.0 * one - 3.0 * two)]
    bad = [name for name, g in mixed.items() if not g.isfinite().all()]
    if bad:
        raise ContractError(f"gradient: at T = {subject.T} these are not finite: {', '.join(bad)}")
    expected = {name: 2.0 * g - 3.0 * second[name] for name, g in first.items()}
    clause = "gradient: it must be linear in the output's gradient"
    expect_gradients_close(mixed, expected, 10 * subject.tolerance, clause, f"T = {subject.T}")


def _retained(stack: Stack, y: torch.Tensor, dy: torch.Tensor, x: torch.Tensor) -> dict[str, torch.Tensor]:
    named = {"x": x, **dict(stack.named_parameters())}
    found = torch.autograd.grad(y, list(named.values()), dy, allow_unused=True, retain_graph=True)
    return {n: torch.zeros_like(t) if g is None else g for (n, t), g in zip(named.items(), found, strict=True)}


def check_reduced_precision(subject: Subject) -> None:
    """Lower precisions stay within ``tolerances`` of float64 on the same, already rounded parameters.

    Outputs by relative root-mean-square error; where the tags say discontinuous by the median over the tokens, because
    a rounding error may change what some of them select. Input gradients by the error that nine of ten tokens stay
    within: where a norm meets an output that is almost nothing, as at a sequence's first tokens, the gradient is large
    and ill-conditioned, and such a token alone would make up the mean.
    """
    for dtype in subject.tags.dtypes:
        if dtype == torch.float64:
            continue
        low, high = subject.build(dtype), subject.build(torch.float64)
        high.load_state_dict(low.state_dict())
        x = subject.noise(2, subject.T, dtype=dtype).requires_grad_()
        x64 = x.detach().double().requires_grad_()
        y, expected = low(x)[0], high(x64)[0]
        allowed = subject.tags.tolerances.get(dtype)
        if allowed is None:
            raise ContractError(f"precision: the tag dtypes lists {dtype}, the tag tolerances has no entry for it")
        if y.dtype != dtype:
            raise ContractError(f"precision: the output for an input of {dtype} is {y.dtype}")
        measure = token_error if subject.tags.discontinuous else relative_rms
        with torch.no_grad():
            steps = run_pieces(low, x, [1] * subject.T)
        errors = {"output": measure(y, expected), "output, token by token,": measure(steps, expected)}
        if not subject.tags.discontinuous:
            dy = subject.noise(2, subject.T, dtype=dtype, seed=4)
            actual = gradients(low, y, dy, x)["x"]
            exact = gradients(high, expected, dy.double(), x64)["x"]
            errors["input gradient, but for a tenth of the tokens,"] = token_error(actual, exact, 0.9)
        kind = "median token" if subject.tags.discontinuous else "relative"
        for name, error in errors.items():
            if not error <= allowed:
                raise ContractError(
                    f"precision: the {kind} error of the {name} in {dtype} is {error:.3g}, above {allowed:.3g}"
                )
