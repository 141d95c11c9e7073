"""Wheels, and environments in which they are installed: without the network, on the packages of this interpreter."""

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path


def wheel(project: Path, folder: Path) -> Path:
    """Build the project's wheel into a folder."""
    before = set(folder.glob("*.whl"))
    _pip("wheel", "--no-build-isolation", "--no-deps", "--no-index", "--wheel-dir", str(folder), str(project))
    (built,) = set(folder.glob("*.whl")) - before
    return built


def environment(folder: Path, seqarch: Path) -> Path:
    """The Python of a new environment that has this wheel of seqarch, and finds what else it needs in this one's.

    An editable seqarch of this one is no part of it: a .pth file puts it on the path, and those are read here only.
    """
    venv.EnvBuilder(with_pip=False, symlinks=os.name != "nt").create(folder)
    python = folder / ("Scripts" if os.name == "nt" else "bin") / "python"
    scheme = sysconfig.get_preferred_scheme("prefix")
    site = Path(sysconfig.get_path("purelib", scheme, vars={"base": str(folder), "platbase": str(folder)}))
    here = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (site / "here.pth").write_text("\n".join(sorted(here)) + "\n")
    for name in ("pip", "pytest"):  # as `pip install pytest` would leave them
        program = python.with_name(name)
        program.write_text(f'#!/bin/sh\nexec "{python}" -m {name} "$@"\n')
        program.chmod(0o755)
    install(python, "--no-deps", "--force-reinstall", str(seqarch))
    return python


def install(python: Path, *arguments: str) -> None:
    """With this interpreter's pip, into that one's environment."""
    _pip("--python", str(python), "install", "--no-index", *arguments)


def _pip(*arguments: str) -> None:
    done = subprocess.run([sys.executable, "-m", "pip", *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
