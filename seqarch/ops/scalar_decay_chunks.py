"""Scalar decay by chunk: what tokens read of earlier chunks and of their own, and its gradients.

Written for ``seqarch.ops.scalar_decay``: nothing here is meant to be differentiated by autograd.

Shape legend: B batch, T tokens, H heads, G groups of R heads that share q and k, K key size, V value size, N chunks, C
chunk size; BG stands for B·G and RV for R·V.
"""

from __future__ import annotations

import torch
from torch import Tensor


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


class Heads:
    """What differs between the heads of a group: decay, gain and skip. Any of them may be absent."""

    def __init__(self, g: Tensor | None, gain: Tensor | None, skip: Tensor | None) -> None:
        self.decay = None if g is None else _Decay(g)
        self.gain = gain  # [BG, N, C, R]
        self.skip = skip  # [BG, R]
        self.alike = g is None and gain is None and skip is None
        #: Of v, for what a token writes to the chunk's end; of what a token reads from the chunk's first state.
        write = None if self.decay is None else self.decay.write
        self.write = write if gain is None else gain[..., None] if write is None else write * gain[..., None]
        self.read = None if self.decay is None else self.decay.read

    def scores(self, within: Tensor | None, scores: Tensor, head: int) -> Tensor:
        """What token j adds of its v to the output of token i, ``[BG·N, C, C]``; overwrites ``within``."""
        weights = scores.clone() if within is None else within.mul_(scores)
        if self.gain is not None:
            weights.mul_(self.gain[..., head].flatten(0, 1)[:, None])
        if self.skip is not None:
            chunks = weights.shape[0] // self.skip.shape[0]
            own = self.skip[:, head].repeat_interleave(chunks)[:, None]
            weights.diagonal(dim1=1, dim2=2).add_(own)
        return weights


def _per_head(x: Tensor, V: int) -> Tensor:
    return x.unflatten(-1, (-1, V))


def _times(x: Tensor, factor: Tensor | None, V: int) -> Tensor:
    """x ``[BG, C, RV]`` by one factor a token and head, ``[BG, C, R, 1]``."""
    return x if factor is None else (_per_head(x, V) * factor).flatten(2)


def read_states(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    heads: Heads,
    V: int,
    start: Tensor | None,
    resets: frozenset[int],
    final: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """What tokens read of earlier chunks ``[BG, N, C, RV]``, the states at chunk starts, the last state."""
    BG, N, _, K = q.shape
    o = torch.empty_like(v, memory_format=torch.contiguous_format)
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
            if heads.read is not None:
                _per_head(o[:, n], V).mul_(heads.read[:, n])
        if n + 1 < N:
            if n + 1 in resets:
                continue
            after = states[:, n + 1]
        elif final:
            after = end = torch.empty_like(state, memory_format=torch.contiguous_format)
        else:
            break
        written = _times(v[:, n], None if heads.write is None else heads.write[:, n], V)
        if empty:
            after.baddbmm_(k[:, n].mT, written, beta=0)
            continue
        after.copy_(state)
        if heads.decay is not None:
            _per_head(after, V).mul_(heads.decay.whole[:, n])
        after.baddbmm_(k[:, n].mT, written)
    return o, states, end


def add_within(o: Tensor, q: Tensor, k: Tensor, v: Tensor, heads: Heads, V: int) -> None:
    """Add what each token reads of its own chunk. One head of a group at a time: the scores are large."""
    scores = (q.flatten(0, 1) @ k.flatten(0, 1).mT).tril_()
    if heads.alike:
        o.flatten(0, 1).baddbmm_(scores, v.flatten(0, 1))
        return
    o_, v_ = _per_head(o.flatten(0, 1), V), _per_head(v.flatten(0, 1), V)
    for r in range(v_.shape[2]):
        within = None if heads.decay is None else heads.decay.within(r)
        o_[:, :, r] += torch.bmm(heads.scores(within, scores, r), v_[:, :, r])


class Gradients:
    """Backward of ``read_states`` and ``add_within``, all tensors by chunk."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, do: Tensor, heads: Heads, V: int) -> None:
        self.q, self.k, self.v, self.do, self.heads, self.V = q, k, v, do, heads, V
        self.dq, self.dk, self.dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
        # Gradients of sums of g: a token's own for what it reads, the chunk's for what is written and for what passes.
        shape = (*v.shape[:3], v.shape[3] // V)
        self.reads, self.passes = v.new_zeros(shape), v.new_zeros(shape[0], shape[1], 1, shape[3])
        self.writes, self.gain = v.new_zeros(shape), v.new_zeros(shape)
        self.skip = v.new_zeros(shape[0], shape[3])

    def through_states(
        self, states: Tensor, end: Tensor | None, resets: frozenset[int], has_start: bool
    ) -> Tensor | None:
        """Set dq, dk and dv to the part that runs through states; returns the gradient of the first state."""
        q, k, v, V, heads, decay = self.q, self.k, self.v, self.V, self.heads, self.heads.decay
        d_after = end  # of the state after chunk n; None stands for zero
        for n in reversed(range(q.shape[1])):
            state = states[:, n]
            empty = n in resets or (n == 0 and not has_start)
            if d_after is None:
                self.dv[:, n] = 0
                self.dk[:, n] = 0
            else:
                factor = None if heads.write is None else heads.write[:, n]
                dv = self.dv[:, n].baddbmm_(k[:, n], d_after, beta=0)
                self.dk[:, n].baddbmm_(_times(v[:, n], factor, V), d_after.mT, beta=0)
                if factor is not None:
                    written = _per_head(dv * v[:, n], V).sum(-1)
                    if heads.gain is not None:
                        self.gain[:, n] = written if decay is None else written * decay.write[:, n, :, :, 0]
                    self.writes[:, n] = written.mul_(factor[..., 0])
                    _per_head(dv, V).mul_(factor)
            if empty:
                self.dq[:, n] = 0
                d_after = None
                continue
            do = _times(self.do[:, n], None if decay is None else decay.read[:, n], V)
            self.dq[:, n].baddbmm_(do, state.mT, beta=0)
            if decay is not None:
                self.reads[:, n] = _per_head(torch.bmm(q[:, n], state).mul_(do), V).sum(-1)
            if d_after is None:
                d_after = torch.bmm(q[:, n].mT, do)
                continue
            if decay is not None:
                _per_head(d_after, V).mul_(decay.whole[:, n])
                self.passes[:, n] = _per_head((d_after * state).sum(1, keepdim=True), V).sum(-1)
            d_after.baddbmm_(q[:, n].mT, do)
        return d_after

    def within_chunks(self) -> None:
        """Add the part that stays in a chunk, one head of a group at a time."""
        q, k, v, do, dq, dk, dv = (
            x.flatten(0, 1) for x in (self.q, self.k, self.v, self.do, self.dq, self.dk, self.dv)
        )
        scores = (q @ k.mT).tril_()
        if self.heads.alike:
            d_scores = do @ v.mT
            dv.baddbmm_(scores.mT, do)
        else:
            d_scores = torch.zeros_like(scores)
            v, do, dv = (_per_head(x, self.V) for x in (v, do, dv))
            earlier = scores.tril(-1)  # a token's own score has no decay
            for r in range(v.shape[2]):
                within = None if self.heads.decay is None else self.heads.decay.within(r)
                d_within = torch.bmm(do[:, :, r], v[:, :, r].mT)
                self._head(r, d_within, within, scores, earlier, d_scores)
                dv[:, :, r] += torch.bmm(self.heads.scores(within, scores, r).mT, do[:, :, r])
        d_scores.tril_()
        dq.baddbmm_(d_scores, k)
        dk.baddbmm_(d_scores.mT, q)

    def _head(
        self, r: int, d_within: Tensor, within: Tensor | None, scores: Tensor, earlier: Tensor, d_scores: Tensor
    ) -> None:
        """Gradients of skip, scores, gain and decay, from that of what token i reads of the v of token j."""
        own = d_within.diagonal(dim1=1, dim2=2)  # a view
        if self.heads.skip is not None:
            self.skip[:, r] = own.reshape(self.skip.shape[0], -1).sum(1)
        if within is not None:
            d_within.mul_(within)
        gain = None if self.heads.gain is None else self.heads.gain[..., r].flatten(0, 1)
        if gain is None:
            d_scores += d_within
        else:
            d_scores.addcmul_(d_within, gain[:, None])
            self.gain[..., r].flatten(0, 1).addcmul_(own, scores.diagonal(dim1=1, dim2=2))
        d_within.mul_(earlier)
        columns = d_within.sum(1)
        if gain is None:
            rows = d_within.sum(2)
        else:
            self.gain[..., r] += columns.view_as(self.gain[..., r])
            rows = torch.bmm(d_within, gain[..., None])[..., 0]
            columns *= gain
        self.reads[..., r] += rows.sub_(columns).view_as(self.reads[..., r])

    def decays(self) -> Tensor:
        """The gradient of g, ``[BG, N, C, R]``: each g_t is part of the sums of tokens t … C-1 and of the chunk's."""
        dg = self.reads.flip(2).cumsum(2).flip(2) + self.passes
        dg[:, :, 1:] += self.writes[:, :, :-1].cumsum(2)
        return dg
