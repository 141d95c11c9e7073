"""From a model on the meta device to one with values, unit by unit, so that the values depend on the seed alone."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

_MARKS = ("_no_weight_decay", "_keep_float32")


def marked(module: nn.Module, mark: str) -> set[str]:
    """Names of the parameters that carry a mark of the contract (``_no_weight_decay``, ``_keep_float32``)."""
    return {name for name, p in module.named_parameters() if getattr(p, mark, False)}


def materialise(module: nn.Module, device: torch.device | str, seed: int, unit: int) -> None:
    """Give a module on the meta device storage and initial values, which depend on (seed, unit) alone.

    The caller's random state is left as it was; the marks of the parameters are kept, which ``to_empty`` would drop.
    """
    marks = {mark: marked(module, mark) for mark in _MARKS}
    module.to_empty(device=device)
    parameters = dict(module.named_parameters())
    for mark, names in marks.items():
        for name in names:
            setattr(parameters[name], mark, True)
    devices = [device] if torch.device(device).type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed * 1_000_003 + unit)
        reset(module)


def reset(module: nn.Module) -> None:
    """Call ``reset_parameters`` of the outermost modules that have one.

    Raises:
        TypeError: If a module holds parameters or buffers and has no ``reset_parameters``.
    """
    for child in _outermost(module):
        child.reset_parameters()  # pyright: ignore[reportCallIssue]  (found by name)


def _outermost(module: nn.Module) -> Iterator[nn.Module]:
    if hasattr(module, "reset_parameters"):
        yield module
        return
    if (
        next(module.parameters(recurse=False), None) is not None
        or next(module.buffers(recurse=False), None) is not None
    ):
        raise TypeError(f"{type(module).__name__} has parameters or buffers of its own but no reset_parameters()")
    for child in module.children():
        yield from _outermost(child)


def cast_parameters(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast floating-point parameters to ``dtype`` in place, except those marked to stay float32."""
    for p in module.parameters():
        if p.is_floating_point() and not getattr(p, "_keep_float32", False):
            p.data = p.data.to(dtype)
