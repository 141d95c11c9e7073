"""Learning-rate schedules: the factor on the peak rate as a pure function of the step.

Nothing here has state, so a resumed run needs none restored. The first step is step 0. A schedule rises to 1 at the end
of its warm-up and would reach its lowest value at the step after the last, so that no step is spent at rate zero.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass


@dataclass(frozen=True)
class Length:
    """How long training is.

    Attributes:
        steps: Optimiser steps of the whole training.
        tokens_per_step: Tokens of one step, over all ranks.
    """

    steps: int
    tokens_per_step: int

    def part(self, name: str, steps: int | None, tokens: int | None, default: float) -> int:
        """Steps of a part of training given in steps or tokens, or as the fraction ``default`` if in neither."""
        if steps is not None:
            part = steps
        elif tokens is not None:
            part = math.ceil(tokens / self.tokens_per_step)
        else:
            part = math.ceil(default * self.steps)
        if part > self.steps:
            raise ValueError(
                f"schedule: {name} takes {part} steps, but training has {self.steps}: "
                f"lower {name}_steps or {name}_tokens, or train longer"
            )
        return part


def _check(name: str, steps: int | None, tokens: int | None) -> None:
    if steps is not None and tokens is not None:
        raise ValueError(f"schedule: give {name}_steps or {name}_tokens, not both")
    for unit, value in (("steps", steps), ("tokens", tokens)):
        if value is not None and value < 0:
            raise ValueError(f"schedule: {name}_{unit} must not be negative, got {value}")


def _check_ratio(min_ratio: float) -> None:
    if not 0 <= min_ratio <= 1:
        raise ValueError(f"schedule: min_ratio must be from 0 to 1, got {min_ratio}")


class Schedule(ABC):
    """How the learning rate changes over training."""

    @abstractmethod
    def factor(self, step: int, length: Length) -> float:
        """What the peak rate is multiplied with at ``step`` (from 0).

        Raises:
            ValueError: If the parts of the schedule are longer than training.
        """


@dataclass(frozen=True)
class Cosine(Schedule):
    """Linear warm-up, then half a cosine down to ``min_ratio`` (Loshchilov & Hutter 2017, arXiv 1608.03983).

    Args:
        warmup_steps: Steps of the warm-up; by default 2 % of training.
        warmup_tokens: The same in tokens; give one of the two.
        min_ratio: Where the rate ends, as a share of its peak.
    """

    warmup_steps: int | None = None
    warmup_tokens: int | None = None
    min_ratio: float = 0.1

    def __post_init__(self) -> None:
        _check("warmup", self.warmup_steps, self.warmup_tokens)
        _check_ratio(self.min_ratio)

    def factor(self, step: int, length: Length) -> float:
        """The factor at ``step``."""
        warmup = length.part("warmup", self.warmup_steps, self.warmup_tokens, 0.02)
        if step < warmup:
            return (step + 1) / warmup
        progress = min(1.0, (step - warmup) / max(1, length.steps - warmup))
        return self.min_ratio + (1 - self.min_ratio) * 0.5 * (1 + math.cos(math.pi * progress))


@dataclass(frozen=True)
class WarmupStableDecay(Schedule):
    """Linear warm-up, a constant rate, then a linear decay to ``min_ratio`` (Hu et al. 2024, arXiv 2404.06395).

    Args:
        warmup_steps: Steps of the warm-up; by default 2 % of training.
        warmup_tokens: The same in tokens; give one of the two.
        decay_steps: Steps of the decay, the last of training; by default 20 % of training.
        decay_tokens: The same in tokens; give one of the two.
        min_ratio: Where the rate ends, as a share of its peak.
    """

    warmup_steps: int | None = None
    warmup_tokens: int | None = None
    decay_steps: int | None = None
    decay_tokens: int | None = None
    min_ratio: float = 0.1

    def __post_init__(self) -> None:
        _check("warmup", self.warmup_steps, self.warmup_tokens)
        _check("decay", self.decay_steps, self.decay_tokens)
        _check_ratio(self.min_ratio)

    def factor(self, step: int, length: Length) -> float:
        """The factor at ``step``."""
        warmup = length.part("warmup", self.warmup_steps, self.warmup_tokens, 0.02)
        decay = length.part("decay", self.decay_steps, self.decay_tokens, 0.2)
        if warmup + decay > length.steps:
            raise ValueError(
                f"schedule: warm-up ({warmup} steps) and decay ({decay}) are longer than training ({length.steps}): "
                "lower one of them, or train longer"
            )
        if step < warmup:
            return (step + 1) / warmup
        left = length.steps - step
        if left >= decay:
            return 1.0
        return self.min_ratio + (1 - self.min_ratio) * max(0.0, left / decay)
