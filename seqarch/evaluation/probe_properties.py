"""Full-sequence visibility and non-uniformity, from the influence of every input on every late output."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from seqarch.evaluation.probe_jacobian import Influence

SPAN_MASS = 0.95
"""The part of a row's weight that its span holds."""


def late_rows(T: int) -> range:
    """The outputs that are looked at: the last quarter, which has most of the sequence before it."""
    return range(T - T // 4, T)


def weights_by_distance(found: Influence) -> list[Tensor]:
    """Effective mixing weights w_ij = G_ij / Σ_{j'<i} G_ij' of each late output i, nearest input first.

    The diagonal is left out: there, what an output takes from its own input through gates and queries comes on top of
    the mixing. So are rows with a jump, and rows that take nothing from any earlier input.
    """
    weights = []
    for G, jumped in zip(found.G, found.jumped, strict=True):
        for i in late_rows(G.shape[0]):
            row = G[i, :i].flip(0)
            if not jumped[i] and row.any():
                weights.append(row / row.sum())
    return weights


def visibility(found: Influence) -> dict[str, Any]:
    """How far the outputs see, taken together: one that selects a single input is not blind to the others.

    Returns:
        ``curve``, the mean weight at distances 1, 2, …; ``span`` (tokens), the smallest distance within which lie 95 %
        of the weights of all late outputs, and ``span_share``, of the mean number of inputs before them; ``reach``
        (tokens), the largest distance from which any late output is moved by more than rounding, and ``reach_share``,
        of the largest that there is.
    """
    T = found.G.shape[-1]
    rows = weights_by_distance(found)
    total, count = torch.zeros(T - 1, dtype=torch.float64), torch.zeros(T - 1, dtype=torch.float64)
    for row in rows:
        total[: len(row)] += row
        count[: len(row)] += 1
    # Rounding may keep a running sum from its last value, 1, and from values equal to 0.95.
    span = int((total.cumsum(0) < SPAN_MASS * len(rows) - 1e-9).sum()) + 1 if rows else 0
    reach = int(total.nonzero().max()) + 1 if rows else 0
    return {
        "span": span,
        "span_share": span / (sum(map(len, rows)) / len(rows)) if rows else 0.0,
        "reach": reach,
        "reach_share": reach / (T - 1),
        "curve": (total / count.clamp(min=1)).tolist(),
    }


def non_uniformity(found: Influence) -> dict[str, float | None]:
    """How unevenly an output weighs the inputs before it; all None for a mixer that looks at no earlier input.

    Returns:
        ``entropy``, -Σ w ln w over ln i, from 0 (a single input) to 1 (all alike); ``inputs``, exp(-Σ w ln w), the
        number of inputs that an even distribution of the same entropy has; ``top1``, the largest weight. Averaged over
        the late outputs (``inputs``: geometrically).
    """
    rows = weights_by_distance(found)
    nats = [float(-(row * row.clamp(min=1e-300).log()).sum()) for row in rows]
    mean = _mean(nats)
    return {
        "entropy": _mean([h / math.log(len(row)) for h, row in zip(nats, rows, strict=True)]),
        "inputs": None if mean is None else math.exp(mean),
        "top1": _mean([float(row.max()) for row in rows]),
    }


def own_share(found: Influence) -> float | None:
    """G_ii / Σ_{j≤i} G_ij, averaged over the late outputs: how much of an output's influence is its own input's."""
    shares = []
    for G, jumped in zip(found.G, found.jumped, strict=True):
        rows = [i for i in late_rows(G.shape[0]) if not jumped[i] and G[i].any()]
        shares += [float(G[i, i] / G[i].sum()) for i in rows]
    return _mean(shares)


def dropped_share(found: Influence) -> float:
    """Share of the late outputs that were left out because a selection changed under a perturbation."""
    late = late_rows(found.G.shape[-1])
    return float(found.jumped[:, late.start :].double().mean())


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None
