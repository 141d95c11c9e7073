"""Data: raw text to token shards, and shards to batches. Importing it is light: its names load on first use."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from seqarch.data.datamodule import LimitedDomainDataModule, MixedDomainDataModule, TokenDataModule

_HOMES = {
    "LimitedDomainDataModule": "datamodule",
    "MixedDomainDataModule": "datamodule",
    "TokenDataModule": "datamodule",
}
__all__ = ["LimitedDomainDataModule", "MixedDomainDataModule", "TokenDataModule"]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
