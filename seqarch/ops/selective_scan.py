"""The scan of Mamba-1: a linear recurrence with a decay of its own for every channel and state.

Gu and Dao 2023 (arXiv 2312.00752).

Shape legend: B batch, T tokens, D channels, N states a channel, S tokens in a block.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

_BLOCK = 1 << 19  # numbers of a [S, B, N, D] buffer that stay in a CPU's cache


def selective_scan(
    x: Tensor,
    delta: Tensor,
    A: Tensor | None,
    B: Tensor,
    C: Tensor,
    *,
    decay_by_delta: bool = True,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """h_t = exp(Δ_t A) ⊙ h_{t-1} + Δ_t x_t B_tᵀ and y_t = h_t C_t, at least in float32 inside.

    Work is linear in T. Backward keeps the inputs and the states at the starts of blocks of 16 to 64 tokens, and
    computes the states between again; ``[B, T, D, N]`` never exists.

    Args:
        x: ``[B, T, D]``.
        delta: Step sizes Δ, as x.
        A: ``[D, N]``, at most 0; None for no decay.
        B: ``[B, T, N]``.
        C: As B.
        decay_by_delta: The decay is exp(Δ_t A); otherwise exp(A) for every token.
        initial_state: ``[B, D, N]``; zero by default.
        cu_seqlens: int32 ``[n+1]``, boundaries of packed documents (B = 1); not together with ``initial_state``.

    Returns:
        y ``[B, T, D]`` in x's dtype and the state after the last token ``[B, D, N]``, float32 or float64.

    Raises:
        ValueError: If both ``cu_seqlens`` and ``initial_state`` are given.
    """
    if cu_seqlens is not None and initial_state is not None:
        raise ValueError("cu_seqlens and initial_state cannot be given together: documents start from zero")
    y, final, _ = _scan(x, delta, A, B, C, initial_state, cu_seqlens, decay_by_delta)
    return y, final


def _block_size(T: int, width: int) -> int:
    """S, for states of ``width`` numbers."""
    return min(T, max(16, min(64, _BLOCK // width)))


class _Blocks:
    """Buffers for one block of tokens at a time, ``[S, B, N, D]``: time first, so that a step lies in one piece."""

    def __init__(
        self, x: Tensor, delta: Tensor, A: Tensor | None, B: Tensor, C: Tensor, cu: Tensor | None, by_delta: bool
    ) -> None:
        batch, self.T, D = x.shape
        N = B.shape[2]
        self.wide = torch.promote_types(x.dtype, torch.float32)
        self.size = _block_size(self.T, batch * N * D)
        self.starts = range(0, self.T, self.size)
        self.documents: frozenset[int] = frozenset() if cu is None else frozenset(cu.tolist()) - {0}  # after the first
        self.A = None if A is None else A.to(self.wide).T.contiguous()
        self.by_delta = by_delta and A is not None
        self.constant = self.A.exp() if self.A is not None and not by_delta else None
        self.x, self.delta, self.B, self.C = x, delta, B, C
        shape = (self.size, batch, N, D)
        self._decay = torch.empty(shape, dtype=self.wide, device=x.device) if self.by_delta else None
        self.h = torch.empty(self.size + 1, *shape[1:], dtype=self.wide, device=x.device)

    def cut(self, t: Tensor, start: int) -> Tensor:
        """The tokens of one block, ``[S, B, …]``."""
        return t[:, start : start + self.size].transpose(0, 1).to(self.wide)

    def run(self, start: int, h: Tensor) -> tuple[Tensor | None, Tensor, Tensor]:
        """Decays ``[S, B, N, D]`` or ``[N, D]``, inputs Δx ``[S, B, D]`` and states ``[S+1, B, N, D]`` from h on."""
        delta = self.cut(self.delta, start)
        u = delta * self.cut(self.x, start)
        S = len(u)
        decay = self.constant
        if self._decay is not None and self.A is not None:
            decay = torch.mul(delta.unsqueeze(2), self.A, out=self._decay[:S]).exp_()
        states = self.h[: S + 1]
        states[0] = h
        torch.mul(u.unsqueeze(2), self.cut(self.B, start).unsqueeze(3), out=states[1:])
        steps, decays = states.unbind(0), self.each(decay, S)
        for t in range(S):
            if start + t not in self.documents:
                _add_decayed(steps[t + 1], decays[t], steps[t])
        return decay, u, states

    def each(self, decay: Tensor | None, S: int) -> Any:
        """The decay of every step of a block."""
        return decay.unbind(0) if decay is not None and decay.ndim == 4 else [decay] * S


def _add_decayed(new: Tensor, decay: Tensor | None, old: Tensor) -> None:
    if decay is None:
        new.add_(old)
    else:
        new.addcmul_(decay, old)


@torch.library.custom_op("seqarch::selective_scan", mutates_args=())
def _scan(
    x: Tensor,
    delta: Tensor,
    A: Tensor | None,
    B: Tensor,
    C: Tensor,
    initial: Tensor | None,
    cu_seqlens: Tensor | None,
    by_delta: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """y, the last state and those at block starts ``[T/S, B, N, D]``; an operator, so that it is never unrolled."""
    blocks = _Blocks(x, delta, A, B, C, cu_seqlens, by_delta)
    batch, T, D = x.shape
    saved = torch.zeros(len(blocks.starts), batch, B.shape[2], D, dtype=blocks.wide, device=x.device)
    y = torch.empty(batch, T, D, dtype=x.dtype, device=x.device)
    h = saved[0] if initial is None else initial.mT.to(blocks.wide)
    for i, start in enumerate(blocks.starts):
        saved[i] = h
        _, _, states = blocks.run(start, saved[i])
        read = blocks.cut(C, start).unsqueeze(2) @ states[1:]
        y[:, start : start + blocks.size] = read.squeeze(2).transpose(0, 1)
        h = states[-1]
    return y, h.mT.contiguous(), saved


@_scan.register_fake
def _(
    x: Tensor,
    delta: Tensor,
    A: Tensor | None,
    B: Tensor,
    C: Tensor,
    initial: Tensor | None,
    cu_seqlens: Tensor | None,
    by_delta: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    batch, T, D = x.shape
    N = B.shape[2]
    wide = torch.promote_types(x.dtype, torch.float32)
    saved = x.new_empty(-(-T // _block_size(T, batch * N * D)), batch, N, D, dtype=wide)
    return torch.empty_like(x, memory_format=torch.contiguous_format), x.new_empty(batch, D, N, dtype=wide), saved


def selective_scan_flops(tokens: int, D: int, N: int, *, decay: bool = True, decay_by_delta: bool = True) -> int:
    """A multiply-add to write and to read every state of every token, one product to decay it, one for Δ_t A."""
    return tokens * D * N * (4 + decay + (decay and decay_by_delta))


@register_flop_formula(torch.ops.seqarch.selective_scan)
def _(
    x: torch.Size,
    delta: torch.Size,
    A: torch.Size | None,
    B: torch.Size,
    C: torch.Size,
    initial: torch.Size | None,
    cu_seqlens: torch.Size | None,
    by_delta: bool,
    **_: Any,
) -> int:
    return selective_scan_flops(x[0] * x[1], x[2], B[2], decay=A is not None, decay_by_delta=by_delta)


@torch.library.custom_op("seqarch::selective_scan_backward", mutates_args=())
def _scan_backward(
    dy: Tensor,
    d_final: Tensor,
    x: Tensor,
    delta: Tensor,
    A: Tensor | None,
    B: Tensor,
    C: Tensor,
    cu_seqlens: Tensor | None,
    saved: Tensor,
    by_delta: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, delta, A ``[D, N]``, B, C and the initial state."""
    blocks = _Blocks(x, delta, A, B, C, cu_seqlens, by_delta)
    dx, d_delta, dB, dC = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (x, delta, B, C))
    dA = saved.new_zeros(saved.shape[2:])
    carry = d_final.mT.to(blocks.wide, copy=True)  # gradient of the state before the tokens that are done
    buffer = torch.empty_like(blocks.h[1:])
    for i, start in reversed(list(enumerate(blocks.starts))):
        decay, u, states = blocks.run(start, saved[i])
        S = len(u)
        part = slice(start, start + S)
        dy_, b, c = blocks.cut(dy, start), blocks.cut(B, start), blocks.cut(C, start)
        dC[:, part] = (states[1:] @ dy_.unsqueeze(3)).squeeze(3).transpose(0, 1)
        dh = torch.mul(dy_.unsqueeze(2), c.unsqueeze(3), out=buffer[:S])
        steps, decays = dh.unbind(0), blocks.each(decay, S)
        steps[-1].add_(carry)
        crossed = [t for t in range(S) if start + t in blocks.documents]
        for t in range(S - 1, 0, -1):
            if t not in crossed:
                _add_decayed(steps[t - 1], decays[t], steps[t])
        carry = steps[0].clone() if decays[0] is None else steps[0] * decays[0]
        du = (b.unsqueeze(2) @ dh).squeeze(2)
        dB[:, part] = (dh @ u.unsqueeze(3)).squeeze(3).transpose(0, 1)
        step = blocks.cut(delta, start)
        d_step = du * blocks.cut(x, start)
        dx[:, part] = du.mul_(step).transpose(0, 1)
        if 0 in crossed:
            carry.zero_()
        if blocks.A is not None and decay is not None:
            passed = dh.mul_(states[:-1])  # gradient of the decay itself, then of its logarithm
            passed[crossed] = 0
            if blocks.by_delta:
                passed.mul_(decay)
                d_step += torch.mul(passed, blocks.A, out=decay).sum(2)
                dA += passed.mul_(step.unsqueeze(2)).sum((0, 1))
            else:
                dA += passed.sum((0, 1)).mul_(decay)
        d_delta[:, part] = d_step.transpose(0, 1)
    return dx, d_delta, dA.T.contiguous(), dB, dC, carry.mT.contiguous()


@_scan_backward.register_fake
def _(
    dy: Tensor,
    d_final: Tensor,
    x: Tensor,
    delta: Tensor,
    A: Tensor | None,
    B: Tensor,
    C: Tensor,
    cu_seqlens: Tensor | None,
    saved: Tensor,
    by_delta: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    dx, d_delta, dB, dC = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (x, delta, B, C))
    N, D = saved.shape[2:]
    return dx, d_delta, saved.new_empty(D, N), dB, dC, torch.empty_like(d_final, memory_format=torch.contiguous_format)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    x, delta, A, B, C, initial, cu_seqlens, by_delta = inputs
    ctx.save_for_backward(x, delta, A, B, C, cu_seqlens, output[2])
    ctx.by_delta = by_delta
    ctx.initial_dtype = None if initial is None else initial.dtype


def _backward(ctx: Any, dy: Tensor, d_final: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    x, delta, A, B, C, cu_seqlens, saved = ctx.saved_tensors
    dx, d_delta, dA, dB, dC, d_initial = _scan_backward(dy, d_final, x, delta, A, B, C, cu_seqlens, saved, ctx.by_delta)
    d_start = None if ctx.initial_dtype is None else d_initial.to(ctx.initial_dtype)
    return dx, d_delta, None if A is None else dA.to(A.dtype), dB, dC, d_start, None, None


_scan.register_autograd(_backward, setup_context=_setup)
