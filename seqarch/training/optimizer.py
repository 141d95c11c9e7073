"""AdamW: which parameters decay, whether the fused kernel may be used, and the norm of the gradient."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from seqarch.model import SequenceModel


@dataclass(frozen=True)
class AdamWConfig:
    """Settings of AdamW (Loshchilov & Hutter 2019, arXiv 1711.05101).

    Args:
        lr: Peak learning rate; the schedule multiplies it.
        betas: Decay rates of the two moments.
        eps: Added to the root of the second moment.
        weight_decay: Decoupled decay of matrices; norms, biases, embeddings and what a mixer marks are left alone.
        fused: Use the fused kernel; by default wherever it is allowed.
    """

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    fused: bool | None = None

    def __post_init__(self) -> None:
        if self.lr <= 0:
            raise ValueError(f"optimizer: lr must be above 0, got {self.lr}")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"optimizer: betas must be from 0 to below 1, got {self.betas}")
        if self.eps <= 0:
            raise ValueError(f"optimizer: eps must be above 0, got {self.eps}")
        if self.weight_decay < 0:
            raise ValueError(f"optimizer: weight_decay must not be negative, got {self.weight_decay}")


def decayed(model: SequenceModel) -> dict[str, bool]:
    """Whether each parameter, by name, is decayed.

    Not decayed: what mixers mark with ``no_weight_decay``, all vectors (norms, biases), and embeddings. A tied head is
    the embedding, so it is not decayed either; a head of its own is a matrix as any other, and is.
    """
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding) and m is not model.head}
    return {
        name: p.ndim > 1 and name not in model.no_weight_decay and id(p) not in embeddings
        for name, p in model.named_parameters()
    }


def build_adamw(config: AdamWConfig, model: SequenceModel, *, loss_scaling: bool) -> torch.optim.AdamW:
    """The optimiser with its two groups, decayed and not.

    Args:
        config: The settings.
        model: Its parameters, on the device where they stay.
        loss_scaling: A gradient scaler is in use (float16): the fused kernel would hide the true gradients from
            clipping.

    Raises:
        ValueError: If ``fused`` is asked for together with loss scaling.
    """
    if config.fused and loss_scaling:
        raise ValueError(
            "optimizer: fused=true cannot be used with 16-mixed precision: use bf16-mixed, or leave it out"
        )
    decay = decayed(model)
    parameters = dict(model.named_parameters())
    groups = [
        {"params": [p for name, p in parameters.items() if decay[name]]},
        {"params": [p for name, p in parameters.items() if not decay[name]]},
    ]
    fused = not loss_scaling if config.fused is None else config.fused
    optimizer = torch.optim.AdamW(groups, lr=config.lr, fused=fused)
    configure_groups(config, optimizer)
    return optimizer


def configure_groups(config: AdamWConfig, optimizer: torch.optim.Optimizer) -> None:
    """Set the groups' options as configured: a resumed optimiser comes with those of the checkpoint."""
    for group, weight_decay in zip(optimizer.param_groups, (config.weight_decay, 0.0), strict=True):
        group.update(betas=tuple(config.betas), eps=config.eps, weight_decay=weight_decay)


def gradient_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """The 2-norm of all gradients together; of the whole tensors where they are sharded."""
    norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
