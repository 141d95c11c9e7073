"""Losses by domain: exact sums over all tokens and ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean


@dataclass(frozen=True)
class DomainLoss:
    """What validation found for one domain.

    Attributes:
        name: The domain.
        in_domain: Whether it is one that is trained on.
        nats: Sum of the negative log-likelihoods.
        tokens: Number of predictions.
        bytes: Length of the text in bytes.
    """

    name: str
    in_domain: bool
    nats: float
    tokens: int
    bytes: float

    @property
    def loss(self) -> float:
        """Nats per token."""
        return self.nats / self.tokens if self.tokens else math.nan

    @property
    def bpb(self) -> float:
        """Bits per byte, which does not depend on the tokenizer."""
        return self.nats / (math.log(2) * self.bytes) if self.bytes else math.nan

    @property
    def perplexity(self) -> float:
        """e to the loss; infinite where that overflows."""
        return math.exp(self.loss) if self.loss < 700 else math.inf


def domain_metrics(losses: Sequence[DomainLoss]) -> dict[str, float]:
    """``val/loss/<domain>``, ``val/bpb/<domain>``, and the unweighted means over the domains in and out of training.

    A mean over no domain is left out.
    """
    metrics = {f"val/loss/{d.name}": d.loss for d in losses} | {f"val/bpb/{d.name}": d.bpb for d in losses}
    for name, inside in (("id", True), ("ood", False)):
        group = [d.loss for d in losses if d.in_domain is inside]
        if group:
            metrics[f"val/loss/{name}"] = fmean(group)
    return metrics
