"""The three principles of a mixer, measured: full-sequence visibility, real relation, non-uniform distribution.

The properties are those of "How Does Sequence Modeling Architecture Influence Base Capabilities of Pre-trained Language
Models?" (arXiv 2505.18522); docs/probe.md has the definitions used here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from seqarch.evaluation.probe_jacobian import Layer, influence
from seqarch.evaluation.probe_properties import dropped_share, non_uniformity, own_share, visibility
from seqarch.evaluation.probe_relation import log_distances, relation

DISTANCES = 6
CONTENTS = 6


def steps(layer: Layer) -> int:
    """How many times ``measure`` calls ``advance``."""
    N, T, _ = layer.inputs.shape
    return N * (1 + len(log_distances(3 * T // 4, DISTANCES)))


def measure(
    layer: Layer,
    *,
    seed: int = 0,
    directions: int = 1,
    batch_size: int = 32,
    advance: Callable[[int], object] = lambda steps: None,
) -> dict[str, Any]:
    """The properties of one mixer.

    Args:
        layer: The mixer and its inputs, at least 2 sequences of at least 16 tokens.
        seed: Of the directions in which inputs are moved, and of the contents of the crossed design.
        directions: How many.
        batch_size: Sequences a call of the mixer: memory is that of its forward pass.
        advance: Called with 1, ``steps`` times at about even intervals.

    Returns:
        ``visibility``, ``relation`` and ``non_uniformity`` as the functions of these names return them; ``own``, the
        share of an output's influence that is its own input's; ``dropped``, of the late outputs, because a selection
        changed under a perturbation.

    Raises:
        ValueError: If the mixer is not causal, or there is nothing to measure.
    """
    generator = torch.Generator().manual_seed(seed)
    D, dtype = layer.inputs.shape[-1], layer.inputs.dtype
    u = torch.randn(directions, D, generator=generator, dtype=torch.float64).to(dtype)
    found = influence(layer, u, batch_size=batch_size, advance=advance)
    related = relation(
        layer, u, found.floor, generator=generator, distances=DISTANCES, contents=CONTENTS,
        batch_size=batch_size, advance=advance,
    )  # fmt: skip
    return {
        "visibility": visibility(found),
        "relation": related,
        "non_uniformity": non_uniformity(found),
        "own": own_share(found),
        "dropped": dropped_share(found),
    }


def average(layers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The mean over layers of every number (and of every place of the curve), of those layers that have it."""
    keys = layers[0].keys()
    return {key: _mean([layer[key] for layer in layers]) for key in keys}


def _mean(values: Sequence[Any]) -> Any:
    there = [v for v in values if v is not None]
    if not there:
        return None
    if isinstance(there[0], dict):
        return {k: _mean([v[k] for v in there]) for k in there[0] if k != "distances"}
    if isinstance(there[0], list):
        return [sum(column) / len(there) for column in zip(*there, strict=True)]
    return sum(there) / len(there)
