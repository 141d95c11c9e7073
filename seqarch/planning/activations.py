"""Memory of activations: each kind of block runs forward and backward on tensors without storage.

Shape legend: B sequences of a micro batch, T tokens, D model width.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)

from seqarch.model.backbone import SequenceModel
from seqarch.model.block import Block
from seqarch.model.init import marked, materialise
from seqarch.model.loss import linear_cross_entropy
from seqarch.planning.live_bytes import LiveBytes

_LONGEST = 2048
"""Tokens up to which a length is run as it is; longer ones too, if the number of operators does not grow with it."""
_USUAL = 512
"""Tokens from which on nothing changes its form for want of tokens: bytes are linear in the sequences of a batch."""


@dataclass(frozen=True)
class Precision:
    """In which types a model computes.

    Attributes:
        dtype: Of parameters, as they are used, and of what enters the first block.
        autocast: What torch.autocast computes products in; None without it.
    """

    dtype: torch.dtype = torch.float32
    autocast: torch.dtype | None = None

    def context(self) -> AbstractContextManager[Any]:
        """In which the forward pass runs."""
        return nullcontext() if self.autocast is None else torch.autocast("cpu", dtype=self.autocast)


@dataclass(frozen=True)
class Activations:
    """Bytes on one device, for one micro batch.

    Attributes:
        held: What all blocks, and the head, hold between the forward and the backward pass.
        working: What is needed above that while a part computes, at the most.
    """

    held: int
    working: int

    @property
    def total(self) -> int:
        """The most bytes at one time."""
        return self.held + self.working


class _Part(NamedTuple):
    """Bytes of a block, or of the head."""

    output: float
    """What it hands on."""
    shared: float
    """What it is the first to leave for all later blocks."""
    held: float
    """All that it holds between the passes, its output included, what it shares not."""
    peak: float
    """The most that it takes at one time, gradients of its output and input included."""


class _Run(NamedTuple):
    """One length."""

    parts: list[_Part]
    operators: int
    """How many were called."""


class ActivationModel:
    """What the activations of a model take, by micro batch and checkpointing.

    The ``torch`` backend is counted; torch.compile and fused kernels hold less, as a rule. What an operator allocates
    and frees within itself is not seen.

    Args:
        model: On the meta device, as ``SequenceModule`` builds it.
        seq_len: T.
        precision: In which it computes.
    """

    def __init__(self, model: SequenceModel, seq_len: int, precision: Precision) -> None:
        self.model, self.seq_len, self.precision = model, seq_len, precision
        self._kinds = [_kind(block) for block in model.blocks]
        first = {kind: i for i, kind in reversed(list(enumerate(self._kinds)))}
        self._examples = sorted(first.values())
        self._counted: dict[int, list[_Part]] = {}

    def __call__(self, micro_batch_size: int, checkpointing: bool) -> Activations:
        """Bytes of a micro batch."""
        *blocks, head = self._at(micro_batch_size)
        layers = [blocks[self._examples.index(self._kinds.index(kind))] for kind in self._kinds]
        entering = micro_batch_size * self.seq_len * self.model.d_model * self.precision.dtype.itemsize
        if checkpointing:
            held = sum(b.output for b in layers)
            above = max(b.peak for b in blocks)  # a block is run again; its output is there from before
        else:
            held = sum(b.held for b in layers)
            above = max(b.peak - b.held for b in blocks)
        held += sum(b.shared for b in blocks)
        # The backward pass begins with the gradient of what the head was given; its weight's waits until the end.
        gradient = head.held
        above = max(head.peak, gradient + above)
        return Activations(round(entering + held + gradient), round(above - gradient))

    def _at(self, B: int) -> list[_Part]:
        """Each kind of block in the order in which it comes first, and the head; large batches by a line."""
        enough = -(-_USUAL // self.seq_len)
        if B <= 2 * enough:
            return self._parts(B)
        a, b = np.array(self._parts(enough)), np.array(self._parts(2 * enough))
        return [_Part(*row) for row in a + (B / enough - 1) * (b - a)]

    def _parts(self, B: int) -> list[_Part]:
        if B not in self._counted:
            try:
                blocks = self._at_length(lambda T: self._run_blocks(B, T, values=False))
            except (DataDependentOutputException, DynamicOutputShapeException):
                blocks = self._by_line(lambda T: self._run_blocks(B, T, values=True))
            self._counted[B] = [*blocks, *self._at_length(lambda T: self._run_head(B, T))]
        return self._counted[B]

    def _at_length(self, run: Callable[[int], _Run]) -> list[_Part]:
        """At T: run so where that takes no longer than a short one; else extrapolated from four shorter lengths.

        A loop over tokens would take minutes. What it takes at its peak has bends, where another moment becomes the
        peak, so a parabola is believed only if the curvature is the same in both halves: else it is a line.
        """
        if self.seq_len <= _LONGEST:
            return run(self.seq_len).parts
        lengths = [_LONGEST // 8, _LONGEST // 4, _LONGEST // 2, _LONGEST]
        runs = [run(T) for T in lengths]
        if runs[-1].operators == runs[-2].operators:
            return run(self.seq_len).parts
        x = np.array(lengths) / _LONGEST
        at = self.seq_len / _LONGEST
        values = np.array([r.parts for r in runs], dtype=np.float64).reshape(4, -1)
        before, after = np.polyfit(x[:3], values[:3], 2), np.polyfit(x[1:], values[1:], 2)
        line = values[-1] + (values[-1] - values[-2]) / (x[-1] - x[-2]) * (at - 1)
        parabola = after[0] * at**2 + after[1] * at + after[2]
        curved = np.isclose(before[0], after[0], rtol=0.1, atol=0) & (after[0] > 0)
        return [_Part(*row) for row in np.where(curved, parabola, line).reshape(len(runs[0].parts), -1)]

    def _by_line(self, run: Callable[[int], _Run]) -> list[_Part]:
        """At T; where that is too long to compute, by a line through three shorter lengths: values make noise."""
        if self.seq_len <= _LONGEST:
            return run(self.seq_len).parts
        lengths = [_LONGEST // 2, _LONGEST * 3 // 4, _LONGEST]
        values = np.array([run(T).parts for T in lengths], dtype=np.float64)
        line = np.polyfit(lengths, values.reshape(3, -1), 1)
        return [_Part(*row) for row in (line[0] * self.seq_len + line[1]).reshape(values.shape[1:])]

    def _run_blocks(self, B: int, T: int, *, values: bool) -> _Run:
        out, operators, context = [], 0, {}
        blocks = [copy.deepcopy(self.model.blocks[i]) for i in self._examples]
        with nullcontext() if values else FakeTensorMode(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            for i, block in zip(self._examples, blocks, strict=True):
                if values:
                    materialise(block, "cpu", 0, i)
                self._allocate(block)
                x = torch.empty(B, T, self.model.d_model, dtype=self.precision.dtype).normal_().requires_grad_()
                context = {name: t.detach().requires_grad_(t.requires_grad) for name, t in context.items()}
                given = set(context)
                known = [x, *context.values(), *block.parameters(), *block.buffers()]
                with LiveBytes(known, made_up_products=values) as live, self.precision.context():
                    y, context, _ = block(x, context)
                    shared = sum(t.untyped_storage().nbytes() for name, t in context.items() if name not in given)
                    output, held = y.untyped_storage().nbytes(), live.now - shared
                    gradient = torch.empty_like(y)
                    with torch.autocast("cpu", enabled=False):
                        _backward(y, gradient, block)
                out.append(_Part(output, shared, held, live.peak - shared))
                operators += live.operators
        return _Run(out, operators)

    def _run_head(self, B: int, T: int) -> _Run:
        """The final norm, and the loss."""
        model = self.model
        norm = copy.deepcopy(model.norm)
        with FakeTensorMode():
            self._allocate(norm)
            weight = nn.Parameter(torch.empty(model.vocab_size, model.d_model, dtype=self.precision.dtype))
            x = torch.empty(B, T, model.d_model, dtype=self.precision.dtype, requires_grad=True)
            labels = torch.zeros(B * T, dtype=torch.int64)
            known = [x, weight, labels, *norm.parameters()]
            with LiveBytes(known) as live, self.precision.context():
                total, _ = linear_cross_entropy(norm(x).flatten(0, 1), weight, labels)
                held = live.now
                with torch.autocast("cpu", enabled=False):
                    _backward(total, torch.ones_like(total), norm)
        return _Run([_Part(0, 0, held, live.peak)], live.operators)

    def _allocate(self, module: nn.Module) -> None:
        """Give what is on the meta device storage, and the parameters the type that they are used in."""
        wide = marked(module, "_keep_float32")
        for name, p in list(module.named_parameters()):
            dtype = p.dtype if name in wide else self.precision.dtype
            data = torch.empty(p.shape, dtype=dtype) if p.is_meta else p.detach().to(dtype)
            owner, _, attribute = name.rpartition(".")
            setattr(module.get_submodule(owner), attribute, nn.Parameter(data))
        for name, t in list(module.named_buffers()):
            if t.is_meta:
                owner, _, attribute = name.rpartition(".")
                setattr(module.get_submodule(owner), attribute, torch.empty(t.shape, dtype=t.dtype))


def _backward(output: Tensor, gradient: Tensor, module: nn.Module) -> None:
    """Run backward; the parameters' gradients are let go at once, since they are counted elsewhere."""
    for p in module.parameters():
        p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    torch.autograd.backward(output, gradient)


def _kind(block: nn.Module) -> tuple[Any, ...]:
    """Equal for blocks that differ in their place only."""
    assert isinstance(block, Block)
    plain = (int, float, str, bool, type(None))
    parts = [block.mixer] if block.channel_mixer is None else [block.mixer, block.channel_mixer]
    options = [
        (type(part), tuple((k, v) for k, v in vars(part).items() if isinstance(v, plain) and k != "layer_idx"))
        for part in parts
    ]
    return (*options, tuple((name, tuple(p.shape)) for name, p in block.named_parameters()))
