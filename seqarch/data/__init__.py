"""Data: raw text to token shards, shards to batches, and synthetic tasks. Its names load on first use: it is light."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from seqarch.data.datamodule import TokenDataModule
    from seqarch.data.mqar import MQARDataModule
    from seqarch.data.settings import LimitedDomainDataModule, MixedDomainDataModule
    from seqarch.data.steps import StepDataModule

_HOMES = {
    "LimitedDomainDataModule": "settings",
    "MQARDataModule": "mqar",
    "MixedDomainDataModule": "settings",
    "StepDataModule": "steps",
    "TokenDataModule": "datamodule",
}
__all__ = ["LimitedDomainDataModule", "MQARDataModule", "MixedDomainDataModule", "StepDataModule", "TokenDataModule"]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    for home in set(_HOMES.values()):  # all of them, so that a recipe can name any by its bare name
        importlib.import_module(f"{__name__}.{home}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
