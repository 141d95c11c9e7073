"""A comparison as plain data (report.json), as CSV, and as tables for the terminal."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from seqarch.evaluation import downstream_report
from seqarch.evaluation.architectures import differing
from seqarch.evaluation.bootstrap import holm
from seqarch.evaluation.comparison import Comparison, Points, Setting
from seqarch.evaluation.gap import OPEN, Gap

FORMAT, VERSION = "seqarch-comparison", 1
MEAN = "mean"
"""The name of the target that is the mean over the domains that are compared."""


def to_plain(comparison: Comparison) -> dict[str, Any]:
    """Everything that was found, as data that JSON can hold; what is not a number is null."""
    runs = [p.run for s in comparison.settings for points in s.points.values() for p in points]
    names = {p.run.path: name for s in comparison.settings for name, points in s.points.items() for p in points}
    options = {}
    for option in differing([run.options for run in runs]):
        options[option] = {names[run.path]: _readable(run.options.get(option)) for run in runs}
    return {
        "format": FORMAT,
        "version": VERSION,
        "reference": comparison.reference,
        "axis": comparison.axis,
        "unit": comparison.unit_name,
        "margin": comparison.margin,
        "level": comparison.level,
        "replicates": comparison.replicates,
        "documents": {d: {"count": n, "effective": e} for d, (n, e) in comparison.documents.items()},
        "settings": [_setting(s, comparison) for s in comparison.settings],
        "differing_options": options,
        "refused": [{"run": str(path), "reason": reason} for path, reason in comparison.refused.items()],
        "notes": comparison.notes,
        "other_results": [str(path) for path in comparison.other_results],
    }


def _setting(setting: Setting, comparison: Comparison) -> dict[str, Any]:
    return {
        "title": setting.title,
        "mixed": setting.mixed,
        "trained": list(setting.trained),
        "targets": list(setting.targets),
        "architectures": [
            {
                "name": name,
                "runs": [_run(p) for p in points],
                "gap": _gap(setting.gaps[name], setting.targets, comparison.margin) if name in setting.gaps else None,
            }
            for name, points in sorted(setting.points.items(), key=lambda item: _rank(setting, item[0]))
        ],
        "downstream": downstream_report.plain_scores(setting.downstream),
    }


def _rank(setting: Setting, name: str) -> float:
    """The reference first, then by gap; those without one last."""
    if name not in setting.gaps:
        return -math.inf
    targets = setting.gaps[name].targets
    return targets[0].value if targets else math.inf


def _run(points: Points) -> dict[str, Any]:
    run = points.run
    return {
        "path": str(run.path),
        "seed": run.seed,
        "tokens": run.tokens.tolist(),
        "pretraining_loss": points.x.tolist(),
        "losses": {MEAN: points.out.tolist(), **{name: loss.tolist() for name, loss in points.losses.items()}},
        "unseen_share": run.unseen_share,
    }


def _gap(gap: Gap, targets: Sequence[str], margin: float) -> dict[str, Any]:
    found = dict(zip((MEAN, *targets), gap.targets, strict=False))
    adjusted = [gap.adjusted_p, *holm([found[name].p for name in targets])] if found else []
    return {
        "verdict": gap.verdict,
        "seeds": list(gap.seeds),
        "covers": "documents" if gap.seed_deviation is None else "documents and seeds",
        "seed_deviation": gap.seed_deviation,
        "at_pretraining_loss": _number(gap.at),
        "shared_from": _number(gap.start),
        "targets": {
            name: {"value": e.value, "low": e.low, "high": e.high, "p": e.p, "adjusted_p": p}
            for (name, e), p in zip(found.items(), adjusted, strict=True)
        },
        "curve": [list(point) for point in gap.curve],
        "pretraining_at_end": {"value": gap.final.value, "low": gap.final.low, "high": gap.final.high},
        "advice": advice(gap, margin),
    }


def advice(gap: Gap, margin: float) -> str:
    """What would decide a comparison that is not decided; empty for the others."""
    if gap.verdict != OPEN:
        return ""
    if not gap.targets:
        return "the runs share no range of pre-training loss: train the one that is behind for longer"
    overall = gap.targets[0]
    needed = []
    if overall.documents > margin:
        times = math.ceil((overall.documents / margin) ** 2)
        needed.append(f"about {times} times the test documents (data.max_val_tokens)")
    if gap.seed_deviation is None:
        needed.append("several seeds of each")
    elif math.sqrt(max(0.0, ((overall.high - overall.low) / 2) ** 2 - overall.documents**2)) > margin:
        needed.append("more seeds")
    return " and ".join(needed) + f" for an interval of ±{margin:g}" if needed else "slightly more of either would do"


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _readable(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def gaps_csv(report: Mapping[str, Any]) -> str:
    """One row for each setting, architecture and target."""
    header = "setting,architecture,target,pretraining_loss,gap,low,high,p,adjusted_p,seeds,reference_seeds,verdict"
    rows = []
    for setting in report["settings"]:
        for architecture in setting["architectures"]:
            if (gap := architecture["gap"]) is None:
                continue
            for target, e in gap["targets"].items():
                numbers = [gap["at_pretraining_loss"], *(e[k] for k in ("value", "low", "high", "p", "adjusted_p"))]
                last = gap["verdict"] if target == MEAN else ""
                rows.append([setting["title"], architecture["name"], target, *numbers, *gap["seeds"], last])
    return _csv(header, rows)


def curves_csv(report: Mapping[str, Any]) -> str:
    """One row for each run, validation and domain; ``mean`` is that over the domains that are compared."""
    header = "setting,architecture,run,seed,tokens,pretraining_loss,domain,loss"
    rows = []
    for setting in report["settings"]:
        for architecture in setting["architectures"]:
            for run in architecture["runs"]:
                head = [setting["title"], architecture["name"], run["path"], run["seed"]]
                for domain, losses in run["losses"].items():
                    for tokens, x, loss in zip(run["tokens"], run["pretraining_loss"], losses, strict=True):
                        rows.append([*head, tokens, x, domain, loss])
    return _csv(header, rows)


def _csv(header: str, rows: Sequence[Sequence[Any]]) -> str:
    out = io.StringIO()
    out.write(header + "\n")
    csv.writer(out, lineterminator="\n").writerows(rows)
    return out.getvalue()


def tables(report: Mapping[str, Any]) -> list[Table]:
    """For the terminal: a table of verdicts for each setting, then the gaps by domain."""
    found = []
    several = len(report["settings"]) > 1
    for setting in report["settings"]:
        table = Table(title=f"Trained on: {setting['title']}", title_justify="left", box=SIMPLE_HEAD)
        table.add_column("architecture", overflow="fold")
        table.add_column("seeds", justify="right")
        table.add_column("pre-training loss at the end", justify="right")
        table.add_column("gap out of domain at equal loss" if not setting["mixed"] else "gap on the same domains")
        table.add_column("verdict", overflow="fold")
        for architecture in setting["architectures"]:
            end = [run["pretraining_loss"][-1] for run in architecture["runs"]]
            head = [escape(architecture["name"]), str(len(end)), f"{sum(end) / len(end):.4f}"]
            gap = architecture["gap"]
            table.add_row(*head, *(("reference", "") if gap is None else (interval(gap, MEAN), verdict(gap))))
        found.append(table)
    for setting in report["settings"]:
        title = "Gaps by domain" + (f", trained on: {setting['title']}" if several else "")
        table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
        table.add_column("architecture", overflow="fold")
        for target in setting["targets"]:
            table.add_column(target, justify="right")
        for architecture in setting["architectures"]:
            if (gap := architecture["gap"]) is not None and gap["targets"]:
                cells = [domain_gap(gap["targets"][t], 1 - report["level"]) for t in setting["targets"]]
                table.add_row(escape(architecture["name"]), *cells)
        found.append(table)
    found += [downstream_report.table(setting, 1 - report["level"]) for setting in report["settings"]]
    return [table for table in found if table.row_count]


def interval(gap: Mapping[str, Any], target: str) -> str:
    """``+0.052 [+0.031, +0.074]``."""
    if target not in gap["targets"]:
        return "no shared loss"
    e = gap["targets"][target]
    return f"{e['value']:+.3f} [{e['low']:+.3f}, {e['high']:+.3f}]".replace("-", "−")


def verdict(gap: Mapping[str, Any]) -> str:
    """The verdict, with a star if it holds for these runs only."""
    only = gap["covers"] == "documents" and gap["verdict"] != OPEN
    return gap["verdict"] + ("*" if only else "")


def domain_gap(estimate: Mapping[str, Any], alpha: float) -> str:
    """A domain's gap, in bold type where it differs from 0 even when the number of domains is allowed for."""
    text = f"{estimate['value']:+.3f}".replace("-", "−")
    return f"[bold]{text}[/bold]" if estimate["adjusted_p"] < alpha else text


def explain(report: Mapping[str, Any]) -> list[str]:
    """How to read the tables, a line each."""
    percent = f"{100 * report['level']:g}%"
    axis = "loss on held-out text of the training domains" if report["axis"] == "held-out" else "smoothed training loss"
    fewest = min((d["count"] for d in report["documents"].values()), default=0)
    lines = [
        f"Losses in {report['unit']}; pre-training loss: {axis}. Gap: loss minus that of {report['reference']} at "
        f"equal pre-training loss, with its {percent} interval ({report['replicates']:,} resampled test sets; "
        f"{fewest:,} documents or more a domain).",
        f"Verdict: equal if the interval lies within ±{report['margin']:g}; else degraded or better if it excludes 0, "
        "allowing for the number of architectures (Holm); else not decidable.",
    ]
    gaps = [a["gap"] for s in report["settings"] for a in s["architectures"] if a["gap"] is not None]
    if any(verdict(gap).endswith("*") for gap in gaps):
        lines.append("* One seed of each architecture: it holds for these runs; another seed may come out otherwise.")
    wanting: dict[str, list[str]] = {}
    for setting in report["settings"]:
        for architecture in setting["architectures"]:
            if architecture["gap"] is not None and (needed := architecture["gap"]["advice"]):
                where = f" ({setting['title']})" if len(report["settings"]) > 1 else ""
                wanting.setdefault(needed, []).append(architecture["name"] + where)
    lines += [f"To decide {', '.join(names)}: {needed}." for needed, names in wanting.items()]
    return lines + downstream_report.explain_scores(report)


def write_tables(report: Mapping[str, Any], folder: Path) -> None:
    """Write gaps.csv and curves.csv, and downstream.csv where there are scores."""
    (folder / "gaps.csv").write_text(gaps_csv(report), encoding="utf-8")
    (folder / "curves.csv").write_text(curves_csv(report), encoding="utf-8")
    if scores := [row for setting in report["settings"] for row in downstream_report.rows(setting)]:
        (folder / "downstream.csv").write_text(_csv(downstream_report.HEADER, scores), encoding="utf-8")
