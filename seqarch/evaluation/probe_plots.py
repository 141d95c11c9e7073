"""The picture of a probe: the three properties as bars, what the weights depend on, and weight against distance."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from textwrap import fill
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from seqarch.evaluation.position import bin_edges
from seqarch.evaluation.probe_properties import SPAN_MASS

_FACTORS = {
    "position": "#9aa0a6",
    "others": "#d5d8dc",
    "query": "#7fb3d5",
    "key": "#f5b041",
    "pair": "#c0392b",
}
_PROPERTIES = {"visibility: span": "#2e86c1", "relation: pair": "#c0392b", "non-uniformity": "#229954"}


def properties(mean: dict[str, Any]) -> dict[str, float | None]:
    """The three properties as numbers between 0 and 1: span share, pair share, 1 - normalised entropy."""
    shares, entropy = mean["relation"]["shares"], mean["non_uniformity"]["entropy"]
    found = (mean["visibility"]["span_share"], shares and shares["pair"], None if entropy is None else 1 - entropy)
    return dict(zip(_PROPERTIES, found, strict=True))


def plot_probe(found: dict[str, Any], path: Path) -> None:
    """Write the picture of a probe's JSON."""
    mixers = found["mixers"]
    n = len(mixers)
    figure = Figure(figsize=(13, 2.2 + 0.5 * n + 4.2), layout="constrained")
    grid = figure.add_gridspec(2, 2, height_ratios=[1.4 + 0.5 * n, 4.2])
    left = figure.add_subplot(grid[0, 0])
    _bars(left, mixers)
    _shares(figure.add_subplot(grid[0, 1], sharey=left), mixers)
    _curves(figure.add_subplot(grid[1, :]), mixers)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def _rows(axes: Axes, mixers: list[dict[str, Any]]) -> None:
    axes.set_yticks(range(len(mixers)), [fill(m["label"], 24) for m in mixers])
    axes.set_ylim(len(mixers) - 0.4, -0.6)
    axes.set_xlim(0, 1)
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:.0%}")
    axes.spines[["top", "right"]].set_visible(False)


def _bars(axes: Axes, mixers: list[dict[str, Any]]) -> None:
    for k, (name, colour) in enumerate(_PROPERTIES.items()):
        values = [properties(m["mean"])[name] for m in mixers]
        places = [i + 0.26 * (k - 1) for i in range(len(mixers))]
        axes.barh(places, [v or 0.0 for v in values], height=0.24, color=colour, label=name)
        for place, value in zip(places, values, strict=True):
            if value is None:
                axes.text(0.01, place, "not measurable", va="center", fontsize=7, color=colour)
    _rows(axes, mixers)
    axes.axvline(SPAN_MASS, color=_PROPERTIES["visibility: span"], lw=0.8, ls=":")
    axes.set_title("The three properties (dotted: span of an even weight)", fontsize=10, pad=22)
    axes.legend(
        frameon=False,
        ncols=3,
        fontsize=8,
        columnspacing=1.0,
        loc="lower center",
        bbox_to_anchor=(0.5, 1.0),
        borderaxespad=0.2,
    )


def _shares(axes: Axes, mixers: list[dict[str, Any]]) -> None:
    for name, colour in _FACTORS.items():
        shares = [m["mean"]["relation"]["shares"] for m in mixers]
        values = [0.0 if s is None else s[name] for s in shares]
        before = [0.0 if s is None else sum(s[f] for f in list(_FACTORS)[: list(_FACTORS).index(name)]) for s in shares]
        axes.barh(range(len(mixers)), values, left=before, height=0.6, color=colour, label=name)
    _rows(axes, mixers)
    axes.tick_params(labelleft=False)
    axes.set_title("What log-weights depend on (shares of their variance)", fontsize=10, pad=22)
    axes.legend(
        frameon=False,
        ncols=5,
        fontsize=8,
        columnspacing=1.0,
        loc="lower center",
        bbox_to_anchor=(0.5, 1.0),
        borderaxespad=0.2,
    )


def _curves(axes: Axes, mixers: list[dict[str, Any]]) -> None:
    length = len(mixers[0]["mean"]["visibility"]["curve"])
    edges = bin_edges(length, per_octave=3)
    x = [((a + 1) * b) ** 0.5 for a, b in pairwise(edges)]
    dashes = ("-", "--", ":")
    lowest, highest = 1.0, 0.0
    for i, mixer in enumerate(mixers):
        curve = mixer["mean"]["visibility"]["curve"]
        y = [sum(curve[a:b]) / (b - a) for a, b in pairwise(edges)]
        lowest, highest = min([lowest, *(v for v in y if v > 0)]), max([highest, *y])
        drawn = [v if v > 0 else float("nan") for v in y]
        axes.plot(
            x, drawn, marker="o", ms=2.5, color=f"C{i % 10}", ls=dashes[i // 10 % 3], label=fill(mixer["label"], 24)
        )
    axes.axhline(1 / (7 / 8 * (length + 1)), color="black", lw=0.8, ls=":", label="even")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_ylim(max(lowest / 2, 1e-7), 2 * (highest or 1.0))
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set(xlabel="distance (tokens)", ylabel="mean weight of one input")
    axes.set_title("Visibility: the weight of an input against its distance", fontsize=10)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
