"""The two mixers: DeltaNet, and Gated DeltaNet, whose state also decays.

Shape legend: B batch, T tokens, D model width, H heads of q and k, G heads of v, each with a state of its own, K and
V sizes of a head of q and k and of a head of v.
"""

from __future__ import annotations

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seqarch import Backend, Tags, TokenMixer
from seqarch.mixer import TORCH, State, keep_float32, no_weight_decay
from seqarch.ops.convolution import ShortConvolution
from seqarch.ops.delta_rule import delta_rule
from seqarch.ops.gated_norm import GatedRMSNorm
from seqarch.ops.linear import joint_linear
from seqarch.ops.norm import RMSNorm
from seqarch.options import at_least
from seqarch_deltanet.backends import fla_delta_rule, fla_fault
from seqarch_deltanet.l2_norm import l2_normalize

_CHUNK = 32
_EPS = 1e-5


class _DeltaRuleMixer(TokenMixer):
    """Projections, short convolutions, the delta rule with or without decay, and a norm, gated or not."""

    backends = (Backend("fla", ("fla",), device="cuda"), TORCH)

    def __init__(
        self,
        d_model: int,
        *,
        layer_idx: int,
        n_layers: int,
        n_heads: int,
        n_v_heads: int,
        head_dim: int,
        expand_v: float,
        conv: bool,
        conv_kernel: int,
        gate: bool,
        decay: bool,
        backend: str,
    ) -> None:
        super().__init__(d_model, layer_idx=layer_idx, n_layers=n_layers, backend=backend)
        if n_v_heads < 1 or n_v_heads % n_heads:
            raise ValueError(f"n_v_heads ({n_v_heads}) must be a multiple of n_heads ({n_heads})")
        at_least(1, head_dim=head_dim)
        v_dim = round(head_dim * expand_v)
        if v_dim < 1 or not math.isclose(v_dim, head_dim * expand_v):
            raise ValueError(f"expand_v ({expand_v}) times head_dim ({head_dim}) must be a whole number above 0")
        self.n_heads, self.n_v_heads, self.head_dim, self.v_dim = n_heads, n_v_heads, head_dim, v_dim
        self.tags = Tags(recurrent=True, constant_state=True, chunk_size=_CHUNK)

        qk, v = n_heads * head_dim, n_v_heads * v_dim
        self.q_proj = nn.Linear(d_model, qk, bias=False)
        self.k_proj = nn.Linear(d_model, qk, bias=False)
        self.v_proj = nn.Linear(d_model, v, bias=False)
        self.b_proj = nn.Linear(d_model, n_v_heads, bias=False)
        self.a_proj = nn.Linear(d_model, n_v_heads, bias=False) if decay else None
        self.g_proj = nn.Linear(d_model, v, bias=False) if gate else None
        if decay:
            self.A_log = no_weight_decay(keep_float32(nn.Parameter(torch.empty(n_v_heads, dtype=torch.float32))))
            self.dt_bias = no_weight_decay(keep_float32(nn.Parameter(torch.empty(n_v_heads, dtype=torch.float32))))
        self.q_conv1d = ShortConvolution(qk, conv_kernel) if conv else None
        self.k_conv1d = ShortConvolution(qk, conv_kernel) if conv else None
        self.v_conv1d = ShortConvolution(v, conv_kernel) if conv else None
        self.o_norm = GatedRMSNorm(v_dim, _EPS, gate_first=False) if gate else RMSNorm(v_dim, _EPS)
        self.o_proj = nn.Linear(v, d_model, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Normal weights, σ = 1/√fan_in, o_proj further scaled by 1/√(2·n_layers).

        A is uniform in (0, 16), the step that softplus makes of dt_bias log-uniform in [0.001, 0.1].
        """
        for name, module in self.named_children():
            if isinstance(module, nn.Linear):
                depth = 2 * self.n_layers if name == "o_proj" else 1
                nn.init.normal_(module.weight, std=(depth * module.in_features) ** -0.5)
            else:
                assert isinstance(module, (ShortConvolution, GatedRMSNorm, RMSNorm))
                module.reset_parameters()
        if self.a_proj is not None:
            with torch.no_grad():
                self.A_log.uniform_(0, 16).clamp_(min=1e-4).log_()
                dt = torch.empty_like(self.dt_bias).uniform_(math.log(1e-3), math.log(0.1)).exp_()
                self.dt_bias.copy_(dt + torch.log(-torch.expm1(-dt)))  # softplus(dt_bias) = dt

    def forward(
        self, x: Tensor, *, cu_seqlens: Tensor | None = None, state: State | None = None
    ) -> tuple[Tensor, State | None]:
        """See ``TokenMixer.forward``."""
        self.check_input(x, cu_seqlens, state)
        # One token is served by torch on every device: there is nothing to chunk.
        plain = x.shape[1] == 1 or self.choose_backend(x) == "torch"
        function = delta_rule if plain else fla_delta_rule
        projections = [self.q_proj, self.k_proj, self.v_proj, self.b_proj]
        projections += [p for p in (self.a_proj, self.g_proj) if p is not None]
        q, k, v, b, *others = joint_linear(x, *projections)
        new: State = {}
        convolve = partial(self._convolve, cu_seqlens=cu_seqlens, state=state, new=new, fused=not plain)
        q = convolve("q", self.q_conv1d, q).unflatten(-1, (-1, self.head_dim))
        k = convolve("k", self.k_conv1d, k).unflatten(-1, (-1, self.head_dim))
        v = convolve("v", self.v_conv1d, v).unflatten(-1, (-1, self.v_dim))
        q, k = l2_normalize(q), l2_normalize(k)
        group = self.n_v_heads // self.n_heads
        if group > 1:
            q, k = q.repeat_interleave(group, dim=2), k.repeat_interleave(group, dim=2)
        wide = torch.promote_types(x.dtype, torch.float32)
        g = None
        if self.a_proj is not None:
            g = -self.A_log.to(wide).exp() * F.softplus(others[0].to(wide) + self.dt_bias)
        o, s = function(
            q, k, v, b.to(wide).sigmoid(), g, initial_state=None if state is None else state["s"], cu_seqlens=cu_seqlens
        )
        if isinstance(self.o_norm, GatedRMSNorm):
            o = self.o_norm(o, others[-1].unflatten(-1, (-1, self.v_dim)))
        else:
            o = self.o_norm(o)
        if state is not None:
            new["s"] = s.to(state["s"].dtype)
        return self.o_proj(o.flatten(2)), None if state is None else new

    @staticmethod
    def _convolve(
        name: str,
        conv: ShortConvolution | None,
        x: Tensor,
        *,
        cu_seqlens: Tensor | None,
        state: State | None,
        new: State,
        fused: bool,
    ) -> Tensor:
        """SiLU of x, convolved where there is a convolution; its new state goes to ``new``."""
        if conv is None:
            return F.silu(x)
        y, after = conv(x, cu_seqlens=cu_seqlens, state=None if state is None else state[name], fused=fused)
        if after is not None:
            new[name] = after
        return y

    def init_state(
        self,
        batch_size: int,
        max_len: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> State:
        """``s`` ``[B, G, K, V]``, at least float32, and the last inputs of the convolutions, ``q``, ``k`` and ``v``."""
        weight = self.q_proj.weight
        device, dtype = device or weight.device, dtype or weight.dtype
        shape = (batch_size, self.n_v_heads, self.head_dim, self.v_dim)
        state = {"s": torch.zeros(shape, device=device, dtype=torch.promote_types(dtype, torch.float32))}
        for name, conv in (("q", self.q_conv1d), ("k", self.k_conv1d), ("v", self.v_conv1d)):
            if conv is not None:
                state[name] = conv.init_state(batch_size, device, dtype)
        return state

    def refuses(self, backend: str, device_type: str, dtype: torch.dtype) -> str | None:
        """Also what fla's kernels do not take, and versions of it and Triton that are known to be wrong on a device."""
        reason = super().refuses(backend, device_type, dtype)
        if reason is None and backend == "fla":
            reason = fla_fault(dtype, decay=self.a_proj is not None, head_dim=self.head_dim)
        return reason

    def flops(self, T: int) -> int:
        """Projections and convolutions, and per token and state: read twice, write, and decay."""
        widths = sum(m.in_features * m.out_features for m in self.children() if isinstance(m, nn.Linear))
        convolutions = sum(m.flops(T) for m in self.children() if isinstance(m, ShortConvolution))
        per_entry = 6 if self.a_proj is None else 7
        return 2 * T * widths + convolutions + per_entry * T * self.n_v_heads * self.head_dim * self.v_dim


class DeltaNet(_DeltaRuleMixer):
    """Linear attention whose state is corrected by the delta rule (Schlag et al. 2021; Yang et al. 2024).

    Queries and keys, after a short convolution and SiLU, have length one; S += β k ⊗ (v - Sᵀk), β = σ(b_proj(x)).

    Args:
        d_model: Width of the model.
        layer_idx: Which layer of the backbone this is.
        n_layers: How many layers the backbone has.
        n_heads: Heads, each with a state.
        head_dim: Size of a head of q and k; by default d_model / n_heads, which gives the layer the 4·d_model²
            parameters of an attention layer.
        expand_v: Size of a head of v, in units of head_dim.
        conv: Short convolutions of q, k and v.
        conv_kernel: Tokens that one sees.
        gate: Gate the output with SiLU of a projection of the input.
        backend: auto, fla or torch.
    """

    formats = {"fla-delta_net": "seqarch_deltanet.formats:FlaDeltaNet"}

    def __init__(
        self,
        d_model: int,
        *,
        layer_idx: int = 0,
        n_layers: int = 1,
        n_heads: int = 4,
        head_dim: int | None = None,
        expand_v: float = 1.0,
        conv: bool = True,
        conv_kernel: int = 4,
        gate: bool = False,
        backend: str = "auto",
    ) -> None:
        at_least(1, n_heads=n_heads)
        if head_dim is None and d_model % n_heads:
            raise ValueError(f"n_heads ({n_heads}) must divide d_model ({d_model}), or give head_dim")
        super().__init__(
            d_model,
            layer_idx=layer_idx,
            n_layers=n_layers,
            n_heads=n_heads,
            n_v_heads=n_heads,
            head_dim=d_model // n_heads if head_dim is None else head_dim,
            expand_v=expand_v,
            conv=conv,
            conv_kernel=conv_kernel,
            gate=gate,
            decay=False,
            backend=backend,
        )


class GatedDeltaNet(_DeltaRuleMixer):
    """DeltaNet with a data-dependent decay of the state (Yang et al. 2024, arXiv 2412.06464).

    S ← e^g S; S += β k ⊗ (v - Sᵀk), with g = -e^A_log · softplus(a_proj(x) + dt_bias), one number a head and token.

    Args:
        d_model: Width of the model.
        layer_idx: Which layer of the backbone this is.
        n_layers: How many layers the backbone has.
        n_heads: Heads of q and k.
        n_v_heads: Heads of v, each with a state; n_v_heads / n_heads of them share q and k. By default n_heads.
        head_dim: Size of a head of q and k; by default 0.75 · d_model / n_heads (without gate: d_model / n_heads),
            rounded, which with expand_v = 2 gives the layer the 6·d_model² parameters of the paper's.
        expand_v: Size of a head of v, in units of head_dim.
        conv: Short convolutions of q, k and v.
        conv_kernel: Tokens that one sees.
        gate: Gate the output with SiLU of a projection of the input.
        backend: auto, fla or torch.
    """

    formats = {"fla-gated_deltanet": "seqarch_deltanet.formats:FlaGatedDeltaNet"}

    def __init__(
        self,
        d_model: int,
        *,
        layer_idx: int = 0,
        n_layers: int = 1,
        n_heads: int = 6,
        n_v_heads: int | None = None,
        head_dim: int | None = None,
        expand_v: float = 2.0,
        conv: bool = True,
        conv_kernel: int = 4,
        gate: bool = True,
        backend: str = "auto",
    ) -> None:
        at_least(1, n_heads=n_heads)
        if head_dim is None:
            head_dim = max(1, round((0.75 if gate else 1.0) * d_model / n_heads))
        super().__init__(
            d_model,
            layer_idx=layer_idx,
            n_layers=n_layers,
            n_heads=n_heads,
            n_v_heads=n_heads if n_v_heads is None else n_v_heads,
            head_dim=head_dim,
            expand_v=expand_v,
            conv=conv,
            conv_kernel=conv_kernel,
            gate=gate,
            decay=True,
            backend=backend,
        )
