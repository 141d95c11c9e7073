"""Which window of which domain a sample is: a pure function of the seed and the sample's number.

Nothing here has state, so any rank or worker finds its samples alone, and resuming is starting at another number.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache

import numpy as np

from seqarch.data.permutation import KeyedPermutation, derive_key

BLOCK = 4096
"""Samples after which the domains' shares are exact (largest remainder)."""


def check_weights(weights: Mapping[str, float], domains: list[str]) -> dict[str, float]:
    """The weights of ``domains``, scaled to sum 1.

    Raises:
        ValueError: For a weight that is negative or not finite, names no domain or is missing, or if all are zero.
    """
    unknown = sorted(set(weights) - set(domains))
    if unknown:
        raise ValueError(f"weights: {', '.join(unknown)} is no training domain (there are: {', '.join(domains)})")
    missing = [d for d in domains if d not in weights]
    if missing:
        raise ValueError(
            f"weights: no weight for {', '.join(missing)}: give every training domain one (0 leaves it out)"
        )
    for name, weight in weights.items():
        if not math.isfinite(weight) or weight < 0:
            raise ValueError(f"weights: {name} has weight {weight}: weights must be finite and not negative")
    total = math.fsum(weights.values())
    if total <= 0:
        raise ValueError("weights: all are zero: give at least one domain a positive weight")
    return {d: weights[d] / total for d in domains}


def largest_remainder(shares: list[float], total: int) -> list[int]:
    """Integers that sum to ``total``, each within one of ``share * total`` (Hamilton's method; ties to the first)."""
    exact = [s * total for s in shares]
    counts = [math.floor(e) for e in exact]
    order = sorted(range(len(shares)), key=lambda i: (counts[i] - exact[i], i))
    for i in order[: total - sum(counts)]:
        counts[i] += 1
    return counts


class SampleOrder:
    """The endless order of training samples.

    Samples come in blocks of ``BLOCK``. Each block holds every domain in the same number of places, permuted by a key
    of its own. The n-th sample of a domain is the window ``permutation(n mod windows)``, with one permutation for each
    of the domain's epochs: every window once an epoch.

    Args:
        windows: Number of windows of each domain.
        weights: Share of samples of each domain; see `check_weights`.
        seed: Another seed is another order.
    """

    def __init__(self, windows: Mapping[str, int], weights: Mapping[str, float], seed: int) -> None:
        weights = check_weights(weights, list(windows))
        self.domains = [d for d in windows if weights[d] > 0]
        self.seed = seed
        self.windows = [windows[d] for d in self.domains]
        self.counts = largest_remainder([weights[d] for d in self.domains], BLOCK)
        for domain, count, n in zip(self.domains, self.counts, self.windows, strict=True):
            if count == 0:
                raise ValueError(
                    f"weights: the share of {domain}, {weights[domain]:.2g}, is under 1/{BLOCK}: raise it or set 0"
                )
            if n < 1:
                raise ValueError(
                    f"domain {domain} has fewer tokens than one window: lower seq_len or set its weight to 0"
                )
        self._ends = np.cumsum(self.counts)
        self._starts = self._ends - self.counts
        self._permutation = lru_cache(maxsize=256)(self._make_permutation)

    def __getstate__(self) -> dict:
        return {k: v for k, v in self.__dict__.items() if k != "_permutation"}

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        self._permutation = lru_cache(maxsize=256)(self._make_permutation)

    def _make_permutation(self, n: int, *key: int | str) -> KeyedPermutation:
        return KeyedPermutation(n, derive_key(self.seed, *key))

    def __call__(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Domain (index into ``domains``) and window of each of ``samples`` (int64 ``[n]``); both int64 ``[n]``."""
        block, place = np.divmod(np.asarray(samples, dtype=np.int64), BLOCK)
        slot = np.empty_like(place)
        for b in np.unique(block):
            here = block == b
            slot[here] = self._permutation(BLOCK, "block", int(b))(place[here])
        domain = np.searchsorted(self._ends, slot, side="right")
        counter = block * np.asarray(self.counts)[domain] + slot - self._starts[domain]
        epoch, rank = np.divmod(counter, np.asarray(self.windows)[domain])
        window = np.empty_like(rank)
        for d, e in set(zip(domain.tolist(), epoch.tolist(), strict=True)):
            here = (domain == d) & (epoch == e)
            window[here] = self._permutation(self.windows[d], "window", self.domains[d], e)(rank[here])
        return domain, window
