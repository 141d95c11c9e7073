"""How often the intervals of `seqarch compare` hold the true gap, on simulated studies (tests/evaluation/simulated.py).

    python benchmarks/compare_coverage.py

Prints a Markdown table. "documents alone" is the interval over test documents without the spread of seeds; "seeds
resampled" draws both documents and seeds with replacement, the plain hierarchical bootstrap.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from seqarch.evaluation.bootstrap import draw_documents, interval
from seqarch.evaluation.gap import Curve
from tests.evaluation.simulated import DOMAINS, Truth, gaps_of, simulate

STUDIES = [  # test documents a domain, spread of seeds, seeds, further architectures with as many
    (10, 0.0, 1, 0),
    (20, 0.0, 1, 0),
    (40, 0.0, 1, 0),
    (160, 0.0, 1, 0),
    (160, 0.03, 1, 0),
    (160, 0.03, 2, 0),
    (160, 0.03, 3, 0),
    (160, 0.03, 2, 4),
]
GAP = 0.05


def seeds_resampled(architectures: list[list[dict]], replicates: int, seed: int) -> tuple[float, float]:
    """The interval of the plain hierarchical bootstrap, for the first two architectures."""
    rng = np.random.default_rng(seed)
    draws = {d: draw_documents(d, architectures[0][0]["tokens"][d], replicates, seed) for d in DOMAINS}
    curves = []
    for runs in architectures[:2]:
        losses = [{d: draw.losses(run["nats"][d]) for d, draw in draws.items()} for run in runs]
        curves.append([Curve(v["in"], ((v["out"] + v["far"]) / 2)[:, :, None]) for v in losses])
    at = np.max([c.last for group in curves for c in group], axis=0)
    means = []
    for group in curves:
        values = np.stack([c.at(at)[1:, 0] for c in group])
        drawn = rng.integers(len(group), size=values.shape)
        means.append(np.take_along_axis(values, drawn, axis=0).mean(axis=0))
    return interval(means[1] - means[0], 0.95)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--studies", type=int, default=300)
    parser.add_argument("--replicates", type=int, default=1000)
    args = parser.parse_args()
    print(
        "| documents | spread of seeds | seeds | architectures | coverage | documents alone | seeds resampled | width |"
    )
    print("|--:|--:|--:|--:|--:|--:|--:|--:|")
    for documents, spread, seeds, others in STUDIES:
        truth = Truth(documents=documents, seeds=spread)
        rng = np.random.default_rng(0)
        held, alone, resampled, width = 0, 0, 0, 0.0
        for i in range(args.studies):
            study = simulate(rng, [0.0, GAP] + [0.0] * others, [seeds] * (2 + others), truth)
            estimate = gaps_of(study, replicates=args.replicates, seed=i)[0].targets[0]
            held += estimate.low <= GAP <= estimate.high
            alone += abs(estimate.value - GAP) <= estimate.documents
            low, high = seeds_resampled(study, args.replicates, i)
            resampled += low <= GAP <= high
            width += estimate.high - estimate.low
        shares = " | ".join(f"{100 * n / args.studies:.1f}%" for n in (held, alone, resampled))
        print(
            f"| {documents} | {spread} | {seeds} | {2 + others} | {shares} | {width / args.studies:.3f} |", flush=True
        )


if __name__ == "__main__":
    main()
