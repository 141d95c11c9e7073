"""Causal scores whose every channel decays between key and query, without an exponential of a positive number.

    A_ij = Σ_c r_ic c_jc Π_{j<t<i} e_tc   for j < i,   e = exp(g), 0 ≤ e ≤ 1

The factored form (r e^G)(c e^-G)ᵀ overflows where decays are strong. Here blocks of s = 1, 2, 4, … tokens are joined in
pairs: a row of the second block meets a column of the first, and the decay between them splits at the border, into what
the row's own block loses before it (``prefix``) and what the column's own block loses after it (``suffix``). Both are
products of factors ≤ 1, both are one product away from those of the next size, and all pairs of one size are one
batched matrix product. The gradient of g goes down the same tree and adds only terms that do decay by g_t: the usual
difference of two cumulative sums would leave rounding noise where the decay is strong and the gradient vanishes.

Written for autograd.Functions: nothing here is meant to be differentiated by autograd.

Shape legend: P chunks of all heads and sequences, C tokens of a chunk (a power of two), K channels, R rows and S
columns of each token, s block size, M = C / 2s pairs of blocks.
"""

from __future__ import annotations

import torch
from torch import Tensor


def decay_products(e: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Products of e ``[P, C, K]`` over the tokens of the chunk before each one, over those after it, and over all.

    The first two are ``[P, C, K]``, the last is ``[P, K]``.
    """
    prefix, suffix, total = torch.ones_like(e), torch.ones_like(e), e
    s = 1
    while s < e.shape[1]:
        total = _join(prefix, suffix, total, s)
        s *= 2
    return prefix, suffix, total[:, 0]


def decayed_scores(rows: Tensor, columns: Tensor, e: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Scores of all rows and columns of each chunk, and what meets the states before and after it.

    Args:
        rows: ``[P, C, R, K]``, r.
        columns: ``[P, C, S, K]``, c.
        e: ``[P, C, K]``, the factor of each token.

    Returns:
        A ``[P, R, S, C, C]``, 0 on and above the diagonal; rows times the decay since the chunk's start; columns times
        the decay until its end; and the decay over the whole chunk, ``[P, K]``.
    """
    P, C, R, _ = rows.shape
    S = columns.shape[2]
    A = rows.new_zeros(P, R, S, C, C)
    prefix, suffix, total = torch.ones_like(e), torch.ones_like(e), e
    s = 1
    while s < C:
        r, c = _second(rows, s), _first(columns, s)
        if s > 1:
            r, c = r * _second(prefix, s).unsqueeze(2), c * _first(suffix, s).unsqueeze(2)
        scores = r.flatten(1, 2) @ c.flatten(1, 2).mT
        _pairs(A, s).copy_(scores.view(P, C // (2 * s), s, R, s, S).permute(0, 3, 5, 2, 4, 1))
        total = _join(prefix, suffix, total, s)
        s *= 2
    return A, rows * prefix.unsqueeze(2), columns * suffix.unsqueeze(2), total[:, 0]


def decayed_scores_backward(
    grad_scores: Tensor,
    grad_read: Tensor,
    grad_carried: Tensor,
    grad_total: Tensor,
    rows: Tensor,
    columns: Tensor,
    e: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of ``rows``, ``columns`` and g = log(e), from those of the four results of ``decayed_scores``.

    What ``grad_scores`` holds on and above the diagonal is not read.
    """
    _, C, R, K = rows.shape
    S = columns.shape[2]
    d_rows, d_columns = torch.zeros_like(rows), torch.zeros_like(columns)
    prefix, suffix, total = torch.ones_like(e), torch.ones_like(e), e
    scaling: list[tuple[Tensor, Tensor]] = []  # by size, from s = 2: x · dx of what scales with prefix and suffix
    s = 1
    while s < C:
        before, after = _second(prefix, s).unsqueeze(2), _first(suffix, s).unsqueeze(2)
        r, c = _second(rows, s), _first(columns, s)
        if s > 1:
            r, c = r * before, c * after
        g = _pairs(grad_scores, s).permute(0, 5, 3, 1, 4, 2).reshape(-1, s * R, s * S)
        dr = (g @ c.flatten(1, 2)).view(-1, s, R, K)
        dc = (g.mT @ r.flatten(1, 2)).view(-1, s, S, K)
        if s > 1:
            _second(d_rows, s).addcmul_(dr, before)
            _first(d_columns, s).addcmul_(dc, after)
            scaling.append((_products(r, dr), _products(c, dc)))
        else:
            _second(d_rows, s).copy_(dr)
            _first(d_columns, s).copy_(dc)
        total = _join(prefix, suffix, total, s)
        s *= 2
    d_rows.addcmul_(grad_read, prefix.unsqueeze(2))
    d_columns.addcmul_(grad_carried, suffix.unsqueeze(2))

    # Logarithmic derivatives, from the largest blocks down to single tokens, whose total is e.
    of_prefix = _products(rows, grad_read).mul_(prefix)
    of_suffix = _products(columns, grad_carried).mul_(suffix)
    of_total = (total[:, 0] * grad_total).unsqueeze(1)
    while s > 1:
        s //= 2
        before, after = _second(of_prefix, s), _first(of_suffix, s)
        of_pair = of_total.reshape(-1, 1, K)
        of_blocks = torch.cat((before.sum(1, keepdim=True), after.sum(1, keepdim=True)), 1).add_(of_pair)
        of_total = of_blocks.view(e.shape[0], -1, K)
        if s > 1:
            of_rows, of_columns = scaling.pop()
            before.add_(of_rows)
            after.add_(of_columns)
    return d_rows, d_columns, of_total


def _products(x: Tensor, dx: Tensor) -> Tensor:
    """x · dx ``[…, K]``, summed over dimension 2, the rows or columns of a token."""
    total = x[:, :, 0] * dx[:, :, 0]
    for i in range(1, x.shape[2]):
        total.addcmul_(x[:, :, i], dx[:, :, i])
    return total


def _first(x: Tensor, s: int) -> Tensor:
    """First blocks of all pairs, ``[P·M, s, …]``."""
    return x.view(-1, 2, s, *x.shape[2:])[:, 0]


def _second(x: Tensor, s: int) -> Tensor:
    """Second blocks of all pairs, ``[P·M, s, …]``."""
    return x.view(-1, 2, s, *x.shape[2:])[:, 1]


def _pairs(A: Tensor, s: int) -> Tensor:
    """The scores of second blocks against first ones, a view ``[P, R, S, s, s, M]`` of A."""
    P, R, S, C, _ = A.shape
    M = C // (2 * s)
    return A.view(P, R, S, M, 2, s, M, 2, s)[:, :, :, :, 1, :, :, 0].diagonal(dim1=3, dim2=5)


def _join(prefix: Tensor, suffix: Tensor, total: Tensor, s: int) -> Tensor:
    """From blocks of s tokens to blocks of 2s: changes ``prefix`` and ``suffix``, returns the new ``total``."""
    P, n, K = total.shape
    first, second = total.view(P, n // 2, 2, K).unbind(2)
    _second(prefix, s).mul_(first.reshape(-1, 1, K))
    _first(suffix, s).mul_(second.reshape(-1, 1, K))
    return first * second
