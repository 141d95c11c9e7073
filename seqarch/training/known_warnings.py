"""Warnings of the frameworks that do not concern users, each by its exact message."""

from __future__ import annotations

import warnings


def ignore_known_warnings() -> None:
    """Ignore what Lightning and torch say wrongly about a run of ours."""
    # Lightning 2.6 calls a function that torch 2.13 deprecates.
    warnings.filterwarnings("ignore", message=r"`isinstance\(treespec, LeafSpec\)` is deprecated")
    # Shards are mapped into memory: loader processes seldom help.
    warnings.filterwarnings("ignore", message=r"The '\w+' does not have many workers")
