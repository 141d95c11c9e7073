"""Bad options: one message, with the nearest valid name."""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import get_close_matches
from typing import NoReturn

from jsonargparse import ArgumentParser


class UsageError(SystemExit):
    """Bad options. No ``Exception``, which the parser would catch and wrap while it tries the types of a union."""


class Parser(ArgumentParser):
    """A parser that raises ``UsageError`` with one short message; commands that are functions use it."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Raise."""
        raise UsageError(f"{self._named(message)} (`{self.prog.replace(' [options]', '')} --help` lists all)") from ex

    def _named(self, message: str) -> str:
        options = [o for a in self._actions for o in a.option_strings if o.startswith("--") and "print_" not in o]
        if found := re.search(r"unrecognized arguments: (--[\w.-]+)", message):
            return f"there is no option '{found[1]}'{nearest(found[1], options)}"
        if found := re.search(r"argument subcommand: invalid choice: '([^']*)' \(choose from (.*)\)", message):
            return f"there is no '{found[1]}'{nearest(found[1], re.findall(r'[a-z]+', found[2]))}"
        if found := re.search(r'expected "subcommand" to be one of \{(.*)\}', message):
            return f"say what to do: {found[1].replace(',', ', ')}"
        return plain(message)


_KEY = re.compile(r'Parser key "([^"]+)":\s*')
_UNION = re.compile(
    r"Does not validate against any of the Union subtypes\s+Subtypes: \[(.*?)\]\s.*Given value: (.*)", re.S
)


def plain(message: str) -> str:
    """One of the parser's messages on one line, without Python's names for types."""
    text = _KEY.sub(r"\1: ", message)
    text = _UNION.sub(lambda found: f"must be one of {found[1]}, got {found[2]}", text)
    text = re.sub(r"<class '([\w.]+)'>", r"\1", text).replace("typing.", "").replace("collections.abc.", "")
    return " ".join(text.replace("NoneType", "null").split())


def nearest(name: str, names: Iterable[str]) -> str:
    """The end of a message that there is no such name: which one was meant, or which there are."""
    near = get_close_matches(name, names, n=1)
    return f": did you mean '{near[0]}'?" if near else f"; there are {', '.join(sorted(names))}"
