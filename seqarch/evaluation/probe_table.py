"""The table of a probe."""

from __future__ import annotations

from typing import Any

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from seqarch.evaluation.probe_relation import FACTORS


def probe_table(mixers: list[dict[str, Any]]) -> Table:
    """A row for each mixer; for each layer and their mean where a checkpoint has several."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    table.add_column("mixer", overflow="fold", min_width=14)
    for name in ("span", "reach", *FACTORS, "entropy", "inputs", "top-1", "own", "dropped"):
        table.add_column(name, justify="right", no_wrap=True)
    for mixer in mixers:
        label = escape(mixer["label"])
        if len(mixer["layers"]) > 1:
            for layer in mixer["layers"]:
                table.add_row(f"  layer {layer['layer']}: {escape(layer['mixer'])}", *_cells(layer), style="dim")
            label += " (mean)"
        table.add_row(label, *_cells(mixer["mean"]))
    return table


def _cells(found: dict[str, Any]) -> list[str]:
    shares, uneven = found["relation"]["shares"] or {}, found["non_uniformity"]
    return [
        _percent(found["visibility"]["span_share"]),
        f"{found['visibility']['reach']:.0f}",
        *(_percent(shares.get(name)) for name in FACTORS),
        _number(uneven["entropy"], ".2f"),
        _number(uneven["inputs"], ".1f"),
        _number(uneven["top1"], ".2f"),
        _percent(found["own"]),
        _percent(found["dropped"]),
    ]


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f}%"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


EXPLANATION = """\
visibility: span, share of the earlier inputs that holds 95 % of the weight; reach, largest distance felt, in tokens
relation: shares of the variance of log-weights that come from the position, other inputs, the query, the key, the pair
non-uniformity: entropy of the weights, 1 is even; inputs, how many even weights would have it; top-1, largest weight
own: an output's own input's share, left out elsewhere; dropped: outputs whose selection jumped while it was measured"""
"""What the columns are."""
