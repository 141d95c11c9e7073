"""The mixers Top-1 Element and Top-1 Chunk.

Shape legend: B batch, T tokens, D model width, H heads, G key-value heads, R = H/G, d head size, C tokens a chunk.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from seqarch import Tags
from seqarch.mixer import State
from seqarch.ops.cache import append
from seqarch.options import at_least, one_of
from seqarch_top1.chunk import top1_chunk
from seqarch_top1.decode import decode
from seqarch_top1.element import top1_element
from seqarch_top1.heads import SelectionMixer
from seqarch_top1.tiles import working


class Top1Element(SelectionMixer):
    """Each query takes the value of the one key with the largest score of its past (the smallest index among equals).

    Top-1 Element of "How Does Sequence Modeling Architecture Influence Base Capabilities of Pre-trained Language
    Models?" (arXiv 2505.18522). The gradient is straight-through: attention weights are onehot(j*) + p - sg(p) with p
    the softmax of the scores, so that values get the gradient of the hard selection, queries and keys that of softmax.
    Time grows as T², memory as T.

    Args:
        d_model: Width of the model.
        layer_idx: Which layer of the backbone this is.
        n_layers: How many layers the backbone has.
        n_heads: Query heads.
        n_kv_heads: Key-value heads, a divisor of n_heads; by default n_heads.
        head_dim: Size of a head; by default d_model / n_heads.
        position: rope (rotary) or none.
        rope_base: Base of the rotary wavelengths.
        temperature: Scores are q·k / (temperature · √head_dim); it matters to the gradient only.
        qk_norm: Normalise queries and keys per head (RMS) before positions.
        backend: auto, triton (a CUDA or ROCm device, head_dim up to 128) or torch.
    """

    tags = Tags(straight_through=True, discontinuous=True, fullgraph=False)

    def __init__(
        self,
        d_model: int,
        *,
        layer_idx: int = 0,
        n_layers: int = 1,
        n_heads: int = 8,
        n_kv_heads: int | None = None,
        head_dim: int | None = None,
        position: Literal["rope", "none"] = "rope",
        rope_base: float = 10000.0,
        temperature: float = 1.0,
        qk_norm: bool = False,
        backend: str = "auto",
    ) -> None:
        super().__init__(
            d_model, layer_idx=layer_idx, n_layers=n_layers, n_heads=n_heads, n_kv_heads=n_kv_heads, head_dim=head_dim,
            position=position, rope_base=rope_base, temperature=temperature, qk_norm=qk_norm, backend=backend,
        )  # fmt: skip

    def forward(
        self, x: Tensor, *, cu_seqlens: Tensor | None = None, state: State | None = None
    ) -> tuple[Tensor, State | None]:
        """See ``TokenMixer.forward``."""
        self.check_input(x, cu_seqlens, state)
        triton = self.choose_backend(x) == "triton"
        start = 0 if state is None else int(state["pos"][0])
        q, k, v = self.heads(x, start, cu_seqlens)
        if state is not None:
            state = self.extend(k, v, state, start)
            k, v = self.cached(state)
        if triton and state is not None and q.shape[1] == 1 and not _needs_gradient(q, k, v):
            from seqarch_top1.triton_element_decode import triton_element_token

            o = triton_element_token(q, k, v)
        elif triton:
            from seqarch_top1.triton_element import triton_element

            o = triton_element(q, k, v, scale=self.scale, cu_seqlens=cu_seqlens)
        else:
            o = top1_element(q, k, v, scale=self.scale, cu_seqlens=cu_seqlens)
        return self.o_proj(o.flatten(2).to(x.dtype)), state

    def flops(self, T: int) -> int:
        """Projections, and 2·d operations for every score of the causal half, per head; the value is only fetched."""
        return self.projection_flops(T) + T * (T + 1) * self.n_heads * self.head_dim


class Top1Chunk(SelectionMixer):
    """Each query attends to its own chunk of the sequence and to one earlier chunk, which it selects.

    Top-1 Chunk of "How Does Sequence Modeling Architecture Influence Base Capabilities of Pre-trained Language
    Models?" (arXiv 2505.18522). Candidates are the complete chunks before the own one; a query in the first chunk
    selects nothing. The output is one softmax over the tokens of both chunks. The selection learns by a
    straight-through gradient: the selected chunk's part of the output is scaled by 1 + P - sg(P), P being that chunk's
    probability.

    Documents of ``cu_seqlens`` are cut into chunks each on its own.

    Args:
        d_model: Width of the model.
        layer_idx: Which layer of the backbone this is.
        n_layers: How many layers the backbone has.
        n_heads: Query heads.
        n_kv_heads: Key-value heads, a divisor of n_heads; by default n_heads.
        head_dim: Size of a head; by default d_model / n_heads.
        position: rope (rotary) or none.
        rope_base: Base of the rotary wavelengths.
        temperature: Scores are q·k / (temperature · √head_dim), for selection and attention.
        qk_norm: Normalise queries and keys per head (RMS) before positions.
        chunk_size: Tokens of a chunk.
        selection: How likely a chunk is. exact: softmax over the candidates' log-sum-exps of scores, in T² time.
            approx: the log-sum-exp to first order around equal scores, log n + mean of the n scores, so that a chunk is
            scored by its mean key, in T²/chunk_size time.
        local: Every query sees its own chunk. Otherwise the own chunk, as far as it is past, is one more candidate and
            the softmax is over the selected chunk alone. (approx: the logit of the n ≤ chunk_size past tokens is
            log(n / chunk_size) + their mean score, since complete chunks leave out log chunk_size.)
        select: chunk: softmax over the tokens of both chunks. element: the value of the token with the largest score
            among them instead, with weights onehot(j*) + p - sg(p) (Top-1 Element within the two chunks); the selected
            chunk's part of the output is then that value where j* lies in the selected chunk, and 0 elsewhere.
        backend: auto, triton (a CUDA or ROCm device; local, select: chunk, a chunk_size of 16 to 256 that is a power of
            two, head_dim up to 128) or torch.
    """

    def __init__(
        self,
        d_model: int,
        *,
        layer_idx: int = 0,
        n_layers: int = 1,
        n_heads: int = 8,
        n_kv_heads: int | None = None,
        head_dim: int | None = None,
        position: Literal["rope", "none"] = "rope",
        rope_base: float = 10000.0,
        temperature: float = 1.0,
        qk_norm: bool = False,
        chunk_size: int = 128,
        selection: Literal["exact", "approx"] = "exact",
        local: bool = True,
        select: Literal["chunk", "element"] = "chunk",
        backend: str = "auto",
    ) -> None:
        super().__init__(
            d_model, layer_idx=layer_idx, n_layers=n_layers, n_heads=n_heads, n_kv_heads=n_kv_heads, head_dim=head_dim,
            position=position, rope_base=rope_base, temperature=temperature, qk_norm=qk_norm, backend=backend,
        )  # fmt: skip
        at_least(1, chunk_size=chunk_size)
        one_of(("exact", "approx"), selection=selection)
        one_of(("chunk", "element"), select=select)
        self.chunk_size, self.local = chunk_size, local
        self.exact, self.element = selection == "exact", select == "element"
        self.tags = Tags(
            straight_through=True, discontinuous=True, bitwise_prefix=False, fullgraph=False, chunk_size=chunk_size
        )

    def refuses(self, backend: str, device_type: str, dtype: torch.dtype) -> str | None:
        """Also options that the Triton kernels do not serve."""
        reason = super().refuses(backend, device_type, dtype)
        if reason is not None or backend != "triton":
            return reason
        C = self.chunk_size
        faults = {
            "needs local: true": not self.local,
            "needs select: chunk": self.element,
            f"needs a chunk_size that is a power of two from 16 to 256, not {C}": C & (C - 1) or not 16 <= C <= 256,
        }
        return next((fault for fault, there in faults.items() if there), None)

    def forward(
        self, x: Tensor, *, cu_seqlens: Tensor | None = None, state: State | None = None
    ) -> tuple[Tensor, State | None]:
        """See ``TokenMixer.forward``."""
        self.check_input(x, cu_seqlens, state)
        triton = self.choose_backend(x) == "triton"
        start = 0 if state is None else int(state["pos"][0])
        q, k, v = self.heads(x, start, cu_seqlens)
        if state is not None:
            state = self._extend(k, v, state, start)
            k, v = self.cached(state)
        options = {"scale": self.scale, "chunk_size": self.chunk_size}
        if state is not None and q.shape[1] == 1:
            if triton and not _needs_gradient(q, k, v):
                from seqarch_top1.triton_decode import triton_decode

                o = triton_decode(q, k, v, state.get("means"), **options)
            else:
                o = decode(q, k, v, state.get("means"), **options, local=self.local, element=self.element)
        elif triton:
            from seqarch_top1.triton_chunk import triton_chunk

            o = triton_chunk(q, k, v, **options, exact=self.exact, cu_seqlens=cu_seqlens)
        else:
            o = top1_chunk(
                q, k, v, **options, exact=self.exact, local=self.local, element=self.element, cu_seqlens=cu_seqlens
            )
        return self.o_proj(o.flatten(2).to(x.dtype)), state

    def _extend(self, k: Tensor, v: Tensor, state: State, start: int) -> State:
        """The state with T more tokens, and the mean keys of the chunks that they complete."""
        T = k.shape[1]
        new = self.extend(k, v, state, start)
        a, b = start // self.chunk_size, (start + T) // self.chunk_size
        if "means" in state and a < b:
            chunks = new["k"][:, :, a * self.chunk_size : b * self.chunk_size].unflatten(2, (b - a, self.chunk_size))
            means = append(state["means"].flatten(0, 1), working(chunks).mean(3).flatten(0, 1), a)
            new["means"] = means.view_as(state["means"])
        return new

    def init_state(
        self,
        batch_size: int,
        max_len: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> State:
        """``k``, ``v``, ``pos``; for ``approx`` also the mean keys ``[B, G, ⌊max_len/C⌋, d]`` in at least float32."""
        state = super().init_state(batch_size, max_len, device, dtype)
        if not self.exact:
            shape = (batch_size, self.n_kv_heads, max_len // self.chunk_size, self.head_dim)
            state["means"] = working(state["k"].new_zeros(shape))
        return state

    def flops(self, T: int) -> int:
        """Projections, scores of the selection, and 4·d operations for every token that is attended to, per head.

        Selection scores every key (exact) or every mean key (approx) of the chunks before the own one; the means cost
        one addition a key and head. Without ``local``, a query after the first chunk counts as one that selects a
        complete chunk.
        """
        C = self.chunk_size
        N, tail = divmod(T, C)
        earlier = C * C * N * (N - 1) // 2 + tail * N * C  # pairs of a query and a token of a chunk before its own
        own = N * C * (C + 1) // 2 + tail * (tail + 1) // 2
        attended = max(T - C, 0) * C + own
        scored = earlier if self.exact else earlier // C
        if not self.local:
            scored += own if self.exact else T
            first = min(T, C)
            attended = max(T - C, 0) * C + first * (first + 1) // 2
        means = 0 if self.exact else T * self.n_kv_heads * self.head_dim
        return self.projection_flops(T) + means + (2 * scored + 4 * attended) * self.n_heads * self.head_dim


def _needs_gradient(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
