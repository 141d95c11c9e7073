"""No output depends on what comes after it, in values and in gradients."""

from __future__ import annotations

import torch

from seqarch.testing.compare import ContractError, expect_close, expect_identical
from seqarch.testing.subject import Subject, run


def _cuts(subject: Subject) -> list[int]:
    C, T = subject.C, subject.T
    return sorted({t for t in (1, 2, C - 1, C, C + 1, 2 * C, T - 1) if 0 < t < T})


def check_causality(subject: Subject) -> None:
    """Outputs up to t are bit-identical under any change after t (within rounding if not ``bitwise_prefix``)."""
    clause = "causality: outputs up to t may not change with inputs after t"
    x, other = subject.noise(2, subject.T), subject.noise(2, subject.T, seed=3)
    for dtype in (torch.float64, torch.float32):
        if dtype not in subject.tags.dtypes or (dtype != subject.dtype and not subject.tags.bitwise_prefix):
            continue
        stack = subject.build(dtype)
        y = run(stack, x.to(dtype))
        for t in _cuts(subject):
            for scale in (1.0, 8.0):
                changed = torch.cat((x[:, :t], scale * other[:, t:]), dim=1).to(dtype)
                prefix = run(stack, changed)[:, :t]
                where = f"t = {t} of {subject.T}, {dtype}, suffix of scale {scale}"
                if subject.tags.bitwise_prefix:
                    expect_identical(prefix, y[:, :t], clause, where)
                else:
                    expect_close(prefix, y[:, :t], subject.tolerance, clause, where)


def check_causality_gradients(subject: Subject) -> None:
    """The gradient of outputs up to t with respect to inputs after t is zero."""
    clause = "causality: the gradient of outputs up to t must vanish for inputs after t"
    stack = subject.build()
    x = subject.noise(2, subject.T).requires_grad_()
    y = stack(x)[0]
    dy = subject.noise(2, subject.T, seed=4)
    for t in _cuts(subject):
        (dx,) = torch.autograd.grad(y[:, :t], x, dy[:, :t], retain_graph=True)
        leak, scale = dx[:, t:].abs().max().item(), dx[:, :t].abs().max().item()
        if not leak <= 1e-3 * subject.tolerance * scale:
            raise ContractError(f"{clause}: at t = {t} of {subject.T} it is {leak:.3g}, against {scale:.3g} before t")
