"""``seqarch doctor``: what is installed here, and whether every backend computes what it should."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from seqarch.commands.usage import Parser

_PACKAGES = (
    "torch",
    "lightning",
    "triton",
    "flash-linear-attention",
    "flash-attn",
    "mamba-ssm",
    "causal-conv1d",
)


def run(name: str, arguments: list[str]) -> None:
    """Print versions and a table of backends; exit with status 1 if one is wrong."""
    parser = Parser(prog=f"seqarch {name}", description="Compare every backend with the torch backend in float64.")
    parser.add_argument("--device", type=str | None, help="Where to compute; by default a GPU if there is one.")
    parser.add_argument("--mixer", type=str | None, help="Only this mixer; by default all that are installed.")
    options = parser.parse_args(arguments)
    import torch

    from seqarch.discovery import find, plugins
    from seqarch.testing.backends import compare_backends

    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    what = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    console = Console()
    console.print(f"Python {platform.python_version()}, {device} ({what})", highlight=False)
    console.print(", ".join(f"{package} {_version(package)}" for package in _PACKAGES), highlight=False)
    mixers = [find(options.mixer)] if options.mixer else [p.mixer for p in plugins() if p.mixer is not None]
    table = Table(title="Backends against torch in float64; relative RMS errors", title_justify="left")
    for column in ("mixer", "backend", "dtype", "output", "gradients", "allowed", "verdict"):
        table.add_column(column, overflow="fold")
    wrong = []
    for mixer in mixers:
        for c in compare_backends(mixer, device):
            if c.dtype is None:
                table.add_row(c.mixer, c.backend, "", "", "", "", f"not here: {escape(c.reason)}")
                continue
            gradient = "–" if c.gradient is None else f"{c.gradient:.1e}"
            verdict = escape(f"wrong {c.reason}".strip()) if c.wrong else "agrees"
            dtype = str(c.dtype).removeprefix("torch.")
            table.add_row(c.mixer, c.backend, dtype, f"{c.output:.1e}", gradient, f"{c.allowed:.0e}", verdict)
            wrong += [f"{c.mixer}'s {c.backend}"] if c.wrong else []
    console.print(table)
    if wrong:
        console.print(f"Do not use {', '.join(wrong)} here: set backend to another one.", highlight=False)
        raise SystemExit(1)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "–"
