"""Runs whose base-capability gap is known: losses by document drawn from a model.

In domain, a document's loss per token is the run's pre-training loss, which falls over the validations, plus what is
hard about the document, plus what is hard about it for the architecture and for the run; out of domain it is a line in
the pre-training loss plus the architecture's gap plus the same kinds of noise. Lengths are log-normal.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from seqarch.evaluation.bootstrap import draw_documents
from seqarch.evaluation.gap import Curve, Gap, compare_architectures

DOMAINS = {"in": True, "out": False, "far": False}


@dataclass(frozen=True)
class Truth:
    """Standard deviations, in nats per token."""

    documents: int = 40
    spread_of_lengths: float = 1.0  # of the logarithm
    hardness: float = 0.5
    interaction: float = 0.08  # of document and architecture
    run_interaction: float = 0.02  # of document and run
    slope: float = 0.05  # how much faster some documents are learnt than others, in each architecture
    seeds: float = 0.0
    validations: int = 8


def simulate(rng: np.random.Generator, gaps: list[float], n_seeds: list[int], truth: Truth) -> list[list[dict]]:
    """For each architecture and seed: by domain the nats ``[K, n]``, and the sizes under ``tokens``."""
    T = truth
    size = {d: np.maximum(8, rng.lognormal(5, T.spread_of_lengths, T.documents)).round() for d in DOMAINS}
    hardness = {d: rng.normal(0, T.hardness, T.documents) for d in DOMAINS}
    architectures = []
    for i, (gap, seeds) in enumerate(zip(gaps, n_seeds, strict=True)):
        speed = 1.0 + 0.15 * i  # later architectures learn faster, so that ends differ
        own = {d: rng.normal(0, T.interaction, T.documents) for d in DOMAINS}
        slope = {d: rng.normal(0, T.slope, T.documents) for d in DOMAINS}
        runs = []
        for _ in range(seeds):
            progress = 2.0 * speed * (1 - np.exp(-np.arange(1, T.validations + 1) / 5))
            pretraining = 6.0 - progress + rng.normal(0, 0.003, T.validations)
            nats = {}
            for d, inside in DOMAINS.items():
                level = pretraining if inside else 1.2 + 0.9 * pretraining + gap + rng.normal(0, T.seeds)
                own_run = own[d] + rng.normal(0, T.run_interaction, T.documents)
                by_document = level[:, None] + hardness[d] + own_run + slope[d] * progress[:, None]
                nats[d] = (by_document * size[d]).astype(np.float32)
            runs.append({"nats": nats, "tokens": size})
        architectures.append(runs)
    return architectures


def gaps_of(architectures: list[list[dict]], *, replicates: int, seed: int, margin: float = 0.02) -> list[Gap]:
    """The comparison of all others with the first."""
    draws = {d: draw_documents(d, architectures[0][0]["tokens"][d], replicates, seed) for d in DOMAINS}
    curves, finals = [], []
    for runs in architectures:
        losses = [{d: draw.losses(run["nats"][d]) for d, draw in draws.items()} for run in runs]
        y = [np.stack([(v["out"] + v["far"]) / 2, v["out"], v["far"]], axis=2) for v in losses]
        curves.append([Curve(v["in"], out) for v, out in zip(losses, y, strict=True)])
        finals.append([v["in"][:, -1] for v in losses])
    return compare_architectures(curves[0], curves[1:], finals, margin=margin, level=0.95, seed=seed)
