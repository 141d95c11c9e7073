"""Initial values that Mamba-1 and Mamba-2 share."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


def init_projection_(linear: nn.Linear, depth: int = 1) -> None:
    """Normal weights, σ = 1/√(depth · fan_in)."""
    nn.init.normal_(linear.weight, std=(depth * linear.in_features) ** -0.5)


@torch.no_grad()
def init_dt_bias_(bias: Tensor, low: float = 1e-3, high: float = 0.1, floor: float = 1e-4) -> None:
    """A bias whose softplus, the step size Δ of a zero input, is log-uniform in [low, high]."""
    dt = bias.uniform_(math.log(low), math.log(high)).exp_().clamp_(min=floor)
    dt.add_(torch.log(-torch.expm1(-dt)))  # softplus⁻¹(Δ) = Δ + log(1 - e^{-Δ})
