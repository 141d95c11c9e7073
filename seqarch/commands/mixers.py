"""``seqarch mixers``: what is installed, and what of it can run here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from seqarch.commands.usage import Parser

if TYPE_CHECKING:
    from seqarch.discovery import Plugin


def run(name: str, arguments: list[str]) -> None:
    """Print a table of all mixers and their backends on this machine."""
    Parser(prog=f"seqarch {name}", description="List the token mixers that are installed.").parse_args(arguments)
    import torch

    from seqarch.discovery import plugins

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
