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
        bytes: Length of the text in bytes; 0 if the tokens stand for no text.
        hits: Labels that are the most probable token; None if they were not counted.
        unseen_nats: The part of ``nats`` that falls on labels which never were one in training; None if that is not
            known.
    """

    name: str
    in_domain: bool
    nats: float
    tokens: int
    bytes: float
    hits: int | None = None
    unseen_nats: float | None = None

    @property
    def loss(self) -> float:
        """Nats per token."""
        return self.nats / self.tokens if self.tokens else math.nan

    @property
    def bpb(self) -> float:
        """Bits per byte, which does not depend on the tokenizer."""
        return self.nats / (math.log(2) * self.bytes) if self.bytes else math.nan

    @property
    def accuracy(self) -> float | None:
        """Share of labels that are the most probable token; None if they were not counted."""
        return None if self.hits is None else self.hits / self.tokens if self.tokens else math.nan

    @property
    def unseen_share(self) -> float | None:
        """Share of the loss that falls on labels which never were one in training; None if that is not known."""
        return None if self.unseen_nats is None else self.unseen_nats / self.nats if self.nats else math.nan

    @property
    def perplexity(self) -> float:
        """e to the loss; infinite where that overflows."""
        return math.exp(self.loss) if self.loss < 700 else math.inf


def domain_metrics(losses: Sequence[DomainLoss]) -> dict[str, float]:
    """``val/loss/<domain>``, ``val/bpb/<domain>``, and the unweighted means over the domains in and out of training.

    Where they were counted, ``val/accuracy/<domain>`` and ``val/unseen_share/<domain>`` too. Bits per byte of no text
    and a mean over no domain are left out.
    """
    metrics = {f"val/loss/{d.name}": d.loss for d in losses}
    metrics |= {f"val/bpb/{d.name}": d.bpb for d in losses if d.bytes}
    metrics |= {f"val/accuracy/{d.name}": d.accuracy for d in losses if d.accuracy is not None}
    metrics |= {f"val/unseen_share/{d.name}": d.unseen_share for d in losses if d.unseen_share is not None}
    for name, inside in (("id", True), ("ood", False)):
        group = [d.loss for d in losses if d.in_domain is inside]
        if group:
            metrics[f"val/loss/{name}"] = fmean(group)
    return metrics
