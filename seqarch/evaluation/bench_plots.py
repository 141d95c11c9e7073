"""Plots of ``seqarch bench``: speed against length, a line for each mixer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from textwrap import wrap
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

from seqarch.evaluation.bench_report import outcome
from seqarch.evaluation.comparison_plots import COLOURS, STYLES

_MARKERS = "osD^vP"
_TITLES = {"training": "Training (forward and backward)", "decoding": "Decoding, one token at a time"}
_X = {"training": "sequence length (tokens)", "decoding": "tokens in the state"}


def write_plots(plain: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write ``training.png`` and ``decoding.png``, each where there is something to show; returns the files."""
    written = []
    for phase in _TITLES:
        entries = [e for e in plain["entries"] if e["phase"] == phase]
        if any(e["tokens_per_s"] is not None for e in entries):
            path = folder / f"{phase}.png"
            _plot(plain, phase, entries).savefig(path, dpi=150)
            written.append(path)
    return written


def _plot(plain: Mapping[str, Any], phase: str, entries: list[Mapping[str, Any]]) -> Figure:
    labels = list(plain["settings"]["mixers"])
    figure = Figure(figsize=(8.5, max(4.4, 1.6 + 0.24 * len(labels))), layout="constrained")
    axes = figure.subplots()
    for i, label in enumerate(labels):
        own = [e for e in entries if e["mixer"] == label]
        done = [e for e in own if e["tokens_per_s"] is not None]
        colour, style = COLOURS[i % len(COLOURS)], STYLES[i // len(COLOURS) % len(STYLES)]
        x, y = [e["length"] for e in done], [e["tokens_per_s"] for e in done]
        ends = [[abs(v - e["spread"][side]) for v, e in zip(y, done, strict=True)] for side in (0, 1)]
        marker, name = _MARKERS[i % len(_MARKERS)], "\n".join(wrap(label, 34, subsequent_indent="   "))
        axes.plot(x, y, color=colour, ls=style, marker=marker, ms=5, lw=1.6, label=name)
        axes.errorbar(x, y, yerr=ends, fmt="none", ecolor=colour, elinewidth=1, capsize=2)
        beyond = [e for e in own if done and e["tokens_per_s"] is None and e["length"] > x[-1]]
        if beyond:
            note = f"{outcome(beyond[0])} at {beyond[0]['length']:,}"
            place = {"xytext": (6, -9), "textcoords": "offset points", "fontsize": 7.5}
            axes.annotate(note, (x[-1], y[-1]), color=colour, **place)
    lengths = sorted({e["length"] for e in entries})
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
    axes.xaxis.set_minor_locator(NullLocator())
    _number_ticks(axes)
    axes.set(xlabel=_X[phase], ylabel="tokens per second")
    axes.set_title(_TITLES[phase], loc="left", fontsize=11, pad=20)
    settings, device = plain["settings"], plain["environment"]["device"]
    layers = f"{settings['n_layers']} layer{'s' if settings['n_layers'] > 1 else ''}"
    below = f"{device}; {layers} of width {settings['d_model']}, {settings['dtype']}; median and quartiles"
    axes.text(0, 1.02, below, transform=axes.transAxes, fontsize=8, color="#444444")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(
        *axes.get_legend_handles_labels(), loc="outside right upper", frameon=False, fontsize=8.5, handlelength=3
    )
    return figure


def _number_ticks(axes: Any) -> None:
    """Plain numbers on the logarithmic y axis, several in each decade where there are few decades."""
    low, high = axes.get_ylim()
    subs = (1, 2, 3, 5, 7) if high / low < 10 else (1, 2, 5) if high / low < 100 else (1,)
    axes.yaxis.set_major_locator(LogLocator(subs=subs))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}" if value >= 10 else f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
