"""Attention of each query over its own chunk and one selected chunk, under one softmax.

The own chunks are regular blocks; for the selected ones the queries are sorted into slots. The two parts meet through
their log-sum-exps.

Shape legend: M batch × key-value heads, N chunks of keys, C tokens a chunk, Q chunks of queries, R query heads a
key-value head, D head size; a query is a row of M·Q·R·C.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from seqarch_top1.slots import Slots, arrange
from seqarch_top1.tiles import tiles


def _softmax(s: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax over the last dimension, and the log-sum-exp ``[…]``."""
    p = s.softmax(-1)
    return p, s.amax(-1).sub_(p.amax(-1).log_())


def hidden(segment: Tensor | None, n0: int, n1: int, rows: int, C: int, device: torch.device) -> Tensor:
    """What a query may not see of its own chunk: its future, and other documents; bool ``[n1 - n0 or 1, R·C, C]``."""
    i = torch.arange(C, device=device)
    mask = (i > i[:, None])[None]
    if segment is not None:
        segment = segment[n0:n1]
        mask = mask | (segment[:, None] != segment[:, :, None])
    return mask.repeat(1, rows // C, 1)


class ChunkAttention(torch.autograd.Function):
    """See ``chunk_attention``."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        index: Tensor,
        P: Tensor,
        segment: Tensor | None,
        offset: int,
        local: bool,
        element: bool,
    ) -> Tensor:
        """Own part, selected part, and their meeting."""
        M, Q, rows, D = q.shape
        N, C = k.shape[1:3]
        q_flat, k_flat, v_flat = q.view(-1, D), k.view(M * N, C, D), v.view(M * N, C, D)
        o, lse = torch.empty_like(q), torch.empty_like(P)
        top = torch.empty_like(P) if element else None
        pick = torch.empty_like(index) if element else None
        for heads, n0, n1 in tiles(M, Q, rows * C, q):
            own = slice(offset + n0, offset + n1)
            shape = (-1, n1 - n0, rows)
            s = torch.bmm(q[heads, n0:n1].flatten(0, 1), k[heads, own].flatten(0, 1).mT).view(*shape, C)
            s.masked_fill_(hidden(segment, n0, n1, rows, C, q.device), -torch.inf)
            if top is not None and pick is not None:
                top[heads, n0:n1], pick[heads, n0:n1] = s.max(-1)
            p, lse[heads, n0:n1] = _softmax(s)
            o[heads, n0:n1] = torch.bmm(p.flatten(0, 1), v[heads, own].flatten(0, 1)).view(*shape, D)
        number = torch.arange(offset, offset + Q, device=q.device)[:, None]
        if not local:
            lse.masked_fill_(index != number, -torch.inf)
            index = torch.where(index == number, -1, index)
        slots = arrange(index, N, C)
        S = len(slots.query)
        o_slots, lse_slots = q.new_empty(S + 1, D), q.new_full((S + 1,), -torch.inf)
        o_slots[S] = 0
        top_slots = torch.full_like(lse_slots, -torch.inf) if element else None
        pick_slots = torch.zeros_like(lse_slots, dtype=torch.int64) if element else None
        for first, n, longest, a in slots.groups:
            at, chunk = slice(a, a + n * longest), slots.chunk[first : first + n]
            q_group = q_flat.index_select(0, slots.query[at].clamp(max=len(q_flat) - 1)).view(n, longest, D)
            s = torch.bmm(q_group, k_flat.index_select(0, chunk).mT)
            if top_slots is not None and pick_slots is not None:
                top_group, pick_group = s.max(-1)
                top_slots[at], pick_slots[at] = top_group.flatten(), (pick_group + chunk[:, None] * C).flatten()
            p, lse_group = _softmax(s)
            lse_slots[at] = lse_group.flatten()
            torch.bmm(p, v_flat.index_select(0, chunk), out=o_slots[at].view(n, longest, D))
        lse_selected = lse_slots[slots.slot].view_as(lse)
        share = (lse_selected - lse).sigmoid_()
        lse = torch.logaddexp(lse, lse_selected)
        o.view(-1, D).lerp_(o_slots.index_select(0, slots.slot), share.view(-1, 1))
        hard = None
        if top is not None and pick is not None and top_slots is not None and pick_slots is not None:
            if not local:
                top.masked_fill_(lse_selected > -torch.inf, -torch.inf)
            base = torch.arange(M, device=q.device).view(M, 1, 1) * N + number
            won = top_slots[slots.slot].view_as(top) >= top
            pick = torch.where(won, pick_slots[slots.slot].view_as(pick), pick.add_(base * C))
            share = won.to(q.dtype)
            hard = v.view(-1, D).index_select(0, pick.flatten()).view_as(o)
        ctx.save_for_backward(q, k, v, o, lse, share, index, segment, pick, hard, slots.query, slots.slot, slots.chunk)
        ctx.groups, ctx.offset, ctx.local = slots.groups, offset, local
        return o if hard is None else hard

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        """Softmax attention's gradient from recomputed probabilities; dP is do · the selected chunk's part of o."""
        q, k, v, o, lse, share, index, segment, pick, hard, query, slot, chunk = ctx.saved_tensors
        slots, offset = Slots(query, slot, chunk, ctx.groups), ctx.offset
        do = grad_outputs[0].contiguous()
        M, Q, rows, D = q.shape
        N, C = k.shape[1:3]
        delta = (do * o).sum(-1)
        dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        own_lse = lse if ctx.local else lse.masked_fill(index >= 0, torch.inf)
        for heads, n0, n1 in tiles(M, Q, rows * C, q):
            own = slice(offset + n0, offset + n1)
            shape = (-1, n1 - n0)
            q_tile, k_tile, v_tile, do_tile, lse_tile, delta_tile = (
                t.flatten(0, 1)
                for t in (
                    q[heads, n0:n1], k[heads, own], v[heads, own],
                    do[heads, n0:n1], own_lse[heads, n0:n1, :, None], delta[heads, n0:n1, :, None],
                )
            )  # fmt: skip
            p = torch.bmm(q_tile, k_tile.mT).sub_(lse_tile).exp_()
            p.view(*shape, rows, C).masked_fill_(hidden(segment, n0, n1, rows, C, q.device), 0)
            ds = torch.bmm(do_tile, v_tile.mT).sub_(delta_tile).mul_(p)
            dq[heads, n0:n1] = torch.bmm(ds, k_tile).view(*shape, rows, D)
            dk[heads, own] = torch.bmm(ds.mT, q_tile).view(*shape, C, D)
            if pick is None:
                dv[heads, own] = torch.bmm(p.mT, do_tile).view(*shape, C, D)
        S = len(slots.query)
        q_flat, do_flat = q.view(-1, D), do.view(-1, D)
        k_flat, v_flat, dk_flat, dv_flat = (t.view(M * N, C, D) for t in (k, v, dk, dv))
        lse_slots = torch.cat((lse.flatten(), lse.new_full((1,), torch.inf)))[slots.query]
        dq_slots, sum_slots = q.new_empty(S + 1, D), q.new_empty(S + 1)
        dq_slots[S] = sum_slots[S] = 0
        for first, n, longest, a in slots.groups:
            at, chunk = slice(a, a + n * longest), slots.chunk[first : first + n]
            query = slots.query[at].clamp(max=len(q_flat) - 1)
            q_group, do_group = (t.index_select(0, query).view(n, longest, D) for t in (q_flat, do_flat))
            k_group, v_group = k_flat.index_select(0, chunk), v_flat.index_select(0, chunk)
            p = torch.bmm(q_group, k_group.mT).sub_(lse_slots[at].view(n, longest, 1)).exp_()
            ds = torch.bmm(do_group, v_group.mT).sub_(delta.view(-1)[query].view(n, longest, 1)).mul_(p)
            sum_slots[at] = ds.sum(-1).flatten()
            torch.bmm(ds, k_group, out=dq_slots[at].view(n, longest, D))
            dk_flat.index_add_(0, chunk, torch.bmm(ds.mT, q_group))
            if pick is None:
                dv_flat.index_add_(0, chunk, torch.bmm(p.mT, do_group))
        dq.view(-1, D).add_(dq_slots.index_select(0, slots.slot))
        if pick is None:
            dP = sum_slots[slots.slot].view_as(delta).addcmul_(delta, share)
            if not ctx.local:
                dP = delta
        else:
            dv.view(-1, D).index_add_(0, pick.flatten(), do_flat)
            dP = (do * hard).sum(-1)
            if ctx.local:
                dP.mul_(share)
        return dq, dk, dv, None, dP, None, None, None, None


def chunk_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    index: Tensor,
    P: Tensor,
    *,
    segment: Tensor | None,
    offset: int,
    local: bool,
    element: bool,
) -> Tensor:
    """Attention over the selected and the own chunk, one softmax; and the straight-through gradient of the selection.

    Args:
        q: ``[M, Q, R·C, D]``, contiguous; a score is q·k.
        k: ``[M, N, C, D]``, contiguous.
        v: ``[M, N, C, D]``, contiguous.
        index: int64 ``[M, Q, R·C]``, the chunk of each query, -1 for none; with ``local=False`` it may be the own one.
        P: ``[M, Q, R·C]``, the probability of that chunk: the part of the output that comes from the chunk is scaled by
            1 + P - sg(P), which shows in the gradient only.
        segment: int ``[Q, C]``, the document of each place; None where there is only one.
        offset: Chunk number of the first chunk of queries.
        local: The own chunk is always seen; otherwise only where ``index`` names it.
        element: Instead of softmax, the value with the largest score among all these tokens (Top-1 Element): weights
            are onehot(j*) + p - sg(p).

    Returns:
        ``[M, Q, R·C, D]``.
    """
    return ChunkAttention.apply(  # pyright: ignore[reportReturnType]
        q, k, v, index, P, segment, offset, local, element
    )
