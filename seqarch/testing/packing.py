"""Packed documents: each is treated as if it were alone, in values and in gradients."""

from __future__ import annotations

from itertools import accumulate, pairwise

import torch
from torch import Tensor

from seqarch.testing.compare import expect_close, expect_gradients_close
from seqarch.testing.subject import Subject, gradients, run


def _layouts(subject: Subject) -> list[list[int]]:
    """Lengths of documents; an empty one stands for a boundary that is listed twice, as padded ``cu_seqlens`` have."""
    C = subject.C
    return [[C, C], [1, 2, C - 1, C + 1, 3], [C + 2, 1, 1, 2 * C + 3], [3, 0, C, 0]]


def _boundaries(lengths: list[int]) -> tuple[Tensor, list[slice]]:
    bounds = [0, *accumulate(lengths)]
    return torch.tensor(bounds, dtype=torch.int32), [slice(a, b) for a, b in pairwise(bounds) if b > a]


def check_packed_documents(subject: Subject) -> None:
    """Documents packed with ``cu_seqlens`` give the outputs of separate documents, short convolutions included."""
    stack = subject.build()
    for lengths in _layouts(subject):
        cu_seqlens, documents = _boundaries(lengths)
        x = subject.noise(1, sum(lengths))
        expected = torch.cat([run(stack, x[:, d]) for d in documents], dim=1)
        clause = "packing: packed documents must equal separate documents"
        expect_close(run(stack, x, cu_seqlens=cu_seqlens), expected, subject.tolerance, clause, f"lengths {lengths}")


def check_packed_gradients(subject: Subject) -> None:
    """The gradients of packed documents are those of separate documents."""
    stack = subject.build()
    for lengths in _layouts(subject)[1:3]:
        cu_seqlens, documents = _boundaries(lengths)
        x = subject.noise(1, sum(lengths)).requires_grad_()
        dy = subject.noise(1, sum(lengths), seed=4)
        separate = torch.cat([stack(x[:, d])[0] for d in documents], dim=1)
        expect_gradients_close(
            gradients(stack, stack(x, cu_seqlens=cu_seqlens)[0], dy, x),
            gradients(stack, separate, dy, x),
            10 * subject.tolerance,
            "packing: packed documents must have the gradients of separate documents",
            f"lengths {lengths}",
        )
