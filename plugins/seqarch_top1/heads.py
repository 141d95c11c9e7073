"""What both mixers are around their selection: projections, positions and the key-value cache.

Shape legend: B batch, T tokens, D model width, H heads, G key-value heads, d head size, L room of the cache.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from seqarch import TokenMixer
from seqarch.mixer import TORCH, Backend, State
from seqarch.ops.cache import append
from seqarch.ops.linear import joint_linear
from seqarch.ops.norm import RMSNorm
from seqarch.ops.rotary import positions, rotate, rotation
from seqarch.options import head_sizes, one_of


class SelectionMixer(TokenMixer):
    """Base of Top-1 Element and Top-1 Chunk; the options are described there."""

    backends = (Backend("triton", ("triton",), device="cuda"), TORCH)

    def __init__(
        self,
        d_model: int,
        *,
        layer_idx: int,
        n_layers: int,
        n_heads: int,
        n_kv_heads: int | None,
        head_dim: int | None,
        position: Literal["rope", "none"],
        rope_base: float,
        temperature: float,
        qk_norm: bool,
        backend: str,
    ) -> None:
        super().__init__(d_model, layer_idx=layer_idx, n_layers=n_layers, backend=backend)
        n_kv_heads, head_dim = head_sizes(d_model, n_heads, n_kv_heads, head_dim)
        if temperature <= 0:
            raise ValueError(f"temperature must be above 0, got {temperature}")
        one_of(("rope", "none"), position=position)
        if position == "rope" and head_dim % 2:
            raise ValueError(f"position 'rope' needs an even head_dim, got {head_dim}")
        self.n_heads, self.n_kv_heads, self.head_dim = n_heads, n_kv_heads, head_dim
        self.position, self.rope_base = position, rope_base
        self.scale = 1.0 / (temperature * head_dim**0.5)
        self.q_proj = nn.Linear(d_model, n_heads * head_dim, bias=False)
        self.k_proj = nn.Linear(d_model, n_kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(d_model, n_kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(n_heads * head_dim, d_model, bias=False)
        self.q_norm = RMSNorm(head_dim, 1e-6) if qk_norm else None
        self.k_norm = RMSNorm(head_dim, 1e-6) if qk_norm else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Normal weights, σ = 1/√fan_in, o_proj further scaled by 1/√(2·n_layers)."""
        for name, module in self.named_children():
            if isinstance(module, RMSNorm):
                module.reset_parameters()
            elif isinstance(module, nn.Linear):
                depth = 2 * self.n_layers if name == "o_proj" else 1
                nn.init.normal_(module.weight, std=(depth * module.in_features) ** -0.5)

    def refuses(self, backend: str, device_type: str, dtype: torch.dtype) -> str | None:
        """Also a dtype or a head size that the Triton kernels do not serve."""
        reason = super().refuses(backend, device_type, dtype)
        if reason is not None or backend != "triton":
            return reason
        if dtype == torch.float64:
            return f"works in float32, float16 and bfloat16, not {dtype}"
        return f"takes head_dim up to 128, not {self.head_dim}" if self.head_dim > 128 else None

    def heads(self, x: Tensor, start: int, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries ``[B, T, H, d]``, keys and values ``[B, T, G, d]``, with norms and positions."""
        q, k, v = (t.unflatten(-1, (-1, self.head_dim)) for t in joint_linear(x, self.q_proj, self.k_proj, self.v_proj))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.position == "rope":
            position = positions(x.shape[1], start=start, cu_seqlens=cu_seqlens, device=x.device)
            cos, sin = rotation(position, self.head_dim, self.rope_base, torch.promote_types(x.dtype, torch.float32))
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        return q, k, v

    def init_state(
        self,
        batch_size: int,
        max_len: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> State:
        """``k`` and ``v`` ``[B, G, max_len, d]``, and ``pos`` ``[B]``, on the CPU."""
        weight = self.v_proj.weight
        shape = (batch_size, self.n_kv_heads, max_len, self.head_dim)
        kv = {n: torch.zeros(shape, device=device or weight.device, dtype=dtype or weight.dtype) for n in ("k", "v")}
        return {**kv, "pos": torch.zeros(batch_size, dtype=torch.int64)}  # reading it never waits for a device

    def extend(self, k: Tensor, v: Tensor, state: State, start: int) -> State:
        """The state with the keys and values of tokens ``start`` … ``start + T - 1``.

        Raises:
            ValueError: If there is no room for them.
        """
        B, T, G, d = k.shape
        max_len = state["k"].shape[2]
        if start + T > max_len:
            raise ValueError(f"the state has room for max_len = {max_len} tokens, not for {start + T}")
        new: State = {**state, "pos": state["pos"] + T}
        for name, x in (("k", k), ("v", v)):
            cache = append(state[name].flatten(0, 1), x.transpose(1, 2).reshape(B * G, T, d), start)
            new[name] = cache.view(B, G, max_len, d)
        return new

    def cached(self, state: State) -> tuple[Tensor, Tensor]:
        """Keys and values so far, ``[B, S, G, d]``."""
        end = int(state["pos"][0])
        return state["k"][:, :, :end].transpose(1, 2), state["v"][:, :, :end].transpose(1, 2)

    def projection_flops(self, T: int) -> int:
        """Operations of the projections of T tokens."""
        return 2 * T * sum(m.in_features * m.out_features for m in self.children() if isinstance(m, nn.Linear))
