"""Many runs from one file: every combination of the values of some axes, each a run of its own.

A sweep file is YAML, its paths relative to it::

    out: runs/laptop                 # from where the command is called; one folder a run
    base: [base.yaml]                # what all runs share
    axes:
      architecture:
        transformer: transformer.yaml
        mamba2: [mamba2.yaml, {model.mixer.init_args.conv: false}]
      seed:
        1: {seed_everything: 1}

A value is a configuration file, a mapping of options by their full names, or a list of both; later ones win.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, TextIO

import yaml

from seqarch.training.runs import CHECKPOINTS

_NAME = re.compile(r"[\w.-]+")
_STATE = ".sweep"


@dataclass(frozen=True)
class Member:
    """One run of a sweep.

    Attributes:
        name: The names of its values, joined by hyphens; also of its run folder.
        arguments: Of ``seqarch fit``.
        out: The sweep's folder.
    """

    name: str
    arguments: tuple[str, ...]
    out: Path

    @property
    def run_dir(self) -> Path:
        """Its run folder."""
        return self.out / self.name

    def file(self, suffix: str) -> Path:
        """One of the files beside the run folders in which the sweep keeps what it knows of the member."""
        return self.out / _STATE / f"{self.name}.{suffix}"

    def state(self) -> str:
        """``done``, ``failed``, ``running`` (perhaps by another process), ``stopped`` or ``waiting``.

        A run that was done with other options is stopped again, as is one whose processes vanished without a word (a
        job's time limit, a lost node).
        """
        if self.file("lock").exists():
            lock = self._lock()
            if lock is None:
                return "running"
            lock.close()
        status = self._status()
        if status == 0:
            return "done" if self.run_dir.is_dir() else "waiting"  # it was deleted since
        if status not in (None, os.EX_TEMPFAIL):  # that one asks to be called again
            return "failed"
        return "stopped" if self._last.exists() or self.file("log").exists() else "waiting"

    def _status(self) -> int | None:
        """Exit status of the process that trained it last with these options; None if there is none."""
        try:
            record = json.loads(self.file("json").read_text())
        except (FileNotFoundError, json.JSONDecodeError):
            return None
        return record["status"] if record.get("arguments") == list(self.arguments) else None

    @property
    def _last(self) -> Path:
        return self.run_dir / CHECKPOINTS / "last.ckpt"

    def last_line(self) -> str:
        """The end of what the run printed."""
        try:
            lines = self.file("log").read_text(errors="replace").split("\n")
        except FileNotFoundError:
            return ""
        return next((line.split("\r")[-1].strip() for line in reversed(lines) if line.strip()), "")

    def failure(self) -> str:
        """How it failed: the signal that ended it, if one did, and the end of what it printed."""
        status = self._status() or 0
        killed = f"signal {-status} ({signal.strsignal(-status)}) ended it; " if status < 0 else ""
        return killed + self.last_line()

    def start(self, environment: Mapping[str, str] | None = None) -> Running | None:
        """Start to train in another process, or to go on from the last checkpoint; what it prints goes to the log.

        Returns:
            None if another process has this member.
        """
        self.file("log").parent.mkdir(parents=True, exist_ok=True)
        lock = self._lock()
        if lock is None:
            return None
        self.file("json").unlink(missing_ok=True)  # how an earlier try ended
        command = [sys.executable, "-m", "seqarch", "fit", *self.arguments, "--run_dir", str(self.run_dir)]
        if self._last.exists():
            command += ["--ckpt_path", "last"]
        with lock, self.file("log").open("w") as log:
            # The lock is the child's too: it lasts as long as one of the two lives.
            process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env=environment, pass_fds=[lock.fileno()]
            )
        return Running(self, process)

    def _lock(self) -> TextIO | None:
        """Take the member; the end of all processes that have the file open gives it back."""
        file = self.file("lock").open("w")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            return None
        return file


@dataclass(frozen=True)
class Running:
    """A member that trains in another process."""

    member: Member
    process: subprocess.Popen[bytes]

    def ended(self) -> bool:
        """Whether the process has ended; its status is then written down."""
        status = self.process.poll()
        if status is None:
            return False
        record = {"status": status, "arguments": list(self.member.arguments)}
        aside = self.member.file("json.new")
        aside.write_text(json.dumps(record))
        aside.replace(self.member.file("json"))
        return True

    def stop(self) -> None:
        """End the process. The member is then neither done nor failed."""
        self.process.terminate()
        self.process.wait()


def run_members(
    members: Iterable[Member], jobs: int, environment: Mapping[str, str] | None, tell: Callable[[Member, str], None]
) -> None:
    """Train some members, so many at a time; whatever ends this ends them too.

    Args:
        members: In this order. Those that another process has are left to it.
        jobs: How many at a time.
        environment: Of their processes.
        tell: Called with a member and what has become of it.
    """
    queue = deque(members)
    running: list[Running] = []
    try:
        while queue or running:
            while queue and len(running) < jobs:
                member = queue.popleft()
                run = member.start(environment)
                tell(member, "another process has it" if run is None else f"started, log in {member.file('log')}")
                running += [] if run is None else [run]
            for run in [run for run in running if run.ended()]:
                running.remove(run)
                tell(run.member, run.member.state())
            time.sleep(0.1)
    finally:
        for run in running:
            run.stop()


def read_sweep(path: Path, out: Path | None = None) -> list[Member]:
    """The members of a sweep file, in the order of its axes, the last one fastest.

    Args:
        path: Of the file.
        out: The folder for the runs, in place of the file's.

    Raises:
        ValueError: If the file is no sweep, or names a file that does not exist.
    """
    try:
        sweep = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"{path}: {' '.join(str(error).split())}") from error
    if not isinstance(sweep, dict) or not isinstance(sweep.get("axes"), dict) or not sweep["axes"]:
        raise ValueError(f"{path}: a sweep has 'axes', a mapping of names to the values that it runs through")
    unknown = sorted(map(str, sweep.keys() - {"out", "base", "axes"}))
    if unknown:
        raise ValueError(f"{path}: there is no '{unknown[0]}' in a sweep; it has out, base and axes")
    folder = out or Path(str(sweep.get("out") or f"runs/{path.stem}"))
    base = _arguments(path, "base", sweep.get("base") or [])
    axes: list[list[tuple[str, list[str]]]] = []
    for axis, values in sweep["axes"].items():
        if not isinstance(values, dict) or not values:
            raise ValueError(f"{path}: axes.{axis} must be a mapping of names to configuration files or options")
        for name in map(str, values):
            if not _NAME.fullmatch(name):
                raise ValueError(
                    f"{path}: axes.{axis}: '{name}' becomes part of a folder's name: letters, digits, . _ -"
                )
        axes.append([(str(name), _arguments(path, f"axes.{axis}.{name}", value)) for name, value in values.items()])
    members = []
    for values in product(*axes):
        arguments = [*base, *(argument for _, given in values for argument in given)]
        # files first: an option that comes before a file would be overridden by it
        pairs = sorted(zip(arguments[::2], arguments[1::2], strict=True), key=lambda pair: pair[0] != "--config")
        name = "-".join(name for name, _ in values)
        members.append(Member(name, tuple(text for pair in pairs for text in pair), folder))
    names = [member.name for member in members]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"{path}: two members would be called '{twice}': name the values otherwise")
    return members


def _arguments(path: Path, where: str, value: Any) -> list[str]:
    """Of ``seqarch fit``, an option's name and its value in turn."""
    arguments = []
    for item in value if isinstance(value, list) else [value]:
        if isinstance(item, str):
            file = path.parent / item
            if not file.is_file():
                raise ValueError(f"{path}: {where}: there is no file {file}")
            arguments += ["--config", os.path.normpath(file)]
        elif isinstance(item, dict):
            for option, given in item.items():
                arguments += [f"--{option}", given if isinstance(given, str) else json.dumps(given)]
        elif item is not None:
            raise ValueError(f"{path}: {where}: '{item}' is neither a configuration file nor a mapping of options")
    return arguments
