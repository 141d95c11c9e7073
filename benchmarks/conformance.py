"""Every installed mixer against every check of its contract: a Markdown table and its notes.

The configurations are those that the tests check (`CONFIGURATIONS` in tests/plugins/test_*_conformance.py); a mixer
that has none there is checked with its defaults.

    python -m benchmarks.conformance [--slow] [--only Mamba2]

`--slow` runs the check that compiles too.
"""

from __future__ import annotations

import argparse
import warnings
from collections import defaultdict
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from seqarch.discovery import plugins
from seqarch.testing import check_mixer
from seqarch.testing.kit import CHECKS
from seqarch.testing.report import Row
from seqarch.testing.subject import MixerFactory

D_MODEL = 32
Configuration = tuple[str, MixerFactory, dict[str, Any]]


def configurations() -> dict[str, list[Configuration]]:
    """By class name: name, factory and keyword arguments of ``check_mixer``."""
    found: dict[str, list[Configuration]] = {p.class_name: [] for p in plugins() if p.mixer is not None}
    for file in sorted(Path(__file__).parents[1].glob("tests/plugins/test_*_conformance.py")):
        module = import_module(f"tests.plugins.{file.stem}")
        options = {"d_model": D_MODEL, **getattr(module, "OPTIONS", {})}
        expected = options.pop("expected_failures", {})
        for name, factory in module.CONFIGURATIONS:
            mixer = factory(options["d_model"])
            found[type(mixer).__name__].append((name, factory, options | {"expected_failures": expected.get(name)}))
    for plugin in plugins():
        if plugin.mixer is not None and not found[plugin.class_name]:
            found[plugin.class_name] = [("defaults", plugin.mixer, {"d_model": 256})]
    return found


class Notes:
    """Numbers for what stands below the table, each text once."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def __call__(self, text: str) -> str:
        return f"[{self.numbers.setdefault(text, len(self.numbers) + 1)}]"


def cell(rows: dict[str, Row], notes: Notes) -> str:
    """What came of one check on all configurations of a mixer."""
    groups = defaultdict(list)
    for name, row in rows.items():
        groups[row.status, row.message].append(name)
    parts = []
    for (status, message), names in groups.items():
        where = "" if len(names) == len(rows) else f" ({', '.join(names)})"
        if status == "passed":
            parts.insert(0, "pass")
        elif status == "skipped":
            word = "not run" if message == "slow" else "n/a"
            parts.append(f"{word} {notes(f'{message}{where}')}")
        else:
            word = status if status == "expected failure" else f"**{status}**"
            parts.append(f"{word} {notes(f'{message}{where}')}")
    return ", ".join(parts)


def table(slow: bool, only: str) -> Iterator[str]:
    chosen = {name: found for name, found in configurations().items() if name.startswith(only)}
    reports = {
        mixer: {name: check_mixer(factory, slow=slow, **options) for name, factory, options in found}
        for mixer, found in chosen.items()
    }
    yield f"| check | {' | '.join(reports)} |"
    yield "|---" * (len(reports) + 1) + "|"
    notes = Notes()
    for check in CHECKS:
        cells = []
        for every in reports.values():
            rows = {name: row for name, report in every.items() for row in report.rows if row.check == check.name}
            cells.append(cell(rows, notes) if rows else "**cannot be built**")
        yield f"| `{check.name.removeprefix('check_')}` | {' | '.join(cells)} |"
    yield ""
    for text, number in notes.numbers.items():
        yield f"{number}. {text}"
    yield ""
    for mixer, every in reports.items():
        yield f"- `{mixer}`: {', '.join(every)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slow", action="store_true", help="run slow checks too")
    parser.add_argument("--only", default="", help="mixers whose class name begins with this")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    print("\n".join(table(args.slow, args.only)))


if __name__ == "__main__":
    main()
