"""Resampling of test documents: how a loss would come out on another test set of the same kind and size.

Tokens of one document are not independent, documents are: so whole documents are drawn. A run's loss on a domain is
Σ nats / Σ tokens over its documents, and a replicate draws documents with replacement and takes the same quotient. All
runs, and all validations of a run, see the same draws: differences between runs are then compared on the same
documents, and most of what makes a document hard cancels.

The plain bootstrap is too sure of itself where documents are few or of very unequal length: it divides by n instead of
n - 1, and has a normal's tails instead of Student's. So a replicate's deviation is stretched by
√(n / (n - 1)) · √(ν / χ²_ν), one draw of χ²_ν for each domain and replicate, with ν = n_eff - 1 and Kish's effective
number of documents n_eff = (Σ tokens)² / Σ tokens² (Kish 1965, *Survey Sampling*, section 11.7): a normal deviate
stretched so is one of Student's t with ν degrees of freedom.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import numpy as np

MIN_DOCUMENTS = 5
"""A domain with fewer has no useful interval."""


@dataclass(frozen=True)
class Draws:
    """Replicates of one domain's test set.

    Attributes:
        weights: How often each document was drawn, ``[B, n]``.
        stretch: Factor of each replicate's deviation, ``[B]``.
        size: Tokens (or bytes) of each document, ``[n]``.
        effective: Kish's effective number of documents.
    """

    weights: np.ndarray
    stretch: np.ndarray
    size: np.ndarray
    effective: float

    def losses(self, nats: np.ndarray) -> np.ndarray:
        """Losses ``[B + 1, K]`` of documents' nats ``[K, n]``: the one observed, then the replicates."""
        observed = nats.sum(axis=1, dtype=np.float64) / self.size.sum()
        drawn = (self.weights @ nats.T.astype(np.float64)) / (self.weights @ self.size)[:, None]
        return np.concatenate([observed[None], observed + (drawn - observed) * self.stretch[:, None]])


def draw_documents(domain: str, size: np.ndarray, replicates: int, seed: int) -> Draws:
    """Draw ``replicates`` test sets of a domain; the same for the same name, documents and seed.

    Args:
        domain: Its name.
        size: Tokens (or bytes) of each document, ``[n]``.
        replicates: B.
        seed: Of the draws.
    """
    rng = np.random.default_rng([seed, zlib.crc32(domain.encode())])
    n = len(size)
    weights = rng.multinomial(n, np.full(n, 1 / n), size=replicates).astype(np.float64)
    effective = float(size.sum()) ** 2 / float(np.square(size, dtype=np.float64).sum())
    freedom = max(effective - 1.0, 1.0)
    stretch = np.sqrt(n / max(n - 1, 1) * freedom / rng.chisquare(freedom, size=replicates))
    return Draws(weights, stretch, size.astype(np.float64), effective)


def interval(values: np.ndarray, level: float) -> tuple[float, float]:
    """The central ``level`` of replicates ``values``."""
    tail = (1.0 - level) / 2.0
    low, high = np.quantile(values, [tail, 1.0 - tail])
    return float(low), float(high)


def p_value(values: np.ndarray) -> float:
    """Two-sided p-value of the hypothesis that what the replicates estimate is 0: twice the smaller tail."""
    B = len(values)
    below, above = int((values <= 0).sum()), int((values >= 0).sum())
    return min(1.0, 2.0 * (min(below, above) + 1) / (B + 1))


def holm(p_values: list[float]) -> list[float]:
    """p-values adjusted for their number (Holm 1979): below α they are all true at once with probability 1 - α."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    adjusted, highest = [0.0] * len(p_values), 0.0
    for rank, i in enumerate(order):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[i]))
        adjusted[i] = highest
    return adjusted
