"""A comparison as one HTML file that needs nothing else: tables, charts with hover, and how to read them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from seqarch.evaluation.downstream_report import difference_text, is_sure, metric_name, score_text, steps
from seqarch.evaluation.report import MEAN, explain, interval, verdict

_HERE = Path(__file__).parent


def to_html(report: Mapping[str, Any]) -> str:
    """The page of a report (`report.to_plain`)."""
    n = len({a["name"] for s in report["settings"] for a in s["architectures"]}) - 1
    title = f"Base capabilities: {n} architecture{'s' if n != 1 else ''} against {report['reference']}"
    # Inside a script element only "</" could end the data early.
    data = json.dumps(report, allow_nan=False).replace("</", "<\\/")
    lines = explain(report)
    body = [
        f"<h1>{escape(title)}</h1>",
        *(f"<p>{escape(line)}</p>" for line in lines[:2]),
        *_verdicts(report),
        *(f'<p class="soft">{escape(line)}</p>' for line in lines[2:]),
        *(part for i, s in enumerate(report["settings"]) for part in _charts(s, i)),
        *(part for s in report["settings"] for part in _by_domain(report, s)),
        *(part for s in report["settings"] for part in _downstream(report, s)),
        *_in_domain(report),
        *_options(report),
        *_runs(report),
        *_left_out(report),
        *_how_to_read(report),
    ]
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>{escape(title)}</title>\n'
        f"<style>\n{(_HERE / 'report.css').read_text(encoding='utf-8')}</style>\n</head>\n<body>\n"
        + "\n".join(body)
        + f'\n<script type="application/json" id="data">{data}</script>\n'
        f"<script>\n{(_HERE / 'report.js').read_text(encoding='utf-8')}</script>\n</body>\n</html>\n"
    )


def _table(caption: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Cells are HTML; one that begins with <td or <th is whole."""
    lines = ["".join(c if c.startswith("<td") else f"<td>{c}</td>" for c in row) for row in rows]
    if not lines:
        return []
    return [
        f'<div class="scroll"><table><caption>{escape(caption)}</caption><thead><tr>',
        "".join(c if c.startswith("<th") else f"<th>{c}</th>" for c in head),
        "</tr></thead><tbody>",
        *(f"<tr>{line}</tr>" for line in lines),
        "</tbody></table></div>",
    ]


def _text(cell: str, kind: str = "") -> str:
    return f'<td class="text {kind}">{cell}</td>'


def _left(heading: str) -> str:
    return f'<th class="text">{escape(heading)}</th>'


def _verdicts(report: Mapping[str, Any]) -> list[str]:
    settings = report["settings"]
    names = list(dict.fromkeys(a["name"] for s in settings for a in s["architectures"]))
    head = ["architecture"]
    for s in settings:
        where = "mixed" if s["mixed"] else "limited" if len(settings) == 2 else escape(s["title"])
        head += [f'<th class="text">{where}:<br>verdict</th>', "gap at<br>equal loss", "loss at<br>the end"]
    rows = []
    for name in names:
        row = [escape(name)]
        for s in settings:
            found = next((a for a in s["architectures"] if a["name"] == name), None)
            if found is None:
                row += ["", "", ""]
                continue
            ends = [run["pretraining_loss"][-1] for run in found["runs"]]
            gap = found["gap"]
            row += (
                [_text("reference"), ""]
                if gap is None
                else [_text(verdict(gap), _kind(gap)), _small(interval(gap, MEAN))]
            )
            seeds = "1 seed" if len(ends) == 1 else f"{len(ends)} seeds"
            row.append(f"{sum(ends) / len(ends):.4f}<br><small>{seeds}</small>")
        rows.append(row)
    return ["<h2>Verdicts</h2>", *_table("Mean over the domains out of training", head, rows)]


def _small(text: str) -> str:
    """A value above its interval."""
    value, bracket, rest = text.partition(" [")
    return f"{value}<br><small>[{rest}</small>" if bracket else text


def _kind(gap: Mapping[str, Any]) -> str:
    return gap["verdict"].replace(" ", "-")


def _charts(setting: Mapping[str, Any], i: int) -> list[str]:
    def chart(kind: str, title: str) -> str:
        return (
            f'<div class="chart" data-chart="{kind}" data-setting="{i}"><h3>{escape(title)}</h3>'
            '<div class="plot"></div><div class="tip" role="status"></div></div>'
        )

    options = "".join(f"<option>{escape(t)}</option>" for t in setting["targets"])
    return [
        f"<h2>Trained on: {escape(setting['title'])}</h2>",
        f'<p><label>Loss on <select id="target-{i}"><option value="{MEAN}">the mean of these domains</option>'
        f"{options}</select></label> <span class=soft>A name below hides or shows its curves.</span></p>",
        f'<ul class="legend" data-setting="{i}"></ul>',
        '<div class="charts">',
        chart("forest", "Gap at equal pre-training loss"),
        chart("curves", "Loss against pre-training loss"),
        chart("gap", "The gap in the course of training (mean)"),
        "</div><noscript><p>The charts need JavaScript; the PNG files beside this page show the same.</p></noscript>",
    ]


def _by_domain(report: Mapping[str, Any], setting: Mapping[str, Any]) -> list[str]:
    rows = []
    for a in setting["architectures"]:
        if a["gap"] is not None and a["gap"]["targets"]:
            cells = []
            for target in setting["targets"]:
                text = _small(interval(a["gap"], target))
                sure = a["gap"]["targets"][target]["adjusted_p"] < 1 - report["level"]
                cells.append(f"<b>{text}</b>" if sure else text)
            rows.append([escape(a["name"]), *cells])
    caption = "Gap at equal pre-training loss; bold: differs from 0, allowing for the number of domains (Holm)"
    table = _table(caption, ["architecture", *map(escape, setting["targets"])], rows)
    return [f"<h2>By domain: {escape(setting['title'])}</h2>", *table] if table else []


def _downstream(report: Mapping[str, Any], setting: Mapping[str, Any]) -> list[str]:
    seeds = {a["name"]: len(a["runs"]) for a in setting["architectures"]}
    rows = []
    for entry in setting["downstream"]:
        s, scores = entry["settings"], entry["architectures"]
        step = ", ".join(dict.fromkeys(steps(entry, name) for name in scores))
        limit = "" if s["limit"] is None else f", limit {s['limit']}"
        what = f"{s['num_fewshot']} shots, {s['documents']:,} documents{limit}, step {step}"
        row = [f"{escape(metric_name(entry))}<br><small>{escape(what)}</small>"]
        for name, all_seeds in seeds.items():
            if (score := scores.get(name)) is None:
                row.append("–")
                continue
            text = _small(difference_text(score["difference"]))
            lines = [score_text(score), f"<b>{text}</b>" if is_sure(score["difference"], 1 - report["level"]) else text]
            if (n := len(score["runs"])) < all_seeds:
                lines.append(f"<small>{n} of {all_seeds} seeds</small>")
            row.append("<br>".join(filter(None, lines)))
        rows.append(row)
    caption = f"Score ± standard error; below it the difference to {report['reference']} with its interval"
    table = _table(caption, ["task", *map(escape, seeds)], rows)
    return [f"<h2>Downstream tasks: {escape(setting['title'])}</h2>", *table] if table else []


def _in_domain(report: Mapping[str, Any]) -> list[str]:
    rows = [
        [escape(a["name"]), _text(escape(s["title"])), _signed(a["gap"]["pretraining_at_end"])]
        for s in report["settings"]
        for a in s["architectures"]
        if a["gap"] is not None
    ]
    caption = f"Pre-training loss at the end minus that of {report['reference']}: how fast each learns, at equal tokens"
    return ["<h2>In domain</h2>", *_table(caption, ["architecture", _left("trained on"), "difference"], rows)]


def _signed(e: Mapping[str, float]) -> str:
    return f"{e['value']:+.3f} [{e['low']:+.3f}, {e['high']:+.3f}]".replace("-", "−")


def _options(report: Mapping[str, Any]) -> list[str]:
    options = report["differing_options"]
    names = list(dict.fromkeys(n for values in options.values() for n in values))
    rows = [
        [escape(option), *(_text("–" if (v := values.get(n)) is None else escape(str(v))) for n in names)]
        for option, values in options.items()
    ]
    head = ["option", *(_left(n) for n in names)]
    return ["<h2>What differs in the configurations</h2>", *_table("All other options are the same", head, rows)]


def _runs(report: Mapping[str, Any]) -> list[str]:
    domains = list(report["documents"])
    rows = []
    for s in report["settings"]:
        for a in s["architectures"]:
            for run in a["runs"]:
                shares = [f"{100 * run['unseen_share'][d]:.1f}%" if d in run["unseen_share"] else "–" for d in domains]
                head = [escape(a["name"]), _text(escape(s["title"])), str(run["seed"]), f"{run['tokens'][-1]:,}"]
                rows.append([*head, *shares, _text(escape(run["path"]))])
    head = ["architecture", _left("trained on"), "seed", "tokens", *map(escape, domains)]
    caption = "By domain: share of the last loss that falls on tokens never seen as a label in training"
    documents = ", ".join(
        f"{d} {n['count']:,} (as good as {n['effective']:,.0f} of equal length)" for d, n in report["documents"].items()
    )
    return [
        "<h2>Runs and test documents</h2>",
        f"<p>Test documents: {escape(documents)}.</p>",
        *_table(caption, [*head, _left("folder")], rows),
    ]


def _left_out(report: Mapping[str, Any]) -> list[str]:
    lines = [f"{r['run']}: {r['reason']}" for r in report["refused"]] + list(report["notes"])
    lines += [f"{file}: not compared, but there" for file in report["other_results"]]
    if not lines:
        return []
    return ["<h2>Left out, and to be known</h2><ul>", *(f"<li>{escape(line)}</li>" for line in lines), "</ul>"]


def _how_to_read(report: Mapping[str, Any]) -> list[str]:
    reference = escape(report["reference"])
    return [
        "<h2>How to read this</h2>",
        "<p>All models are pre-trained on the same text. A model that learns faster is ahead everywhere; that is not "
        "the question. The question is what a model can do on text of other kinds <em>once it has reached the same "
        "pre-training loss</em>. The curves show the loss on such text against the pre-training loss; a curve that "
        f"lies above that of {reference} has lost base capabilities (Lu et al. 2025, arXiv 2505.18522).</p>",
        "<p>The gap is the distance of two curves at the lowest pre-training loss that all runs of both have reached. "
        "Its interval says where it would come to lie on other test documents of the same kinds, and, where runs with "
        "several seeds are given, with other seeds. Documents are drawn as wholes and are the same for all runs. "
        "An interval that covers the documents alone (verdict with a star) says nothing about other seeds.</p>",
        "<p>Trained on a mixture of all domains, the gaps on the same test domains should be small: they are then in "
        "the training data. A gap in the limited setting that is absent in the mixed one is the sign of lost base "
        "capabilities. Where much of the loss falls on tokens never seen in training, the tokenizer decides the result "
        "rather than the architecture: train it on the training domains.</p>",
    ]
