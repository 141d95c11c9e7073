"""``seqarch new-plugin``: a package with a mixer in it that works, to be filled with one's own."""

from __future__ import annotations

import importlib.util
import keyword
import re
import shlex
import sys
from pathlib import Path

from seqarch.commands.usage import Parser

_TEMPLATE = Path(__file__).parents[1] / "plugin_template"
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9]*([-_][A-Za-z0-9]+)*")


def run(name: str, arguments: list[str]) -> None:
    """Parse the arguments, write the package, and say what can be done with it."""
    parser = Parser(prog=f"seqarch {name}", description="Write a package with a token mixer that works, a plugin.")
    parser.add_argument("name", type=str, help="Of the distribution: my-mixer gives the class MyMixer in my_mixer.")
    parser.add_argument("--folder", type=str | None, help="Where to write it; by default a new folder of that name.")
    options = parser.parse_args(arguments)
    names = plugin_names(options.name)
    folder = Path(options.folder or names["my-mixer"])
    write_plugin(names, folder)
    there = shlex.quote(str(folder))
    print(
        f"{folder} holds {names['MyMixer']}, a mixer that works: make it yours in {names['my_mixer']}/mixer.py. Next:\n"
        "\n"
        f"  pip install -e {there}\n"
        f"  seqarch check {names['MyMixer']}\n"
        f"  seqarch fit --config {there}/recipes/{names['my_mixer']}.yaml"
    )


def plugin_names(name: str) -> dict[str, str]:
    """What the template's names become: those of the distribution, the package and the class.

    A leading ``seqarch-`` is left out of the class's name: seqarch-retention holds Retention.

    Raises:
        ValueError: If the name cannot be one of a distribution, a package or a class, or is taken here.
    """
    from seqarch.discovery import plugins

    if not _NAME.fullmatch(name):
        raise ValueError(f"name: '{name}' must be letters and digits in words joined by -, like my-mixer")
    words = re.split("[-_]", name.lower())
    package = "_".join(words)
    own = words[1:] if words[0] == "seqarch" else words
    cls = "".join(word.capitalize() for word in own)
    if keyword.iskeyword(package) or package in sys.stdlib_module_names or not cls.isidentifier():
        raise ValueError(f"name: '{name}' cannot be the name of a Python package with a class in it: choose another")
    for plugin in plugins():
        if cls == plugin.class_name or package == plugin.name:
            raise ValueError(f"name: {plugin.distribution} already has a mixer '{plugin.class_name}': choose another")
    if importlib.util.find_spec(package) is not None:
        raise ValueError(f"name: there is already a package '{package}' here: choose another")
    return {"my-mixer": "-".join(words), "my_mixer": package, "MyMixer": cls}


def write_plugin(names: dict[str, str], folder: Path) -> None:
    """Write the template into a new or empty folder.

    Args:
        names: As ``plugin_names`` gives them.
        folder: Where the package's ``pyproject.toml`` goes.

    Raises:
        ValueError: If the folder is a file or holds something.
    """
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file: name another folder with --folder")
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder} already holds something: name another folder with --folder")
    _copy(_TEMPLATE, folder, names)


def _copy(source: Path, target: Path, names: dict[str, str]) -> None:
    target.mkdir(parents=True, exist_ok=True)
    for entry in source.iterdir():
        if entry.name == "__pycache__":
            continue
        place = target / _renamed(entry.name, names)
        if entry.is_dir():
            _copy(entry, place, names)
        else:
            place.write_text(_renamed(entry.read_text(encoding="utf-8"), names), encoding="utf-8")


def _renamed(text: str, names: dict[str, str]) -> str:
    return re.sub("|".join(names), lambda found: names[found[0]], text)
