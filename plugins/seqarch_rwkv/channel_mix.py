"""RWKV's channel mixer, which sees the token before as well."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from seqarch.mixer import State
from seqarch.model.channel import ChannelMixer
from seqarch.ops.convolution import token_shift
from seqarch.options import at_least
from seqarch_rwkv import initial
from seqarch_rwkv.layers import MixedLinear, float32_parameter


class RWKVChannelMix(ChannelMixer):
    """W_v relu(W_k k)², times σ(W_r r) with a gate; k and r are mixes of each token with the one before.

    With a gate as in RWKV-5 and RWKV-6 (Peng et al. 2024, arXiv 2404.05892), without one as in RWKV-7 (Peng et al.
    2025, arXiv 2503.14456). Parameters are those of flash-linear-attention's RWKV6FeedForward and RWKV7FeedForward.

    Args:
        d_model: Width of the model.
        n_layers: Layers of the backbone; the output projection starts smaller in deeper ones.
        d_ff: Inner width; by default 3.5 · d_model with a gate and 4 · d_model without, rounded up to a multiple of 32.
        gate: Gate the output with the receptance.
    """

    def __init__(self, d_model: int, *, n_layers: int = 1, d_ff: int | None = None, gate: bool = True) -> None:
        super().__init__(d_model, n_layers=n_layers)
        if d_ff is None:
            d_ff = -(-(7 if gate else 8) * d_model // 64) * 32
        at_least(1, d_ff=d_ff)
        self.d_ff = d_ff
        if gate:
            self.key = MixedLinear(d_model, d_ff)
            self.receptance = MixedLinear(d_model, d_model)
        else:
            self.x_k = float32_parameter(d_model)
            self.key = nn.Linear(d_model, d_ff, bias=False)
            self.receptance = None
        self.value = nn.Linear(d_ff, d_model, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Normal weights, σ = 1/√fan_in, the output further scaled by 1/√(2·n_layers); mixes as in a first layer."""
        for module in (self.key, self.receptance):
            if module is not None:
                linear = module.linear if isinstance(module, MixedLinear) else module
                nn.init.normal_(linear.weight, std=self.d_model**-0.5)
        nn.init.normal_(self.value.weight, std=(2 * self.n_layers * self.d_ff) ** -0.5)
        mixes = [self.x_k] if self.receptance is None else [m.mu for m in (self.key, self.receptance)]
        with torch.no_grad():
            for mix in mixes:
                assert isinstance(mix, Tensor)
                mix.copy_(initial.mix(mix, 1.0))

    def forward(
        self, x: Tensor, *, cu_seqlens: Tensor | None = None, state: State | None = None
    ) -> tuple[Tensor, State | None]:
        """Map x ``[B, T, D]`` to the same shape; the state holds the last input."""
        shifted, last = token_shift(x, cu_seqlens=cu_seqlens, state=None if state is None else state["shift"])
        delta = shifted - x
        if isinstance(self.key, MixedLinear):
            k = self.key(x, delta)
        else:
            k = self.key(torch.addcmul(x, delta, self.x_k.to(x.dtype)))
        y = self.value(torch.relu(k).square())
        if self.receptance is not None:
            y = y * torch.sigmoid(self.receptance(x, delta))
        return y, None if last is None else {"shift": last}

    def init_state(
        self,
        batch_size: int,
        max_len: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> State:
        """``shift`` ``[B, D]``, the last input."""
        weight = self.value.weight
        shape = (batch_size, self.d_model)
        return {"shift": torch.zeros(shape, device=device or weight.device, dtype=dtype or weight.dtype)}

    def flops(self, T: int) -> int:
        """Two projections, and the receptance's."""
        receptance = 0 if self.receptance is None else 2 * T * self.d_model**2
        return 4 * T * self.d_model * self.d_ff + receptance
