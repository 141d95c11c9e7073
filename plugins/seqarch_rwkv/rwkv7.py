"""RWKV-7: a generalised delta rule with a decay per channel.

Shape legend: B batch, T tokens, D model width, H heads, K size of a head.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seqarch import Tags
from seqarch.ops.diagonal_low_rank import CHUNK_SIZE, diagonal_low_rank
from seqarch.options import at_least
from seqarch_rwkv import initial
from seqarch_rwkv.backends import STRONGEST_DECAY, fla_diagonal_low_rank
from seqarch_rwkv.layers import HeadNorm, LowRank, float32_parameter
from seqarch_rwkv.mixer import Context, RWKVMixer


class RWKV7(RWKVMixer):
    """RWKV-7, "Goose" (Peng et al. 2025, arXiv 2503.14456).

    S = diag(w) S + (κ ⊙ a) (-κᵀ S) + k vᵀ, o = Sᵀ r, with κ of length one, w in (0.545, 1) and a in (0, 1) by channel.
    The first RWKV-7 layer of a model leaves its values in the context; v of later ones moves towards them. Parameters
    are those of flash-linear-attention's RWKV7Attention.

    Args:
        d_model: Width of the model.
        layer_idx: Which layer of the backbone this is.
        n_layers: How many layers the backbone has.
        n_heads: Heads, each with a state; by default d_model / head_dim.
        head_dim: Size of a head; by default 64, or d_model / n_heads.
        decay_rank: Rank of the map from the input to the decays; by default 2.5·√D · head_dim/64, in steps of 32.
        a_rank: Rank of the map to a; by default as decay_rank.
        v_rank: Rank of the map to how far v moves towards the first layer's; by default with 1.7.
        gate_rank: Rank of the map to the output gate; by default 5·√D, in steps of 32.
        norm_eps: ε of the norm of each head's output, times head_dim.
        backend: auto, fla or torch.
    """

    formats = {"fla-rwkv7": "seqarch_rwkv.formats:FlaRWKV7"}

    def __init__(
        self,
        d_model: int,
        *,
        layer_idx: int = 0,
        n_layers: int = 1,
        n_heads: int | None = None,
        head_dim: int | None = None,
        decay_rank: int | None = None,
        a_rank: int | None = None,
        v_rank: int | None = None,
        gate_rank: int | None = None,
        norm_eps: float = 1e-5,
        backend: str = "auto",
    ) -> None:
        n_heads, head_dim = _heads(d_model, n_heads, head_dim)
        super().__init__(
            d_model,
            layer_idx=layer_idx,
            n_layers=n_layers,
            n_heads=n_heads,
            key_dim=d_model,
            value_dim=d_model,
            backend=backend,
        )
        self.head_dim = head_dim
        self.tags = Tags(recurrent=True, constant_state=True, shares_context=True, chunk_size=CHUNK_SIZE)
        by_head = d_model**0.5 * head_dim / 64
        ranks = {
            "decay_rank": _rank(2.5 * by_head) if decay_rank is None else decay_rank,
            "a_rank": _rank(2.5 * by_head) if a_rank is None else a_rank,
            "v_rank": _rank(1.7 * by_head) if v_rank is None else v_rank,
            "gate_rank": _rank(5 * d_model**0.5) if gate_rank is None else gate_rank,
        }
        at_least(1, **ranks)

        self.x_r, self.x_w, self.x_k = (float32_parameter(1, 1, d_model) for _ in range(3))
        self.x_v, self.x_a, self.x_g = (float32_parameter(1, 1, d_model) for _ in range(3))
        self.k_k, self.k_a = float32_parameter(d_model), float32_parameter(d_model)
        self.r_k = float32_parameter(n_heads, head_dim)
        self.r_proj = nn.Linear(d_model, d_model, bias=False)
        self.k_proj = nn.Linear(d_model, d_model, bias=False)
        self.v_proj = nn.Linear(d_model, d_model, bias=False)
        self.o_proj = nn.Linear(d_model, d_model, bias=False)
        self.w_lora = LowRank(d_model, d_model, ranks["decay_rank"], nn.Tanh())
        self.a_lora = LowRank(d_model, d_model, ranks["a_rank"], nn.Identity())
        self.v_lora = LowRank(d_model, d_model, ranks["v_rank"], nn.Identity()) if layer_idx > 0 else None
        self.g_lora = LowRank(d_model, d_model, ranks["gate_rank"], nn.Sigmoid(), bias=False)
        self.g_norm = HeadNorm(n_heads, d_model, head_dim * norm_eps)
        self.reset_parameters()

    def mix(
        self,
        x: Tensor,
        delta: Tensor,
        *,
        fla: bool,
        initial_state: Tensor | None,
        cu_seqlens: Tensor | None,
        context: Context,
    ) -> tuple[Tensor, Tensor]:
        """See ``RWKVMixer.mix``. Leaves ``v_first`` in the context if no layer before has."""
        mixes = torch.stack((self.x_r, self.x_w, self.x_k, self.x_v, self.x_a, self.x_g))
        of_r, of_w, of_k, of_v, of_a, of_g = torch.addcmul(x, delta, mixes.to(x.dtype)).unbind()
        r, k, v = self.r_proj(of_r), self.k_proj(of_k), self.v_proj(of_v)
        g = STRONGEST_DECAY * torch.sigmoid(self.w_lora(of_w))
        a = torch.sigmoid(self.a_lora(of_a))
        gate = self.g_lora(of_g).to(x.dtype)
        if self.v_lora is not None:
            first: Tensor = context.get("v_first", v)  # pyright: ignore[reportAssignmentType]
            v = torch.lerp(v, first, torch.sigmoid(self.v_lora(of_v)).to(v.dtype))
        context.setdefault("v_first", v)

        wide = k.to(a.dtype)
        kappa = F.normalize(self.heads(wide * self.k_k), dim=-1)
        k = self.heads(torch.addcmul(wide, wide * (a - 1.0), self.k_a)).to(x.dtype)
        erase, write = -kappa, kappa * self.heads(a)
        r, v = self.heads(r), self.heads(v)
        recurrence = fla_diagonal_low_rank if fla else diagonal_low_rank
        o, s = recurrence(
            r,
            k,
            v,
            erase.to(x.dtype),
            write.to(x.dtype),
            self.heads(g),
            initial_state=initial_state,
            cu_seqlens=cu_seqlens,
        )
        current = (r * k * self.r_k.to(x.dtype)).sum(-1, keepdim=True) * v
        return self.o_proj((self.g_norm(o).to(x.dtype) + current.flatten(2)) * gate), s

    def reset_parameters(self) -> None:
        """As RWKV-LM's RWKV-7: orthogonal projections, o_proj = 0, vectors by depth and channel."""
        D = self.d_model
        ascent, descent = initial.depth(self.layer_idx, self.n_layers)
        channel = torch.arange(D, device=self.k_k.device, dtype=torch.float32)
        share = channel / max(D - 1, 1)
        middle = (self.head_dim - 1) / 2
        zigzag = (channel % self.head_dim - middle) / max(middle, 0.5)
        zigzag = zigzag * zigzag.abs()
        for lora in (self.w_lora, self.a_lora, self.v_lora, self.g_lora):
            if lora is not None:
                lora.reset_parameters()
        nn.init.orthogonal_(self.r_proj.weight)
        nn.init.orthogonal_(self.k_proj.weight, gain=0.1)
        nn.init.orthogonal_(self.v_proj.weight)
        nn.init.zeros_(self.o_proj.weight)
        nn.init.constant_(self.k_a, 1.02)
        nn.init.constant_(self.r_k, -0.04)
        nn.init.constant_(self.g_norm.weight, ((self.layer_idx + 1) / self.n_layers) ** 0.7)
        nn.init.zeros_(self.g_norm.bias)
        with torch.no_grad():
            for x, power in (
                (self.x_r, 0.2),
                (self.x_w, 0.9),
                (self.x_k, 0.7),
                (self.x_v, 0.7),
                (self.x_a, 0.9),
                (self.x_g, 0.2),
            ):
                x.copy_(initial.mix(x, power * descent))
            self.k_k.copy_(0.71 - 0.1 * (share - 0.5))
            self.w_lora.bias.copy_(-5.5 + 6.0 * share ** (1.0 + ascent**0.3) + 2.5 * zigzag)
            self.a_lora.bias.copy_(-0.19 + 0.3 * zigzag + 0.4 * (share - 0.5))
            if self.v_lora is not None:
                self.v_lora.bias.copy_(0.73 - 0.4 * (share - 0.5))

    def flops(self, T: int) -> int:
        """Projections, and per token and entry of the state: decay, read, write twice, and read again."""
        return self._projection_flops(T) + 9 * T * self._state_entries()


def _heads(d_model: int, n_heads: int | None, head_dim: int | None) -> tuple[int, int]:
    if n_heads is None:
        head_dim = 64 if head_dim is None else head_dim
        if head_dim < 1 or d_model % head_dim:
            raise ValueError(f"head_dim ({head_dim}) must divide d_model ({d_model}), or give n_heads")
        return d_model // head_dim, head_dim
    if n_heads < 1 or d_model % n_heads:
        raise ValueError(f"n_heads ({n_heads}) must divide d_model ({d_model})")
    if head_dim is not None and head_dim * n_heads != d_model:
        raise ValueError(
            f"n_heads ({n_heads}) times head_dim ({head_dim}) must be d_model ({d_model}): give one of them"
        )
    return n_heads, d_model // n_heads


def _rank(width: float) -> int:
    """The nearest multiple of 32, at least 32."""
    return max(32, round(width / 32) * 32)
