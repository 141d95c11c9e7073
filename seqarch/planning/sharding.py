"""How parameters are spread over processes, what each of them keeps, and what they send each other."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn

from seqarch.model.backbone import SequenceModel
from seqarch.model.init import marked

_WIDE = 4  # bytes of what is float32


@dataclass(frozen=True)
class Sharding:
    """How a model is spread.

    Attributes:
        shards: Processes that share one copy of the parameters.
        replicas: Copies.
        sharded: FSDP2 is used. Otherwise each process has all parameters.
        gathered: In what the parameters are gathered and used.
        reshard: Gathered parameters are freed after the forward pass.
        prefetch: Blocks that are gathered ahead, beyond the one that FSDP looks ahead.
    """

    shards: int = 1
    replicas: int = 1
    sharded: bool = False
    gathered: torch.dtype = torch.float32
    reshard: bool = True
    prefetch: int = 0


def local_elements(p: torch.Tensor, shards: int) -> int:
    """Elements of a parameter on the process that has the most: FSDP2 cuts the first dimension into equal pieces."""
    if p.ndim == 0:
        return 1
    return -(-p.shape[0] // shards) * math.prod(p.shape[1:])


@dataclass(frozen=True)
class Kept:
    """Bytes on one process from one step to the next.

    Attributes:
        weights: The parameters.
        gradients: Of the same size.
        optimizer: AdamW's two moments, and its count of steps by parameter.
    """

    weights: int
    gradients: int
    optimizer: int


def kept(model: nn.Module, shards: int, dtype: torch.dtype = torch.float32) -> Kept:
    """What the process that has the most keeps of a model in ``shards`` pieces, of ``dtype``; exact."""
    parameters = list(model.parameters())
    size = dtype.itemsize * sum(local_elements(p, shards) for p in parameters)
    return Kept(size, size, 2 * size + 4 * len(parameters))


def buffers(model: SequenceModel, sharding: Sharding) -> int:
    """Bytes for gathered parameters and for gradients on their way, on one process, at the most.

    With FSDP2: embedding, final norm and head, and their gradient; two blocks, the one that computes and the next (all,
    if they are not freed after the forward pass); one block's gradient, as computed and in float32 as reduced. Without
    FSDP2, over several processes: the buckets in which gradients are sent.
    """
    if not sharding.sharded:
        return 0 if sharding.replicas == 1 else _WIDE * sum(p.numel() for p in model.parameters())
    blocks = [_gathered(b, sharding.gathered) for b in model.blocks]
    total = sum(p.numel() for p in model.parameters())
    root_elements = total - sum(p.numel() for b in model.blocks for p in b.parameters())
    root = root_elements * sharding.gathered.itemsize
    largest = max(blocks)
    at_once = largest * (2 + sharding.prefetch) if sharding.reshard else sum(blocks)
    elements = max(sum(p.numel() for p in b.parameters()) for b in model.blocks)
    return 2 * root + at_once + largest + _WIDE * elements


def _gathered(module: nn.Module, dtype: torch.dtype) -> int:
    wide = marked(module, "_keep_float32") if dtype != torch.float32 else set()
    return sum(p.numel() * (_WIDE if name in wide else dtype.itemsize) for name, p in module.named_parameters())


@dataclass(frozen=True)
class Traffic:
    """Bytes that one process sends, and receives, in a step.

    Attributes:
        gather: All-gathers of parameters, among the processes of a copy.
        scatter: Reduce-scatters of float32 gradients, among them.
        replicate: All-reduces of float32 gradients between copies.
    """

    gather: float
    scatter: float
    replicate: float


def traffic(model: SequenceModel, sharding: Sharding, accumulation: int) -> Traffic:
    """Of a step of ``accumulation`` micro batches; each gathers, and each reduces. Rings are taken for granted."""
    s, r = sharding.shards, sharding.replicas
    elements = sum(p.numel() for p in model.parameters())
    across = _WIDE * 2 * (r - 1) / r * elements / s
    if not sharding.sharded:
        return Traffic(0.0, 0.0, across)  # once a step: gradients are reduced with the last micro batch
    passes = 2 if sharding.reshard else 1
    part = (s - 1) / s
    gather = passes * part * _gathered(model, sharding.gathered)
    return Traffic(accumulation * gather, accumulation * part * _WIDE * elements, accumulation * across)
