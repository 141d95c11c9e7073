"""The mixer of Mamba-2.

Shape legend: B batch, T tokens, D inner width, H heads, P head size, G groups, N state size per channel.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seqarch import Backend, Tags, TokenMixer
from seqarch.mixer import TORCH, State, keep_float32, no_weight_decay
from seqarch.ops.convolution import ShortConvolution
from seqarch.ops.gate import gated_silu
from seqarch.ops.gated_norm import GatedRMSNorm
from seqarch.ops.scalar_decay import scalar_decay_attention
from seqarch.options import at_least, one_of
from seqarch_mamba.backends import fla_simple_gla, kernel_fault, mamba_ssd
from seqarch_mamba.initial import init_dt_bias_, init_projection_


class Mamba2(TokenMixer):
    """State-space duality (Dao and Gu 2024, arXiv 2405.21060): linear attention with one scalar decay a head.

    S_t = exp(g_t) S_{t-1} + Δ_t x_t B_tᵀ and y_t = S_t C_t + D x_t, with Δ_t = softplus(dt_t + dt_bias). The parameters
    have mamba-ssm's names and shapes.

    Args:
        d_model: Width of the model.
        layer_idx: Which layer of the backbone this is.
        n_layers: How many layers the backbone has.
        expand: Inner width over d_model.
        head_dim: Size P of a head, a divisor of the inner width.
        state_dim: State size N of a channel.
        n_groups: Groups of heads that share B and C.
        conv_kernel: Kernel size of the short convolution over x, B and C.
        chunk_size: Tokens handled at once by the torch and mamba_ssm backends; the result does not depend on it.
        decay: What g_t is: data, -exp(A_log)·Δ_t; shared, -exp(A_log)·softplus(dt_bias), one constant a head for every
            token (Δ_t still scales the input); none, 0.
        conv: Use the short convolution; without it, SiLU stays.
        norm: Use the gated RMS norm, per group; without it, the gate stays.
        backend: auto, mamba_ssm, fla or torch.
    """

    backends = (
        Backend("mamba_ssm", ("mamba_ssm",), device="cuda"),
        Backend("fla", ("fla",), device="cuda"),
        TORCH,
    )
    formats = {"mamba2": "seqarch_mamba.formats:MambaTwo"}

    def __init__(
        self,
        d_model: int,
        *,
        layer_idx: int = 0,
        n_layers: int = 1,
        expand: int = 2,
        head_dim: int = 64,
        state_dim: int = 128,
        n_groups: int = 1,
        conv_kernel: int = 4,
        chunk_size: int = 64,
        decay: Literal["data", "shared", "none"] = "data",
        conv: bool = True,
        norm: bool = True,
        backend: str = "auto",
    ) -> None:
        super().__init__(d_model, layer_idx=layer_idx, n_layers=n_layers, backend=backend)
        at_least(1, expand=expand, head_dim=head_dim, state_dim=state_dim, n_groups=n_groups, chunk_size=chunk_size)
        if conv and conv_kernel < 2:
            raise ValueError(f"conv_kernel must be at least 2, got {conv_kernel}; for no convolution give conv=False")
        if chunk_size & (chunk_size - 1):
            raise ValueError(f"chunk_size must be a power of two, got {chunk_size}")
        one_of(("data", "shared", "none"), decay=decay)
        inner = expand * d_model
        if inner % head_dim:
            raise ValueError(f"head_dim ({head_dim}) must divide expand · d_model ({inner})")
        n_heads = inner // head_dim
        if n_heads % n_groups:
            raise ValueError(f"n_groups ({n_groups}) must divide the heads, expand · d_model / head_dim = {n_heads}")
        self.d_inner, self.n_heads, self.head_dim = inner, n_heads, head_dim
        self.state_dim, self.n_groups, self.chunk_size, self.decay = state_dim, n_groups, chunk_size, decay
        self.tags = Tags(recurrent=True, constant_state=True, chunk_size=chunk_size, bitwise_prefix=False)

        self._widths = [inner, inner + 2 * n_groups * state_dim, n_heads]  # z; x, B, C; dt
        self.in_proj = nn.Linear(d_model, sum(self._widths), bias=False)
        self.conv1d = ShortConvolution(self._widths[1], conv_kernel, bias=True) if conv else None
        self.dt_bias = no_weight_decay(keep_float32(nn.Parameter(torch.empty(n_heads))))
        if decay != "none":
            self.A_log = no_weight_decay(keep_float32(nn.Parameter(torch.empty(n_heads))))
        self.D = no_weight_decay(keep_float32(nn.Parameter(torch.empty(n_heads))))
        self.norm = GatedRMSNorm(inner, 1e-5, gate_first=True, n_groups=n_groups) if norm else None
        self.out_proj = nn.Linear(inner, d_model, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Normal projections, σ = 1/√fan_in (out_proj further by 1/√(2·n_layers)); the rest as in mamba-ssm."""
        init_projection_(self.in_proj)
        init_projection_(self.out_proj, depth=2 * self.n_layers)
        init_dt_bias_(self.dt_bias)
        if self.decay != "none":
            with torch.no_grad():
                self.A_log.uniform_(1, 16).log_()
        nn.init.ones_(self.D)
        for module in (self.conv1d, self.norm):
            if module is not None:
                module.reset_parameters()

    def forward(
        self, x: Tensor, *, cu_seqlens: Tensor | None = None, state: State | None = None
    ) -> tuple[Tensor, State | None]:
        """See ``TokenMixer.forward``."""
        self.check_input(x, cu_seqlens, state)
        backend = self.choose_backend(x)
        # Three products, z's last: no gradient is put together from three, and z's is used up before the states'.
        to_z, to_xbc, to_dt = self.in_proj.weight.split(self._widths)
        xbc, dt = F.linear(x, to_xbc), F.linear(x, to_dt)
        new: State = {}
        if self.conv1d is None:
            xbc = F.silu(xbc)
        else:
            before = None if state is None else state["conv"]
            xbc, conv = self.conv1d(xbc, cu_seqlens=cu_seqlens, state=before, fused=backend != "torch")
            if conv is not None:
                new["conv"] = conv
        groups = self.n_groups * self.state_dim
        u, b, c = xbc.split([self.d_inner, groups, groups], dim=-1)
        u = u.unflatten(-1, (self.n_heads, self.head_dim))
        b, c = (t.unflatten(-1, (self.n_groups, self.state_dim)) for t in (b, c))
        dt = F.softplus(dt + self.dt_bias)  # float32 at least, as dt_bias is
        y, ssm = self._ssd(backend, u, dt, b, c, cu_seqlens, None if state is None else state["ssm"])
        if ssm is not None:
            new["ssm"] = ssm
        y, z = y.flatten(2), F.linear(x, to_z)
        y = gated_silu(z, y.to(z.dtype)) if self.norm is None else self.norm(y, z).to(z.dtype)
        return self.out_proj(y), None if state is None else new

    def _ssd(
        self,
        backend: str,
        u: Tensor,
        dt: Tensor,
        b: Tensor,
        c: Tensor,
        cu_seqlens: Tensor | None,
        ssm: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """y before the gate, ``[B, T, H, P]``, and the new state ``[B, H, P, N]`` where one was given."""
        if self.decay == "data":
            rate = -self.A_log.exp()
        elif self.decay == "shared":
            rate = -self.A_log.exp() * F.softplus(self.dt_bias)
        else:
            rate = None
        if backend == "mamba_ssm" and u.shape[1] > 1:
            scaled = self.decay == "data"  # the kernel's Δ scales the input and the decay alike
            o, ssm = mamba_ssd(
                u if scaled else u * dt.unsqueeze(-1),
                dt if scaled else torch.ones_like(dt),
                torch.zeros_like(self.D) if rate is None else rate,
                b,
                c,
                chunk_size=self.chunk_size,
                initial_state=ssm,
                cu_seqlens=cu_seqlens,
            )
            return self._add_input(o, u), ssm
        g = None if rate is None else dt * rate if self.decay == "data" else rate.expand_as(dt)
        options = {
            "initial_state": None if ssm is None else ssm.mT,
            "cu_seqlens": cu_seqlens,
            "output_final_state": ssm is not None,
        }
        if backend == "fla" and u.shape[1] > 1:
            o, ssm = fla_simple_gla(c, b, u * dt.unsqueeze(-1), g, **options)
            o = self._add_input(o, u)
        else:
            o, ssm = scalar_decay_attention(c, b, u, g, gain=dt, skip=self.D, chunk_size=self.chunk_size, **options)
        return o, None if ssm is None else ssm.mT

    def _add_input(self, o: Tensor, u: Tensor) -> Tensor:
        return torch.addcmul(o, u.to(o.dtype), self.D.to(o.dtype)[:, None])

    def init_state(
        self,
        batch_size: int,
        max_len: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> State:
        """``ssm`` ``[B, H, P, N]``, at least float32, and ``conv`` ``[B, conv_kernel - 1, D + 2·G·N]``."""
        weight = self.in_proj.weight
        device, dtype = device or weight.device, dtype or weight.dtype
        shape = (batch_size, self.n_heads, self.head_dim, self.state_dim)
        state = {"ssm": torch.zeros(shape, device=device, dtype=torch.promote_types(dtype, torch.float32))}
        if self.conv1d is not None:
            state["conv"] = self.conv1d.init_state(batch_size, device, dtype)
        return state

    def refuses(self, backend: str, device_type: str, dtype: torch.dtype) -> str | None:
        """Also float64, which the kernels do not have."""
        return super().refuses(backend, device_type, dtype) or kernel_fault(backend, dtype)

    def flops(self, T: int) -> int:
        """Projections, the convolution, and a write and a read of every state per token."""
        widths = self.in_proj.weight.numel() + self.out_proj.weight.numel()
        conv = 0 if self.conv1d is None else self.conv1d.flops(T)
        return 2 * T * widths + conv + 4 * T * self.d_inner * self.state_dim
