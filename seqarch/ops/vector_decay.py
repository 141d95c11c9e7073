"""Linear attention whose state forgets by channel: the recurrence of RWKV-5 and RWKV-6, and of gated linear attention.

Shape legend: B batch, T tokens, H heads, K key and V value channels, N chunks, C chunk size, P = N·B·H.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from seqarch.ops.chunks import ChunkLayout, fitting_chunk_size
from seqarch.ops.decayed_scores import decay_products, decayed_scores, decayed_scores_backward

CHUNK_SIZE = 32


def vector_decay(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    *,
    bonus: Tensor | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = CHUNK_SIZE,
) -> tuple[Tensor, Tensor]:
    """S_t = diag(exp(g_t)) S_{t-1} + k_t v_tᵀ, read before or after the update.

    With a bonus u, o_t = S_{t-1}ᵀ q_t + (q_t · (u ⊙ k_t)) v_t (Peng et al. 2024, arXiv 2404.05892); without one,
    o_t = S_tᵀ q_t (Yang et al. 2023, arXiv 2312.06635). Computed in chunks, in at least float32; for backward the
    inputs, the scores inside chunks and the states between chunks are kept.

    Args:
        q: ``[B, T, H, K]``.
        k: ``[B, T, H, K]``.
        v: ``[B, T, H, V]``.
        g: ``[B, T, H, K]``, log decays, at most 0.
        bonus: ``[H, K]``, u.
        initial_state: ``[B, H, K, V]``, by default zeros.
        cu_seqlens: int32 ``[n+1]``, boundaries of packed documents (B = 1); each begins with a state of zeros, but for
            the first, which begins with ``initial_state``.
        chunk_size: C, a power of two. Shorter sequences take a shorter one.

    Returns:
        o ``[B, T, H, V]`` in the dtype of v, and the state after the last token, ``[B, H, K, V]``, in at least float32.
    """
    layout = ChunkLayout(q.shape[1], fitting_chunk_size(q.shape[1], chunk_size), cu_seqlens)
    return _VectorDecay.apply(q, k, v, g, bonus, initial_state, layout)


class _VectorDecay(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        bonus: Tensor | None,
        initial_state: Tensor | None,
        layout: ChunkLayout,
    ) -> tuple[Tensor, Tensor]:
        B, _, H, K = q.shape
        V = v.shape[-1]
        qc, kc, vc, e = _chunks(q, k, v, g, layout)
        rows = qc if bonus is not None else qc * e
        A, read, carried, total = decayed_scores(rows.unsqueeze(2), kc.unsqueeze(2), e)
        A, read, carried = A[:, 0, 0], read.squeeze(2), carried.squeeze(2)
        A.diagonal(dim1=1, dim2=2).copy_((qc * kc if bonus is None else qc * kc * _by_chunk(bonus, qc)).sum(-1))

        # states[n] is the one that chunk n begins with; the last is the final one.
        N = layout.n_chunks
        states = qc.new_empty(N + 1, B * H, K, V)
        states[0] = 0 if initial_state is None else initial_state.flatten(0, 1)
        states[1:] = (carried.mT @ vc).view(N, B * H, K, V)
        total = total.view(N, B * H, K, 1)
        for n in range(N):
            if n not in layout.resets:
                states[n + 1].addcmul_(total[n], states[n])
        for n in layout.resets:
            states[n] = 0

        o = torch.baddbmm(A @ vc, read, states[:N].flatten(0, 1))
        ctx.save_for_backward(q, k, v, g, bonus, initial_state, A, states)
        ctx.layout = layout
        return layout.join_heads(o, H).to(v.dtype), states[N].view(B, H, K, V).clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        q, k, v, g, bonus, initial_state, A, states = ctx.saved_tensors
        layout: ChunkLayout = ctx.layout
        H, N = q.shape[2], layout.n_chunks
        qc, kc, vc, e = _chunks(q, k, v, g, layout)
        rows = qc if bonus is not None else qc * e
        do = layout.split_heads(grad_outputs[0].to(vc.dtype))
        prefix, suffix, total = decay_products(e)

        d_states = torch.empty_like(states)
        d_states[:N] = ((rows * prefix).mT @ do).view_as(states[:N])
        d_states[N] = grad_outputs[1].flatten(0, 1)
        decay = total.view(N, -1, total.shape[-1], 1)
        for n in reversed(range(N)):
            if n in layout.resets:
                d_states[n] = 0
            else:
                d_states[n].addcmul_(decay[n], d_states[n + 1])
        before, after = states[:N].flatten(0, 1), d_states[1:].flatten(0, 1)

        dv = torch.baddbmm(A.mT @ do, kc * suffix, after)
        d_rows, d_columns, dg = decayed_scores_backward(
            (do @ vc.mT)[:, None, None],
            (do @ before.mT).unsqueeze(2),
            (vc @ after.mT).unsqueeze(2),
            (before * after).sum(-1),
            rows.unsqueeze(2),
            kc.unsqueeze(2),
            e,
        )
        d_rows, d_columns = d_rows.squeeze(2), d_columns.squeeze(2)

        diagonal = (do * vc).sum(-1, keepdim=True)
        d_bonus = None
        if bonus is None:
            dg += d_rows * rows
            dq = d_rows.mul_(e).addcmul_(diagonal, kc)
            dk = d_columns.addcmul_(diagonal, qc)
        else:
            weighted = diagonal * _by_chunk(bonus, qc)
            dq, dk = d_rows.addcmul_(weighted, kc), d_columns.addcmul_(weighted, qc)
            d_bonus = (diagonal * qc * kc).sum(1).view(-1, H, bonus.shape[-1]).sum(0).to(bonus.dtype)
        d_initial = None
        if initial_state is not None:
            d_initial = d_states[0].view(initial_state.shape).to(initial_state.dtype)
        grads = [layout.join_heads(x, H).to(t.dtype) for x, t in zip((dq, dk, dv, dg), (q, k, v, g), strict=True)]
        return *grads, d_bonus, d_initial, None


def _chunks(q: Tensor, k: Tensor, v: Tensor, g: Tensor, layout: ChunkLayout) -> tuple[Tensor, ...]:
    """q, k, v and exp(g), ``[P, C, …]``, in at least float32."""
    wide = torch.promote_types(q.dtype, torch.float32)
    qc, kc, vc = (layout.split_heads(x.to(wide)) for x in (q, k, v))
    return qc, kc, vc, layout.split_heads(g.to(wide)).exp()


def _by_chunk(bonus: Tensor, x: Tensor) -> Tensor:
    """``[H, K]`` to ``[P, 1, K]``: the heads vary fastest among the chunks."""
    return bonus.to(x.dtype).repeat(x.shape[0] // bonus.shape[0], 1).unsqueeze(1)
