"""How strongly each input moves each output of a mixer: central differences of the forward function.

Nothing is asked of a mixer but its forward pass: one with a straight-through gradient is measured by what it computes,
not by what it passes back, and one without explicit weights like any other.

Shape legend: N sequences, T tokens, D model width, P perturbed copies, R output rows, K directions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from seqarch.mixer import TokenMixer

_SAFETY = 8.0  # an influence counts where it is so many times what rounding alone could make
_SMOOTH = 0.01  # relative difference between two step sizes above which there was a jump between them


@dataclass(frozen=True)
class Layer:
    """A mixer where it stands: with the inputs that it gets and what earlier layers leave for it.

    Attributes:
        mixer: Under test; its parameters have the dtype of the inputs.
        inputs: ``[N, T, D]``.
        context: What a mixer with the tag ``shares_context`` finds, each tensor with N first. It is held fixed: the
            influence is that of this layer's own input.
    """

    mixer: TokenMixer
    inputs: Tensor
    context: Mapping[str, Tensor]

    def __call__(self, x: Tensor, sequence: int) -> Tensor:
        """Outputs ``[P, T, D]`` for variants x of one of the sequences."""
        if not self.mixer.tags.shares_context:
            return self.mixer(x)[0]
        context = {name: t[sequence].expand(len(x), *t.shape[1:]) for name, t in self.context.items()}
        return self.mixer(x, context=context)[0]

    @property
    def step(self) -> float:
        """Step of the central differences: ∛ε of the dtype, times the inputs' root mean square."""
        return torch.finfo(self.inputs.dtype).eps ** (1 / 3) * float(self.inputs.square().mean().sqrt())


class Slopes(NamedTuple):
    """Derivatives of P outputs along one direction.

    Attributes:
        norm: ``[P, R]``, ‖∂y_i/∂x_j · u‖.
        rounding: ``[P, R]``, what rounding could make of a norm that is 0.
        jumped: ``[P, R]``, where the difference over half the step is another one: no derivative was measured.
    """

    norm: Tensor
    rounding: Tensor
    jumped: Tensor


@torch.no_grad()
def slopes(
    layer: Layer,
    x: Tensor,
    sequence: int,
    positions: Tensor,
    direction: Tensor,
    *,
    rows: slice = slice(None),
    batch_size: int = 32,
) -> Slopes:
    """(y(x + h·u at position j) - y(x - h·u at position j)) / 2h for each variant x with its j.

    Args:
        layer: The mixer.
        x: ``[P, T, D]`` (may be expanded), variants of one of the layer's sequences.
        sequence: Which one.
        positions: int64 ``[P]``: j.
        direction: ``[D]``: u.
        rows: Outputs i that are wanted.
        batch_size: Sequences a call of the mixer.
    """
    eps, half = torch.finfo(x.dtype).eps, max(1, batch_size // 2)
    found: list[Slopes] = []
    for part, at in zip(x.split(half), positions.split(half), strict=True):

        def difference(step: float, part: Tensor = part, at: Tensor = at) -> tuple[Tensor, Tensor]:
            moved = torch.cat((part, part))
            copies = torch.arange(len(part))
            moved[copies, at] += step * direction
            moved[copies + len(part), at] -= step * direction
            plus, minus = layer(moved, sequence)[:, rows].chunk(2)
            return (plus - minus) / (2 * step), plus.norm(dim=-1)

        slope, size = difference(layer.step)
        norm, rounding = slope.norm(dim=-1), _SAFETY * eps / layer.step * size
        jumped = torch.zeros_like(norm, dtype=torch.bool)
        if layer.mixer.tags.discontinuous:
            other = difference(layer.step / 2)[0]
            jumped = (slope - other).norm(dim=-1) > _SMOOTH * norm + 2 * rounding
        found.append(Slopes(norm, rounding, jumped))
    return Slopes(*(torch.cat(tensors) for tensors in zip(*found, strict=True)))


@dataclass(frozen=True)
class Influence:
    """G_ij, the influence of input j on output i, of every sequence.

    Attributes:
        G: ``[N, T, T]``, 0 where it cannot be told from rounding, and above the diagonal.
        floor: The size below which it cannot.
        jumped: ``[N, T]``: rows in which a selection changed under a perturbation; their G is not to be used.
    """

    G: Tensor
    floor: float
    jumped: Tensor


def influence(
    layer: Layer, directions: Tensor, *, batch_size: int = 32, advance: Callable[[int], object] = lambda steps: None
) -> Influence:
    """G_ij = √(mean over the directions u of ‖∂y_i/∂x_j · u‖²), an estimate of the Frobenius norm ‖∂y_i/∂x_j‖.

    With u ~ N(0, 1) the mean over u of ‖J·u‖² is ‖J‖² (Hutchinson 1990). The directions are the same for all i and j,
    so that where the Jacobians of a row are multiples of one matrix, its normalised influences are exact with any u.

    What rounding makes of a zero is seen above the diagonal, where causality leaves nothing else.

    Args:
        layer: The mixer.
        directions: ``[K, D]``.
        batch_size: Sequences a call of the mixer.
        advance: Called with 1 after each sequence.

    Raises:
        ValueError: If the outputs are not finite, do not depend on the inputs at all, or depend on later ones.
    """
    N, T, _ = layer.inputs.shape
    all_G, all_jumped, floor = [], [], 0.0
    for n in range(N):
        squares = torch.zeros(T, T, dtype=torch.float64)
        jumped = torch.zeros(T, dtype=torch.bool)
        x = layer.inputs[n].expand(T, -1, -1)
        for u in directions:
            found = slopes(layer, x, n, torch.arange(T), u, batch_size=batch_size)
            squares += found.norm.mT.double().square() / len(directions)
            jumped |= found.jumped.any(dim=0)
            floor = max(floor, float(found.rounding.max()))
        all_G.append(squares.sqrt())
        all_jumped.append(jumped)
        advance(1)
    G, jumped = torch.stack(all_G), torch.stack(all_jumped)
    name = type(layer.mixer).__name__
    if not G.isfinite().all():
        raise ValueError(f"{name}: its outputs are not finite; there is nothing to measure")
    sound = G.masked_fill(jumped[..., None], 0.0)
    future = float(sound.triu(1).max())
    if future > max(_SMOOTH * float(sound.max()), floor):
        i, j = (sound.triu(1).amax(dim=0) == future).nonzero()[0].tolist()
        raise ValueError(f"{name} is not causal: input {j} moves output {i}")
    floor = max(floor, _SAFETY * future)
    G = G.tril()
    G = G.masked_fill(G <= floor, 0.0)
    if not G.any():
        raise ValueError(f"{name}: its outputs do not depend on its inputs; there is nothing to measure")
    return Influence(G, floor, jumped)
