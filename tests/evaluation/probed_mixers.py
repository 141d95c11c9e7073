"""Mixers whose influences are known in closed form.

Shape legend: B batch, T tokens, D model width.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from seqarch.evaluation.probe_jacobian import Layer
from seqarch.mixer import State, Tags, TokenMixer


class Explicit(TokenMixer):
    """y_i = Σ_j W_ij(x) x_j for a function W ``[B, T, D] -> [B, T, T]`` that is constant around almost every x.

    So ∂y_i/∂x_j = W_ij · I.
    """

    def __init__(self, d_model: int, weights: Callable[[Tensor], Tensor], tags: Tags | None = None) -> None:
        super().__init__(d_model)
        self.weights = weights
        self.tags = tags or Tags()

    def reset_parameters(self) -> None:
        pass

    def forward(
        self, x: Tensor, *, cu_seqlens: Tensor | None = None, state: State | None = None
    ) -> tuple[Tensor, State | None]:
        return self.weights(x) @ x, None

    def init_state(
        self,
        batch_size: int,
        max_len: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> State:
        raise NotImplementedError

    def flops(self, T: int) -> int:
        raise NotImplementedError


def inputs(N: int, T: int, D: int, seed: int = 0) -> Tensor:
    return torch.randn(N, T, D, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def explicit(weights: Callable[[Tensor], Tensor], *, N: int = 2, T: int = 16, D: int = 6, tags=None) -> Layer:
    return Layer(Explicit(D, weights, tags), inputs(N, T, D), {})


def constant(W: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda x: W.expand(len(x), -1, -1)
