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
from seqarch.ops.scalar_decay_chunks import Gradients, Heads, add_within, read_states


def scalar_decay_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    *,
    scale: float = 1.0,
    gain: Tensor | None = None,
    skip: Tensor | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    output_final_state: bool = True,
    chunk_size: int = 64,
) -> tuple[Tensor, Tensor | None]:
    """S_t = exp(g_t) S_{t-1} + k_t v_tᵀ and o_t = scale · S_tᵀ q_t, at least in float32 inside.

    With a gain a token writes gain_t · v_t; with a skip its own v_t is added to the output: Mamba-2's Δ and D.

    Work and memory are linear in T. Backward keeps the inputs and the states at the starts of chunks.

    Args:
        q: ``[B, T, G, K]``; G divides H, and heads h·G/H share a group.
        k: As q.
        v: ``[B, T, H, V]``.
        g: Log decays ``[B, T, H]``, at most 0; None for no decay.
        scale: Factor of what is read.
        gain: Factors ``[B, T, H]`` of what is written.
        skip: Factors ``[H]`` of v in the output.
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
        o, state = _step(q, k, v, g, gain, skip, scale, initial_state)
        return o, state if output_final_state else None
    layout = ChunkLayout(T, min(chunk_size, 1 << (T - 1).bit_length()), cu_seqlens)
    final = output_final_state and cu_seqlens is None
    o, state = _ScalarDecay.apply(q, k, v, g, gain, skip, initial_state, layout, scale, final)
    return o, state if final else None


def _step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    gain: Tensor | None,
    skip: Tensor | None,
    scale: float,
    state: Tensor,
) -> tuple[Tensor, Tensor]:
    """The recurrence for one token, T = 1."""
    B, _, H, V = v.shape
    G, K = q.shape[2:]
    wide = torch.promote_types(v.dtype, torch.float32)
    q5 = q.to(wide).view(B, G, 1, 1, K)
    x = v.to(wide)
    written = x if gain is None else x * gain.to(wide)[..., None]
    new = k.to(wide).view(B, G, 1, K, 1) * written.view(B, G, H // G, 1, V)
    old = state.to(wide).view(B, G, H // G, K, V)
    new = new + old if g is None else torch.addcmul(new, old, g.to(wide).exp().view(B, G, H // G, 1, 1))
    o = (q5 @ new).view(B, 1, H, V)
    o = o if scale == 1 else o * scale
    o = o if skip is None else torch.addcmul(o, x, skip.to(wide)[:, None])
    return o.to(v.dtype), new.view(B, H, K, V)


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

    def split_heads(self, x: Tensor | None) -> Tensor | None:
        """``[H]`` to ``[BG, R]``."""
        return None if x is None else x.to(self.wide).view(self.G, -1).repeat(self.B, 1)

    def split_state(self, state: Tensor) -> Tensor:
        """``[B, H, K, V]`` to a new ``[BG, K, RV]``."""
        state = state.to(self.wide, copy=True).unflatten(1, (self.G, -1)).transpose(2, 3)
        return state.flatten(3).flatten(0, 1)

    def join_state(self, state: Tensor, V: int) -> Tensor:
        """``[BG, K, RV]`` to ``[B, H, K, V]``."""
        state = state.unflatten(0, (self.B, self.G)).unflatten(3, (-1, V))
        return state.transpose(2, 3).reshape(self.B, -1, state.shape[2], V)


class _ScalarDecay(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor | None,
        gain: Tensor | None,
        skip: Tensor | None,
        initial: Tensor | None,
        layout: ChunkLayout,
        scale: float,
        final: bool,
    ) -> tuple[Tensor, Tensor | None]:
        V = v.shape[3]
        cut = _Cut(layout, q.shape[0], q.shape[2], torch.promote_types(v.dtype, torch.float32))
        q_, k_, v_ = cut.split(q), cut.split(k), cut.split(v)
        heads = _cut_heads(cut, g, gain, skip, scale)
        start = None if initial is None else cut.split_state(initial)
        o, states, end = read_states(q_, k_, v_, heads, V, start, layout.resets, final)
        add_within(o, q_, k_, v_, heads, V)
        if scale != 1:
            o.mul_(scale)
        ctx.save_for_backward(q, k, v, g, gain, skip, states)
        ctx.cut, ctx.scale, ctx.has_start = cut, scale, initial is not None
        ctx.set_materialize_grads(False)
        return cut.join(o, v), None if end is None else cut.join_state(end, V)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        q, k, v, g, gain, skip, states = ctx.saved_tensors
        cut: _Cut = ctx.cut
        V = v.shape[3]
        do, d_end = grad_outputs
        q_, k_, v_ = cut.split(q), cut.split(k), cut.split(v)
        do_ = cut.split(torch.zeros_like(v) if do is None else do * ctx.scale if ctx.scale != 1 else do)
        end = None if d_end is None else cut.split_state(d_end)
        grads = Gradients(q_, k_, v_, do_, _cut_heads(cut, g, gain, skip, ctx.scale), V)
        d_start = grads.through_states(states, end, cut.layout.resets, ctx.has_start)
        grads.within_chunks()
        dg = None if g is None else cut.join(grads.decays(), g)
        d_gain = None if gain is None else cut.join(grads.gain, gain)
        d_skip = None
        if skip is not None:
            d_skip = (grads.skip.view(cut.B, -1).sum(0) / ctx.scale).to(skip.dtype)
        d_initial = None if d_start is None else cut.join_state(d_start, V)
        dq, dk, dv = cut.join(grads.dq, q), cut.join(grads.dk, k), cut.join(grads.dv, v)
        return dq, dk, dv, dg, d_gain, d_skip, d_initial, None, None, None


def _cut_heads(cut: _Cut, g: Tensor | None, gain: Tensor | None, skip: Tensor | None, scale: float) -> Heads:
    """With a skip that the factor ``scale`` of the whole output leaves as it is."""
    skip = cut.split_heads(skip)
    return Heads(
        None if g is None else cut.split(g),
        None if gain is None else cut.split(gain),
        None if skip is None else skip / scale,
    )
