"""Finding the mixers that are installed: every entry point of the group ``seqarch.mixers``."""

from __future__ import annotations

import warnings
from collections import defaultdict
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points

from seqarch.mixer import TokenMixer

GROUP = "seqarch.mixers"


@dataclass(frozen=True)
class Plugin:
    """An entry point of the group, loaded or not.

    Attributes:
        name: Name of the entry point.
        class_name: Name of the class it stands for, which recipes use.
        distribution: What was installed with pip, and its version.
        mixer: The class, or None where ``problem`` says why it cannot be used.
        problem: What is wrong with it.
    """

    name: str
    class_name: str
    distribution: str
    mixer: type[TokenMixer] | None
    problem: str | None = None


@cache
def plugins() -> tuple[Plugin, ...]:
    """All mixers that are installed, sorted by name. A broken one costs a warning here, an error when it is chosen."""
    found = [_load(entry) for entry in entry_points(group=GROUP)]
    for attribute in ("name", "class_name"):
        owners = defaultdict(set)
        for plugin in found:
            if plugin.problem is None:
                owners[getattr(plugin, attribute)].add(plugin.distribution)
        for i, plugin in enumerate(found):
            rivals = owners[getattr(plugin, attribute)]
            if len(rivals) > 1 and plugin.problem is None:
                problem = (
                    f"'{getattr(plugin, attribute)}' is defined by {' and by '.join(sorted(rivals))}: uninstall one"
                )
                found[i] = Plugin(plugin.name, plugin.class_name, plugin.distribution, None, problem)
    for plugin in found:
        if plugin.problem is not None:
            warnings.warn(
                f"mixer '{plugin.name}' of {plugin.distribution} cannot be used: {plugin.problem}", stacklevel=2
            )
    return tuple(sorted(found, key=lambda p: (p.name, p.distribution)))


def find(name: str) -> type[TokenMixer]:
    """The mixer with this entry point or class name.

    Raises:
        ValueError: If there is none, with the nearest names, or if it is broken, with the reason.
    """
    from difflib import get_close_matches

    of_name = [plugin for plugin in plugins() if name in (plugin.name, plugin.class_name)]
    for plugin in of_name:
        if plugin.mixer is not None:
            return plugin.mixer
    for plugin in of_name:
        raise ValueError(f"mixer '{name}' of {plugin.distribution} cannot be used: {plugin.problem}")
    known = [n for p in plugins() for n in (p.class_name, p.name)]
    near = get_close_matches(name, known, n=1)
    hint = f"did you mean '{near[0]}'? " if near else ""
    raise ValueError(f"no mixer is called '{name}': {hint}`seqarch mixers` lists what is installed")


def _load(entry: EntryPoint) -> Plugin:
    distribution = f"{entry.dist.name} {entry.dist.version}" if entry.dist is not None else "an unknown distribution"
    class_name = entry.attr or entry.value
    try:
        mixer = entry.load()
    except (Exception, SystemExit) as error:  # third-party code at import: nothing of it may stop the rest
        return Plugin(
            entry.name, class_name, distribution, None, f"importing it raised {type(error).__name__}: {error}"
        )
    if not (isinstance(mixer, type) and issubclass(mixer, TokenMixer)):
        return Plugin(entry.name, class_name, distribution, None, f"{entry.value} is no subclass of seqarch.TokenMixer")
    if missing := sorted(getattr(mixer, "__abstractmethods__", ())):
        return Plugin(entry.name, class_name, distribution, None, f"{class_name} does not define {', '.join(missing)}")
    return Plugin(entry.name, class_name, distribution, mixer)
