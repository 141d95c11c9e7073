"""Class paths: how a file names a class, and finding the class again without running what the file's author likes.

A path from a file is looked up among the classes that are in memory already: those of this program, and of the plugins
that the user installed. Nothing is imported for it, unless the user says that it may be.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from importlib import import_module
from typing import TypeVar

from seqarch.discovery import plugins

ALLOW = "SEQARCH_ALLOW_IMPORTS"
"""Environment variable: packages, modules or classes that a file may have imported, with commas or blanks between."""

T = TypeVar("T")


def class_path(cls: type) -> str | None:
    """The shortest path that imports this very class, or None if nothing does."""
    parts = cls.__module__.split(".")
    for n in range(1, len(parts) + 1):
        module = ".".join(parts[:n])
        if getattr(sys.modules.get(module), cls.__qualname__, None) is cls and module != "__main__":
            return f"{module}.{cls.__qualname__}"
    return None


def find_class(path: str, base: type[T]) -> type[T]:
    """The subclass of ``base`` that ``path`` names, among those of this program and of the installed plugins.

    Args:
        path: As ``class_path`` gives it, or with the module that defines the class.
        base: What it must be a subclass of.

    Raises:
        ValueError: If there is none. Importing its module before, or naming it in ``SEQARCH_ALLOW_IMPORTS``, adds
            to what there is.
    """
    plugins()
    if found := _in_memory(path, base):
        return found
    module = path.rpartition(".")[0]
    if module and any(path == name or path.startswith(f"{name}.") for name in allowed_imports()):
        try:
            import_module(module)
        except ImportError as error:
            raise ValueError(f"{path}, which {ALLOW} allows, cannot be imported: {error}") from error
        if found := _in_memory(path, base):
            return found
    raise ValueError(
        f"{path}, which is not installed here: install the plugin it comes from. (If it is your own and no plugin, "
        f"import it first, or name it in {ALLOW}: files cannot import what they like)"
    )


def allowed_imports() -> list[str]:
    """What the user allows files to import."""
    return [name for name in re.split(r"[,\s]+", os.environ.get(ALLOW, "")) if name]


def plugin_packages() -> list[str]:
    """The packages of the installed plugins' mixers, which are imported already."""
    return sorted({p.mixer.__module__.split(".")[0] for p in plugins() if p.mixer is not None})


def _in_memory(path: str, base: type[T]) -> type[T] | None:
    for cls in (base, *_subclasses(base)):
        if path in (class_path(cls), f"{cls.__module__}.{cls.__qualname__}"):
            return cls
    return None


def _subclasses(base: type[T]) -> Iterator[type[T]]:
    for cls in base.__subclasses__():
        yield cls
        yield from _subclasses(cls)
