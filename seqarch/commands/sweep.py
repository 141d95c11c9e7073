"""``seqarch sweep``: many runs from one file, on this machine or as a Slurm array."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from seqarch.commands.usage import Parser, UsageError

if TYPE_CHECKING:
    from seqarch.training.sweep import Member

_SBATCH = """#!/bin/bash
#SBATCH --job-name="{name}"
#SBATCH --array=0-{last}
#SBATCH --requeue
#SBATCH --chdir="{here}"
#SBATCH --output="{out}/.sweep/slurm-%A_%a.log"
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@120
# Resources are given when it is submitted: sbatch --gres=gpu:1 --cpus-per-task=8 --time=24:00:00 FILE
{command} --member "$SLURM_ARRAY_TASK_ID" &
trap 'kill -USR1 $!' USR1
wait $!
status=$?
# A signal ends `wait`; it is called again for the status of the run, which saves first.
[ $status -le 128 ] || {{ wait $!; status=$?; }}
if [ $status -eq 75 ]; then
    scontrol requeue "${{SLURM_ARRAY_JOB_ID}}_$SLURM_ARRAY_TASK_ID" && sleep 60 # until Slurm ends this script
fi
exit $status
"""


def run(name: str, arguments: list[str]) -> None:
    """Run what is left of a sweep, or one member of it; exit with status 1 if one failed, 75 if one was stopped."""
    parser = Parser(
        prog=f"seqarch {name}",
        description="Train every combination of a sweep file's values, each in a run folder of its own. "
        "Called again, it goes on where it was stopped, and tries again what failed.",
    )
    parser.add_argument(
        "--config", type=str, required=True, help="The sweep file; recipes/laptop/sweep.yaml shows one."
    )
    parser.add_argument("--out", type=str | None, help="Folder of the runs; by default the file's.")
    parser.add_argument("--jobs", type=int, default=1, help="Runs at a time.")
    parser.add_argument("--member", type=int | None, help="Run only this one, counted from 0 as --list does.")
    parser.add_argument("--list", action="store_true", help="Run nothing; show what there is and how it stands.")
    parser.add_argument("--slurm", action="store_true", help="Run nothing; print a batch script of an array job.")
    options = parser.parse_args(arguments)
    from seqarch.training.sweep import read_sweep

    members = read_sweep(Path(options.config), None if options.out is None else Path(options.out))
    if options.jobs < 1:
        raise UsageError(f"jobs must be at least 1, got {options.jobs}")
    if options.slurm:
        sys.stdout.write(_batch_script(members, options.config, options.out))
        return
    chosen = members
    if options.member is not None:
        if not 0 <= options.member < len(members):
            raise UsageError(f"member must be one of 0 … {len(members) - 1}, got {options.member}")
        chosen = [members[options.member]]
    if not options.list:
        _run(chosen, options.jobs)
    states = {member: member.state() for member in chosen}
    _show(members, states)
    if not options.list and "failed" in states.values():
        raise SystemExit(1)
    if not options.list and "stopped" in states.values():
        raise SystemExit(os.EX_TEMPFAIL)


def _batch_script(members: list[Member], config: str, out: str | None) -> str:
    """An array job that works from whatever folder, and in whatever environment, it is submitted."""
    folder = members[0].out
    (folder / ".sweep").mkdir(parents=True, exist_ok=True)  # Slurm does not make the folder of its logs
    command = [sys.executable, "-m", "seqarch", "sweep", "--config", config, *(["--out", out] if out else [])]
    return _SBATCH.format(
        name=folder.name,
        last=len(members) - 1,
        here=Path.cwd(),
        out=str(folder).replace("%", "%%"),  # Slurm's sign for what it fills in
        command=shlex.join(command),
    )


def _run(members: list[Member], jobs: int) -> None:
    """Train those that are left, and say so as each begins and ends."""
    from seqarch.training.sweep import run_members

    environment = dict(os.environ)
    if jobs > 1:
        environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // jobs)))
    # By way of ending the runs, which save. SIGUSR1 is what a batch script gets before its time is up.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    signal.signal(signal.SIGUSR1, lambda *_: sys.exit(os.EX_TEMPFAIL))
    run_members(
        [member for member in members if member.state() != "done"],
        jobs,
        environment,
        lambda member, news: print(f"{member.name}: {news}", flush=True),
    )


def _show(members: list[Member], states: dict[Member, str]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=f"Sweep in {members[0].out}", title_justify="left")
    for column in ("member", "run", "state", "how it failed, and the last line of its log"):
        table.add_column(column, overflow="fold")
    for i, member in enumerate(members):
        if member in states:
            line = escape(member.failure()) if states[member] == "failed" else ""
            table.add_row(str(i), member.name, states[member], line)
    Console().print(table)
