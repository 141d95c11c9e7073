"""Which chunk a query selects, and with what probability: arg-max and log-sum-exp over candidates, in blocks.

Shape legend: M batch × key-value heads, N chunks of keys, C tokens a chunk, Q chunks of queries, R query heads a
key-value head, c keys a candidate is scored by (C for exact selection, 1 for its mean key), D head size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from seqarch_top1.tiles import budget, tiles

NONE = -1
"""The index of a query that has no candidate."""


class Route(torch.autograd.Function):
    """Index and probability of the chunk that each query selects.

    A candidate's logit is the log-sum-exp of its c scores, P is the softmax of the logits over the candidates, and the
    index is its arg-max (the smallest one of equals). Only P has a gradient; nothing of size T × N outlives a block.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, keys: Tensor, own: Tensor | None, first: Tensor | None, offset: int
    ) -> tuple[Tensor, Tensor]:
        """See ``route``."""
        M, Q, rows, _ = q.shape
        c = keys.shape[2]
        index = torch.full((M, Q, rows), NONE, dtype=torch.int64, device=q.device)
        best = torch.full((M, Q, rows), -torch.inf, dtype=q.dtype, device=q.device)
        lse = torch.full_like(best, -torch.inf)
        for heads, n0, n1, lo, hi in _query_tiles(q, keys, first, offset):
            q_tile = q[heads, n0:n1].flatten(1, 2)
            parts = []
            for a, b in _key_tiles(q_tile, lo, hi, c):
                s = torch.bmm(q_tile, keys[heads, a:b].flatten(1, 2).mT)
                if c > 1:
                    s = s.unflatten(-1, (b - a, c))
                    top = s.amax(-1)
                    s = s.sub_(top[..., None]).exp_().sum(-1).log_().add_(top)
                parts.append(s)
            logits = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
            _hide(logits, -torch.inf, first, offset, n0, n1, lo)
            top, where = logits.max(-1)
            z = logits.sub_(top.clamp(min=torch.finfo(q.dtype).min)[..., None]).exp_().sum(-1).log_().add_(top)
            shape = (-1, n1 - n0, rows)
            index[heads, n0:n1] = where.add_(lo).masked_fill_(top == -torch.inf, NONE).view(shape)
            best[heads, n0:n1], lse[heads, n0:n1] = top.view(shape), z.view(shape)
        if own is not None:
            lse = torch.logaddexp(lse, own)
            chunk = torch.arange(offset, offset + Q, device=q.device)[:, None]
            index = torch.where(own > best, chunk, index)
            best = torch.maximum(best, own)
        lse.masked_fill_(index == NONE, torch.inf)
        P = (best - lse).exp_()
        ctx.save_for_backward(q, keys, own, first, index, P, lse)
        ctx.offset = offset
        ctx.mark_non_differentiable(index)
        return index, P

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        """With g = dP·P: the logit of m gets g·([m = m*] - P_m), and each of its scores its softmax share of that."""
        q, keys, own, first, index, P, lse = ctx.saved_tensors
        offset = ctx.offset
        Q, rows = q.shape[1:3]
        c = keys.shape[2]
        g = grad_outputs[1] * P
        dq, dkeys, down = torch.zeros_like(q), torch.zeros_like(keys), None
        g_selected = g
        if own is not None:
            is_own = index == torch.arange(offset, offset + Q, device=q.device)[:, None]
            down = g * (is_own.to(g.dtype) - (own - lse).exp())
            g_selected = g.masked_fill(is_own, 0)
        for heads, n0, n1, lo, hi in _query_tiles(q, keys, first, offset):
            q_tile = q[heads, n0:n1].flatten(1, 2)
            dq_tile = torch.zeros_like(q_tile)
            g_tile, gs_tile, P_tile, lse_tile, index_tile = (
                t[heads, n0:n1].flatten(1, 2)[..., None] for t in (g, g_selected, P, lse, index)
            )
            index_tile = (index_tile - lo).clamp_(0, hi - lo - 1)
            factor = None
            if c > 1:
                factor = -g_tile.repeat(1, 1, hi - lo)
                factor.scatter_add_(-1, index_tile, gs_tile / P_tile.clamp(min=torch.finfo(P.dtype).tiny))
            for a, b in _key_tiles(dq_tile, lo, hi, c):
                k_tile = keys[heads, a:b].flatten(1, 2)
                w = torch.bmm(q_tile, k_tile.mT).sub_(lse_tile).exp_()
                if factor is None:
                    _hide(w, 0, first, offset, n0, n1, a)
                    w.mul_(-g_tile).scatter_add_(-1, index_tile, gs_tile)
                else:
                    w = w.unflatten(-1, (b - a, c))
                    _hide(w, 0, first, offset, n0, n1, a)
                    w = w.mul_(factor[..., a - lo : b - lo, None]).flatten(-2)
                dq_tile.baddbmm_(w, k_tile)
                dkeys[heads, a:b] += torch.bmm(w.mT, q_tile).unflatten(1, (b - a, c))
            dq[heads, n0:n1] = dq_tile.unflatten(1, (n1 - n0, rows))
        return dq, dkeys, down, None, None


def route(q: Tensor, keys: Tensor, own: Tensor | None, first: Tensor | None, offset: int) -> tuple[Tensor, Tensor]:
    """The chunk that each query selects among the candidates before its own, and the probability of that.

    Args:
        q: ``[M, Q, R·C, D]``; a score is q·k.
        keys: ``[M, N, c, D]``: what a chunk is scored by.
        own: ``[M, Q, R·C]``, logit of the query's own chunk where that is a candidate too.
        first: int64 ``[Q, R·C]``: the first candidate of the query at this place; None for 0.
        offset: Chunk number of the first chunk of queries.

    Returns:
        int64 ``[M, Q, R·C]``, ``NONE`` where there is no candidate, and the probability, 0 there.
    """
    return Route.apply(q, keys, own, first, offset)  # pyright: ignore[reportReturnType]


def own_logit(q: Tensor, k: Tensor, exact: bool, visible: Tensor) -> Tensor:
    """The logit of each query's own chunk, of which it sees the past only.

    Exact: the log-sum-exp of its scores. Otherwise to first order, log(n/C) + mean of its n scores (a complete chunk's
    logit leaves out log C).

    Args:
        q: ``[M, Q, R·C, D]``; a score is q·k.
        k: ``[M, Q, C, D]``, the chunks of the queries themselves.
        exact: Log-sum-exp instead of its first order.
        visible: bool ``[Q or 1, R·C, C]``.

    Returns:
        ``[M, Q, R·C]``.
    """
    if exact:
        return (q @ k.mT).masked_fill(~visible, -torch.inf).logsumexp(-1)
    count = visible.sum(-1)
    mean = (visible.to(k.dtype) / count[..., None]) @ k
    return (q * mean).sum(-1) + (count / k.shape[2]).log().to(q.dtype)


def _query_tiles(q: Tensor, keys: Tensor, first: Tensor | None, offset: int):
    """Blocks of queries that have candidates: heads, chunks [n0, n1) of queries, candidates [lo, hi) of any of them."""
    M, Q, rows, _ = q.shape
    c = keys.shape[2]
    width = max(offset + Q - 1, 1) if c == 1 else 512
    for heads, n0, n1 in tiles(M, Q, rows * width, q):
        lo, hi = (0 if first is None else int(first[n0:n1].min())), offset + n1 - 1
        if lo < hi:
            yield heads, n0, n1, lo, hi


def _key_tiles(like: Tensor, lo: int, hi: int, c: int):
    """Ranges of candidates of which one block of scores is held at a time."""
    step = hi - lo if c == 1 else max(1, budget(like) // (like.shape[0] * like.shape[1] * c))
    for a in range(lo, hi, step):
        yield a, min(a + step, hi)


def _hide(x: Tensor, value: float, first: Tensor | None, offset: int, n0: int, n1: int, a: int) -> None:
    """Write ``value`` over what is no candidate, in ``x`` ``[heads, (n1 - n0)·rows, candidates from a on, …]``."""
    rows = x.shape[1] // (n1 - n0)
    for n in range(n0, n1):
        column = max(offset + n - a, 0)
        if column < x.shape[2]:
            x[:, (n - n0) * rows : (n - n0 + 1) * rows, column:].fill_(value)
    if first is not None:
        before = torch.arange(a, a + x.shape[2], device=x.device) < first[n0:n1].reshape(-1, 1)
        x.masked_fill_(before if x.ndim == 3 else before[..., None], value)
