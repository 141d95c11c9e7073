"""``seqarch compare``: which architecture loses base capabilities, by how much, and how sure that is."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Literal

from seqarch.commands.usage import Parser


def run(name: str, arguments: list[str]) -> None:
    """Compare run folders, print the tables, and write the report."""
    parser = Parser(
        prog=f"seqarch {name}",
        description="Compare the out-of-domain loss of runs at equal pre-training loss. docs/compare.md explains the "
        "statistics.",
    )
    parser.add_argument("runs", type=str, nargs="+", help="Run folders. Runs that differ in the seed alone are pooled.")
    parser.add_argument(
        "--reference", type=str, default="transformer", help="Architecture to compare with, or the name's beginning."
    )
    parser.add_argument("--out", type=str, default="report", help="Folder of the report.")
    parser.add_argument(
        "--names", type=dict[str, str], default={}, help='Other names: --names \'{"Transformer++": "Baseline"}\'.'
    )
    parser.add_argument(
        "--x",
        type=Literal["held-out", "train"],
        default="held-out",
        help="Pre-training loss: on held-out text of the training domains, or the smoothed training loss.",
    )
    parser.add_argument("--margin", type=float, default=0.02, help="Differences below it count as none.")
    parser.add_argument("--level", type=float, default=0.95, help="Coverage of the intervals.")
    parser.add_argument("--replicates", type=int, default=2000, help="Number of resampled test sets.")
    parser.add_argument(
        "--keep_all", action="store_true", help="Compare unfinished runs and those of other lengths too."
    )
    options = parser.parse_args(arguments)
    from rich.console import Console

    from seqarch.evaluation.comparison import compare_runs
    from seqarch.evaluation.html import to_html
    from seqarch.evaluation.report import explain, tables, to_plain, write_tables

    comparison = compare_runs(
        [Path(path) for path in options.runs],
        reference=options.reference,
        names=options.names,
        axis=options.x,
        margin=options.margin,
        level=options.level,
        replicates=options.replicates,
        keep_all=options.keep_all,
    )
    report = to_plain(comparison)
    folder = Path(options.out)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.json").write_text(json.dumps(report, indent=1, allow_nan=False), encoding="utf-8")
    (folder / "report.html").write_text(to_html(report), encoding="utf-8")
    write_tables(report, folder)
    if plots := importlib.util.find_spec("matplotlib") is not None:
        from seqarch.evaluation.comparison_plots import write_plots

        write_plots(report, folder)
    console = Console(width=None if sys.stdout.isatty() else 120)
    for refused in report["refused"]:
        console.print(f"Left out: {refused['run']}: {refused['reason']}", highlight=False, markup=False)
    for note in report["notes"]:
        console.print(f"Note: {note}", highlight=False, markup=False)
    for table in tables(report):
        console.print(table)
    for line in explain(report):
        console.print(line, highlight=False, markup=False)
    for file in report["other_results"]:
        console.print(f"Not compared, but there: {file}", highlight=False, markup=False)
    if not plots:
        console.print("No PNG and PDF: matplotlib is not installed (pip install 'seqarch[eval]')", markup=False)
    console.print(f"Report: {folder / 'report.html'}", highlight=False, markup=False)
