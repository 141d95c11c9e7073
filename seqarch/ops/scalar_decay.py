"""Chunked linear attention with one scalar decay a head: simple gated linear attention, the core of Mamba-2.

Dao and Gu 2024 (arXiv 2405.21060) for the chunked form and the name SSD.

Shape legend: B batch, T tokens, H heads, G groups of R heads that share q and k, K key size, V value size, N chunks, C
chunk size; BG stands for B·G and RV for R·V.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from seqarch.ops.chunks import ChunkLayout


def scalar_decay_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    *,
    scale: float = 1.0,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    output_final_state: bool = True,
    chunk_size: int = 64,
) -> tuple[Tensor, Tensor | None]:
    """S_t = exp(g_t) S_{t-1} + k_t v_tᵀ and o_t = scale · S_tᵀ q_t, at least in float32 inside.

    Work and memory are linear in T. Backward keeps the inputs and the states at the starts of chunks.

    Args:
        q: ``[B, T, G, K]``; G divides H, and heads h·G/H share a group.
        k: As q.
        v: ``[B, T, H, V]``.
        g: Log decays ``[B, T, H]``, at most 0; None for no decay.
        scale: Factor of the output.
        initial_state: ``[B, H, K, V]``; zero by default.
        cu_seqlens: int32 ``[n+1]``, boundaries of packed documents (B = 1); not together with ``initial_state``.
        output_final_state: Return the state after the last token; the second result is None otherwise and for packed
            documents.
        chunk_size: C; short inputs take a smaller one.

    Returns:
        o ``[B, T, H, V]`` in v's dtype and the final state ``[B, H, K, V]``, float32 or float64.

    Raises:
        ValueError: If G does not divide H, or both ``cu_seqlens`` and ``initial_state`` are given.
    """
    T, G, H = q.shape[1], q.shape[2], v.shape[2]
    if H % G:
        raise ValueError(f"the groups of q and k ({G}) must divide the heads of v ({H})")
    if cu_seqlens is not None and initial_state is not None:
        raise ValueError("cu_seqlens and initial_state cannot be given together: documents start from zero")
    if T == 1 and initial_state is not None:
        o, state = _step(q, k, v, g, scale, initial_state)
        return o, state if output_final_state else None
    layout = ChunkLayout(T, min(chunk_size, 1 << (T - 1).bit_length()), cu_seqlens)
    final = output_final_state and cu_seqlens is None
    o, state = _ScalarDecay.apply(q, k, v, g, initial_state, layout, scale, final)
    return o, state if final else None


def _step(q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, scale: float, state: Tensor) -> tuple[Tensor, Tensor]:
    """The recurrence for one token, T = 1."""
    B, _, H, V = v.shape
    G, K = q.shape[2:]
    wide = torch.promote_types(v.dtype, torch.float32)
    q5 = q.to(wide).view(B, G, 1, 1, K)
    new = k.to(wide).view(B, G, 1, K, 1) * v.to(wide).view(B, G, H // G, 1, V)
    old = state.to(wide).view(B, G, H // G, K, V)
    new = new + old if g is None else torch.addcmul(new, old, g.to(wide).exp().view(B, G, H // G, 1, 1))
    o = (q5 @ new).view(B, 1, H, V)
    return (o if scale == 1 else o * scale).to(v.dtype), new.view(B, H, K, V)


class _Cut:
    """Tensors by group and chunk, ``[BG, N, C, …]``; views where G is 1 and nothing needs padding."""

    def __init__(self, layout: ChunkLayout, B: int, G: int, wide: torch.dtype) -> None:
        self.layout, self.B, self.G, self.wide = layout, B, G, wide

    def split(self, x: Tensor) -> Tensor:
        """``[B, T, H, …]`` to ``[BG, N, C, H/G · …]``."""
        x = self.layout.split(x.to(self.wide))
        return x.flatten(3).unflatten(3, (self.G, -1)).permute(0, 3, 1, 2, 4).flatten(0, 1)

    def join(self, x: Tensor, like: Tensor) -> Tensor:
        """The reverse of ``split``, in the shape and dtype of ``like``."""
        x = x.unflatten(0, (self.B, self.G)).permute(0, 2, 3, 1, 4)
        x = x.reshape(*x.shape[:3], *like.shape[2:])
        return self.layout.join(x).to(like.dtype)

    def split_state(self, state: Tensor) -> Tensor:
        """``[B, H, K, V]`` to a new ``[BG, K, RV]``."""
        state = state.to(self.wide, copy=True).unflatten(1, (self.G, -1)).transpose(2, 3)
        return state.flatten(3).flatten(0, 1)

    def join_state(self, state: Tensor, V: int) -> Tensor:
        """``[BG, K, RV]`` to ``[B, H, K, V]``."""
        state = state.unflatten(0, (self.B, self.G)).unflatten(3, (-1, V))
        return state.transpose(2, 3).reshape(self.B, -1, state.shape[2], V)


class _Decay:
    """Factors that a token's distance from others brings, from g ``[BG, N, C, R]``.

    Sums of g run in float64, so that a strong decay at the start of a chunk does not cost the later, weak ones their
    digits. Exponents lie between a floor and 0: the floor keeps subnormal numbers, which are slow, out of the products.
    """

    def __init__(self, g: Tensor) -> None:
        self.dtype = g.dtype
        self.floor = -70.0 if g.dtype == torch.float32 else -700.0
        sums = g.double().cumsum(2)
        self._sums = sums.permute(3, 0, 1, 2).contiguous()
        self.read = self._exp(sums)[..., None]  # of the chunk's first state, at each token
        self.write = self._exp(sums[:, :, -1:] - sums)[..., None]  # of each token, at the chunk's end
        self.whole = self._exp(sums[:, :, -1])[:, :, None, :, None]  # of a state over the chunk, [BG, N, 1, R, 1]

    def _exp(self, x: Tensor) -> Tensor:
        return x.to(self.dtype, copy=True).clamp_(self.floor, 0).exp_()

    def within(self, head: int) -> Tensor:
        """Of token j at token i of the same chunk, ``[BG·N, C, C]``; the upper triangle holds ones."""
        sums = self._sums[head].flatten(0, 1)
        return self._exp(sums[:, :, None] - sums[:, None, :])


def _per_head(x: Tensor, V: int) -> Tensor:
    return x.unflatten(-1, (-1, V))


class _ScalarDecay(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor | None,
        initial: Tensor | None,
        layout: ChunkLayout,
        scale: float,
        final: bool,
    ) -> tuple[Tensor, Tensor | None]:
        V = v.shape[3]
        cut = _Cut(layout, q.shape[0], q.shape[2], torch.promote_types(v.dtype, torch.float32))
        q_, k_, v_ = cut.split(q), cut.split(k), cut.split(v)
        decay = None if g is None else _Decay(cut.split(g))
        start = None if initial is None else cut.split_state(initial)
        o, states, end = _read_states(q_, k_, v_, decay, V, start, layout.resets, final)
        _add_within(o, q_, k_, v_, decay, V)
        if scale != 1:
            o.mul_(scale)
        ctx.save_for_backward(q, k, v, g, states)
        ctx.cut, ctx.scale, ctx.has_start = cut, scale, initial is not None
        ctx.set_materialize_grads(False)
        return cut.join(o, v), None if end is None else cut.join_state(end, V)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        q, k, v, g, states = ctx.saved_tensors
        cut: _Cut = ctx.cut
        V = v.shape[3]
        do, d_end = grad_outputs
        q_, k_, v_ = cut.split(q), cut.split(k), cut.split(v)
        do_ = cut.split(torch.zeros_like(v) if do is None else do * ctx.scale if ctx.scale != 1 else do)
        decay = None if g is None else _Decay(cut.split(g))
        end = None if d_end is None else cut.split_state(d_end)
        grads = _Gradients(q_, k_, v_, do_, decay, V)
        d_start = grads.through_states(states, end, cut.layout.resets, ctx.has_start)
        grads.within_chunks()
        dg = None if g is None else cut.join(grads.decays(), g)
        d_initial = None if d_start is None else cut.join_state(d_start, V)
        dq, dk, dv = cut.join(grads.dq, q), cut.join(grads.dk, k), cut.join(grads.dv, v)
        return dq, dk, dv, dg, d_initial, None, None, None


def _read_states(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: _Decay | None,
    V: int,
    start: Tensor | None,
    resets: frozenset[int],
    final: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """What tokens read of earlier chunks ``[BG, N, C, RV]``, the states at chunk starts, the last state."""
    BG, N, _, K = q.shape
    o = torch.empty_like(v, memory_format=torch.contiguous_format)
    written = v if decay is None else (_per_head(v, V) * decay.write).flatten(3)
    states = v.new_empty(BG, N, K, v.shape[3])
    end = None
    for n in range(N):
        state = states[:, n]
        empty = n in resets or (n == 0 and start is None)
        if n == 0 and start is not None:
            state.copy_(start)
        if empty:
            state.zero_()
            o[:, n] = 0
        else:
            o[:, n].baddbmm_(q[:, n], state, beta=0)
        if n + 1 < N:
            if n + 1 in resets:
                continue
            after = states[:, n + 1]
        elif final:
            after = end = torch.empty_like(state, memory_format=torch.contiguous_format)
        else:
            break
        if empty:
            after.baddbmm_(k[:, n].mT, written[:, n], beta=0)
        else:
            after.copy_(state if decay is None else (_per_head(state, V) * decay.whole[:, n]).flatten(2))
            after.baddbmm_(k[:, n].mT, written[:, n])
    if decay is not None:
        _per_head(o, V).mul_(decay.read)
    return o, states, end


def _add_within(o: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: _Decay | None, V: int) -> None:
    """Add what each token reads of its own chunk. One head of a group at a time: the scores are large."""
    scores = (q.flatten(0, 1) @ k.flatten(0, 1).mT).tril_()
    if decay is None:
        o.flatten(0, 1).baddbmm_(scores, v.flatten(0, 1))
        return
    o_, v_ = _per_head(o.flatten(0, 1), V), _per_head(v.flatten(0, 1), V)
    for r in range(v_.shape[2]):
        o_[:, :, r] += torch.bmm(decay.within(r).mul_(scores), v_[:, :, r])


class _Gradients:
    """Backward of ``_read_states`` and ``_add_within``, all tensors by chunk."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, do: Tensor, decay: _Decay | None, V: int) -> None:
        self.q, self.k, self.v, self.do, self.decay, self.V = q, k, v, do, decay, V
        self.dq, self.dk, self.dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
        # Gradients of sums of g: a token's own for what it reads, the chunk's for what is written and for what passes.
        heads = (*v.shape[:3], v.shape[3] // V)
        self.reads, self.passes = v.new_zeros(heads), v.new_zeros(heads[0], heads[1], 1, heads[3])
        self.writes = self.reads

    def through_states(
        self, states: Tensor, end: Tensor | None, resets: frozenset[int], has_start: bool
    ) -> Tensor | None:
        """Set dq, dk and dv to the part that runs through states; returns the gradient of the first state."""
        q, k, V, decay = self.q, self.k, self.V, self.decay
        do, written = self.do, self.v
        if decay is not None:
            do = (_per_head(do, V) * decay.read).flatten(3)
            written = (_per_head(written, V) * decay.write).flatten(3)
        d_after = end  # of the state after chunk n; None stands for zero
        for n in reversed(range(q.shape[1])):
            state = states[:, n]
            empty = n in resets or (n == 0 and not has_start)
            if d_after is None:
                self.dv[:, n] = 0
                self.dk[:, n] = 0
            else:
                self.dv[:, n].baddbmm_(k[:, n], d_after, beta=0)
                self.dk[:, n].baddbmm_(written[:, n], d_after.mT, beta=0)
            if empty:
                self.dq[:, n] = 0
                d_after = None
                continue
            self.dq[:, n].baddbmm_(do[:, n], state.mT, beta=0)
            if decay is not None:
                self.reads[:, n] = _per_head(torch.bmm(q[:, n], state).mul_(do[:, n]), V).sum(-1)
            if d_after is None:
                d_after = torch.bmm(q[:, n].mT, do[:, n])
                continue
            if decay is not None:
                _per_head(d_after, V).mul_(decay.whole[:, n])
                self.passes[:, n] = _per_head((d_after * state).sum(1, keepdim=True), V).sum(-1)
            d_after.baddbmm_(q[:, n].mT, do[:, n])
        if decay is not None:
            dv = _per_head(self.dv, V)
            self.writes = (dv * _per_head(written, V)).sum(-1)
            dv.mul_(decay.write)
        return d_after

    def within_chunks(self) -> None:
        """Add the part that stays in a chunk, one head of a group at a time."""
        q, k, v, do, dq, dk, dv = (
            x.flatten(0, 1) for x in (self.q, self.k, self.v, self.do, self.dq, self.dk, self.dv)
        )
        scores = (q @ k.mT).tril_()
        if self.decay is None:
            d_scores = do @ v.mT
            dv.baddbmm_(scores.mT, do)
        else:
            reads = self.reads.flatten(0, 1)
            earlier = scores.tril(-1)  # a token's own score has no decay
            d_scores = torch.zeros_like(scores)
            v, do, dv = (_per_head(x, self.V) for x in (v, do, dv))
            for r in range(v.shape[2]):
                within = self.decay.within(r)
                d_within = torch.bmm(do[:, :, r], v[:, :, r].mT).mul_(within)
                dv[:, :, r] += torch.bmm(within.mul_(scores).mT, do[:, :, r])
                d_scores += d_within
                d_within.mul_(earlier)
                reads[:, :, r] += d_within.sum(2) - d_within.sum(1)
        d_scores.tril_()
        dq.baddbmm_(d_scores, k)
        dk.baddbmm_(d_scores.mT, q)

    def decays(self) -> Tensor:
        """The gradient of g, ``[BG, N, C, R]``: each g_t is part of the sums of tokens t … C-1 and of the chunk's."""
        dg = self.reads.flip(2).cumsum(2).flip(2) + self.passes
        dg[:, :, 1:] += self.writes[:, :, :-1].cumsum(2)
        return dg
