"""Hyper-parameters as plain data: what a checkpoint stores, to rebuild the model from it and to compare two runs.

A class with options becomes ``{"class_path": ..., "init_args": {...}}``, the form that recipes have, whether the
module was built by the command line or from Python.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from seqarch.class_paths import class_path
from seqarch.model.options import ARCHITECTURE, factory, model_options
from seqarch.training.optimizer import AdamWConfig
from seqarch.training.schedule import Schedule

NOT_STORED = "not stored: "
_GIVEN_BY_BACKBONE = ("self", "d_model", "layer_idx", "n_layers")


def to_plain(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of ``SequenceModule`` as plain data. What has no class path becomes a note that says so."""
    return {name: _plain(value) for name, value in options.items()}


def from_plain(plain: Mapping[str, Any]) -> dict[str, Any]:
    """The options of ``SequenceModule`` from plain data that ``to_plain`` made.

    Raises:
        ValueError: If a class is not known here (see ``find_class``), or one of the options is missing.
    """
    if missing := sorted({*ARCHITECTURE, "optimizer", "schedule"} - plain.keys()):
        raise ValueError(f"its hyper-parameters have no {', '.join(missing)}")
    optimizer: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in plain["optimizer"].items()}
    schedule = factory(plain["schedule"], Schedule, "schedule")()
    return {**model_options(plain), "optimizer": AdamWConfig(**optimizer), "schedule": schedule}


def _plain(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, AdamWConfig):
        return {name: _plain(v) for name, v in dataclasses.asdict(value).items()}
    if isinstance(value, Schedule):
        if dataclasses.is_dataclass(value):
            return {"class_path": class_path(type(value)), "init_args": dataclasses.asdict(value)}
        return f"{NOT_STORED}{type(value).__name__} is no dataclass"
    if callable(value):
        return _describe(value)
    return value


def _describe(factory: Callable[..., Any]) -> dict[str, Any] | str:
    cls, given = _unwrap(factory)
    path = None if cls is None else class_path(cls)
    if cls is None or path is None:
        return f"{NOT_STORED}{getattr(factory, '__qualname__', type(factory).__name__)} is no importable class"
    arguments = {
        name: p.default
        for name, p in inspect.signature(cls.__init__).parameters.items()
        if name not in _GIVEN_BY_BACKBONE and p.default is not p.empty
    }
    arguments.update((name, value) for name, value in given.items() if name not in _GIVEN_BY_BACKBONE)
    strange = [name for name, value in arguments.items() if not _is_plain(value)]
    if strange:
        return f"{NOT_STORED}{cls.__name__} was given {', '.join(strange)} that is no plain value"
    return {"class_path": path, "init_args": {name: _listed(value) for name, value in arguments.items()}}


def _unwrap(factory: Any) -> tuple[type | None, dict[str, Any]]:
    """The class behind nested partials, and the options given. jsonargparse passes the class as an argument."""
    given: dict[str, Any] = {}
    while isinstance(factory, partial):
        given = {**factory.keywords, **given}
        classes = [a for a in factory.args if isinstance(a, type)]
        if not classes and factory.args:
            return None, given
        factory = classes[0] if classes else factory.func
    return (factory, given) if isinstance(factory, type) else (None, given)


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(isinstance(k, str) and _is_plain(v) for k, v in value.items())
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return value is None or type(value) in (bool, int, float, str)


def _listed(value: Any) -> Any:
    """Tuples as lists, which is how they come back from a recipe."""
    if isinstance(value, Mapping):
        return {k: _listed(v) for k, v in value.items()}
    return [_listed(v) for v in value] if isinstance(value, (list, tuple)) else value


def differences(stored: Mapping[str, Any], own: Mapping[str, Any]) -> list[str]:
    """One line for each hyper-parameter of the architecture that differs: ``name: stored, here own``."""
    a, b = ({k: v for name in ARCHITECTURE for k, v in _flat(name, hp.get(name))} for hp in (stored, own))
    lines = []
    for name in sorted(a.keys() | b.keys(), key=lambda n: (ARCHITECTURE.index(n.split(".")[0].split("[")[0]), n)):
        if a.get(name, _MISSING) != b.get(name, _MISSING):
            lines.append(f"{name}: {a.get(name, _MISSING)!r} in the checkpoint, {b.get(name, _MISSING)!r} here")
    return lines


class _Missing:
    def __repr__(self) -> str:
        return "nothing"


_MISSING = _Missing()


def _flat(name: str, value: Any) -> list[tuple[str, Any]]:
    if name != "mixer":
        return _options(name, value)
    mixers = list(value) if isinstance(value, (list, tuple)) else [value]
    if len(mixers) == 1:
        return _options("mixer", mixers[0])
    return [pair for i, mixer in enumerate(mixers) for pair in _options(f"mixer[{i}]", mixer)]


def _options(name: str, value: Any) -> list[tuple[str, Any]]:
    if not (isinstance(value, Mapping) and "class_path" in value):
        return [(name, value)]
    options = value.get("init_args") or {}
    # The backend changes how a mixer is computed, not what.
    kept = [(f"{name}.{k}", v) for k, v in options.items() if k not in (*_GIVEN_BY_BACKBONE, "backend")]
    return [(name, value["class_path"]), *kept]
