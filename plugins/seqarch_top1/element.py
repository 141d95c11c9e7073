"""Top-1 Element: the value of the best key, with the gradient of softmax; score matrices are held in blocks only.

Shape legend: B batch, T queries, S keys (the last T are the queries' own), H heads, G key-value heads, M = B·G,
R = H/G, D head size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from seqarch.ops.rotary import positions
from seqarch_top1.tiles import budget, working

_ROWS = 256  # queries a block


class Top1(torch.autograd.Function):
    """See ``top1_element``."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, start: Tensor | None, soft: bool) -> Tensor:
        """Arg-max, and for the gradient log-sum-exp and softmax output, over one range of keys after another."""
        M, R, T, D = q.shape
        pick = torch.zeros(M, R, T, dtype=torch.int64, device=q.device)
        lse, o = (q.new_empty(M, R, T), torch.empty_like(q)) if soft else (None, None)
        for heads, t0, t1, lo, hi, step in _query_tiles(q, k, start):
            q_tile = q[heads, :, t0:t1].flatten(1, 2)
            top = q.new_full(q_tile.shape[:2], -torch.inf)
            best = torch.zeros_like(top, dtype=torch.int64)
            total, acc = torch.zeros_like(top), torch.zeros_like(q_tile)
            for a in range(lo, hi, step):
                b = min(a + step, hi)
                s = torch.bmm(q_tile, k[heads, a:b].mT)
                _hide(s, -torch.inf, q, k, start, t0, t1, a)
                high, where = s.max(-1)
                better = high > top
                best = torch.where(better, where.add_(a), best)
                new = torch.where(better, high, top)
                if soft:
                    decay = (top - new).exp_().nan_to_num_(0.0)  # both -inf while nothing is visible
                    p = s.sub_(new.clamp(min=torch.finfo(q.dtype).min)[..., None]).exp_()
                    total = total * decay + p.sum(-1)
                    acc = torch.baddbmm(acc.mul_(decay[..., None]), p, v[heads, a:b])
                top = new
            shape = (-1, R, t1 - t0)
            pick[heads, :, t0:t1] = best.view(shape)
            if lse is not None and o is not None:
                lse[heads, :, t0:t1] = (top + total.log()).view(shape)
                o[heads, :, t0:t1] = acc.div_(total[..., None]).view(*shape, D)
        ctx.save_for_backward(q, k, v, start, pick, lse, o)
        return _gather(v, pick)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        """dV from the hard selection, dS = p(dp - Σ p dp) from the softmax, whose probabilities are recomputed."""
        q, k, v, start, pick, lse, o = ctx.saved_tensors
        do = grad_outputs[0]
        M, R, _, D = q.shape
        delta = (do * o).sum(-1)
        dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        row = pick + torch.arange(M, device=q.device).view(M, 1, 1) * k.shape[1]
        dv.view(-1, D).index_add_(0, row.flatten(), do.reshape(-1, D))
        for heads, t0, t1, lo, hi, step in _query_tiles(q, k, start):
            q_tile, do_tile, lse_tile, delta_tile = (
                t[heads, :, t0:t1].flatten(1, 2) for t in (q, do, lse[..., None], delta[..., None])
            )
            dq_tile = torch.zeros_like(q_tile)
            for a in range(lo, hi, step):
                b = min(a + step, hi)
                p = torch.bmm(q_tile, k[heads, a:b].mT).sub_(lse_tile).exp_()
                _hide(p, 0, q, k, start, t0, t1, a)
                ds = torch.bmm(do_tile, v[heads, a:b].mT).sub_(delta_tile).mul_(p)
                dq_tile.baddbmm_(ds, k[heads, a:b])
                dk[heads, a:b] += torch.bmm(ds.mT, q_tile)
            dq[heads, :, t0:t1] = dq_tile.unflatten(1, (R, t1 - t0))
        return dq, dk, dv, None, None


def _gather(v: Tensor, pick: Tensor) -> Tensor:
    """Rows ``pick`` ``[M, R, T]`` of ``v`` ``[M, S, D]``."""
    M, S, D = v.shape
    row = pick + torch.arange(M, device=v.device).view(M, 1, 1) * S
    return v.view(-1, D).index_select(0, row.flatten()).view(*pick.shape, D)


def _query_tiles(q: Tensor, k: Tensor, start: Tensor | None):
    """Blocks: heads, queries [t0, t1), the range [lo, hi) of keys that they may see, and how many keys at a time."""
    M, R, T, _ = q.shape
    past = k.shape[1] - T
    rows = min(T, max(1, _ROWS // R))
    for t0 in range(0, T, rows):
        t1 = min(t0 + rows, T)
        lo, hi = (0 if start is None else int(start[t0])), past + t1
        heads = min(M, max(1, budget(q) // (R * rows * (hi - lo))))
        step = max(1, budget(q) // (heads * R * rows))
        for m in range(0, M, heads):
            yield slice(m, min(m + heads, M)), t0, t1, lo, hi, step


def _hide(s: Tensor, value: float, q: Tensor, k: Tensor, start: Tensor | None, t0: int, t1: int, a: int) -> None:
    """Write ``value`` over what is invisible, in ``s`` ``[heads, R·(t1 - t0), keys from a on]``."""
    past, b = k.shape[1] - q.shape[2], a + s.shape[2]
    s = s.unflatten(1, (-1, t1 - t0))
    future = max(past + t0 + 1, a)  # the first key that is future to any of the queries
    if future < b:
        query = torch.arange(past + t0, past + t1, device=s.device)[:, None]
        s[..., future - a :].masked_fill_(torch.arange(future, b, device=s.device) > query, value)
    if start is not None and int(start[t1 - 1]) > a:
        s.masked_fill_(torch.arange(a, b, device=s.device) < start[t0:t1, None], value)


@torch.compiler.disable(recursive=True)
def top1_element(q: Tensor, k: Tensor, v: Tensor, *, scale: float, cu_seqlens: Tensor | None = None) -> Tensor:
    """The value of the key with the largest score of the past, the smallest index among equals.

    The gradient is straight-through: weights are onehot(j*) + p - sg(p) with p the softmax over the past. Time T·S,
    memory T + S, forward and backward.

    Args:
        q: ``[B, T, H, D]``.
        k: ``[B, S, G, D]``, G divides H, S ≥ T; the last T are the queries' own.
        v: ``[B, S, G, D]``.
        scale: Factor of the scores q·k.
        cu_seqlens: int32 ``[n+1]``, boundaries of packed documents (B = 1, S = T).

    Returns:
        ``[B, T, H, D]``, in at least float32.
    """
    B, T, H, D = q.shape
    start = None
    if cu_seqlens is not None:
        start = torch.arange(T, device=q.device) - positions(T, cu_seqlens=cu_seqlens, device=q.device)
    soft = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    q = (working(q) * scale).transpose(1, 2).reshape(B * k.shape[2], -1, T, D)
    k, v = (working(t).transpose(1, 2).flatten(0, 1).contiguous() for t in (k, v))
    o: Tensor = Top1.apply(q.contiguous(), k, v, start, soft)  # pyright: ignore[reportAssignmentType]
    return o.view(B, H, T, D).transpose(1, 2)
