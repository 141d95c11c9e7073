"""A comparison's charts as PNG and PDF files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from seqarch.evaluation.report import MEAN

COLOURS = ("#000000", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#8a6d00", "#56b4e9", "#7b3fa0", "#b2182b")
STYLES = ("-", "--", ":")


def write_plots(report: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write, for each setting, its curves and gaps as ``<setting>.png`` and ``.pdf``; returns the files."""
    names = list(dict.fromkeys(a["name"] for s in report["settings"] for a in s["architectures"]))
    looks = {name: (COLOURS[i % 9], STYLES[i // 9 % 3]) for i, name in enumerate(names)}
    written = []
    for i, setting in enumerate(report["settings"]):
        stem = "mixed" if setting["mixed"] else "limited" if i == 0 else f"limited-{i + 1}"
        rows = [a for a in setting["architectures"] if a["gap"] is not None and a["gap"]["targets"]]
        with matplotlib.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
            figure = Figure(figsize=(11, max(4.2, 2.2 + 0.27 * len(rows))), layout="constrained")
            left, right = figure.subplots(1, 2)
            _curves(left, report, setting, looks)
            if rows:
                _forest(right, report, rows, looks)
            else:
                right.set_axis_off()  # no pair shares a range of pre-training loss
            figure.suptitle(f"Trained on: {setting['title']}", x=0.01, ha="left")
            for suffix in ("png", "pdf"):
                path = folder / f"{stem}.{suffix}"
                # Without a date two reports of the same runs are the same files.
                metadata = {"CreationDate": None} if suffix == "pdf" else {}
                figure.savefig(path, dpi=150, metadata=metadata)
                written.append(path)
    return written


def _curves(axes: Any, report: Mapping[str, Any], setting: Mapping[str, Any], looks: Mapping[str, tuple]) -> None:
    for a in setting["architectures"]:
        colour, style = looks[a["name"]]
        for i, run in enumerate(a["runs"]):
            name = a["name"] if i == 0 else None
            width = 1.2 if a["gap"] else 2.0
            x, y = run["pretraining_loss"], run["losses"][MEAN]
            axes.plot(x, y, style, color=colour, lw=width, marker=".", ms=3, label=name)
    axes.invert_xaxis()
    axes.set_xlabel(f"pre-training loss ({report['unit']})")
    axes.set_ylabel(f"mean loss on {', '.join(setting['targets'])}")
    axes.set_title("Lower is better at equal pre-training loss", loc="left")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=7.5)


def _forest(axes: Any, report: Mapping[str, Any], rows: list[Any], looks: Mapping[str, tuple]) -> None:
    axes.axvspan(-report["margin"], report["margin"], color="#eef1f5", zorder=0)
    axes.axvline(0, color="gray", lw=0.8)
    for y, a in enumerate(rows):
        e = a["gap"]["targets"][MEAN]
        colour = looks[a["name"]][0]
        axes.plot([e["low"], e["high"]], [y, y], color=colour, lw=2)
        axes.plot(e["value"], y, "o", color=colour, ms=5)
    axes.set_yticks(range(len(rows)), [f"{a['name']}\n{a['gap']['verdict']}" for a in rows], fontsize=7.5)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlabel(f"gap to {report['reference']} at equal loss, {100 * report['level']:g}% interval; right: worse")
    axes.set_title("Base-capability gap", loc="left")
    axes.grid(alpha=0.3, axis="x")
