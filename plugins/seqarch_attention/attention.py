"""The mixer of Transformer++.

Shape legend: B batch, T tokens, S cached and new keys, H heads, G key-value heads, D head size.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from seqarch import Backend, Tags, TokenMixer
from seqarch.mixer import TORCH, State
from seqarch.ops.attention import add_alibi, alibi_slopes, causal_attention
from seqarch.ops.cache import append
from seqarch.ops.linear import joint_linear
from seqarch.ops.norm import RMSNorm
from seqarch.ops.rotary import positions, rotate, rotation, sinusoid
from seqarch.options import at_least, head_sizes, one_of
from seqarch_attention.backends import flash_attention, flex_attention


class Attention(TokenMixer):
    """Causal multi-head softmax attention (Vaswani et al. 2017), with grouped key-value heads and a window as options.

    Args:
        d_model: Width of the model.
        layer_idx: Which layer of the backbone this is.
        n_layers: How many layers the backbone has.
        n_heads: Query heads.
        n_kv_heads: Key-value heads, a divisor of n_heads (Ainslie et al. 2023); by default n_heads.
        head_dim: Size of a head; by default d_model / n_heads.
        window: Each token sees itself and the window - 1 before it; by default the whole sequence.
        position: rope (rotary), alibi, absolute (sinusoids added to the mixer's input), or none.
        rope_base: Base of the rotary wavelengths.
        relation: What a score is made of: qk, the product of query and key; random_keys, of the query and a trainable
            constant per key position; random_scores, of two trainable constants per position, without any content.
        max_len: Positions that have trainable constants, for a relation other than qk.
        temperature: Scores are q·k / (temperature · √head_dim).
        qk_norm: Normalise queries and keys per head (RMS) before positions.
        backend: auto, flash_attn, flex or torch.
    """

    backends = (
        Backend("flash_attn", ("flash_attn",), device="cuda"),
        Backend("flex", ("triton",), device="cuda"),
        TORCH,
    )
    formats = {"llama": "seqarch_attention.llama:Llama"}

    def __init__(
        self,
        d_model: int,
        *,
        layer_idx: int = 0,
        n_layers: int = 1,
        n_heads: int = 8,
        n_kv_heads: int | None = None,
        head_dim: int | None = None,
        window: int | None = None,
        position: Literal["rope", "alibi", "absolute", "none"] = "rope",
        rope_base: float = 10000.0,
        relation: Literal["qk", "random_keys", "random_scores"] = "qk",
        max_len: int = 2048,
        temperature: float = 1.0,
        qk_norm: bool = False,
        backend: str = "auto",
    ) -> None:
        super().__init__(d_model, layer_idx=layer_idx, n_layers=n_layers, backend=backend)
        n_kv_heads, head_dim = head_sizes(d_model, n_heads, n_kv_heads, head_dim)
        at_least(1, window=window, max_len=max_len)
        one_of(("rope", "alibi", "absolute", "none"), position=position)
        one_of(("qk", "random_keys", "random_scores"), relation=relation)
        if temperature <= 0:
            raise ValueError(f"temperature must be above 0, got {temperature}")
        if position == "rope" and head_dim % 2:
            raise ValueError(f"position 'rope' needs an even head_dim, got {head_dim}")
        if position == "absolute" and d_model % 2:
            raise ValueError(f"position 'absolute' needs an even d_model, got {d_model}")
        self.n_heads, self.n_kv_heads, self.head_dim = n_heads, n_kv_heads, head_dim
        self.window, self.position, self.rope_base = window, position, rope_base
        self.relation, self.max_len = relation, max_len
        self.scale = 1.0 / (temperature * head_dim**0.5)
        self.tags = Tags(recurrent=window is not None, constant_state=window is not None, chunk_size=window)

        self.v_proj = nn.Linear(d_model, n_kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(n_heads * head_dim, d_model, bias=False)
        if relation != "random_scores":
            self.q_proj = nn.Linear(d_model, n_heads * head_dim, bias=False)
        else:
            self.random_queries = nn.Parameter(torch.empty(max_len, n_heads, head_dim))
        if relation == "qk":
            self.k_proj = nn.Linear(d_model, n_kv_heads * head_dim, bias=False)
        else:
            self.random_keys = nn.Parameter(torch.empty(max_len, n_kv_heads, head_dim))
        self.q_norm = RMSNorm(head_dim, 1e-6) if qk_norm else None
        self.k_norm = RMSNorm(head_dim, 1e-6) if qk_norm else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Normal weights, σ = 1/√fan_in, o_proj further scaled by 1/√(2·n_layers); random constants have σ = 1."""
        for name, module in self.named_children():
            if isinstance(module, nn.RMSNorm):
                module.reset_parameters()
            elif isinstance(module, nn.Linear):
                depth = 2 * self.n_layers if name == "o_proj" else 1
                nn.init.normal_(module.weight, std=(depth * module.in_features) ** -0.5)
        for name, parameter in self.named_parameters(recurse=False):
            assert name.startswith("random_")
            nn.init.normal_(parameter)

    def forward(
        self, x: Tensor, *, cu_seqlens: Tensor | None = None, state: State | None = None
    ) -> tuple[Tensor, State | None]:
        """See ``TokenMixer.forward``.

        Raises:
            ValueError: Also where a position has no trainable constant (``relation`` and ``max_len``).
        """
        self.check_input(x, cu_seqlens, state)
        backend = self.choose_backend(x)
        start = 0 if state is None else int(state["pos"][0])
        if self.relation != "qk":
            longest = start + x.shape[1] if cu_seqlens is None else int(cu_seqlens.diff().max())
            if longest > self.max_len:
                raise ValueError(
                    f"relation '{self.relation}' has constants for max_len = {self.max_len} positions, the input has "
                    f"{longest}: raise max_len"
                )
        q, k, v = self._qkv(x, positions(x.shape[1], start=start, cu_seqlens=cu_seqlens, device=x.device))
        if state is not None:
            k, v, state = self._extend(k, v, state, start)
        # A state is served by SDPA on every device: the other backends are for training.
        if backend == "torch" or state is not None:
            o = self._torch(q, k, v, cu_seqlens)
        else:
            function = flash_attention if backend == "flash_attn" else flex_attention
            slopes = alibi_slopes(self.n_heads) if self.position == "alibi" else None
            o = function(q, k, v, scale=self.scale, window=self.window, cu_seqlens=cu_seqlens, slopes=slopes)
        return self.o_proj(o.flatten(2)), state

    def refuses(self, backend: str, device_type: str, dtype: torch.dtype) -> str | None:
        """FlashAttention works in half precision only."""
        if backend == "flash_attn" and dtype not in (torch.float16, torch.bfloat16):
            return f"flash-attn works in float16 and bfloat16, not {dtype}"
        return super().refuses(backend, device_type, dtype)

    def _qkv(self, x: Tensor, position: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries ``[B, T, H, D]``, keys and values ``[B, T, G, D]`` with everything done but attention."""
        B, T, _ = x.shape
        if self.position == "absolute":
            x = x + sinusoid(position, self.d_model, x.dtype)
        if self.relation == "qk":
            q, k, v = joint_linear(x, self.q_proj, self.k_proj, self.v_proj)
        elif self.relation == "random_keys":
            q, v = joint_linear(x, self.q_proj, self.v_proj)
            k = self._constants(self.random_keys, position, B)
        else:
            v = self.v_proj(x)
            q, k = (self._constants(table, position, B) for table in (self.random_queries, self.random_keys))
        q = q.view(B, T, self.n_heads, self.head_dim)
        k, v = (t.view(B, T, self.n_kv_heads, self.head_dim) for t in (k, v))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.position == "rope":
            cos, sin = rotation(position, self.head_dim, self.rope_base, torch.promote_types(x.dtype, torch.float32))
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        return q, k, v

    def _constants(self, table: Tensor, position: Tensor, batch_size: int) -> Tensor:
        """Rows of ``random_queries`` or ``random_keys`` for these positions, ``[B, T, heads · D]``."""
        return table[position].flatten(1).expand(batch_size, -1, -1)

    def _torch(self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> Tensor:
        if self.position != "alibi":
            return causal_attention(q, k, v, scale=self.scale, window=self.window, cu_seqlens=cu_seqlens)
        group = self.n_heads // self.n_kv_heads
        k, v = k.repeat_interleave(group, dim=2), v.repeat_interleave(group, dim=2)
        slopes = torch.tensor(alibi_slopes(self.n_heads), device=q.device)
        q, k, v = add_alibi(q, k, v, slopes, self.scale)
        o = causal_attention(q, k, v, scale=self.scale, window=self.window, cu_seqlens=cu_seqlens)
        return o[..., : self.head_dim]

    def _extend(self, k: Tensor, v: Tensor, state: State, start: int) -> tuple[Tensor, Tensor, State]:
        """All keys and values that the queries may see, and the state after them."""
        end = start + k.shape[1]
        new: State = {"pos": state["pos"] + k.shape[1]}
        seen = []
        for name, x in (("k", k), ("v", v)):
            cache = state[name]
            if self.window is not None:  # the newest keys lie at the end
                every = torch.cat((cache, x.to(cache.dtype)), dim=1)
                new[name] = every[:, every.shape[1] - cache.shape[1] :]
                seen.append(every[:, max(0, cache.shape[1] - start) :])
            else:
                if end > cache.shape[1]:
                    raise ValueError(f"the state has room for max_len = {cache.shape[1]} tokens, not for {end}")
                new[name] = append(cache, x, start)
                seen.append(new[name][:, :end])
        return seen[0], seen[1], new

    def init_state(
        self,
        batch_size: int,
        max_len: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> State:
        """``k``, ``v`` ``[B, max_len, G, D]`` (with a window: ``window - 1`` keys), and ``pos`` ``[B]``, on the CPU."""
        length = max_len if self.window is None else self.window - 1
        weight = self.v_proj.weight
        device, dtype = device or weight.device, dtype or weight.dtype
        shape = (batch_size, length, self.n_kv_heads, self.head_dim)
        return {
            "k": torch.zeros(shape, device=device, dtype=dtype),
            "v": torch.zeros(shape, device=device, dtype=dtype),
            "pos": torch.zeros(batch_size, dtype=torch.int64),  # on the CPU: reading it never waits for a device
        }

    def flops(self, T: int) -> int:
        """Projections, and 4·D operations for every query-key pair inside the causal window, per head."""
        W = T if self.window is None else min(self.window, T)
        pairs = W * (W + 1) // 2 + (T - W) * W
        widths = sum(m.in_features * m.out_features for m in self.children() if isinstance(m, nn.Linear))
        return 2 * T * widths + 4 * pairs * self.n_heads * self.head_dim
