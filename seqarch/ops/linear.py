"""Several projections of one input as one matrix product."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_FEW = 256  # tokens under which joining the weights costs more than it saves


def joint_linear(x: Tensor, *projections: nn.Linear) -> tuple[Tensor, ...]:
    """The outputs of several bias-free projections of x ``[..., D]``.

    The weights keep their own names and are joined on the fly: one large product in place of several small ones, and
    one gradient of x in place of a sum. Where there are few tokens, the copy of the weights would cost more.
    """
    if x.numel() // x.shape[-1] < _FEW:
        return tuple(p(x) for p in projections)
    joined = F.linear(x, torch.cat([p.weight for p in projections]))
    return joined.split([p.out_features for p in projections], dim=-1)
