"""The delta rule and its gated form, in chunks.

For each head, with a state S ``[K, V]``, decays e^g and step sizes β:

    S ← e^{g_t} S;  S ← S + β_t k_t ⊗ (v_t - Sᵀk_t);  o_t = scale · Sᵀq_t

The chunked form is that of Yang et al. 2024 (arXiv 2406.06484; with decay: arXiv 2412.06464). Inside a chunk, with G
the cumulative sum of g, b = βk and Γ_ij = e^{G_i - G_j} (j ≤ i, so that no exponent is positive), what the tokens
write, Z = v - Sᵀk, solves a unit lower triangular system in the state S₀ at the chunk's start:

    (I + a) Z = V - e^G K S₀,   a = tril(K bᵀ ⊙ Γ, -1)
    O = scale · (e^G Q S₀ + tril(Q bᵀ ⊙ Γ) Z)
    S₁ = e^{G_C} S₀ + (e^{G_C - G} b)ᵀ Z

Everything but S is computed for all chunks at once. β appears in b alone, which makes β = 0 an ordinary case.

Shape legend: B batch, T tokens, H heads, K key and query size, V value size, N chunks, C chunk size, M = N·B·H.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from seqarch.ops.chunks import ChunkLayout, fitting_chunk_size


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor | None = None,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = 64,
) -> tuple[Tensor, Tensor]:
    """Run the recurrence above over a sequence, in at least float32.

    Args:
        q: ``[B, T, H, K]``.
        k: ``[B, T, H, K]``; the recurrence is stable where β·|k|² ≤ 2.
        v: ``[B, T, H, V]``.
        beta: ``[B, T, H]``.
        g: ``[B, T, H]``, log decays, at most 0; none by default.
        scale: Factor of the output, by default 1/√K.
        initial_state: ``[B, H, K, V]``, by default 0.
        cu_seqlens: int32 ``[n+1]``, boundaries of packed documents (B = 1). The initial state is that of the first, the
            final state that of the last.
        chunk_size: C, for the form above; shorter sequences take a smaller one.

    Returns:
        o ``[B, T, H, V]`` in the dtype of v, and the state after the last token ``[B, H, K, V]``, in at least float32.
    """
    B, T, H, K = q.shape
    factor = float(K**-0.5 if scale is None else scale)
    wide = torch.promote_types(q.dtype, torch.float32)
    if initial_state is None:
        initial_state = q.new_zeros((B, H, K, v.shape[-1]), dtype=wide)
    if T == 1:
        decay = None if g is None else g[:, 0].to(wide)
        q, k, u, beta = (x[:, 0].to(wide) for x in (q, k, v, beta))
        o, state = _step(q, k, u, beta, decay, initial_state.to(wide))
        return (o * factor).to(v.dtype)[:, None], state
    layout = ChunkLayout(T, fitting_chunk_size(T, chunk_size), cu_seqlens)
    return _DeltaRule.apply(q, k, v, beta, g, initial_state.to(wide), factor, layout)


def _step(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor | None, state: Tensor) -> tuple[Tensor, Tensor]:
    """One token: q, k ``[B, H, K]``, v ``[B, H, V]``, beta and g ``[B, H]``."""
    if g is not None:
        state = state * g.exp()[..., None, None]
    written = (v - (k[..., None, :] @ state)[..., 0, :]) * beta[..., None]
    state = torch.addcmul(state, k[..., None], written[..., None, :])
    return (q[..., None, :] @ state)[..., 0, :], state


class _Chunks(NamedTuple):
    """What both passes need of q, k, β and g, for all chunks."""

    qk: Tensor  # [M, 2C, K], the chunk's queries, then its keys
    k: Tensor  # [M, C, K], a view of it
    b: Tensor  # [M, C, K], βk
    qk_decayed: Tensor  # e^G qk
    b_decayed: Tensor  # e^{G_C - G} b
    gamma: Tensor | None  # [M, C, C], Γ on and below the diagonal, 0 above
    since: Tensor | None  # [M, C, 1], e^G
    until: Tensor | None  # [M, C, 1], e^{G_C - G}
    decay: Tensor | None  # [N, B·H, 1, 1], e^{G_C}


def _split(x: Tensor, layout: ChunkLayout) -> Tensor:
    """``[B, T, H, …]`` to ``[N, B, H, C, …]``."""
    x = layout.split(x)
    return x.permute(1, 0, 3, 2, *range(4, x.ndim))


def _join(x: Tensor, layout: ChunkLayout, like: Tensor) -> Tensor:
    """``[M, C, …]`` to the shape and dtype of ``like``, ``[B, T, H, …]``."""
    B, H = like.shape[0], like.shape[2]
    x = x.view(layout.n_chunks, B, H, *x.shape[1:])
    return layout.join(x.permute(1, 0, 3, 2, *range(4, x.ndim))).to(like.dtype)


def _prepare(q: Tensor, k: Tensor, beta: Tensor, g: Tensor | None, layout: ChunkLayout, wide: torch.dtype) -> _Chunks:
    B, _, H, K = q.shape
    N, C = layout.n_chunks, layout.chunk_size
    qk = q.new_empty((N, B, H, 2, C, K), dtype=wide)
    qk[..., 0, :, :] = _split(q, layout)
    qk[..., 1, :, :] = _split(k, layout)
    qk = qk.view(-1, 2 * C, K)
    k = qk[:, C:]
    b = k * _split(beta, layout).to(wide).reshape(-1, C, 1)
    if g is None:
        return _Chunks(qk, k, b, qk, b, None, None, None, None)
    # In float64: the difference of two large sums would keep too few digits.
    G = _split(g, layout).reshape(-1, C).cumsum(-1, dtype=torch.float64)
    # Above the diagonal the exponent would be positive.
    gamma = (G[:, :, None] - G[:, None, :]).to(wide).clamp_(max=0).exp_().tril_()
    since, until = G.to(wide).exp()[..., None], (G[:, -1:] - G).to(wide).exp_()[..., None]
    qk_decayed = (qk.view(-1, 2, C, K) * since[:, None]).view(-1, 2 * C, K)
    return _Chunks(qk, k, b, qk_decayed, b * until, gamma, since, until, since[:, -1].reshape(N, B * H, 1, 1))


class _DeltaRule(torch.autograd.Function):
    """Keeps q, k, β, g, what the tokens write, the states between chunks, and (I + a)⁻¹."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        beta: Tensor,
        g: Tensor | None,
        state: Tensor,
        scale: float,
        layout: ChunkLayout,
    ) -> tuple[Tensor, Tensor]:
        N, C = layout.n_chunks, layout.chunk_size
        K, V = state.shape[-2:]
        c = _prepare(q, k, beta, g, layout, state.dtype)
        scores = torch.bmm(c.qk, c.b.mT)
        p, a = scores[:, :C], scores[:, C:]
        if c.gamma is None:
            p.tril_()
        else:
            scores.view(-1, 2, C, C).mul_(c.gamma[:, None])
        eye = torch.eye(C, dtype=a.dtype, device=a.device)
        # What lies on and above the diagonal of a is not read.
        inverse = torch.linalg.solve_triangular(a, eye.expand_as(a), upper=False, unitriangular=True)
        z = torch.bmm(inverse, _split(v, layout).to(state.dtype).reshape(-1, C, V)).view(N, -1, C, V)
        w = torch.bmm(inverse, c.qk_decayed[:, C:]).view(N, -1, C, K)
        b_decayed = c.b_decayed.view(N, -1, C, K)
        S = state.flatten(0, 1)
        states = S.new_empty((N + 1, *S.shape))
        for n in range(N):
            if n in layout.resets:
                S = torch.zeros_like(S)
            states[n] = S
            z[n].baddbmm_(w[n], S, alpha=-1)
            S = torch.baddbmm(S if c.decay is None else S * c.decay[n], b_decayed[n].mT, z[n])
        states[N] = S
        z = z.view(-1, C, V)
        o = torch.bmm(c.qk_decayed[:, :C], states[:N].view(-1, K, V))
        o = o.baddbmm_(p, z, beta=scale, alpha=scale)
        ctx.save_for_backward(q, k, beta, g, z, states, inverse)
        ctx.scale, ctx.layout, ctx.v_dtype = scale, layout, v.dtype
        return _join(o, layout, v), S.view_as(state)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        q, k, beta, g, z, states, inverse = ctx.saved_tensors
        layout: ChunkLayout = ctx.layout
        N, C = layout.n_chunks, layout.chunk_size
        K, V = states.shape[-2:]
        c = _prepare(q, k, beta, g, layout, states.dtype)
        do, d_final = grad_outputs
        # e holds the gradients of o and, negated, of v: every row of qk meets S₀ and z in a product with its row of e.
        e = z.new_empty((z.shape[0], 2, C, V))
        e[:, 0] = _split(do, layout).reshape(-1, C, V)
        e[:, 0].mul_(ctx.scale)
        p = torch.bmm(c.qk[:, :C], c.b.mT)
        p = p.tril_() if c.gamma is None else p.mul_(c.gamma)
        dv = torch.bmm(inverse.mT, torch.bmm(p.mT, e[:, 0])).view(N, -1, C, V)
        w = torch.bmm(inverse.mT, c.b_decayed).view(N, -1, C, K)
        qk_decayed = c.qk_decayed.view(N, -1, 2 * C, K)
        e = e.view(N, -1, 2 * C, V)
        dS = d_final.flatten(0, 1)
        d_states = torch.empty_like(states[:N])  # of the state at each chunk's end
        for n in reversed(range(N)):
            d_states[n] = dS
            dv[n].baddbmm_(w[n], dS)
            e[n, :, C:] = -dv[n]
            dS = torch.baddbmm(dS if c.decay is None else dS * c.decay[n], qk_decayed[n].mT, e[n])
            if n in layout.resets:
                dS = torch.zeros_like(dS)
        d_state = dS.view(beta.shape[0], -1, K, V)
        starts, d_states, e = states[:N].view(-1, K, V), d_states.view(-1, K, V), e.view(-1, 2 * C, V)
        d_scores = torch.bmm(e, z.mT).view(-1, 2, C, C)
        if c.gamma is None:
            d_scores[:, 0].tril_()
        else:
            d_scores.mul_(c.gamma[:, None])
        d_scores[:, 1].tril_(-1)
        d_scores = d_scores.view(-1, 2 * C, C)
        d_qk = torch.bmm(e, starts.mT)
        db = torch.bmm(z, d_states.mT)
        if c.since is not None and c.until is not None:
            d_qk.view(-1, 2, C, K).mul_(c.since[:, None])
            db.mul_(c.until)
        d_qk.baddbmm_(d_scores, c.b)
        db.baddbmm_(d_scores.mT, c.qk)
        d_beta = (c.k * db).sum(-1)
        steps = _split(beta, layout).to(db.dtype).reshape(-1, C)
        dg = None
        if g is not None:
            # q and k meet e^G, b meets e^-G; e^{G_C} meets all that the state at the chunk's end consists of.
            dG = (c.qk * d_qk).sum(-1).view(-1, 2, C).sum(1) - steps * d_beta
            dG[:, -1:] += torch.bmm(states[1:].view(-1, 1, K * V), d_states.view(-1, K * V, 1))[..., 0]
            dg = _join(dG.flip(-1).cumsum(-1).flip(-1), layout, g)
        dq, dk = d_qk[:, :C], d_qk[:, C:].addcmul(db, steps[..., None])
        return (
            _join(dq, layout, q),
            _join(dk, layout, k),
            _join(dv.view(-1, C, V), layout, do).to(ctx.v_dtype),
            _join(d_beta, layout, beta),
            dg,
            d_state,
            None,
            None,
        )
