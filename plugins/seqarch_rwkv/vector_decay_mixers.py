"""RWKV-5 and RWKV-6: linear attention with a decay per channel, constant or data-dependent.

Shape legend: B batch, T tokens, D model width, H heads, K and V sizes of a head's keys and values, r rank.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import OrderedDict

import torch
from torch import Tensor, nn

from seqarch import Tags
from seqarch.ops.gate import gated_silu
from seqarch.ops.vector_decay import CHUNK_SIZE, vector_decay
from seqarch.options import at_least
from seqarch_rwkv import initial
from seqarch_rwkv.backends import fla_vector_decay
from seqarch_rwkv.layers import HeadNorm, LowRank, MixedLinear, float32_parameter
from seqarch_rwkv.mixer import Context, RWKVMixer, whole_width


class _VectorDecayMixer(RWKVMixer):
    """r, k, v and a gate from mixes of each token with the one before; S = diag(e^g) S + k vᵀ with a bonus u.

    o_t = (S_{t-1} + diag(u) k_t v_tᵀ)ᵀ r_t; W_o (norm(o) ⊙ SiLU(gate)).
    """

    def __init__(
        self,
        d_model: int,
        *,
        layer_idx: int,
        n_layers: int,
        n_heads: int,
        expand_k: float,
        expand_v: float,
        norm_eps: float,
        backend: str,
    ) -> None:
        key_dim, value_dim = whole_width("expand_k", d_model, expand_k), whole_width("expand_v", d_model, expand_v)
        at_least(1, n_heads=n_heads)
        for option, width in (("expand_k", key_dim), ("expand_v", value_dim)):
            if width % n_heads:
                raise ValueError(f"n_heads ({n_heads}) must divide {option} · d_model ({width})")
        super().__init__(
            d_model,
            layer_idx=layer_idx,
            n_layers=n_layers,
            n_heads=n_heads,
            key_dim=key_dim,
            value_dim=value_dim,
            backend=backend,
        )
        self.tags = Tags(recurrent=True, constant_state=True, chunk_size=CHUNK_SIZE)
        self.r_proj, self.k_proj = _linear(d_model, key_dim), _linear(d_model, key_dim)
        self.v_proj, self.g_proj = _linear(d_model, value_dim), _linear(d_model, value_dim)
        self.bonus = float32_parameter(n_heads, key_dim // n_heads)
        self.g_norm = HeadNorm(n_heads, value_dim, norm_eps)
        self.o_proj = nn.Linear(value_dim, d_model, bias=False)

    @abstractmethod
    def mixed(self, x: Tensor, delta: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """The inputs ``[B, T, D]`` of r, k, v and the gate, and the log decays, ``[B, T, H · K]``."""

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
        """See ``RWKVMixer.mix``."""
        of_r, of_k, of_v, of_gate, g = self.mixed(x, delta)
        r, k, v = self.heads(self.r_proj(of_r)), self.heads(self.k_proj(of_k)), self.heads(self.v_proj(of_v))
        recurrence = fla_vector_decay if fla else vector_decay
        o, s = recurrence(r, k, v, self.heads(g), bonus=self.bonus, initial_state=initial_state, cu_seqlens=cu_seqlens)
        return self.o_proj(gated_silu(self.g_proj(of_gate), self.g_norm(o).to(x.dtype))), s

    def reset_parameters(self) -> None:
        """Normal projections, σ = 1/√fan_in, o_proj further scaled by 1/√(2·n_layers); vectors as RWKV-LM's."""
        for projection in (self.r_proj, self.k_proj, self.v_proj, self.g_proj):
            for linear in projection:
                assert isinstance(linear, nn.Linear)
                nn.init.normal_(linear.weight, std=self.d_model**-0.5)
        nn.init.normal_(self.o_proj.weight, std=(2 * self.n_layers * self.value_dim) ** -0.5)
        nn.init.ones_(self.g_norm.weight)
        nn.init.zeros_(self.g_norm.bias)
        with torch.no_grad():
            self.bonus.copy_(initial.bonus(self.bonus, self.layer_idx, self.n_layers).view_as(self.bonus))

    def flops(self, T: int) -> int:
        """Projections, mixes, and per token and entry of the state: decay, write, and read."""
        return self._projection_flops(T) + 5 * T * self._state_entries()

    def _initial_mixes(self) -> dict[str, Tensor]:
        """How much r, w, k, v and g see of the token before, ``[D]`` each."""
        ascent, descent = initial.depth(self.layer_idx, self.n_layers)
        like = self.o_proj.weight.mT
        return {
            "r": initial.mix(like, 0.5 * descent),
            "w": initial.mix(like, descent),
            "k": initial.mix(like, descent),
            "v": initial.mix(like, descent, 0.3 * ascent),
            "g": initial.mix(like, 0.5 * descent),
        }


class RWKV5(_VectorDecayMixer):
    """RWKV-5, "Eagle" (Peng et al. 2024, arXiv 2404.05892): decays and token-shift mixes are parameters.

    Names are those of flash-linear-attention's RWKV-6; ``time_mix_*`` and ``time_decay`` are RWKV-LM's.

    Args:
        d_model: Width of the model.
        layer_idx: Which layer of the backbone this is.
        n_layers: How many layers the backbone has.
        n_heads: Heads, each with a state.
        expand_k: Width of r and k, in units of d_model.
        expand_v: Width of v and of the gate, in units of d_model.
        norm_eps: ε of the norm of each head's output.
        backend: auto, fla or torch.
    """

    def __init__(
        self,
        d_model: int,
        *,
        layer_idx: int = 0,
        n_layers: int = 1,
        n_heads: int = 4,
        expand_k: float = 0.5,
        expand_v: float = 1.0,
        norm_eps: float = 1e-5,
        backend: str = "auto",
    ) -> None:
        super().__init__(
            d_model,
            layer_idx=layer_idx,
            n_layers=n_layers,
            n_heads=n_heads,
            expand_k=expand_k,
            expand_v=expand_v,
            norm_eps=norm_eps,
            backend=backend,
        )
        self.time_mix_r, self.time_mix_k = float32_parameter(d_model), float32_parameter(d_model)
        self.time_mix_v, self.time_mix_g = float32_parameter(d_model), float32_parameter(d_model)
        self.time_decay = float32_parameter(n_heads, self.key_dim // n_heads)
        self.reset_parameters()

    def mixed(self, x: Tensor, delta: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """x·time_mix + shifted·(1 - time_mix), and g = -exp(time_decay)."""
        mixes = 1.0 - torch.stack((self.time_mix_r, self.time_mix_k, self.time_mix_v, self.time_mix_g))
        r, k, v, gate = torch.addcmul(x, delta, mixes.to(x.dtype)[:, None, None]).unbind()
        wide = torch.promote_types(x.dtype, torch.float32)
        return r, k, v, gate, -self.time_decay.to(wide).exp().flatten().expand(*x.shape[:2], -1)

    def reset_parameters(self) -> None:
        """See ``_VectorDecayMixer``."""
        super().reset_parameters()
        mixes = self._initial_mixes()
        with torch.no_grad():
            self.time_mix_r.copy_(1.0 - mixes["r"])
            self.time_mix_k.copy_(1.0 - mixes["k"])
            self.time_mix_v.copy_(1.0 - mixes["v"])
            self.time_mix_g.copy_(1.0 - mixes["g"])
            decay = initial.decay(self.time_decay, self.layer_idx, self.n_layers)
            self.time_decay.copy_(decay.view_as(self.time_decay))


class RWKV6(_VectorDecayMixer):
    """RWKV-6, "Finch" (Peng et al. 2024, arXiv 2404.05892): decays and token-shift mixes depend on the data.

    Parameters are those of flash-linear-attention's RWKV6Attention.

    Args:
        d_model: Width of the model.
        layer_idx: Which layer of the backbone this is.
        n_layers: How many layers the backbone has.
        n_heads: Heads, each with a state.
        expand_k: Width of r and k, in units of d_model.
        expand_v: Width of v and of the gate, in units of d_model.
        mix_rank: Rank of the map from the input to each of the five mixes.
        decay_rank: Rank of the map from the input to the decays.
        norm_eps: ε of the norm of each head's output.
        backend: auto, fla or torch.
    """

    formats = {"fla-rwkv6": "seqarch_rwkv.formats:FlaRWKV6"}

    def __init__(
        self,
        d_model: int,
        *,
        layer_idx: int = 0,
        n_layers: int = 1,
        n_heads: int = 4,
        expand_k: float = 0.5,
        expand_v: float = 1.0,
        mix_rank: int = 32,
        decay_rank: int = 64,
        norm_eps: float = 1e-5,
        backend: str = "auto",
    ) -> None:
        super().__init__(
            d_model,
            layer_idx=layer_idx,
            n_layers=n_layers,
            n_heads=n_heads,
            expand_k=expand_k,
            expand_v=expand_v,
            norm_eps=norm_eps,
            backend=backend,
        )
        at_least(1, mix_rank=mix_rank, decay_rank=decay_rank)
        self.mix_rank = mix_rank
        self.x_proj = nn.Sequential(
            MixedLinear(d_model, 5 * mix_rank), nn.Tanh(), nn.Linear(5 * mix_rank, d_model, bias=False)
        )
        self.x_bias = float32_parameter(5, d_model)
        decay = LowRank(d_model, self.key_dim, decay_rank, nn.Tanh())
        self.w_proj = nn.Sequential(OrderedDict(linear=decay))
        self.reset_parameters()

    def mixed(self, x: Tensor, delta: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """x + delta ⊙ (W₂ tanh(W₁ (x + delta ⊙ μ)) + bias) for r, w, k, v and g; the log decay is -exp(w)."""
        B, T, D = x.shape
        low = torch.tanh(self.x_proj[0](x, delta)).view(B * T, 5, self.mix_rank).transpose(0, 1)
        weight = self.x_proj[2].weight
        assert isinstance(weight, Tensor)
        mixes = torch.baddbmm(self.x_bias.to(x.dtype)[:, None], low, weight.view(D, 5, self.mix_rank).permute(1, 2, 0))
        r, w, k, v, gate = torch.addcmul(x, delta, mixes.view(5, B, T, D)).unbind()
        return r, k, v, gate, -self.w_proj(w).exp()

    def reset_parameters(self) -> None:
        """See ``_VectorDecayMixer``; the low-rank maps begin at almost nothing, so that the biases alone count."""
        super().reset_parameters()
        mixes = self._initial_mixes()
        first, second = self.x_proj[0], self.x_proj[2]
        assert isinstance(first, MixedLinear)
        assert isinstance(second, nn.Linear)
        nn.init.zeros_(first.linear.weight)
        nn.init.uniform_(second.weight, -0.01, 0.01)
        decay = self.w_proj.linear
        assert isinstance(decay, LowRank)
        decay.reset_parameters()
        with torch.no_grad():
            first.mu.copy_(mixes["w"])
            self.x_bias.copy_(torch.stack([mixes[name] for name in "rwkvg"]))
            decay.bias.copy_(initial.decay(decay.bias, self.layer_idx, self.n_layers))


def _linear(d_in: int, d_out: int) -> nn.Sequential:
    """A projection under the name that flash-linear-attention gives it, ``linear.weight``."""
    return nn.Sequential(OrderedDict(linear=nn.Linear(d_in, d_out, bias=False)))
