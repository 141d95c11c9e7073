"""``seqarch mixers``: what is installed, and what of it can run here."""

from __future__ import annotations

import torch
from jsonargparse import ArgumentParser
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from seqarch.discovery import Plugin, plugins


def run(name: str, arguments: list[str]) -> None:
    """Print a table of all mixers and their backends on this machine."""
    ArgumentParser(prog=f"seqarch {name}", description="List the token mixers that are installed.").parse_args(
        arguments
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    table = Table(title=f"Token mixers; backends on {device}, * is what backend: auto takes", title_justify="left")
    for column in ("name", "class", "distribution", "backends"):
        table.add_column(column, overflow="fold")
    for plugin in plugins():
        table.add_row(plugin.name, plugin.class_name, plugin.distribution, _backends(plugin, device))
    Console().print(table)


def _backends(plugin: Plugin, device: str) -> str:
    if plugin.mixer is None:
        return f"[red]broken[/red]: {escape(plugin.problem or '')}"
    lines, chosen = [], False
    for backend in plugin.mixer.backends:
        reason = backend.unavailable(device)
        mark = "*" if reason is None and not chosen else ""
        chosen = chosen or reason is None
        lines.append(f"{backend.name}{mark}" if reason is None else f"{backend.name} (no: {reason})")
    return escape("\n".join(lines))
