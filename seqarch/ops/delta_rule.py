"""The delta rule and its gated form, in chunks.

For each head, with a state S ``[K, V]``, decays e^g and step sizes β:

    S ← e^{g_t} S;  S ← S + β_t k_t ⊗ (v_t - Sᵀk_t);  o_t = scale · Sᵀq_t

The chunked form is that of Yang et al. 2024 (arXiv 2406.06484; with decay: arXiv 2412.06464). Inside a chunk, with G
the cumulative sum of g, b = βk and Γ_ij = e^{G_i - G_j} (j ≤ i, so that no exponent is positive), what the tokens
write, Z = v - Sᵀk, solves a unit lower triangular system in the state S₀ at the chunk's start:

    (I + a) Z = V - e^G K S₀,   a = tril(K bᵀ ⊙ Γ, -1)
    O = scale · (e^G Q S₀ + tril(Q bᵀ ⊙ Γ) Z)
    S₁ = e^{G_C} S₀ + (e^{G_C - G} b)ᵀ Z

Everything but S is computed for many chunks at once. β appears in b alone, which makes β = 0 an ordinary case.

Shape legend: B batch, T tokens, H heads, K key and query size, V value size, N chunks, C chunk size.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from seqarch.ops.chunks import ChunkLayout, fitting_chunk_size

_BLOCK = 1 << 18  # numbers


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
    chunk_size: int = 32,
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
    """What both passes need of q, k, β and g, for a block of n chunks; M = n·B·H."""

    qk: Tensor  # [M, 2C, K], the chunk's queries, then its keys
    b: Tensor  # [M, C, K], βk
    beta: Tensor  # [M, C, 1]
    qk_decayed: Tensor  # e^G qk
    b_decayed: Tensor  # e^{G_C - G} b
    gamma: Tensor | None  # [M, C, C], Γ on and below the diagonal, 0 above
    since: Tensor | None  # [M, C, 1], e^G
    until: Tensor | None  # [M, C, 1], e^{G_C - G}
    decay: Tensor | None  # [n, B·H, 1, 1], e^{G_C}


def _blocks(layout: ChunkLayout, q: Tensor, V: int) -> list[range]:
    """Ranges of chunks, short enough on a CPU for what is computed of them to stay in its cache."""
    n = layout.n_chunks
    size = n
    if q.device.type == "cpu" and not torch.compiler.is_compiling():
        B, _, H, K = q.shape
        size = max(1, _BLOCK // (B * H * layout.chunk_size * (K + V)))
    return [range(i, min(n, i + size)) for i in range(0, n, size)]


def _heads(x: Tensor, block: range) -> Tensor:
    """The chunks of a block, ``[B, N, C, H, …]`` to a view ``[n, B, H, C, …]``."""
    return x[:, block.start : block.stop].permute(1, 0, 3, 2, *range(4, x.ndim))


def _prepare(q: Tensor, k: Tensor, beta: Tensor, g: Tensor | None, block: range, wide: torch.dtype) -> _Chunks:
    """Of split q, k, beta and g."""
    q, k = _heads(q, block), _heads(k, block)
    *many, C, K = q.shape
    qk = q.new_empty((*many, 2, C, K), dtype=wide)
    qk[..., 0, :, :] = q
    qk[..., 1, :, :] = k
    qk = qk.view(-1, 2 * C, K)
    beta = _heads(beta, block).to(wide).reshape(-1, C, 1)
    b = qk[:, C:] * beta
    if g is None:
        return _Chunks(qk, b, beta, qk, b, None, None, None, None)
    # In float64: the difference of two large sums would keep too few digits.
    G = _heads(g, block).reshape(-1, C).cumsum(-1, dtype=torch.float64)
    # Above the diagonal the exponent would be positive.
    gamma = (G[:, :, None] - G[:, None, :]).to(wide).clamp_(max=0).exp_().tril_()
    since, until = G.to(wide).exp()[..., None], (G[:, -1:] - G).to(wide).exp_()[..., None]
    qk_decayed = (qk.view(-1, 2, C, K) * since[:, None]).view(-1, 2 * C, K)
    return _Chunks(qk, b, beta, qk_decayed, b * until, gamma, since, until, since[:, -1].reshape(len(block), -1, 1, 1))


def _decayed(state: Tensor, decay: Tensor | None, i: int, out: Tensor) -> Tensor:
    """The state after the decay of the i-th chunk of a block."""
    return out.copy_(state) if decay is None else torch.mul(state, decay[i], out=out)


def _d_log_decays(
    c: _Chunks, scores: Tensor, d_scores: Tensor, d_qk: Tensor, db: Tensor, starts: Tensor, d_ends: Tensor
) -> Tensor:
    """The gradient of g ``[M, C]``; d_qk and db are what the states at the chunk's ends give. Overwrites scores.

    Where an exponent is 0, on the diagonal and for the last token's write, nothing enters. As a difference of q·dq and
    b·db the gradient of a strong decay, which is small, would drown in the rounding of such terms.
    """
    C = scores.shape[-1]
    assert c.decay is not None
    # Γ_ij meets G_i, and G_j negated.
    met = scores.view(-1, 2, C, C).mul_(d_scores).sum(1).tril_(-1)
    dG = met.sum(-1) - met.sum(-2)
    dG += (c.qk * d_qk).sum(-1).view(-1, 2, C).sum(1)
    written = (c.b * db).sum(-1)
    written[:, -1] = 0
    dG -= written
    dG[:, -1] += written.sum(-1) + c.decay.flatten() * (starts * d_ends).sum((1, 2))
    return dG.flip(-1).cumsum(-1).flip(-1)


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
        N, C, V = layout.n_chunks, layout.chunk_size, v.shape[-1]
        S = state.flatten(0, 1)
        HB, K = S.shape[:2]
        qs, ks, vs, betas = (layout.split(x) for x in (q, k, v, beta))
        gs = None if g is None else layout.split(g)
        o = torch.empty_like(vs, memory_format=torch.contiguous_format)
        z = S.new_empty((N, HB, C, V))
        inverse = S.new_empty((N, HB, C, C))
        states = S.new_empty((N + 1, HB, K, V))
        states[0] = S
        eye = torch.eye(C, dtype=S.dtype, device=S.device)
        for block in _blocks(layout, q, V):
            c = _prepare(qs, ks, betas, gs, block, S.dtype)
            scores = torch.bmm(c.qk, c.b.mT)
            if c.gamma is None:
                scores[:, :C].tril_()
            else:
                scores.view(-1, 2, C, C).mul_(c.gamma[:, None])
            # What lies on and above the diagonal of a is not read.
            inverse[block.start : block.stop] = torch.linalg.solve_triangular(
                scores[:, C:], eye.expand(len(scores), C, C), upper=False, unitriangular=True
            ).view(-1, HB, C, C)
            p = scores.view(-1, HB, 2 * C, C)[:, :, :C]
            qk_decayed, b_decayed = c.qk_decayed.view(-1, HB, 2 * C, K), c.b_decayed.view(-1, HB, C, K)
            wanted = _heads(vs, block).to(S.dtype).reshape(-1, HB, C, V)
            out = S.new_empty((len(block), HB, C, V))
            for i, n in enumerate(block):
                if n in layout.resets:
                    states[n].zero_()
                seen = torch.bmm(qk_decayed[i], states[n])
                torch.bmm(inverse[n], wanted[i] - seen[:, C:], out=z[n])
                out[i] = seen[:, :C]
                out[i].baddbmm_(p[i], z[n], beta=scale, alpha=scale)
                _decayed(states[n], c.decay, i, out=states[n + 1]).baddbmm_(b_decayed[i].mT, z[n])
            _heads(o, block).copy_(out.view(len(block), v.shape[0], -1, C, V))
        ctx.save_for_backward(q, k, beta, g, z, states, inverse)
        ctx.scale, ctx.layout, ctx.v_dtype = scale, layout, v.dtype
        return layout.join(o), states[N].clone().view_as(state)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        q, k, beta, g, z, states, inverse = ctx.saved_tensors
        layout: ChunkLayout = ctx.layout
        C = layout.chunk_size
        HB, K, V = states.shape[1:]
        wide = states.dtype
        blocks = _blocks(layout, q, V)
        do, d_final = layout.split(grad_outputs[0]), grad_outputs[1]
        qs, ks, betas = (layout.split(x) for x in (q, k, beta))
        dq, dk, dbeta = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (qs, ks, betas))
        dv = torch.empty_like(do, dtype=ctx.v_dtype, memory_format=torch.contiguous_format)
        gs = None if g is None else layout.split(g)
        dg = None if gs is None else torch.empty_like(gs, memory_format=torch.contiguous_format)
        # One more than a block has chunks: of the state at each one's start, and at the end of the last.
        d_states = states.new_empty((max(map(len, blocks)) + 1, HB, K, V))
        d_states[0] = d_final.flatten(0, 1)
        for block in reversed(blocks):
            n_block = len(block)
            d_states[n_block] = d_states[0]
            heads = (n_block, beta.shape[0], -1, C)
            c = _prepare(qs, ks, betas, gs, block, wide)
            # e holds the gradients of o and, negated, of v: every row of qk meets S₀ and z in a product with its row
            # of e.
            e = states.new_empty((n_block, HB, 2 * C, V))
            e.view(*heads[:2], -1, 2, C, V)[:, :, :, 0] = _heads(do, block)
            e[:, :, :C].mul_(ctx.scale)
            if c.gamma is None:
                scores = torch.bmm(c.qk[:, :C], c.b.mT).tril_()
            else:
                scores = torch.bmm(c.qk, c.b.mT).view(-1, 2, C, C).mul_(c.gamma[:, None]).view(-1, 2 * C, C)
            dz = torch.bmm(scores[:, :C].mT, e.view(-1, 2 * C, V)[:, :C]).view(n_block, HB, C, V)
            qk_decayed, b_decayed = c.qk_decayed.view(-1, HB, 2 * C, K), c.b_decayed.view(-1, HB, C, K)
            du = torch.empty_like(dz)
            for i in reversed(range(n_block)):
                n = block[i]
                dz[i].baddbmm_(b_decayed[i], d_states[i + 1])
                e[i, :, C:] = torch.bmm(inverse[n].mT, dz[i], out=du[i]).neg()
                if n in layout.resets:
                    d_states[i].zero_()
                else:
                    _decayed(d_states[i + 1], c.decay, i, out=d_states[i]).baddbmm_(qk_decayed[i].mT, e[i])
            _heads(dv, block).copy_(du.view(*heads, V))
            chunks = slice(block.start, block.stop)
            starts, written = states[chunks].flatten(0, 1), z[chunks].flatten(0, 1)
            e, d_ends = e.flatten(0, 1), d_states[1 : n_block + 1].flatten(0, 1)
            d_scores = torch.bmm(e, written.mT).view(-1, 2, C, C)
            d_qk = torch.bmm(e, starts.mT)
            db = torch.bmm(written, d_ends.mT)
            if c.gamma is None or c.since is None or c.until is None or c.decay is None:
                d_scores[:, 0].tril_()
            else:
                d_qk.view(-1, 2, C, K).mul_(c.since[:, None])
                db.mul_(c.until)
                if dg is not None:
                    _heads(dg, block).copy_(_d_log_decays(c, scores, d_scores, d_qk, db, starts, d_ends).view(heads))
                d_scores.mul_(c.gamma[:, None])
            d_scores[:, 1].tril_(-1)
            d_scores = d_scores.view(-1, 2 * C, C)
            d_qk.baddbmm_(d_scores, c.b)
            db.baddbmm_(d_scores.mT, c.qk)
            d_beta = (c.qk[:, C:] * db).sum(-1)
            _heads(dbeta, block).copy_(d_beta.view(heads))
            d_qk[:, C:].addcmul_(db, c.beta)
            d_qk = d_qk.view(*heads[:2], -1, 2, C, K)
            _heads(dq, block).copy_(d_qk[:, :, :, 0])
            _heads(dk, block).copy_(d_qk[:, :, :, 1])
        grads = [None if x is None else layout.join(x) for x in (dq, dk, dv, dbeta, dg)]
        return *grads, d_states[0].view(beta.shape[0], -1, K, V), None, None
