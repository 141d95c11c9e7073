"""Which runs are replicates of one architecture, and what to call it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from seqarch.evaluation.runs import Run

_TITLES = {
    "Attention": "Transformer++",
    "GatedDeltaNet": "Gated DeltaNet",
    "Mamba1": "Mamba-1",
    "Mamba2": "Mamba-2",
    "RWKV5": "RWKV-5",
    "RWKV6": "RWKV-6",
    "RWKV7": "RWKV-7",
    "Top1Chunk": "Top-1 Chunk",
    "Top1Element": "Top-1 Element",
}
"""As the field calls them; any other is called by its class."""

_Key = tuple[tuple[str, str], ...]


def name_architectures(runs: Sequence[Run], names: Mapping[str, str]) -> list[str]:
    """The name of each run's architecture; runs with one name differ in seed and setting alone.

    It is the class of the mixer and, where runs of one class differ in other options, those that are set and differ:
    ``Transformer++`` and ``Transformer++ (window 64)``.

    Args:
        runs: All runs of the comparison.
        names: Other names for these.

    Raises:
        ValueError: If ``names`` has one that is not there.
    """
    by_class: dict[str, list[_Key]] = {}
    for run in runs:
        keys = by_class.setdefault(run.mixer, [])
        if (key := _key(run.options)) not in keys:
            keys.append(key)
    found = [_title(run, by_class[run.mixer]) for run in runs]
    for name in names:
        if name not in found:
            raise ValueError(f"names: no architecture is called '{name}'; there are {', '.join(dict.fromkeys(found))}")
    return [names.get(name, name) for name in found]


def differing(options: Sequence[Mapping[str, Any]]) -> list[str]:
    """The names of options that are not the same everywhere, in order."""
    names = dict.fromkeys(name for o in options for name in o)
    return [name for name in names if len({repr(o.get(name)) for o in options}) > 1]


def find_reference(wanted: str, names: Sequence[str]) -> str:
    """The one of ``names`` that is meant, whatever the case: by itself, or by its beginning.

    Raises:
        ValueError: If there is none or more than one.
    """
    distinct = list(dict.fromkeys(names))
    exact = [n for n in distinct if n.lower() == wanted.lower()]
    begins = [n for n in distinct if n.lower().startswith(wanted.lower())]
    bare = [n for n in begins if "(" not in n]
    for found in (exact, bare, begins):
        if len(found) == 1:
            return found[0]
    near = get_close_matches(wanted, distinct, n=1)
    hint = f": did you mean '{near[0]}'?" if near else f"; there are {', '.join(distinct)}"
    what = f"more than one architecture's name begins with '{wanted}'" if begins else f"no architecture is '{wanted}'"
    raise ValueError(f"reference: {what}{hint}")


def _key(options: Mapping[str, Any]) -> _Key:
    return tuple(sorted((name, repr(value)) for name, value in options.items()))


def _title(run: Run, keys: Sequence[_Key]) -> str:
    title = "+".join(_TITLES.get(part, part) for part in run.mixer.split("+"))
    shown = []
    for name in differing([dict(key) for key in keys]):
        value = run.options.get(name)
        if value is None or value is False:
            continue
        last = name.rsplit(".", 1)[-1]
        shown.append(last if value is True else f"{last} {value}")
    return f"{title} ({', '.join(shown)})" if shown else title
