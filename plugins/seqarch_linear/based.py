"""The mixer of Based.

Shape legend: B batch, T tokens, D model width, H heads, F feature size, P features of the state, V head size of v.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from seqarch import Tags, TokenMixer
from seqarch.mixer import State
from seqarch.ops.linear import joint_linear
from seqarch.ops.taylor_attention import n_features, taylor_attention
from seqarch.options import at_least, head_sizes

_CHUNK = 128


class Based(TokenMixer):
    """Linear attention whose weights are the second-order Taylor series of exp (Arora et al. 2024, arXiv 2402.18668).

    o_t = Σ_{j≤t} w_tj v_j / Σ_{j≤t} w_tj, with w = 1 + s + s²/2 and s = q·k/√feature_dim.

    It has one backend, torch, on every device: fla's kernels for it keep no state, know no packed documents, and do not
    serve general sizes.

    Args:
        d_model: Width of the model.
        layer_idx: Which layer of the backbone this is.
        n_layers: How many layers the backbone has.
        n_heads: Heads, each with a state.
        head_dim: Size of a head of v; by default d_model / n_heads.
        feature_dim: Size of a head of q and k; the state has about feature_dim² / 2 rows.
        backend: auto or torch.
    """

    def __init__(
        self,
        d_model: int,
        *,
        layer_idx: int = 0,
        n_layers: int = 1,
        n_heads: int = 8,
        head_dim: int | None = None,
        feature_dim: int = 16,
        backend: str = "auto",
    ) -> None:
        super().__init__(d_model, layer_idx=layer_idx, n_layers=n_layers, backend=backend)
        _, head_dim = head_sizes(d_model, n_heads, None, head_dim)
        at_least(1, feature_dim=feature_dim)
        self.n_heads, self.head_dim, self.feature_dim = n_heads, head_dim, feature_dim
        self.tags = Tags(recurrent=True, constant_state=True, chunk_size=_CHUNK)
        self.q_proj = nn.Linear(d_model, n_heads * feature_dim, bias=False)
        self.k_proj = nn.Linear(d_model, n_heads * feature_dim, bias=False)
        self.v_proj = nn.Linear(d_model, n_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(n_heads * head_dim, d_model, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Normal weights, σ = 1/√fan_in, o_proj further scaled by 1/√(2·n_layers)."""
        for name, module in self.named_children():
            assert isinstance(module, nn.Linear)
            depth = 2 * self.n_layers if name == "o_proj" else 1
            nn.init.normal_(module.weight, std=(depth * module.in_features) ** -0.5)

    def forward(
        self, x: Tensor, *, cu_seqlens: Tensor | None = None, state: State | None = None
    ) -> tuple[Tensor, State | None]:
        """See ``TokenMixer.forward``."""
        self.check_input(x, cu_seqlens, state)
        q, k, v = joint_linear(x, self.q_proj, self.k_proj, self.v_proj)
        q, k = (t.unflatten(-1, (self.n_heads, self.feature_dim)) for t in (q, k))
        v = v.unflatten(-1, (self.n_heads, self.head_dim))
        before = None if state is None else state["s"]
        o, s = taylor_attention(q, k, v, initial_state=before, cu_seqlens=cu_seqlens, chunk_size=_CHUNK)
        return self.o_proj(o.flatten(2)), None if before is None else {"s": s.to(before.dtype)}

    def init_state(
        self,
        batch_size: int,
        max_len: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> State:
        """``s`` ``[B, H, P, V + 1]``, at least float32: sums of features times values, and of features."""
        weight = self.v_proj.weight
        device, dtype = device or weight.device, dtype or weight.dtype
        shape = (batch_size, self.n_heads, n_features(self.feature_dim), self.head_dim + 1)
        return {"s": torch.zeros(shape, device=device, dtype=torch.promote_types(dtype, torch.float32))}

    def flops(self, T: int) -> int:
        """Projections, and per token and head: the features of q and k, writing the state and reading it."""
        widths = sum(m.in_features * m.out_features for m in self.children() if isinstance(m, nn.Linear))
        P = (self.feature_dim + 1) * (self.feature_dim + 2) // 2
        return 2 * T * widths + T * self.n_heads * (2 * P + 4 * P * (self.head_dim + 1))
