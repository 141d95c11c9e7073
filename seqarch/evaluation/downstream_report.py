"""Downstream scores as plain data, as CSV and as a table for the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from seqarch.evaluation.downstream_estimates import Difference, TaskScores

HEADER = (
    "setting,architecture,task,metric,higher_is_better,shots,version,limit,documents,step,value,stderr,seeds,"
    "difference,low,high,p,adjusted_p,paired"
)


def plain_scores(tasks: Sequence[TaskScores]) -> list[dict[str, Any]]:
    """One entry for each task and metric, as data that JSON can hold."""
    return [
        {
            "task": task.task,
            "metric": task.metric,
            "higher_is_better": task.first.higher_is_better.get(task.metric),
            "settings": task.first.settings,
            "architectures": {
                name: {
                    "value": score.value,
                    "stderr": score.stderr,
                    "runs": [
                        {"path": str(r.run), "step": r.step, "value": r.scores[task.metric][0]} for r in score.results
                    ],
                    "difference": None if score.difference is None else _difference(score.difference),
                }
                for name, score in task.scores.items()
            },
        }
        for task in tasks
    ]


def _difference(d: Difference) -> dict[str, Any]:
    return {
        "value": d.value,
        "low": d.low,
        "high": d.high,
        "p": d.p,
        "adjusted_p": d.adjusted_p,
        "paired": d.paired,
        "covers": "documents and seeds" if d.seeds else "documents",
    }


def rows(setting: Mapping[str, Any]) -> list[list[Any]]:
    """Of downstream.csv (`HEADER`): one row for each task, metric and architecture."""
    found = []
    for entry in setting["downstream"]:
        s = entry["settings"]
        for name, score in entry["architectures"].items():
            d = score["difference"] or {}
            found.append(
                [
                    *(setting["title"], name, entry["task"], entry["metric"], entry["higher_is_better"]),
                    *(s["num_fewshot"], s["version"], s["limit"], s["documents"], steps(entry, name)),
                    *(score["value"], score["stderr"], len(score["runs"])),
                    *(d.get(key) for key in ("value", "low", "high", "p", "adjusted_p", "paired")),
                ]
            )
    return found


def table(setting: Mapping[str, Any], alpha: float) -> Table:
    """For the terminal: tasks with their metrics, under each the architectures."""
    title = f"Downstream tasks, trained on: {setting['title']}"
    found = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    for heading in ("task", "shots", "documents", "architecture", "step", "seeds", "score ± error", "difference"):
        left = heading in ("task", "architecture", "difference")
        found.add_column(heading, overflow="fold", justify="left" if left else "right")
    for entry in setting["downstream"]:
        s = entry["settings"]
        head = [escape(metric_name(entry)), str(s["num_fewshot"]), f"{s['documents']:,}"]
        for name, score in entry["architectures"].items():
            text = difference_text(score["difference"])
            if is_sure(score["difference"], alpha):
                text = f"[bold]{text}[/bold]"
            cells = [escape(name), steps(entry, name), str(len(score["runs"])), score_text(score)]
            found.add_row(*head, *cells, text)
            head = ["", "", ""]
        found.add_section()
    return found


def metric_name(entry: Mapping[str, Any]) -> str:
    """Task, metric, and an arrow to where it is better."""
    arrow = {True: " ↑", False: " ↓", None: ""}[entry["higher_is_better"]]
    return f"{entry['task']} {entry['metric']}{arrow}"


def steps(entry: Mapping[str, Any], name: str) -> str:
    """The steps of the checkpoints of an architecture, mostly one."""
    return ", ".join(str(step) for step in sorted({run["step"] for run in entry["architectures"][name]["runs"]}))


def score_text(score: Mapping[str, Any]) -> str:
    """``0.412 ± 0.010``."""
    return f"{score['value']:.3f}" + ("" if score["stderr"] is None else f" ± {score['stderr']:.3f}")


def difference_text(difference: Mapping[str, Any] | None) -> str:
    """``−0.031 [−0.060, −0.002]``; a tilde where documents are not paired, a star where seeds are not covered."""
    if difference is None:
        return ""
    text = f"{difference['value']:+.3f}"
    if difference["low"] is not None:
        signs = ("" if difference["paired"] else "~") + ("*" if difference["covers"] == "documents" else "")
        text += f" [{difference['low']:+.3f}, {difference['high']:+.3f}]{signs}"
    return text.replace("-", "−")


def is_sure(difference: Mapping[str, Any] | None, alpha: float) -> bool:
    """Whether it differs from 0, the number of scores allowed for."""
    return difference is not None and difference["adjusted_p"] is not None and difference["adjusted_p"] < alpha


def explain_scores(report: Mapping[str, Any]) -> list[str]:
    """How to read the table, a line or none."""
    entries = [entry for setting in report["settings"] for entry in setting["downstream"]]
    if not entries:
        return []
    differences = [s["difference"] for e in entries for s in e["architectures"].values() if s["difference"]]
    percent = f"{100 * report['level']:g}%"
    line = (
        "Downstream: mean over seeds ± its standard error, at these checkpoints and not at equal loss; difference to "
        f"{report['reference']} with its {percent} interval; bold: differs from 0, allowing for the number of scores "
        "(Holm)."
    )
    if any(d["low"] is not None and not d["paired"] for d in differences):
        line += " ~ From standard errors, the documents' own scores not being kept or no mean: wider than need be."
    if any(d["low"] is not None and d["covers"] == "documents" for d in differences):
        line += " * Covers documents alone, for no architecture has several seeds."
    if any(d["low"] is None for d in differences):
        line += " Without an interval: every document came out alike, or the task has no standard error."
    return [line]
