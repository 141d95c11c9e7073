"""What ``seqarch bench`` found, as lines, tables and a JSON file."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from rich.box import MARKDOWN, SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from seqarch.data.manifest import write_aside
from seqarch.evaluation.bench import Bench, summarise
from seqarch.evaluation.bench_steps import Phase, Setup
from seqarch.training.callbacks.throughput import peak_flops

_PACKAGES = ("torch", "triton", "flash-linear-attention", "flash-attn", "mamba-ssm")
_NONE = "–"


def to_plain(bench: Bench, command: Sequence[str], peak: float | None, source: str) -> dict[str, Any]:
    """All there is to know about a run, for JSON, tables and plots.

    Args:
        bench: The run, finished or not.
        command: Its command line.
        peak: FLOP/s of the device, or None.
        source: Where that number comes from.
    """
    settings = asdict(bench.setup)
    settings |= {"repeats": bench.repeats, "warmup": bench.warmup, "time_limit": bench.time_limit}
    settings["mixers"] = {s.label: {"class": s.mixer.__name__, "options": s.options} for s in bench.specs}
    return {
        "command": list(command),
        "environment": environment(bench.setup),
        "settings": settings,
        "peak_flops": peak,
        "peak_source": source,
        "entries": summarise(bench.entries, peak),
    }


def environment(setup: Setup) -> dict[str, Any]:
    """Device, system and versions."""
    versions: dict[str, str | None] = {}
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = None
    return {
        "device": device_name(setup.device),
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": versions,
    }


def device_name(device: str) -> str:
    """What the vendor calls it."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def known_peak(setup: Setup) -> float | None:
    """Dense peak of a GPU in FLOP/s from the table of the trainer's MFU, or None for one that is not in it."""
    tf32 = torch.get_float32_matmul_precision() != "highest"
    return peak_flops(device_name(setup.device), "16" if setup.dtype == "bfloat16" else "32", tf32)


def write_json(plain: Mapping[str, Any], file: Path) -> None:
    """Write the results, so that a reader sees the last ones or these."""
    write_aside(file, (json.dumps(plain, indent=1, allow_nan=False) + "\n").encode())


def describe(plain: Mapping[str, Any]) -> list[str]:
    """What was measured on what, in lines above the tables."""
    setup, device = plain["settings"], plain["environment"]["device"]
    threads = "" if setup["device"].startswith("cuda") else f", threads {setup['threads']}"
    layers = f"{setup['n_layers']} layer{'s' if setup['n_layers'] > 1 else ''}"
    size = f"{layers} of width {setup['d_model']} with SwiGLU, vocabulary {setup['vocab_size']:,}"
    peak = plain["peak_flops"]
    known = plain["peak_source"] if peak is None else f"{peak / 1e12:.3g} TFLOP/s, {plain['peak_source']}"
    return [
        f"{device}{threads}, {setup['dtype']}, torch {plain['environment']['versions']['torch']}",
        f"{size}; medians of {setup['repeats']} repetitions after {setup['warmup']} of warm-up, in turns",
        f"peak arithmetic: {known}",
    ]


def tables(plain: Mapping[str, Any], terminal: bool) -> list[Table]:
    """A table for each phase that was measured: for a terminal, or in Markdown."""
    phases: tuple[Phase, ...] = ("training", "decoding")
    found = [(phase, [e for e in plain["entries"] if e["phase"] == phase]) for phase in phases]
    return [_table(phase, entries, plain, terminal) for phase, entries in found if entries]


def reasons(plain: Mapping[str, Any]) -> list[str]:
    """Why numbers are missing, a line for each entry whose cell does not say it."""
    missing = (e for e in plain["entries"] if e["reason"] and e["status"] != "time limit")
    return [f"{e['mixer']}, {e['phase']} at {e['length']:,}: {e['status']}: {e['reason']}" for e in missing]


def line(entry: Mapping[str, Any]) -> str:
    """An entry in a line."""
    what = outcome(entry)
    if entry["tokens_per_s"] is not None:
        what += f" tokens/s ({_spread(entry)}), {_ratio(entry)}, {_memory(entry['peak_memory'])}"
    reason = f" ({entry['reason']})" if entry["status"] in ("error", "skipped") else ""
    return f"{entry['phase']} at {entry['length']:,}: {entry['mixer']}: {what}{reason}"


def outcome(entry: Mapping[str, Any]) -> str:
    """The median speed, or what became of the entry instead."""
    if entry["tokens_per_s"] is not None:
        return f"{_speed(entry['tokens_per_s'])}"
    return entry["reason"] if entry["status"] == "time limit" else entry["status"]


def _table(phase: str, entries: Sequence[Mapping[str, Any]], plain: Mapping[str, Any], terminal: bool) -> Table:
    training = phase == "training"
    title = "Training: forward and backward" if training else "Decoding: one token at a time after so many"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD if terminal else MARKDOWN)
    table.add_column("length", justify="right", no_wrap=True)
    table.add_column("mixer", overflow="fold")
    for name in ("batch", "tokens/s", "quartiles", "to the first"):
        table.add_column(name, justify="right", no_wrap=True)
    if not training:
        table.add_column("state", justify="right", no_wrap=True)
    table.add_column("peak memory", justify="right", no_wrap=True)
    if training:
        table.add_column("of peak FLOP/s", justify="right", no_wrap=True)
    for i, e in enumerate(entries):
        partial = e["status"] == "unfinished" and e["samples"]
        rounds = f" ({len(e['samples'])} of {plain['settings']['repeats']})" if partial else ""
        batch = _NONE if e["batch"] is None else str(e["batch"])
        cells = [f"{e['length']:,}", escape(e["mixer"]), batch, outcome(e) + rounds, _spread(e), _ratio(e)]
        cells += [] if training else [_memory(e["state_bytes"])]
        cells.append(_memory(e["peak_memory"]))
        if training:
            cells.append(_NONE if e["share_of_peak"] is None else f"{e['share_of_peak']:.1%}")
        last = i + 1 == len(entries) or entries[i + 1]["length"] != e["length"]
        table.add_row(*cells, end_section=last and terminal)
    return table


def _speed(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _spread(entry: Mapping[str, Any]) -> str:
    return _NONE if entry["spread"] is None else " … ".join(map(_speed, entry["spread"]))


def _ratio(entry: Mapping[str, Any]) -> str:
    return _NONE if entry["ratio"] is None else f"{entry['ratio']:.2f}×"


def _memory(n: int | None) -> str:
    if n is None:
        return _NONE
    for unit, size in (("GiB", 2**30), ("MiB", 2**20)):
        if n >= size:
            return f"{n / size:.3g} {unit}" if n < 1000 * size else f"{n / size:,.0f} {unit}"
    return f"{n / 2**10:.3g} KiB"
