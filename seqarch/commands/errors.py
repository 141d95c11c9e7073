"""The parser's errors in one or two lines, with the nearest valid name."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator
from difflib import get_close_matches

from jsonargparse import ArgumentParser

from seqarch.class_paths import ALLOW
from seqarch.commands.usage import nearest, plain
from seqarch.discovery import find, plugins

_UNKNOWN_OPTION = (
    re.compile(r"Option '([^']+)' is not accepted"),
    re.compile(r"does not accept option '([^']+)'"),
    re.compile(r"unrecognized arguments: --([\w.]+)"),
)
_UNKNOWN_CLASS = re.compile(r"Expected a dot import path string: ([\w.]+)")
_DENIED = re.compile(r"Importing '([^']+)' is not allowed")
_KEY = re.compile(r'Parser key "([^"]+)":\s*')


def explain(message: str, parser: ArgumentParser, bases: Iterable[type]) -> str:
    """What is wrong and what to do.

    Args:
        message: What jsonargparse says; a union of types makes it repeat itself.
        parser: Knows the options.
        bases: Classes that a configuration may name, or whose subclasses it may name, each with options of its own.
    """
    classes = [cls for base in bases for cls in (base, *_subclasses(base)) if not inspect.isabstract(cls)]
    for pattern in _UNKNOWN_OPTION:
        if found := pattern.search(message):
            return _unknown_option(found[1], parser, classes)
    key = match[1] if (match := _KEY.search(message)) else ""
    if found := _UNKNOWN_CLASS.search(message):
        if key.endswith("mixer") and "channel" not in key:
            return _reason(found[1])
        names = {cls.__name__ for cls in classes}
        return f"{key}: there is no class '{found[1]}'{nearest(found[1], names)}"
    if denied := _DENIED.search(message):
        return (
            f"{key}: a file may not have {denied[1]} imported, which is not of seqarch, an installed plugin or "
            f"Lightning: importing it runs its code. If you trust it, set {ALLOW}={denied[1].split('.')[0]}"
        )
    if own := condense(message):
        return f"{key}: {own}" if key else own
    return plain(message)


def condense(message: str) -> str:
    """Of a union's errors those that are more than "Expected a <class …>"; empty if it is no union's."""
    own = [line.strip()[2:].strip() for line in message.splitlines() if line.strip().startswith("- ")]
    own = [line for line in dict.fromkeys(own) if not line.startswith(("Expected a <class", "Expected a path"))]
    return "; ".join(own) if "Union subtypes" in message else ""


def _unknown_option(option: str, parser: ArgumentParser, classes: list[type]) -> str:
    """Names are compared whole (model.d_model) and by their last part (an option of some class)."""
    dests = {a.dest for a in parser._actions}
    own = {name for cls in classes for name in inspect.signature(cls.__init__).parameters if name != "self"}
    last = option.rsplit(".", 1)[-1]
    near = get_close_matches(option, dests, n=1) or get_close_matches(
        last, own | {d.rsplit(".", 1)[-1] for d in dests}, n=1
    )
    hint = f": did you mean '{near[0]}'?" if near else ":"
    return f"there is no option '{option}'{hint} --help lists all, --model.mixer.help CLASS those of a mixer"


def _reason(name: str) -> str:
    """Why a mixer's name cannot be used."""
    plugins()
    try:
        find(name)
    except ValueError as error:
        return f"model.mixer: {error}"
    return f"model.mixer: '{name}' is the name of an entry point; recipes use the class name"


def _subclasses(base: type) -> Iterator[type]:
    for cls in base.__subclasses__():
        yield cls
        yield from _subclasses(cls)
