"""Multi-scale retention, the mixer of RetNet.

Shape legend: B batch, T tokens, D model width, H heads, K and V sizes of a head of q and k and of a head of v.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from seqarch import State, Tags, TokenMixer
from seqarch.ops.gated_norm import GatedRMSNorm
from seqarch.ops.linear import joint_linear
from seqarch.ops.rotary import positions, rotary
from seqarch.ops.scalar_decay import scalar_decay_attention
from seqarch.options import at_least, head_sizes

_CHUNK = 64
_EPS = 1e-5


class Retention(TokenMixer):
    """Linear attention whose heads forget at fixed rates (Sun et al. 2023, arXiv 2307.08621).

    S_t = γ S_{t-1} + k_t v_tᵀ and o_t = S_tᵀ q_t / √K, with γ = 1 - 2^(-5-h) in head h and rotary positions on q and
    k; the output is W_o(SiLU(W_g x) ⊙ norm(o)), the norm per head. It is computed by chunks (section 2.3 of the paper).

    Args:
        d_model: Width of the model.
        layer_idx: Which layer of the backbone this is.
        n_layers: How many layers the backbone has.
        n_heads: Heads, each with a state and a decay of its own.
        head_dim: Size of a head of q and k, even; by default d_model / n_heads.
        expand_v: Size of a head of v, in units of head_dim.
        rope_base: Base of the rotary positions.
        backend: auto or torch.
    """

    tags = Tags(recurrent=True, constant_state=True, chunk_size=_CHUNK)

    def __init__(
        self,
        d_model: int,
        *,
        layer_idx: int = 0,
        n_layers: int = 1,
        n_heads: int = 4,
        head_dim: int | None = None,
        expand_v: int = 2,
        rope_base: float = 10000.0,
        backend: str = "auto",
    ) -> None:
        super().__init__(d_model, layer_idx=layer_idx, n_layers=n_layers, backend=backend)
        _, head_dim = head_sizes(d_model, n_heads, None, head_dim)
        at_least(1, expand_v=expand_v, rope_base=rope_base)
        if head_dim % 2:
            raise ValueError(f"head_dim ({head_dim}) must be even for rotary positions: give head_dim")
        self.n_heads, self.head_dim, self.v_dim, self.rope_base = n_heads, head_dim, expand_v * head_dim, rope_base
        self.q_proj = nn.Linear(d_model, n_heads * head_dim, bias=False)
        self.k_proj = nn.Linear(d_model, n_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(d_model, n_heads * self.v_dim, bias=False)
        self.g_proj = nn.Linear(d_model, n_heads * self.v_dim, bias=False)
        self.norm = GatedRMSNorm(self.v_dim, _EPS, gate_first=False)
        self.o_proj = nn.Linear(n_heads * self.v_dim, d_model, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Normal weights, σ = 1/√fan_in, o_proj further scaled by 1/√(2·n_layers)."""
        for projection in (self.q_proj, self.k_proj, self.v_proj, self.g_proj):
            nn.init.normal_(projection.weight, std=self.d_model**-0.5)
        nn.init.normal_(self.o_proj.weight, std=(2 * self.n_layers * self.o_proj.in_features) ** -0.5)
        self.norm.reset_parameters()

    def log_decays(self, device: torch.device | None = None) -> Tensor:
        """ln γ of each head, float64 ``[H]``: the slowest forgets over about 2^(5+H) tokens."""
        return torch.log1p(-torch.exp2(-5.0 - torch.arange(self.n_heads, device=device, dtype=torch.float64)))

    def forward(
        self, x: Tensor, *, cu_seqlens: Tensor | None = None, state: State | None = None
    ) -> tuple[Tensor, State | None]:
        """See ``TokenMixer.forward``."""
        self.check_input(x, cu_seqlens, state)
        B, T, _ = x.shape
        q, k, v, gate = joint_linear(x, self.q_proj, self.k_proj, self.v_proj, self.g_proj)
        start = 0 if state is None else int(state["pos"][0])
        position = positions(T, start=start, cu_seqlens=cu_seqlens, device=x.device)
        q, k = (rotary(t.unflatten(-1, (self.n_heads, -1)), position, self.rope_base) for t in (q, k))
        v, gate = (t.unflatten(-1, (self.n_heads, -1)) for t in (v, gate))
        g = self.log_decays(x.device).to(torch.promote_types(x.dtype, torch.float32))
        o, s = scalar_decay_attention(
            q,
            k,
            v,
            g.expand(B, T, -1),
            scale=self.head_dim**-0.5,
            initial_state=None if state is None else state["s"],
            cu_seqlens=cu_seqlens,
            output_final_state=state is not None,
            chunk_size=_CHUNK,
        )
        y = self.o_proj(self.norm(o, gate).flatten(2))
        return y, None if state is None or s is None else {"s": s.to(state["s"].dtype), "pos": state["pos"] + T}

    def init_state(
        self,
        batch_size: int,
        max_len: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> State:
        """``s`` ``[B, H, K, V]``, at least float32, and ``pos`` ``[B]``, the number of tokens so far, on the CPU."""
        weight = self.q_proj.weight
        device, dtype = device or weight.device, torch.promote_types(dtype or weight.dtype, torch.float32)
        return {
            "s": torch.zeros(batch_size, self.n_heads, self.head_dim, self.v_dim, device=device, dtype=dtype),
            "pos": torch.zeros(batch_size, dtype=torch.int64),  # on the CPU: reading it never waits for a device
        }

    def flops(self, T: int) -> int:
        """Projections, and per token and entry of the state: decay, write and read."""
        widths = sum(m.in_features * m.out_features for m in self.children() if isinstance(m, nn.Linear))
        return 2 * T * widths + 5 * T * self.n_heads * self.head_dim * self.v_dim
