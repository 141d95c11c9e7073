"""``seqarch check``: does a mixer keep its contract?"""

from __future__ import annotations

import json
import statistics
import time
import warnings
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from seqarch.commands.usage import Parser

if TYPE_CHECKING:
    from seqarch.mixer import TokenMixer
    from seqarch.testing import Report

_STYLES = {"passed": "green", "failed": "red", "unexpected pass": "red", "expected failure": "yellow"}


def run(name: str, arguments: list[str]) -> None:
    """Parse the arguments and check."""
    parser = Parser(
        prog=f"seqarch {name}", description="Check a mixer against its contract; exits with status 1 if it is broken."
    )
    parser.add_argument("mixer", type=str, help="Name or 'Name(option=value, ...)' of an installed mixer.")
    parser.add_function_arguments(check, skip={"mixer"})
    if not check(**vars(parser.parse_args(arguments))):
        raise SystemExit(1)


def check(
    mixer: str,
    d_model: int = 64,
    seed: int = 0,
    expect: dict[str, str] | None = None,
    compiled: bool = False,
    timing: bool = True,
    json_file: str | None = None,
) -> bool:
    """Check a mixer against its contract, on the CPU, and time a layer of it.

    Args:
        mixer: Name or 'Name(option=value, ...)' of an installed mixer.
        d_model: Width of the layer.
        seed: Of parameters and inputs.
        expect: Checks that may fail, each with the reason: '{check_batch: batch norm}'. One that passes is a fault.
        compiled: Run the check that compiles, too; it takes about a minute.
        timing: Time forward and backward of 4 x 512 tokens at width 256 beside attention.
        json_file: Where to write the report.

    Returns:
        Whether the mixer keeps the contract.
    """
    from seqarch.mixer_spec import parse_mixer
    from seqarch.testing import check_mixer

    spec = parse_mixer(mixer, d_model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they are the mixer's; what is wrong comes as a finding
        report = check_mixer(
            partial(spec.mixer, **spec.options), d_model=d_model, seed=seed, slow=compiled, expected_failures=expect
        )
        timed = _time(parse_mixer(mixer, 256).build(256)) if timing and report.ok else None
    console = Console()
    _show(console, spec.label, report)
    if timed is not None:
        console.print(
            f"A layer of width 256 on 4 x 512 tokens, forward and backward: {timed['ms']:.0f} ms"
            + (f", {timed['ratio']:.2f} times attention's" if "ratio" in timed else ""),
            highlight=False,
        )
    if json_file is not None:
        content = {**report.to_dict(), "mixer": spec.label, "seed": seed, "d_model": d_model, "timing": timed}
        Path(json_file).write_text(json.dumps(content, indent=1) + "\n")
    return report.ok


def _show(console: Console, label: str, report: Report) -> None:
    table = Table(title=escape(label), title_justify="left")
    for column in ("check", "result", "seconds", "why"):
        table.add_column(column, no_wrap=column != "why", overflow="fold")
    for row in report.rows:
        style = _STYLES.get(row.status, "dim")
        table.add_row(row.check, f"[{style}]{row.status}[/{style}]", f"{row.seconds:.2f}", escape(row.message))
    console.print(table)
    count = len(report.failed())
    passed = sum(row.status == "passed" for row in report.rows)
    verdict = f"keeps the contract: {passed} checks passed" if report.ok else f"breaks the contract: {count} failed"
    console.print(f"{escape(label)} {verdict}", highlight=False)


def _time(layer: TokenMixer, rounds: int = 5) -> dict[str, Any]:
    """Median times of a layer and, in turn with it, of attention."""
    import torch

    from seqarch.mixer_spec import parse_mixer

    layers = {"mixer": layer}
    with suppress(ValueError):  # where its distribution is not installed, there is nothing to compare with
        layers["attention"] = parse_mixer("Attention(n_heads=4)").build(256)
    x = torch.randn(4, 512, 256, generator=torch.Generator().manual_seed(0))
    times: dict[str, list[float]] = {name: [] for name in layers}
    for round_ in range(rounds + 1):
        for name, module in layers.items():
            shared = {"context": {}} if module.tags.shares_context else {}
            start = time.perf_counter()
            module(x.requires_grad_(), **shared)[0].sum().backward()
            if round_ > 0:  # the first warms up
                times[name].append(1e3 * (time.perf_counter() - start))
    median = {name: statistics.median(values) for name, values in times.items()}
    ratio = {"ratio": median["mixer"] / median["attention"]} if "attention" in median else {}
    return {"ms": median["mixer"], "rounds": times, **ratio}
