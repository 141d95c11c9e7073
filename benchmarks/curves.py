"""Draw the validation losses of runs: against tokens, and out of domain against in domain.

    python benchmarks/curves.py runs/transformer runs/top1chunk --output docs/img/domains.png

Needs matplotlib (the extra ``eval``).
"""

from __future__ import annotations

import argparse
import csv
from collections import defaultdict
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def read(run: Path) -> dict[str, dict[int, float]]:
    """Values by metric and number of tokens."""
    metrics: dict[str, dict[int, float]] = defaultdict(dict)
    with (run / "metrics.csv").open() as file:
        for row in csv.DictReader(file):
            metrics[row["name"]][int(row["tokens"])] = float(row["value"])
    return metrics


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--labels", nargs="+", help="by default the folders' names")
    parser.add_argument("--output", type=Path, default=Path("curves.png"))
    args = parser.parse_args()
    labels = args.labels or [run.name for run in args.runs]
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for i, (run, label) in enumerate(zip(args.runs, labels, strict=True)):
        metrics = read(run)
        inside, outside = metrics["val/loss/id"], metrics["val/loss/ood"]
        tokens = sorted(inside)
        color = f"C{i}"
        left.plot([t / 1e6 for t in tokens], [inside[t] for t in tokens], "o-", ms=3, color=color, label=label)
        left.plot([t / 1e6 for t in tokens], [outside[t] for t in tokens], "o--", ms=3, color=color)
        right.plot([inside[t] for t in tokens], [outside[t] for t in tokens], "o-", ms=3, color=color, label=label)
    left.plot([], [], "-", color="gray", label="in domain")
    left.plot([], [], "--", color="gray", label="out of domain")
    left.set(xlabel="tokens (millions)", ylabel="test loss (nats per token)", title="Training")
    right.set(
        xlabel="in-domain test loss", ylabel="out-of-domain test loss", title="At equal in-domain loss, lower is better"
    )
    right.invert_xaxis()
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    left.legend(frameon=False)
    right.legend(frameon=False)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(args.output, dpi=130)


if __name__ == "__main__":
    main()
