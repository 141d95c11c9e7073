"""Lengths, padding, batches, memory layout, repetition."""

from __future__ import annotations

import torch

from seqarch.testing.compare import ContractError, expect_close, expect_gradients_close, expect_identical
from seqarch.testing.subject import Subject, gradients, run


def _lengths(subject: Subject) -> list[int]:
    """Around the chunk size, and shorter than the usual short convolution of 4."""
    C = subject.C
    return sorted({T for T in (1, 2, 3, C - 1, C, C + 1, 2 * C + 3) if T > 0})


def check_lengths(subject: Subject) -> None:
    """Any length works: the output has the input's shape and dtype and is finite, as are the gradients."""
    stack = subject.build()
    for T in _lengths(subject):
        x = subject.noise(2, T).requires_grad_()
        y, _ = stack(x)
        if y.shape != x.shape or y.dtype != x.dtype or y.device != x.device:
            raise ContractError(
                f"lengths: at T = {T} the output is {y.dtype} {list(y.shape)} on {y.device}, "
                f"the input {x.dtype} {list(x.shape)} on {x.device}"
            )
        found = {"the output": y, **gradients(stack, y, torch.ones_like(y), x)}
        bad = [name for name, t in found.items() if not t.isfinite().all()]
        if bad:
            raise ContractError(f"lengths: at T = {T} these are not finite: {', '.join(bad)}")


def check_right_padding(subject: Subject) -> None:
    """Zeros appended on the right change nothing before them."""
    stack = subject.build()
    x = subject.noise(2, subject.T)
    for T in _lengths(subject):
        y = run(stack, x[:, :T])
        for extra in (1, subject.C):
            padded = torch.cat((x[:, :T], x.new_zeros(2, extra, subject.d_model)), dim=1)
            clause = "padding: zeros on the right may not change what is before them"
            expect_close(run(stack, padded)[:, :T], y, subject.tolerance, clause, f"T = {T}, {extra} zeros")


def check_batch(subject: Subject) -> None:
    """Sequences of a batch do not see each other: alone, or in another order, each gives the same.

    The gradients of a batch are those of its sequences, concatenated (inputs) or added (parameters).
    """
    stack = subject.build()
    x, dy = subject.noise(3, subject.T), subject.noise(3, subject.T, seed=4)
    y, order = run(stack, x), [2, 0, 1]
    clause = "batch: a sequence may not depend on the others of its batch"
    for i in range(3):
        expect_close(run(stack, x[i : i + 1]), y[i : i + 1], subject.tolerance, clause, f"sequence {i} alone")
    expect_close(run(stack, x[order]), y[order], subject.tolerance, clause, f"order {order}")

    x.requires_grad_()
    together = gradients(stack, stack(x)[0], dy, x)
    alone = gradients(stack, torch.cat([stack(sequence)[0] for sequence in x.split(1)]), dy, x)
    clause = "batch: the gradients of sequences alone must add up to those of the batch"
    expect_gradients_close(alone, together, 10 * subject.tolerance, clause, "a batch of 3")


def check_non_contiguous(subject: Subject) -> None:
    """Inputs and output gradients of any strides give what their contiguous copies give."""
    stack, T, D = subject.build(), subject.T, subject.d_model
    layouts = {
        "time first": subject.noise(T, 2).transpose(0, 1),
        "every other channel": torch.cat((subject.noise(2, T), subject.noise(2, T, seed=5)), dim=2)[..., ::2],
        "expanded batch": subject.noise(1, T).expand(2, T, D),
    }
    for layout, strided in layouts.items():
        clause, where = "strides: an input that is not contiguous must give what its copy gives", f"layout '{layout}'"
        dy = subject.noise(T, 2, seed=4).transpose(0, 1)
        x, copy = strided.requires_grad_(), strided.detach().contiguous().requires_grad_()
        y, expected = stack(x)[0], stack(copy)[0]
        expect_close(y, expected, subject.tolerance, clause, where)
        expect_gradients_close(
            gradients(stack, y, dy, x),
            gradients(stack, expected, dy.contiguous(), copy),
            10 * subject.tolerance,
            clause,
            where,
        )


def check_nothing_mutated(subject: Subject) -> None:
    """A call changes neither its arguments (a state excepted) nor the mixer's parameters and buffers."""
    stack = subject.build()
    x, dy = subject.noise(1, subject.T), subject.noise(1, subject.T, seed=4)
    bounds = torch.tensor([0, 2, subject.T], dtype=torch.int32)
    for cu_seqlens in [None, bounds] if subject.tags.packs_documents else [None]:
        watched = {"x": x, "the output's gradient": dy, **dict(stack.named_parameters()), **dict(stack.named_buffers())}
        if cu_seqlens is not None:
            watched["cu_seqlens"] = cu_seqlens
        before = {name: t.detach().clone() for name, t in watched.items()}
        for train in (False, True):
            with torch.set_grad_enabled(train):
                y, _ = stack(x, cu_seqlens=cu_seqlens)
                if train:
                    y.backward(dy)
            for name, t in watched.items():
                clause = f"mutation: a call may not change {name}"
                expect_identical(t.detach(), before[name], clause, f"T = {subject.T}")


def check_determinism(subject: Subject) -> None:
    """The same call gives the same bits, whatever was called before and whatever the random state."""
    stack = subject.build()
    dy = subject.noise(2, subject.T, seed=4)
    results = []
    for repetition in range(2):
        x = subject.noise(2, subject.T).requires_grad_()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(repetition)
            y, _ = stack(x)
            results.append({"the output": y.detach(), **gradients(stack, y, dy, x)})
        run(stack, subject.noise(1, 3, seed=6))  # leaves traces only if the mixer keeps some
    for name, first in results[0].items():
        clause = f"determinism: {name} must be the same in a second call"
        expect_identical(results[1][name], first, clause, f"T = {subject.T}")
