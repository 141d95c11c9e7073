"""Channel mixers: what a block does to the channels of each position, as a rule by itself."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from seqarch.mixer import State
from seqarch.ops.gate import gated_silu
from seqarch.ops.linear import joint_linear
from seqarch.options import at_least


class ChannelMixer(nn.Module, ABC):
    """Base class of channel mixers, which are called, built and reset as a ``TokenMixer`` is.

    Args:
        d_model: Width D of the model.
        n_layers: Layers of the backbone.
    """

    def __init__(self, d_model: int, *, n_layers: int = 1) -> None:
        super().__init__()
        self.d_model, self.n_layers = d_model, n_layers

    @abstractmethod
    def forward(
        self, x: Tensor, *, cu_seqlens: Tensor | None = None, state: State | None = None
    ) -> tuple[Tensor, State | None]:
        """Map x ``[B, T, D]`` to the same shape; ``cu_seqlens`` and ``state`` as in ``TokenMixer.forward``."""

    def init_state(
        self,
        batch_size: int,
        max_len: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> State:
        """As in ``TokenMixer.init_state``: empty, unless the mixer looks at earlier positions."""
        return {}

    @abstractmethod
    def reset_parameters(self) -> None:
        """Give every parameter and buffer its initial value."""

    @abstractmethod
    def flops(self, T: int) -> int:
        """Operations (a multiply-add is two) of the forward pass for T tokens."""


class SwiGLU(ChannelMixer):
    """Gated feed-forward layer W_down(SiLU(W_gate x) ⊙ W_up x) (Shazeer 2020, arXiv 2002.05202).

    Args:
        d_model: Width of the model.
        n_layers: Layers of the backbone; the output projection starts smaller in deeper ones.
        d_ff: Inner width; by default 8/3 · d_model, rounded up to a multiple of 64.
    """

    def __init__(self, d_model: int, *, n_layers: int = 1, d_ff: int | None = None) -> None:
        super().__init__(d_model, n_layers=n_layers)
        if d_ff is None:
            d_ff = -(-8 * d_model // 3 // 64) * 64
        at_least(1, d_ff=d_ff)
        self.d_ff = d_ff
        self.gate_proj = nn.Linear(d_model, d_ff, bias=False)
        self.up_proj = nn.Linear(d_model, d_ff, bias=False)
        self.down_proj = nn.Linear(d_ff, d_model, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Normal weights, σ = 1/√fan_in; the output projection scaled by 1/√(2·n_layers) (Radford et al. 2019)."""
        nn.init.normal_(self.gate_proj.weight, std=self.d_model**-0.5)
        nn.init.normal_(self.up_proj.weight, std=self.d_model**-0.5)
        nn.init.normal_(self.down_proj.weight, std=(2 * self.n_layers * self.d_ff) ** -0.5)

    def forward(
        self, x: Tensor, *, cu_seqlens: Tensor | None = None, state: State | None = None
    ) -> tuple[Tensor, State | None]:
        """Map x ``[B, T, D]`` to the same shape, each position by itself."""
        gate, up = joint_linear(x, self.gate_proj, self.up_proj)
        return self.down_proj(gated_silu(gate, up)), state

    def flops(self, T: int) -> int:
        """Three projections."""
        return 6 * T * self.d_model * self.d_ff
