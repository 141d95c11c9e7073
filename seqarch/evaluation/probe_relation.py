"""Real relation: does the weight between two positions depend on what stands at both of them together?

The contents of the key's and of the query's position are exchanged in a crossed design, everything else being equal,
and the logarithm of the influence is taken apart by analysis of variance.

Shape legend: T tokens, D model width, P distances, S sequences, A query contents, B key contents.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from seqarch.evaluation.probe_jacobian import Layer, slopes

FACTORS = ("position", "others", "query", "key", "pair")
_CONSTANT = 1e-12  # variance in nats² below which a weight does not vary but by rounding


class TwoWay(NamedTuple):
    """Variance components of a table of rows by columns, without replicates."""

    rows: float
    columns: float
    rest: float


def two_way(table: Tensor) -> TwoWay:
    """Unbiased components of x_ab = μ + α_a + β_b + γ_ab with random effects, from the mean squares.

    E MS_rest = σ²_γ, E MS_rows = σ²_γ + B σ²_α, E MS_columns = σ²_γ + A σ²_β (Searle, Casella and McCulloch, *Variance
    Components*, 1992). An estimate of a variance may come out below 0.

    Args:
        table: ``[…, A, B]``, A and B at least 2; the components are averaged over the leading dimensions.
    """
    A, B = table.shape[-2:]
    mean = table.mean(dim=(-2, -1), keepdim=True)
    rows = table.mean(dim=-1, keepdim=True) - mean
    columns = table.mean(dim=-2, keepdim=True) - mean
    rest = float((table - mean - rows - columns).square().sum(dim=(-2, -1)).mean()) / ((A - 1) * (B - 1))
    of_rows = B * float(rows.square().sum(dim=(-2, -1)).mean()) / (A - 1)
    of_columns = A * float(columns.square().sum(dim=(-2, -1)).mean()) / (B - 1)
    return TwoWay((of_rows - rest) / B, (of_columns - rest) / A, rest)


def components(log_G: Tensor) -> dict[str, float]:
    """Variance of log G, in nats², by what it comes from.

    Args:
        log_G: ``[P, S, A, B]``, all but P at least 2. The contents are drawn afresh for each of the P · S tables.

    Returns:
        Of each of ``FACTORS``, at least 0. query, key and pair are the two-way components of the tables. position and
        others (what stands elsewhere) are those of the tables' means, less what the draw of the contents adds to the
        variance of a mean; what depends on position and others together counts to the others.
    """
    A, B = log_G.shape[-2:]
    inside = two_way(log_G)
    from_contents = inside.rows / A + inside.columns / B + inside.rest / (A * B)
    means = log_G.mean(dim=(-2, -1))
    if len(means) == 1:
        position, others = 0.0, float(means.var()) - from_contents
    else:
        position, common, rest = two_way(means)
        others = max(0.0, common) + max(0.0, rest - from_contents)
    return {
        "position": max(0.0, position),
        "others": max(0.0, others),
        "query": max(0.0, inside.rows),
        "key": max(0.0, inside.columns),
        "pair": max(0.0, inside.rest),
    }


def log_distances(longest: int, count: int) -> list[int]:
    """At most so many distances from 1 to ``longest``, evenly on a logarithmic axis."""
    return sorted({round(math.exp(math.log(longest) * k / (count - 1))) for k in range(count)})


def relation(
    layer: Layer,
    directions: Tensor,
    floor: float,
    *,
    generator: torch.Generator,
    distances: int = 6,
    contents: int = 6,
    batch_size: int = 32,
    advance: Callable[[int], object] = lambda steps: None,
) -> dict[str, Any]:
    """Shares of the variance of log G between the last output (the query) and inputs before it (the keys).

    For each distance d and each of the layer's sequences, A = B = ``contents`` vectors are drawn for
    the query's position T-1 and for the key's, T-1-d, from all inputs of the layer; log G is measured for all A · B
    combinations. A factor of the row (a softmax's normaliser, an output gate) or of the column (a key's norm, an input
    gate) is a sum in log G and thus no pair term, however large; q·k is.

    Influences below ``floor`` count as it. Distances from which nothing is seen at all are left out.

    Args:
        layer: The mixer.
        directions: ``[K, D]``, as for ``influence``.
        floor: What ``influence`` found to be rounding.
        generator: Draws the contents.
        distances: At most so many, from 1 to 3T/4.
        contents: At least 2.
        batch_size: Sequences a call of the mixer.
        advance: Called with 1 after each table.

    Returns:
        ``shares`` by factor (None if log G does not vary), ``nats`` by factor (standard deviations), ``distances``
        that were used, and ``dropped``, the share of tables left out because a selection changed under a perturbation.
    """
    N, T, _ = layer.inputs.shape
    pool = layer.inputs.flatten(0, 1)
    tables: dict[int, Tensor] = {}
    dropped, tried = 0, log_distances(3 * T // 4, distances)
    for distance in tried:
        of_distance = []
        for sequence in range(N):
            # Where a selection changes under the perturbation, other contents are drawn: the design must stay complete.
            for _ in range(5):
                drawn = torch.randperm(len(pool), generator=generator)[: 2 * contents]
                log_G = _table(layer, pool[drawn], sequence, distance, directions, floor, batch_size)
                if log_G is not None:
                    break
                dropped += 1
            else:
                name = type(layer.mixer).__name__
                raise ValueError(f"{name}: its selection changes under every perturbation; nothing can be measured")
            of_distance.append(log_G)
            advance(1)
        if any((t > math.log(floor)).any() for t in of_distance):
            tables[distance] = torch.stack(of_distance)
    result: dict[str, Any] = {
        "shares": None,
        "nats": None,
        "distances": list(tables),
        "dropped": dropped / (dropped + len(tried) * N),
    }
    if not tables:
        return result
    found = components(torch.stack(list(tables.values())))
    total = sum(found.values())
    result["nats"] = {name: math.sqrt(v) for name, v in found.items()}
    if total > _CONSTANT:
        result["shares"] = {name: v / total for name, v in found.items()}
    return result


def _table(
    layer: Layer, drawn: Tensor, sequence: int, distance: int, directions: Tensor, floor: float, batch_size: int
) -> Tensor | None:
    """log G ``[A, B]`` for all combinations of the first and the second half of ``drawn``; None where one jumped."""
    n, T = len(drawn) // 2, layer.inputs.shape[1]
    x = layer.inputs[sequence].repeat(n * n, 1, 1)
    x[:, T - 1] = drawn[:n].repeat_interleave(n, dim=0)
    x[:, T - 1 - distance] = drawn[n:].repeat(n, 1)
    at = torch.full((n * n,), T - 1 - distance)
    squares = torch.zeros(n * n, dtype=torch.float64)
    for u in directions:
        found = slopes(layer, x, sequence, at, u, rows=slice(T - 1, T), batch_size=batch_size)
        if found.jumped.any():
            return None
        squares += found.norm[:, 0].double().square() / len(directions)
    return squares.sqrt().clamp(min=floor).log().view(n, n)
