"""The mixer of Mamba.

Shape legend: B batch, T tokens, D inner width, N states a channel, R rank of Δ.
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
from seqarch.ops.selective_scan import selective_scan, selective_scan_flops
from seqarch.options import at_least, one_of
from seqarch_mamba.backends import kernel_fault, mamba_scan
from seqarch_mamba.initial import init_dt_bias_, init_projection_


class Mamba1(TokenMixer):
    """Selective state spaces (Gu and Dao 2023, arXiv 2312.00752): a decay of its own for every channel and state.

    h_t = exp(Δ_t A) h_{t-1} + Δ_t x_t B_tᵀ and y_t = h_t C_t + D x_t, with Δ_t = softplus(dt_proj(dt_t)) and A =
    -exp(A_log). The parameters have mamba-ssm's names and shapes.

    Args:
        d_model: Width of the model.
        layer_idx: Which layer of the backbone this is.
        n_layers: How many layers the backbone has.
        expand: Inner width over d_model.
        state_dim: States N of a channel.
        dt_rank: Rank of Δ before dt_proj; auto is d_model / 16, rounded up.
        conv_kernel: Kernel size of the short convolution over x.
        decay: What decays a state: data, exp(Δ_t A); shared, exp(softplus(dt_proj.bias)·A) for every token (Δ_t still
            scales the input); none, nothing.
        conv: Use the short convolution; without it, SiLU stays.
        backend: auto, mamba_ssm or torch.
    """

    backends = (Backend("mamba_ssm", ("mamba_ssm",), device="cuda"), TORCH)
    formats = {"mamba": "seqarch_mamba.formats:Mamba"}

    def __init__(
        self,
        d_model: int,
        *,
        layer_idx: int = 0,
        n_layers: int = 1,
        expand: int = 2,
        state_dim: int = 16,
        dt_rank: int | Literal["auto"] = "auto",
        conv_kernel: int = 4,
        decay: Literal["data", "shared", "none"] = "data",
        conv: bool = True,
        backend: str = "auto",
    ) -> None:
        super().__init__(d_model, layer_idx=layer_idx, n_layers=n_layers, backend=backend)
        if isinstance(dt_rank, str):
            if dt_rank != "auto":
                raise ValueError(f"dt_rank must be a number or auto, got '{dt_rank}'")
            dt_rank = -(-d_model // 16)
        at_least(1, expand=expand, state_dim=state_dim, dt_rank=dt_rank)
        if conv and conv_kernel < 2:
            raise ValueError(f"conv_kernel must be at least 2, got {conv_kernel}; for no convolution give conv=False")
        one_of(("data", "shared", "none"), decay=decay)
        inner = expand * d_model
        self.d_inner, self.state_dim, self.dt_rank, self.decay = inner, state_dim, dt_rank, decay
        self.tags = Tags(recurrent=True, constant_state=True, bitwise_prefix=False)

        self.in_proj = nn.Linear(d_model, 2 * inner, bias=False)
        self.conv1d = ShortConvolution(inner, conv_kernel, bias=True) if conv else None
        self.x_proj = nn.Linear(inner, dt_rank + 2 * state_dim, bias=False)
        self.dt_proj = nn.Linear(dt_rank, inner)
        no_weight_decay(keep_float32(self.dt_proj.bias))
        if decay != "none":
            self.A_log = no_weight_decay(keep_float32(nn.Parameter(torch.empty(inner, state_dim))))
        self.D = no_weight_decay(keep_float32(nn.Parameter(torch.empty(inner))))
        self.out_proj = nn.Linear(inner, d_model, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Normal projections, σ = 1/√fan_in (out_proj further by 1/√(2·n_layers)); the rest as in mamba-ssm."""
        init_projection_(self.in_proj)
        init_projection_(self.x_proj)
        init_projection_(self.out_proj, depth=2 * self.n_layers)
        bound = self.dt_rank**-0.5
        nn.init.uniform_(self.dt_proj.weight, -bound, bound)
        init_dt_bias_(self.dt_proj.bias)
        if self.decay != "none":
            with torch.no_grad():
                self.A_log.copy_(torch.arange(1, self.state_dim + 1).log())
        nn.init.ones_(self.D)
        if self.conv1d is not None:
            self.conv1d.reset_parameters()

    def forward(
        self, x: Tensor, *, cu_seqlens: Tensor | None = None, state: State | None = None
    ) -> tuple[Tensor, State | None]:
        """See ``TokenMixer.forward``."""
        self.check_input(x, cu_seqlens, state)
        backend = self.choose_backend(x)
        u, z = self.in_proj(x).chunk(2, dim=-1)
        new: State = {}
        if self.conv1d is None:
            u = F.silu(u)
        else:
            before = None if state is None else state["conv"]
            u, conv = self.conv1d(u, cu_seqlens=cu_seqlens, state=before, fused=backend != "torch")
            if conv is not None:
                new["conv"] = conv
        dt, b, c = self.x_proj(u).split([self.dt_rank, self.state_dim, self.state_dim], dim=-1)
        # float32 at least, as the bias is
        delta = F.softplus(F.linear(dt, self.dt_proj.weight) + self.dt_proj.bias)
        A = self._rates()
        by_delta = self.decay == "data"
        if backend == "mamba_ssm" and state is None:
            y = mamba_scan(u, delta, A, b, c, decay_by_delta=by_delta, cu_seqlens=cu_seqlens)
        else:
            start = None if state is None else state["ssm"]
            y, new["ssm"] = selective_scan(
                u, delta, A, b, c, decay_by_delta=by_delta, initial_state=start, cu_seqlens=cu_seqlens
            )
        y = torch.addcmul(y, u, self.D.to(u.dtype))
        return self.out_proj(gated_silu(z, y)), None if state is None else new

    def _rates(self) -> Tensor | None:
        """A ``[D, N]``, where decay is shared times the step size that every token has."""
        if self.decay == "none":
            return None
        A = -self.A_log.exp()
        return A if self.decay == "data" else A * F.softplus(self.dt_proj.bias)[:, None]

    def init_state(
        self,
        batch_size: int,
        max_len: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> State:
        """``ssm`` ``[B, D, N]``, at least float32, and ``conv`` ``[B, conv_kernel - 1, D]``."""
        weight = self.in_proj.weight
        device, dtype = device or weight.device, dtype or weight.dtype
        shape = (batch_size, self.d_inner, self.state_dim)
        state = {"ssm": torch.zeros(shape, device=device, dtype=torch.promote_types(dtype, torch.float32))}
        if self.conv1d is not None:
            state["conv"] = self.conv1d.init_state(batch_size, device, dtype)
        return state

    def refuses(self, backend: str, device_type: str, dtype: torch.dtype) -> str | None:
        """Also what mamba-ssm's kernel does not take: float64, and more than 256 states a channel."""
        if backend == "mamba_ssm" and self.state_dim > 256:
            return f"mamba-ssm's kernel takes state_dim up to 256, not {self.state_dim}"
        return super().refuses(backend, device_type, dtype) or kernel_fault(backend, dtype)

    def flops(self, T: int) -> int:
        """Projections, the convolution and the scan."""
        layers = (self.in_proj, self.x_proj, self.dt_proj, self.out_proj)
        conv = 0 if self.conv1d is None else self.conv1d.flops(T)
        scan = selective_scan_flops(
            T, self.d_inner, self.state_dim, decay=self.decay != "none", decay_by_delta=self.decay == "data"
        )
        return 2 * T * sum(layer.weight.numel() for layer in layers) + conv + scan
