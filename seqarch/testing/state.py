"""The state: continuing an earlier call gives what one call would have given."""

from __future__ import annotations

import io

import torch
from torch import Tensor

from seqarch.mixer import State
from seqarch.testing.compare import (
    ContractError,
    InapplicableError,
    expect_close,
    expect_gradients_close,
    expect_identical,
)
from seqarch.testing.subject import Subject, gradients, run, run_pieces


def _splits(subject: Subject) -> list[list[int]]:
    C, T = subject.C, subject.T
    two = [[t, T - t] for t in sorted({1, 2, 3, C - 1, C, C + 1, T - 1}) if 0 < t < T]
    return [[T], *two, [2, C, 1, T - C - 3], [C, C, 3]]


def check_state_split(subject: Subject) -> None:
    """Any division into successive calls gives the output of one call, the first of them a call with an empty state."""
    stack = subject.build()
    x = subject.noise(2, subject.T)
    whole, tolerance = run(stack, x), subject.state_tolerance(stack)
    for lengths in _splits(subject):
        with torch.no_grad():
            y = run_pieces(stack, x, lengths)
        expect_close(y, whole, tolerance, "state: successive calls must equal one call", f"pieces of {lengths}")


def check_step_by_step(subject: Subject) -> None:
    """Decoding one token at a time gives the output of one call."""
    stack = subject.build()
    x = subject.noise(2, subject.T)
    with torch.no_grad():
        y = run_pieces(stack, x, [1] * subject.T)
    clause = "state: one token at a time must equal one call"
    expect_close(y, run(stack, x), subject.state_tolerance(stack), clause, f"T = {subject.T}")


def check_state_split_gradients(subject: Subject) -> None:
    """Where the state carries gradient, two successive calls have the gradients of one call."""
    stack = subject.build()
    x = subject.noise(2, subject.T).requires_grad_()
    dy = subject.noise(2, subject.T, seed=4)
    with torch.enable_grad():
        _, state = stack(x[:, : subject.C], state=stack.init_state(2, subject.T, x.dtype))
    if not any(t.requires_grad for s in state for t in s.values()):
        raise InapplicableError("the returned state carries no gradient")
    expected = gradients(stack, stack(x)[0], dy, x)
    for t in sorted({1, subject.C, subject.C + 1}):
        actual = gradients(stack, run_pieces(stack, x, [t, subject.T - t]), dy, x)
        expect_gradients_close(
            actual,
            expected,
            10 * subject.state_tolerance(stack),
            "state: successive calls must have the gradients of one call",
            f"pieces of {[t, subject.T - t]}",
        )


def check_state_batch_first(subject: Subject) -> None:
    """A flat dict of tensors with the batch first: its rows can be reordered between two calls."""
    stack, C = subject.build(), subject.C
    B = 5  # no size that a convolution's tail may have too
    x = subject.noise(B, subject.T)
    order = torch.tensor([2, 0, 1, 4, 3])
    state = stack.init_state(B, subject.T, x.dtype)
    _expect_batch_first(state, B, "after init_state")
    with torch.no_grad():
        y, state = stack(x[:, :C], state=state)
    _expect_batch_first(state, B, "after a call")
    state = [{name: t[order] for name, t in layer.items()} for layer in state]
    with torch.no_grad():
        z, _ = stack(x[order, C:], state=state)
    expect_close(
        torch.cat((y[order], z), dim=1),
        run(stack, x)[order],
        subject.state_tolerance(stack),
        "state: reordering the rows of its tensors must reorder the sequences",
        f"rows {order.tolist()}",
    )


def _expect_batch_first(state: list[State], B: int, moment: str) -> None:
    for layer in state:
        for name, t in layer.items():
            if not isinstance(t, Tensor):
                raise ContractError(f"state: '{name}' {moment} is a {type(t).__name__}, not a tensor")
            if t.ndim == 0 or t.shape[0] != B:
                raise ContractError(f"state: '{name}' {moment} has shape {list(t.shape)}, the batch {B} is not first")


def check_state_dtype(subject: Subject) -> None:
    """A state tensor keeps the dtype that ``init_state`` gave it, float32 in a bfloat16 model say.

    Without the argument ``dtype`` it is that for the mixer's own parameters.
    """
    for dtype in subject.tags.dtypes:
        stack = subject.build(dtype)
        x = subject.noise(2, 3, dtype=dtype)
        state: list[State] = stack.init_state(2, 3, dtype)
        promised = [{name: t.dtype for name, t in layer.items()} for layer in state]
        default = {name: t.dtype for name, t in stack.mixer.init_state(2, 3).items()}
        if default != promised[-1]:
            raise ContractError(
                f"state: with parameters of {dtype} init_state(…, dtype={dtype}) gives {promised[-1]}, init_state "
                f"without dtype gives {default}"
            )
        with torch.no_grad():
            for piece in x.split(1, dim=1):
                _, state = stack(piece, state=state)
        found = [{name: t.dtype for name, t in layer.items()} for layer in state]
        if found != promised:
            raise ContractError(
                f"state: with parameters of {dtype} init_state promises {promised[-1]}, a call returns {found[-1]}"
            )


def check_state_save(subject: Subject) -> None:
    """A state survives ``torch.save`` and ``torch.load(weights_only=True)``."""
    stack, C = subject.build(), subject.C
    x = subject.noise(2, subject.T)
    with torch.no_grad():
        _, state = stack(x[:, :C], state=stack.init_state(2, subject.T, x.dtype))
        buffer = io.BytesIO()
        torch.save(state, buffer)
        buffer.seek(0)
        try:
            loaded = torch.load(buffer, weights_only=True)
        except Exception as e:
            raise ContractError(f"state: torch.load(weights_only=True) refuses a saved state: {e}") from e
        actual, expected = stack(x[:, C:], state=loaded)[0], stack(x[:, C:], state=state)[0]
    expect_identical(actual, expected, "state: a saved and loaded state must continue as the original", f"C = {C}")
