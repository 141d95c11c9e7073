"""The mixer under test: how to build it, with which sizes, on which inputs.

Shape legend: B batch, T tokens, D model width, C chunk size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from seqarch.mixer import State, TokenMixer
from seqarch.model.init import cast_parameters
from seqarch.testing.compare import ContractError

MixerFactory = Callable[..., TokenMixer]

_PERTURBATION = 0.1
_DEFAULT_CHUNK = 16


class Stack(nn.Module):
    """The mixer under test behind the layers whose context it needs; all of them see the same input.

    Args:
        layers: The mixers of layers 0 … i; the last is the one under test.
    """

    def __init__(self, layers: Sequence[TokenMixer]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    @property
    def mixer(self) -> TokenMixer:
        """The mixer under test."""
        mixer = self.layers[-1]
        assert isinstance(mixer, TokenMixer)
        return mixer

    def forward(
        self, x: Tensor, *, cu_seqlens: Tensor | None = None, state: list[State] | None = None
    ) -> tuple[Tensor, list[State] | None]:
        """The output of the mixer under test, and the new state of every layer (None where none was given)."""
        context: dict[str, Tensor] = {}
        y, new = x, []
        for i, layer in enumerate(self.layers):
            shared = {"context": context} if layer.tags.shares_context else {}  # pyright: ignore
            y, s = layer(x, cu_seqlens=cu_seqlens, state=None if state is None else state[i], **shared)
            if state is not None and s is None:
                raise ContractError("state: forward was given a state and returned None instead of the new one")
            if state is None and s is not None:
                raise ContractError("state: forward was given no state and returned one; it must return None")
            new.append(s)
        return y, None if state is None else new

    def init_state(self, batch_size: int, max_len: int, dtype: torch.dtype) -> list[State]:
        """The empty state of every layer."""
        mixers = [m for m in self.layers if isinstance(m, TokenMixer)]
        return [m.init_state(batch_size, max_len, device="cpu", dtype=dtype) for m in mixers]


class Subject:
    """What every check is given.

    Args:
        factory: Called as ``factory(d_model)``, with ``backend=…`` or ``layer_idx=…`` where a check needs it; it fixes
            the options (``functools.partial(Attention, n_heads=2)``).
        d_model: Width D of the instances.
        seed: Seed of parameters and inputs.

    Attributes:
        name: Of the mixer's class.
        tags: Of the mixer.
        layer_idx: Of the mixer.
        dtype: Of comparisons "within rounding": float64 if the tags list it.
        C: The chunk size around which lengths are chosen.
        T: A length of two whole chunks and a part of a third.
    """

    def __init__(self, factory: MixerFactory, *, d_model: int = 32, seed: int = 0) -> None:
        self.factory, self.d_model, self.seed = factory, d_model, seed
        mixer = self.fresh()
        if not isinstance(mixer, TokenMixer):
            raise TypeError(f"the factory must return a TokenMixer, not {type(mixer).__name__}")
        self.name = type(mixer).__name__
        self.tags = mixer.tags
        self.layer_idx = mixer.layer_idx
        self.dtype = next((d for d in (torch.float64, torch.float32) if d in self.tags.dtypes), self.tags.dtypes[0])
        self.C = self.tags.chunk_size or _DEFAULT_CHUNK
        self.T = 2 * self.C + 3

    @property
    def tolerance(self) -> float:
        """What "within rounding" allows in the dtype of the comparisons, relative to the largest value."""
        return 1e-9 if self.dtype == torch.float64 else 1e-4 if self.dtype == torch.float32 else 5e-2

    def state_tolerance(self, stack: Stack) -> float:
        """The same where values pass through a state that may have less precision than the inputs."""
        states = [t for s in stack.init_state(1, 2, self.dtype) for t in s.values()]
        if any(t.dtype == torch.float32 for t in states):
            return max(self.tolerance, 1e-4)
        return self.tolerance

    def fresh(self, **overrides: object) -> TokenMixer:
        """A mixer as its constructor leaves it; the caller's random state is kept."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            return self.factory(self.d_model, **overrides)

    def build(self, dtype: torch.dtype | None = None, *, seed: int = 1) -> Stack:
        """The mixer, behind the layers that it needs, with parameters of ``dtype``, by default that of comparisons.

        Noise is added to every parameter: an initial value of zero, in an output projection say, would hide faults.
        Parameters marked ``_keep_float32`` stay float32 where ``dtype`` is a lower precision.
        """
        dtype = dtype or self.dtype
        mixer = self.fresh()
        earlier = []
        if self.tags.shares_context:
            earlier = [self.fresh(layer_idx=i) for i in range(self.layer_idx)]
        stack = Stack([*earlier, mixer])
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for p in stack.parameters():
                if p.is_floating_point():
                    p.add_(torch.randn(p.shape, generator=generator) * _PERTURBATION)
        if dtype in (torch.float64, torch.float32):
            stack.to(dtype)
        else:
            cast_parameters(stack, dtype)
        return stack

    def noise(self, B: int, T: int, *, dtype: torch.dtype | None = None, seed: int = 2) -> Tensor:
        """Standard normal ``[B, T, D]``."""
        generator = torch.Generator().manual_seed(1_000_003 * self.seed + seed)
        return torch.randn(B, T, self.d_model, generator=generator, dtype=torch.float64).to(dtype or self.dtype)


def run(stack: Stack, x: Tensor, *, cu_seqlens: Tensor | None = None) -> Tensor:
    """The output without gradient and without state."""
    with torch.no_grad():
        return stack(x, cu_seqlens=cu_seqlens)[0]


def run_pieces(stack: Stack, x: Tensor, lengths: Sequence[int]) -> Tensor:
    """The output of successive calls on pieces of these lengths, the state passed along."""
    assert sum(lengths) == x.shape[1]
    state: list[State] | None = stack.init_state(x.shape[0], x.shape[1], x.dtype)
    out = []
    for piece in x.split(list(lengths), dim=1):
        y, state = stack(piece, state=state)
        out.append(y)
    return torch.cat(out, dim=1)


def gradients(stack: Stack, y: Tensor, dy: Tensor, x: Tensor) -> dict[str, Tensor]:
    """Gradients of ``x`` and of every parameter, zero where y does not depend on it."""
    named = {"x": x, **dict(stack.named_parameters())}
    found = torch.autograd.grad(y, list(named.values()), dy, allow_unused=True)
    return {name: torch.zeros_like(t) if g is None else g for (name, t), g in zip(named.items(), found, strict=True)}
