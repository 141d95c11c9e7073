"""Plots of what depends on the place in the context."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from seqarch.data.manifest import write_aside


def keep(found: dict[str, Any], file: Path, plot: Callable[[dict[str, Any], Path], None]) -> None:
    """Write results as JSON with their plot beside it, and say where."""
    file.parent.mkdir(parents=True, exist_ok=True)
    write_aside(file, json.dumps(found, indent=1).encode())
    plot(found, file.with_suffix(".png"))
    print(f"{file} and {file.with_suffix('.png').name}")


def plot_needle(found: dict[str, Any], path: Path) -> None:
    """Heat maps, depth of the needle by length of the context, of `needle_test`'s accuracy and nats."""
    columns, rows = len(found["lengths"]), len(found["depths"])
    figure = Figure(figsize=(3.2 + 1.5 * columns, 1.6 + 0.5 * rows), layout="constrained")
    panels = (
        ("accuracy", "Answers found", "viridis", 0.0, 1.0, "{:.2f}"),
        ("nats", "Cost of the number (nats; a guess: 16)", "viridis_r", 0.0, 16.0, "{:.1f}"),
    )
    for axes, (name, title, colours, low, high, form) in zip(figure.subplots(1, 2), panels, strict=True):
        image = axes.imshow(found[name], cmap=colours, vmin=low, vmax=high, aspect="auto")
        for row, values in enumerate(found[name]):
            for column, value in enumerate(values):
                dark = (value / high < 0.6) == (name == "accuracy")
                colour = "white" if dark else "black"
                axes.text(column, row, form.format(value), ha="center", va="center", fontsize=8, color=colour)
        axes.set_xticks(range(columns), [f"{length:,}" for length in found["lengths"]])
        axes.set_yticks(range(rows), [f"{depth:.0%}" for depth in found["depths"]])
        axes.set(xlabel="context (tokens)", ylabel="depth of the needle")
        axes.set_title(title, fontsize=10)
        figure.colorbar(image, ax=axes)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def plot_position(found: dict[str, Any], path: Path) -> None:
    """Loss against position in the document, a line for each domain, with two standard errors."""
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    # Tokens start + 1 … end: the middle of the bin on the logarithmic axis.
    x = [((start + 1) * end) ** 0.5 for start, end in zip(found["starts"], found["ends"], strict=True)]
    for i, (domain, curve) in enumerate(found["domains"].items()):
        loss, error = curve["loss"], curve["stderr"] or [0.0] * len(x)
        axes.plot(x, loss, "o-", ms=3, color=f"C{i}", label=f"{domain} ({curve['documents']})")
        low, high = ([a + sign * 2 * b for a, b in zip(loss, error, strict=True)] for sign in (-1, 1))
        axes.fill_between(x, low, high, color=f"C{i}", alpha=0.15, lw=0)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set(xlabel="position in the document (tokens)", ylabel="loss (nats per token)")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, title="domain (documents)")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
