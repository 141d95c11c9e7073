"""Initial values of RWKV's vectors, which depend on the depth of the layer and on the channel.

From RWKV-LM (github.com/BlinkDL/RWKV-LM), RWKV-v5 (also used for RWKV-6). A mix says how much of the token before a
channel sees: x + mix ⊙ (shifted - x).
"""

from __future__ import annotations

import torch
from torch import Tensor


def depth(layer_idx: int, n_layers: int) -> tuple[float, float]:
    """From 0 in the first layer to 1 in the last, and from 1 in the first to 1/n_layers in the last."""
    return layer_idx / max(n_layers - 1, 1), 1.0 - layer_idx / n_layers


def mix(like: Tensor, power: float, offset: float = 0.0) -> Tensor:
    """1 - ((i / D)^power + offset) for channel i of the last dimension of ``like``."""
    D = like.shape[-1]
    share = torch.arange(D, device=like.device, dtype=torch.float32) / D
    return 1.0 - (share**power + offset)


def decay(like: Tensor, layer_idx: int, n_layers: int) -> Tensor:
    """log(-g) for each of the channels of ``like``, flat: from slow (-6) to fast (-1)."""
    ascent, _ = depth(layer_idx, n_layers)
    n = like.numel()
    share = torch.arange(n, device=like.device, dtype=torch.float32) / max(n - 1, 1)
    return -6.0 + 5.0 * share ** (0.7 + 1.3 * ascent)


def bonus(like: Tensor, layer_idx: int, n_layers: int) -> Tensor:
    """The bonus of the current token for each of the channels of ``like``, flat."""
    ascent, _ = depth(layer_idx, n_layers)
    n = like.numel()
    i = torch.arange(n, device=like.device)
    return ascent * (1.0 - i / max(n - 1, 1)) + 0.1 * ((i + 1) % 3 - 1)
