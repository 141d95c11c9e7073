"""Causal attention with the second-order Taylor weights of exp, in linear time (Arora et al. 2024, arXiv 2402.18668).

    o_t = Σ_{j≤t} w_tj v_j / Σ_{j≤t} w_tj,   w_tj = 1 + s_tj + s_tj²/2,   s_tj = scale · q_t·k_j

Every weight is at least 1/2. With a 1 put behind the F entries of a query (scaled) and of a key, x̃ ``[E]``, E = F + 1,
w = ((q̃·k̃)² + 1)/2, so that the products x̃_i x̃_j are all the features there need to be, and by symmetry only those that
lie on E / 2 diagonals: φ_di(x̃) = x̃_i x̃_{i+d}, indices modulo E, 0 ≤ d ≤ E / 2. Then w = Σ_di c_di φ_di(q̃) φ_di(k̃),
where c is 1, save 1/2 for the squares of q and k (d = 0) and, where E is even, for d = E / 2, whose every product comes
twice.

The state is S = Σ_j φ(k̃_j) ⊗ [v_j, 1]. Inside a chunk the weights are computed as such; between chunks φ(q̃) reads S.
φ is computed chunk by chunk, in both passes, and never kept.

Shape legend: B batch, T tokens, H heads, F query and key size, V value size, N chunks, C chunk size, P features.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from seqarch.ops.chunks import ChunkLayout, fitting_chunk_size


def taylor_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = 128,
) -> tuple[Tensor, Tensor]:
    """The formula above, in at least float32.

    Args:
        q: ``[B, T, H, F]``.
        k: ``[B, T, H, F]``.
        v: ``[B, T, H, V]``.
        scale: Factor of the scores, by default 1/√F.
        initial_state: ``[B, H, P, V + 1]`` with P = ``n_features(F)``, by default 0.
        cu_seqlens: int32 ``[n+1]``, boundaries of packed documents (B = 1). The initial state is that of the first, the
            final state that of the last.
        chunk_size: C; shorter sequences take a smaller one.

    Returns:
        o ``[B, T, H, V]`` in the dtype of v, and the state after the last token, in at least float32.
    """
    B, T, H, F = q.shape
    scale = F**-0.5 if scale is None else scale
    wide = torch.promote_types(q.dtype, torch.float32)
    if initial_state is None:
        initial_state = q.new_zeros((B, H, n_features(F), v.shape[-1] + 1), dtype=wide)
    layout = ChunkLayout(T, fitting_chunk_size(T, chunk_size), cu_seqlens)
    return _TaylorAttention.apply(q, k, v, initial_state.to(wide), scale, layout)


def n_features(F: int) -> int:
    """Rows P of the state: (E // 2 + 1) · E with E = F + 1, which is E(E + 1)/2 where F is even."""
    return ((F + 1) // 2 + 1) * (F + 1)


def _rows(x: Tensor, scale: float, layout: ChunkLayout, dtype: torch.dtype) -> Tensor:
    """x̃ of q or k ``[B, T, H, F]``, twice one below the other, ``[N, B·H, 2E, C]``."""
    x = layout.split_heads(x).mT
    F, C = x.shape[1:]
    twice = x.new_ones((len(x), 2, F + 1, C), dtype=dtype)
    twice[:, :, :F] = (x * scale)[:, None]
    return twice.view(layout.n_chunks, -1, 2 * (F + 1), C)


def _windows(twice: Tensor) -> tuple[Tensor, Tensor]:
    """x̃ ``[B·H, 1, E, C]`` and its rotations by d, ``[B·H, D, E, C]``, as views."""
    E = twice.shape[1] // 2
    return twice[:, None, :E], twice.unfold(1, E, 1)[:, : E // 2 + 1].transpose(-1, -2)


def _features(twice: Tensor) -> Tensor:
    """φ ``[B·H, P, C]``."""
    x, rotated = _windows(twice)
    return (x * rotated).flatten(1, 2)


def _weigh(features: Tensor, E: int) -> Tensor:
    """Multiply by c, in place, ``[B·H, P, C]``."""
    features[:, : E - 1].mul_(0.5)
    if E % 2 == 0:
        features[:, -E:].mul_(0.5)
    return features


def _features_backward(grad: Tensor, twice: Tensor) -> Tensor:
    """The gradient of x̃ ``[B·H, E, C]`` from that of φ."""
    x, rotated = _windows(twice)
    grad = grad.view(rotated.shape)
    D, E = rotated.shape[1:3]
    out = torch.zeros_like(twice)
    out[:, :E] = (grad * rotated).sum(1)
    for d in range(D):
        out[:, d : d + E].addcmul_(grad[:, d], x[:, 0])
    return out[:, :E] + out[:, E:]


def _values(v: Tensor, layout: ChunkLayout, dtype: torch.dtype) -> Tensor:
    """[v, 1] in chunks, ``[N, B·H, C, V + 1]``; all of it 0 where there is no token."""
    v = torch.cat((v.to(dtype), torch.ones_like(v[..., :1], dtype=dtype)), dim=-1)
    return layout.split_heads(v).view(layout.n_chunks, -1, layout.chunk_size, v.shape[-1])


def _weights(t: Tensor) -> Tensor:
    """(t² + 1)/2 on and below the diagonal, 0 above."""
    return torch.addcmul(t.new_tensor(0.5), t, t, value=0.5).tril_()


class _TaylorAttention(torch.autograd.Function):
    """Keeps q, k, v, o, the normaliser, and the state at every chunk's start."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, state: Tensor, scale: float, layout: ChunkLayout
    ) -> tuple[Tensor, Tensor]:
        dtype, E = state.dtype, q.shape[-1] + 1
        qs, ks, vs = _rows(q, scale, layout, dtype), _rows(k, 1.0, layout, dtype), _values(v, layout, dtype)
        S = state.flatten(0, 1).clone()
        states = S.new_empty((layout.n_chunks, *S.shape))
        out = torch.empty_like(vs)
        for n in range(layout.n_chunks):
            if n in layout.resets:
                S.zero_()
            states[n] = S
            w = _weights(torch.bmm(qs[n, :, :E].mT, ks[n, :, :E]))
            out[n] = torch.bmm(w, vs[n]).baddbmm_(_weigh(_features(qs[n]), E).mT, S)
            S.baddbmm_(_features(ks[n]), vs[n])
        out = layout.join_heads(out.flatten(0, 1), q.shape[2])
        norm = out[..., -1:].clone()
        o = (out[..., :-1] / norm).to(v.dtype)
        ctx.save_for_backward(q, k, v, o, norm, states)
        ctx.scale, ctx.layout = scale, layout
        return o, S.view(state.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        q, k, v, o, norm, states = ctx.saved_tensors
        do, d_final = grad_outputs
        layout, scale, dtype = ctx.layout, ctx.scale, states.dtype
        H, E = q.shape[2], q.shape[-1] + 1
        qs, ks, vs = _rows(q, scale, layout, dtype), _rows(k, 1.0, layout, dtype), _values(v, layout, dtype)
        # o = out / norm
        do = do / norm
        do = torch.cat((do, -(do * o).sum(-1, keepdim=True)), dim=-1)
        dos = layout.split_heads(do).view(vs.shape)
        dq, dk = (torch.empty_like(x[:, :, : E - 1]) for x in (qs, ks))
        dv = torch.empty_like(vs)
        dS = d_final.flatten(0, 1).clone()
        for n in reversed(range(layout.n_chunks)):
            x, y = qs[n, :, :E], ks[n, :, :E]
            t = torch.bmm(x.mT, y)
            dt = torch.bmm(dos[n], vs[n].mT).mul_(t).tril_()
            dx = _features_backward(_weigh(torch.bmm(states[n], dos[n].mT), E), qs[n]).baddbmm_(y, dt.mT)
            dy = _features_backward(torch.bmm(dS, vs[n].mT), ks[n]).baddbmm_(x, dt)
            dv[n] = torch.bmm(_weights(t).mT, dos[n]).baddbmm_(_features(ks[n]).mT, dS)
            dq[n], dk[n] = dx[:, :-1], dy[:, :-1]  # without the 1
            dS.baddbmm_(_weigh(_features(qs[n]), E), dos[n])
            if n in layout.resets:
                dS.zero_()
        dq, dk, dv = (layout.join_heads(x.flatten(0, 1), H) for x in (dq.mul_(scale).mT, dk.mT, dv))
        return (
            dq.to(q.dtype),
            dk.to(k.dtype),
            dv[..., :-1].to(v.dtype),
            dS.view(q.shape[0], H, *dS.shape[1:]),
            None,
            None,
        )
