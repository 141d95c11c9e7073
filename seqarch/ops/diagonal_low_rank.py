"""Linear attention whose state changes by a diagonal and a rank-one matrix: the recurrence of RWKV-7.

For each head, with a state S ``[K, V]`` and decays e^g a channel:

    S_t = diag(e^{g_t}) S_{t-1} + b_t (a_tᵀ S_{t-1}) + k_t v_tᵀ,   o_t = S_tᵀ q_t

which is S_t = S_{t-1} (diag(e^{g_t}) + a_t b_tᵀ) + v_t k_tᵀ for the transposed state of the literature (Peng et al.
2025, arXiv 2503.14456). Inside a chunk with the state S₀ at its start, what a reads, w_t = S_{t-1}ᵀ a_t, solves a unit
lower triangular system. With the decayed scores of rows q e^g and a against columns k and b, rows decayed since the
chunk's start (X) and columns decayed until its end (Y):

    (I - A_ab) W = a_X S₀ + A_ak V
    O = q_X S₀ + A_qk V + A_qb W
    S₁ = diag(e^{G_C}) S₀ + k_Yᵀ V + b_Yᵀ W

Everything but S is computed for all chunks at once, and with W_S = (I - A_ab)⁻¹ a_X the state at a chunk's end is one
matrix product from that at its start: S₁ = (diag(e^{G_C}) + b_Yᵀ W_S) S₀ + Z.

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


def diagonal_low_rank(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    g: Tensor,
    *,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = CHUNK_SIZE,
) -> tuple[Tensor, Tensor]:
    """Run the recurrence above over a sequence, in chunks and in at least float32.

    For backward, the inputs, the scores inside chunks and the states between chunks are kept.

    Args:
        q: ``[B, T, H, K]``.
        k: ``[B, T, H, K]``.
        v: ``[B, T, H, V]``.
        a: ``[B, T, H, K]``, what is read of the state.
        b: ``[B, T, H, K]``, where that is written.
        g: ``[B, T, H, K]``, log decays, at most 0.
        initial_state: ``[B, H, K, V]``, by default zeros.
        cu_seqlens: int32 ``[n+1]``, boundaries of packed documents (B = 1). The initial state is that of the first, the
            final state that of the last.
        chunk_size: C, a power of two. Shorter sequences take a shorter one.

    Returns:
        o ``[B, T, H, V]`` in the dtype of v, and the state after the last token, ``[B, H, K, V]``, in at least float32.
    """
    layout = ChunkLayout(q.shape[1], fitting_chunk_size(q.shape[1], chunk_size), cu_seqlens)
    return _DiagonalLowRank.apply(q, k, v, a, b, g, initial_state, layout)


class _DiagonalLowRank(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        a: Tensor,
        b: Tensor,
        g: Tensor,
        initial_state: Tensor | None,
        layout: ChunkLayout,
    ) -> tuple[Tensor, Tensor]:
        B, _, H, K = q.shape
        N, C, V = layout.n_chunks, layout.chunk_size, v.shape[-1]
        qc, rows, columns, vc, e = _chunks(q, k, v, a, b, g, layout)
        A, read, carried, total = decayed_scores(rows, columns, e)
        # A token's own k and b do not decay before its q.
        A[:, 0].diagonal(dim1=2, dim2=3).copy_((columns * qc.unsqueeze(2)).sum(-1).mT)
        eye = torch.eye(C, dtype=A.dtype, device=A.device)
        inverse = torch.linalg.solve_triangular(
            -A[:, 1, 1], eye.expand(A.shape[0], C, C), upper=False, unitriangular=True
        )

        W_S = inverse @ read[:, :, 1]
        W = inverse @ (A[:, 1, 0] @ vc)  # but for what it has of the states
        transition = _transition(total, carried, W_S).view(N, B * H, K, K)
        # states[n] is the one that chunk n begins with; the last is the final one.
        states = qc.new_empty(N + 1, B * H, K, V)
        states[0] = 0 if initial_state is None else initial_state.flatten(0, 1)
        written = torch.baddbmm(carried[:, :, 0].mT @ vc, carried[:, :, 1].mT, W)
        states[1:] = written.view(N, B * H, K, V)
        for n in range(N):
            if n not in layout.resets:
                states[n + 1].baddbmm_(transition[n], states[n])
        for n in layout.resets:
            states[n] = 0
        before = states[:N].flatten(0, 1)
        W.baddbmm_(W_S, before)
        o = (A[:, 0, 0] @ vc).baddbmm_(A[:, 0, 1], W).baddbmm_(read[:, :, 0], before)
        ctx.save_for_backward(q, k, v, a, b, g, initial_state, A, inverse, states)
        ctx.layout = layout
        return layout.join_heads(o, H).to(v.dtype), states[N].view(B, H, K, V).clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        q, k, v, a, b, g, initial_state, A, inverse, states = ctx.saved_tensors
        layout: ChunkLayout = ctx.layout
        H, N, C = q.shape[2], layout.n_chunks, layout.chunk_size
        qc, rows, columns, vc, e = _chunks(q, k, v, a, b, g, layout)
        prefix, suffix, total = decay_products(e)
        read, carried = rows * prefix.unsqueeze(2), columns * suffix.unsqueeze(2)
        W_S = inverse @ read[:, :, 1]
        before = states[:N].flatten(0, 1)
        W = torch.baddbmm(inverse @ (A[:, 1, 0] @ vc), W_S, before)
        do = layout.split_heads(grad_outputs[0].to(vc.dtype))

        d_states = torch.empty_like(states)
        d_states[:N] = (torch.baddbmm(read[:, :, 0], A[:, 0, 1], W_S).mT @ do).view_as(states[:N])
        d_states[N] = grad_outputs[1].flatten(0, 1)
        transition = _transition(total, carried, W_S).mT.unflatten(0, (N, -1))
        for n in reversed(range(N)):
            if n in layout.resets:
                d_states[n] = 0
            else:
                d_states[n].baddbmm_(transition[n], d_states[n + 1])
        after = d_states[1:].flatten(0, 1)

        dW = torch.baddbmm(A[:, 0, 1].mT @ do, carried[:, :, 1], after)
        d_rows_out = torch.cat((do, inverse.mT @ dW), 1)  # gradients of what the rows of q, and of a, give
        values = torch.cat((vc, W), 1)  # what the columns of k, and of b, write
        d_scores = (d_rows_out @ values.mT).view(-1, 2, C, 2, C).transpose(2, 3)
        dv = torch.baddbmm(A[:, 0, 0].mT @ do, A[:, 1, 0].mT, d_rows_out[:, C:]).baddbmm_(carried[:, :, 0], after)
        d_rows, d_columns, dg = decayed_scores_backward(
            d_scores,
            _by_token(d_rows_out @ before.mT),
            _by_token(values @ after.mT),
            (before * after).sum(-1),
            rows,
            columns,
            e,
        )

        diagonal = d_scores[:, 0].diagonal(dim1=2, dim2=3).mT.unsqueeze(-1)  # [P, C, 2, 1], of q·k and q·b
        d_columns.addcmul_(diagonal, qc.unsqueeze(2))
        of_q = d_rows[:, :, 0]
        dg.addcmul_(of_q, rows[:, :, 0])
        dq = (of_q * e).add_((diagonal * columns).sum(2))
        grads = (dq, d_columns[:, :, 0], dv, d_rows[:, :, 1], d_columns[:, :, 1], dg)
        d_initial = None
        if initial_state is not None:
            d_initial = d_states[0].view(initial_state.shape).to(initial_state.dtype)
        inputs = (q, k, v, a, b, g)
        joined = [layout.join_heads(x.contiguous(), H).to(t.dtype) for x, t in zip(grads, inputs, strict=True)]
        return *joined, d_initial, None


def _chunks(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, g: Tensor, layout: ChunkLayout
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """q, rows (q e^g and a), columns (k and b), v, and e^g, ``[P, C, …]``, in at least float32."""
    wide = torch.promote_types(q.dtype, torch.float32)
    qc, kc, vc, ac, bc = (layout.split_heads(x.to(wide)) for x in (q, k, v, a, b))
    e = layout.split_heads(g.to(wide)).exp()
    return qc, torch.stack((qc * e, ac), 2), torch.stack((kc, bc), 2), vc, e


def _transition(total: Tensor, carried: Tensor, W_S: Tensor) -> Tensor:
    """The matrix ``[P, K, K]`` by which a chunk multiplies the state."""
    matrix = carried[:, :, 1].mT @ W_S
    matrix.diagonal(dim1=1, dim2=2).add_(total)
    return matrix


def _by_token(x: Tensor) -> Tensor:
    """``[P, 2C, K]``, all of one kind and then all of the other, to ``[P, C, 2, K]``."""
    return x.unflatten(1, (2, -1)).transpose(1, 2)
