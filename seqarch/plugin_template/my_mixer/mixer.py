"""The mixer.

Shape legend: B batch, T tokens, D model width, H heads, V = D / H.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seqarch import State, Tags, TokenMixer, keep_float32, no_weight_decay
from seqarch.ops.scalar_decay import scalar_decay_attention

_CHUNK = 64


class MyMixer(TokenMixer):
    """A gated average of the past: h_t = a h_{t-1} + (1 - a) v_t and y_t = W_o(SiLU(g_t) ⊙ h_t), a learned, per head.

    Args:
        d_model: Width of the model.
        layer_idx: Which layer of the backbone this is.
        n_layers: How many layers the backbone has.
        n_heads: Heads, each with a decay of its own.
        backend: auto or torch.
    """

    tags = Tags(recurrent=True, constant_state=True, chunk_size=_CHUNK)

    def __init__(
        self, d_model: int, *, layer_idx: int = 0, n_layers: int = 1, n_heads: int = 4, backend: str = "auto"
    ) -> None:
        super().__init__(d_model, layer_idx=layer_idx, n_layers=n_layers, backend=backend)
        if n_heads < 1 or d_model % n_heads:
            raise ValueError(f"n_heads ({n_heads}) must divide d_model ({d_model})")
        self.n_heads = n_heads
        self.v_proj = nn.Linear(d_model, d_model, bias=False)
        self.g_proj = nn.Linear(d_model, d_model, bias=False)
        self.o_proj = nn.Linear(d_model, d_model, bias=False)
        self.decay = keep_float32(no_weight_decay(nn.Parameter(torch.empty(n_heads, dtype=torch.float32))))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Normal weights, σ = 1/√D, o_proj further scaled by 1/√(2·n_layers); a from 0.5 to 0.998 over the heads."""
        for projection in (self.v_proj, self.g_proj):
            nn.init.normal_(projection.weight, std=self.d_model**-0.5)
        nn.init.normal_(self.o_proj.weight, std=(2 * self.n_layers * self.d_model) ** -0.5)
        with torch.no_grad():
            self.decay.copy_(torch.linspace(0, 6, self.n_heads, device=self.decay.device))

    def forward(
        self, x: Tensor, *, cu_seqlens: Tensor | None = None, state: State | None = None
    ) -> tuple[Tensor, State | None]:
        """See ``TokenMixer.forward``."""
        self.check_input(x, cu_seqlens, state)
        v = self.v_proj(x).unflatten(-1, (self.n_heads, -1))
        # With q = k = 1 the state of linear attention is a sum of values, which decays by exp(g) and gains gain · v.
        q, k = (v.new_ones(*x.shape[:2], 1, 1) for _ in range(2))
        h, s = scalar_decay_attention(
            q,
            k,
            v,
            F.logsigmoid(self.decay).expand(v.shape[:3]),
            gain=torch.sigmoid(-self.decay).expand(v.shape[:3]),
            initial_state=None if state is None else state["s"],
            cu_seqlens=cu_seqlens,
            output_final_state=state is not None,
            chunk_size=_CHUNK,
        )
        y = self.o_proj(F.silu(self.g_proj(x)) * h.flatten(2))
        return y, None if state is None or s is None else {"s": s.to(state["s"].dtype)}

    def init_state(
        self,
        batch_size: int,
        max_len: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> State:
        """``s`` ``[B, H, 1, V]``, at least float32."""
        weight = self.v_proj.weight
        device, dtype = device or weight.device, torch.promote_types(dtype or weight.dtype, torch.float32)
        shape = (batch_size, self.n_heads, 1, self.d_model // self.n_heads)
        return {"s": torch.zeros(shape, device=device, dtype=dtype)}

    def flops(self, T: int) -> int:
        """Three projections, and per channel: decay, gain, sum and gate."""
        return 6 * T * self.d_model**2 + 4 * T * self.d_model
