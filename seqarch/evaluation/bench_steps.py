"""What ``seqarch bench`` times: a training step, a decoded token, and the matrix product that is a CPU's peak.

Shape legend: B batch, T tokens, V vocabulary.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from seqarch.evaluation.generation import PREFILL
from seqarch.mixer import State
from seqarch.mixer_spec import MixerSpec
from seqarch.model import SequenceModel, SwiGLU
from seqarch.model.init import cast_parameters
from seqarch.options import at_least, one_of

Phase = Literal["training", "decoding"]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SHORTEST = 0.2
"""Seconds that a repetition of training lasts at least, in whole steps: shorter ones drown in the noise of a clock."""


@dataclass(frozen=True)
class Setup:
    """What all measurements of a run have in common.

    Attributes:
        d_model: Width of the model.
        n_layers: Blocks, each of the mixer and SwiGLU.
        vocab_size: V.
        tokens: Tokens of a training step, as many sequences as fit in, at least one.
        decode_batch: Sequences that decode together.
        decode_tokens: Tokens that each of them decodes in one repetition.
        device: cpu, cuda or cuda:N.
        dtype: Of parameters (but those marked to stay float32), activations and states.
        threads: Of torch on a CPU.
        memory_limit: Bytes for one measurement beyond what an idle process takes; None for no limit.
        activation_checkpointing: As in ``SequenceModel``, in training.
        compile: Compile each block.
    """

    d_model: int = 256
    n_layers: int = 2
    vocab_size: int = 4096
    tokens: int = 8192
    decode_batch: int = 1
    decode_tokens: int = 16
    device: str = "cpu"
    dtype: str = "float32"
    threads: int = 1
    memory_limit: int | None = None
    activation_checkpointing: bool = False
    compile: bool = False

    def __post_init__(self) -> None:
        at_least(1, d_model=self.d_model, n_layers=self.n_layers, vocab_size=self.vocab_size, tokens=self.tokens)
        at_least(1, decode_batch=self.decode_batch, decode_tokens=self.decode_tokens, threads=self.threads)
        one_of(list(DTYPES), dtype=self.dtype)
        one_of(("cpu", "cuda"), device=self.device.split(":")[0])


class Work(ABC):
    """Something to repeat.

    Attributes:
        batch: Sequences at once.
        tokens: Tokens of one call of ``step``.
        steps: Calls of ``step`` that make a repetition, at least.
        seconds: How long a repetition lasts, at least.
        flops: Operations of one call by the mathematics, or None where they are not counted.
        parameters: Of the model.
        backend: What computes in the mixers.
        state_bytes: Of the model's state, where there is one.
    """

    batch: int
    tokens: int
    steps: int = 1
    seconds: float = 0.0
    flops: int | None = None
    parameters: int = 0
    backend: str = ""
    state_bytes: int | None = None

    @abstractmethod
    def step(self) -> None:
        """Do it once; a GPU may still be at work afterwards."""


class Training(Work):
    """Forward and backward passes over sequences of ``length`` tokens.

    There is no optimiser step: its cost is that of the parameters, whatever the mixer and the length. Operations are
    three times those of the forward pass (Chowdhery et al. 2022, arXiv 2204.02311, appendix B).
    """

    seconds = SHORTEST

    def __init__(self, spec: MixerSpec, length: int, setup: Setup) -> None:
        self.model = build_model(spec, setup)
        self.batch = max(1, setup.tokens // length)
        self.tokens = self.batch * length
        self.flops = 3 * self.model.flops(length) * self.batch
        self.parameters, self.backend = _describe(self.model, setup)
        ids = _random_ids(self.batch, length + 1, setup)
        self.input_ids, self.labels = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    def step(self) -> None:
        """One forward and backward pass."""
        self.model(self.input_ids, labels=self.labels).objective.backward()
        self.model.zero_grad(set_to_none=True)


class Decoding(Work):
    """Greedy decoding, one token a call, after ``length`` tokens that went through the model in chunks.

    Args:
        spec: The mixer.
        length: Tokens in the state when the first call comes; every call adds one.
        setup: Sizes and device.
        room: How many calls there will be at most.
    """

    def __init__(self, spec: MixerSpec, length: int, setup: Setup, room: int) -> None:
        self.model = build_model(spec, setup).eval()
        self.batch = self.tokens = setup.decode_batch
        self.steps = setup.decode_tokens
        self.parameters, self.backend = _describe(self.model, setup)
        self.prompt = _random_ids(self.batch, length, setup)
        self.state: list[State] | None = self.model.init_state(
            self.batch, length + room, device=setup.device, dtype=DTYPES[setup.dtype]
        )
        self.state_bytes = sum(t.numel() * t.element_size() for layer in self.state for t in layer.values())
        with torch.inference_mode():
            for chunk in self.prompt.split(PREFILL, dim=1):
                self._advance(chunk)

    def step(self) -> None:
        """Decode one token of each sequence."""
        with torch.inference_mode():
            self._advance(self.next_ids)

    def _advance(self, ids: Tensor) -> None:
        self.logits, self.state = self.model(ids, state=self.state, last_only=True)
        self.next_ids = self.logits.argmax(dim=-1)


class Product(Work):
    """A square matrix product, the fastest arithmetic that a CPU is given to do."""

    batch = 1

    def __init__(self, setup: Setup, size: int = 2048) -> None:
        self.tokens = size
        self.a, self.b = (torch.randn(size, size, device=setup.device, dtype=DTYPES[setup.dtype]) for _ in range(2))
        self.flops = 2 * size**3

    def step(self) -> None:
        """Multiply."""
        torch.mm(self.a, self.b)


def build_model(spec: MixerSpec, setup: Setup) -> SequenceModel:
    """A language model of the mixer and SwiGLU, with initial values that are the same in every call."""
    with torch.device("meta"):
        model = SequenceModel(
            setup.vocab_size,
            setup.d_model,
            setup.n_layers,
            spec.build,
            SwiGLU,
            activation_checkpointing=setup.activation_checkpointing,
        )
    model.materialise(setup.device, 0)
    cast_parameters(model, DTYPES[setup.dtype])
    if setup.compile:
        model.compile_blocks()
    return model


def timed(
    work: Work, wait: Callable[[], None] = lambda: None, clock: Callable[[], float] = time.perf_counter
) -> tuple[int, float]:
    """Repeat ``work`` for as many steps and as long as it asks for; ``wait`` returns when the device has finished.

    Returns:
        Steps and seconds.
    """
    wait()
    start, done = clock(), 0
    while True:
        work.step()
        done += 1
        if done >= work.steps:
            wait()
            elapsed = clock() - start
            if elapsed >= work.seconds:
                return done, elapsed


def _describe(model: SequenceModel, setup: Setup) -> tuple[int, str]:
    """Parameters, and the backend that the mixers choose."""
    x = torch.empty(1, 1, setup.d_model, device=setup.device, dtype=DTYPES[setup.dtype])
    backends = dict.fromkeys(mixer.choose_backend(x) for mixer in model.mixers)
    return sum(p.numel() for p in model.parameters()), ", ".join(backends)


def _random_ids(batch: int, length: int, setup: Setup) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(setup.vocab_size, (batch, length), generator=generator).to(setup.device)
