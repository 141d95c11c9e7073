"""The queue is tested with a stand-in for ``python -m seqarch fit``; one slow test trains."""

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from seqarch.cli import main
from seqarch.training import sweep
from seqarch.training.sweep import read_sweep, run_members
from tests.test_recipes import parse

PYTHON = sys.executable
SWEEP = """
out: here
base: [base.yaml, {trainer.max_steps: 5}]
axes:
  architecture:
    a: a.yaml
    b: [b.yaml, {model.mixer.init_args.conv: false}]
  seed:
    1: {seed_everything: 1}
    2: {seed_everything: 2, data.train_domains: [web, code]}
"""
TRAINER = """#!{python}
import os, sys, time
from pathlib import Path
arguments = sys.argv[1:]
run_dir = Path(arguments[arguments.index("--run_dir") + 1])
(run_dir / "checkpoints").mkdir(parents=True, exist_ok=True)
(run_dir / "checkpoints" / "last.ckpt").touch()
with (run_dir / "calls").open("a") as calls:
    print(" ".join(arguments), file=calls)
behaviour = run_dir.parent / (run_dir.name + ".does")
what = behaviour.read_text() if behaviour.exists() else ""
if what == "hangs":
    (run_dir / "hanging").touch()
    time.sleep(600)
print("step 1\\n  it broke\\n" if what else "fine", flush=True)
if what == "is killed":
    os.kill(os.getpid(), 9)
sys.exit(75 if what == "is preempted" else 3 if what else 0)
"""


@pytest.fixture
def file(tmp_path, monkeypatch) -> Path:
    for name in ("base", "a", "b"):
        (tmp_path / f"{name}.yaml").touch()
    (tmp_path / "sweep.yaml").write_text(SWEEP)
    trainer = tmp_path / "python"
    trainer.write_text(TRAINER.format(python=sys.executable))
    trainer.chmod(0o755)
    (tmp_path / "here").mkdir()
    monkeypatch.setattr(sweep, "sys", SimpleNamespace(executable=str(trainer)))
    return tmp_path / "sweep.yaml"


def members(file):
    return read_sweep(file, file.parent / "here")


def calls(member) -> list[str]:
    return (member.run_dir / "calls").read_text().splitlines()


def test_every_combination_files_before_options(tmp_path, file):
    found = read_sweep(file)
    assert [m.name for m in found] == ["a-1", "a-2", "b-1", "b-2"]
    assert found[0].run_dir == Path("here/a-1")
    files = ["--config", str(tmp_path / "base.yaml"), "--config", str(tmp_path / "b.yaml")]
    options = ["--trainer.max_steps", "5", "--model.mixer.init_args.conv", "false", "--seed_everything", "2"]
    assert list(found[3].arguments) == [*files, *options, "--data.train_domains", '["web", "code"]']


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- a", "a sweep has 'axes'"),
        ("axes: {}", "a sweep has 'axes'"),
        ("axis: {}\naxes: {x: {y: a.yaml}}", "there is no 'axis' in a sweep"),
        ("axes: {x: [a.yaml]}", "axes.x must be a mapping of names"),
        ("axes: {x: {y: nowhere.yaml}}", r"axes\.x\.y: there is no file .*nowhere\.yaml"),
        ("axes: {x: {y: 3}}", "axes.x.y: '3' is neither a configuration file nor a mapping"),
        ("axes: {x: {a/b: a.yaml}}", "'a/b' becomes part of a folder's name"),
        ("axes: {x: {a: a.yaml, a-b: a.yaml}, y: {b-c: a.yaml, c: a.yaml}}", "two members would be called 'a-b-c'"),
        ("axes: {x: [", "while parsing"),
    ],
)
def test_what_is_no_sweep_is_refused(file, text, message):
    file.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_sweep(file)


def test_a_failed_member_does_not_stop_the_rest_and_is_tried_again(file, capsys):
    (file.parent / "here" / "a-2.does").write_text("breaks")
    command = ["sweep", "--config", str(file), "--out", str(file.parent / "here")]
    with pytest.raises(SystemExit) as end:
        main(command)
    assert end.value.code == 1
    assert [m.state() for m in members(file)] == ["done", "failed", "done", "done"]
    assert members(file)[1].last_line() == "it broke"
    assert "it broke" in capsys.readouterr().out
    (file.parent / "here" / "a-2.does").unlink()
    main(command)
    assert [m.state() for m in members(file)] == ["done"] * 4
    assert [len(calls(m)) for m in members(file)] == [1, 2, 1, 1]
    assert calls(members(file)[1])[1] == calls(members(file)[1])[0] + " --ckpt_path last"


def test_a_member_that_was_killed_says_so_until_it_is_tried_again(file, capsys):
    (file.parent / "here" / "a-2.does").write_text("is killed")
    with pytest.raises(SystemExit):
        main(["sweep", "--config", str(file), "--out", str(file.parent / "here")])
    assert [m.state() for m in members(file)] == ["done", "failed", "done", "done"]
    assert members(file)[1].failure() == "signal 9 (Killed) ended it; it broke"
    assert "signal 9" in capsys.readouterr().out
    (file.parent / "here" / "a-2.does").write_text("hangs")
    running = members(file)[1].start()
    assert running is not None
    running.stop()
    assert members(file)[1].state() == "stopped"


def test_a_member_whose_processes_vanished_is_stopped(file):
    """Both were killed, as at a job's time limit: nothing is written down, and there may be no checkpoint yet."""
    first = members(file)[0]
    first.file("log").parent.mkdir()
    first.file("log").write_text("began\n")
    assert [m.state() for m in members(file)] == ["stopped", "waiting", "waiting", "waiting"]


def test_a_deleted_run_waits_again(file):
    run_members(members(file)[:2], 1, None, lambda *_: None)
    shutil.rmtree(members(file)[1].run_dir)
    assert [m.state() for m in members(file)[:2]] == ["done", "waiting"]


def test_other_options_make_a_run_wait_again(file):
    run_members(members(file), 2, None, lambda *_: None)
    file.write_text(SWEEP.replace("max_steps: 5", "max_steps: 9"))
    assert [m.state() for m in members(file)] == ["stopped"] * 4
    assert {m.state() for m in read_sweep(file, file.parent / "elsewhere")} == {"waiting"}


def test_one_member_by_its_number(file):
    main(["sweep", "--config", str(file), "--out", str(file.parent / "here"), "--member", "2"])
    assert [m.state() for m in members(file)] == ["waiting", "waiting", "done", "waiting"]
    with pytest.raises(SystemExit) as end:
        main(["sweep", "--config", str(file), "--member", "4"])
    assert end.value.code == 2


def test_two_processes_never_train_the_same_member(file):
    (file.parent / "here" / "a-1.does").write_text("hangs")
    first, *_ = members(file)
    running = first.start()
    assert running is not None
    assert first.state() == "running"
    assert first.start() is None
    told = []
    run_members(members(file)[:2], 1, None, lambda m, news: told.append((m.name, news.split(",")[0])))
    assert told == [("a-1", "another process has it"), ("a-2", "started"), ("a-2", "done")]
    running.stop()
    assert first.state() != "running"
    assert len(calls(first)) <= 1


def test_a_member_that_was_preempted_is_stopped_and_its_job_may_be_queued_again(file):
    (file.parent / "here" / "a-2.does").write_text("is preempted")
    command = ["sweep", "--config", str(file), "--out", str(file.parent / "here"), "--member", "1"]
    with pytest.raises(SystemExit) as end:
        main(command)
    assert end.value.code == 75
    assert members(file)[1].state() == "stopped"
    (file.parent / "here" / "a-2.does").unlink()
    main(command)
    assert members(file)[1].state() == "done"


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 128 + signal.SIGTERM), (signal.SIGUSR1, 75)])
def test_ending_the_sweep_ends_its_runs(file, number, status):
    (file.parent / "here" / "a-1.does").write_text("hangs")
    code = (
        f"import sys; from seqarch.training import sweep; from seqarch.cli import main; "
        f"sys.executable = {str(file.parent / 'python')!r}; "
        f"main(['sweep', '--config', {str(file)!r}, '--out', {str(file.parent / 'here')!r}])"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    process = subprocess.Popen([PYTHON, "-c", code], env=environment)
    while not (file.parent / "here" / "a-1" / "hanging").exists():
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(number)
    assert process.wait() == status
    assert [m.state() for m in members(file)] == ["stopped", "waiting", "waiting", "waiting"]


def test_a_batch_script_works_from_any_folder_and_environment(file, capsys, monkeypatch):
    """Slurm runs it in the folder it is submitted from; its words are in quotes, and % is not a pattern of Slurm's."""
    monkeypatch.chdir(file.parent)
    main(["sweep", "--config", "sweep.yaml", "--out", "my 5% runs", "--slurm"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "#!/bin/bash"
    assert {line for line in lines if line.startswith("#SBATCH")} == {
        '#SBATCH --job-name="my 5% runs"',
        "#SBATCH --array=0-3",
        "#SBATCH --requeue",
        f'#SBATCH --chdir="{file.parent}"',
        '#SBATCH --output="my 5%% runs/.sweep/slurm-%A_%a.log"',
        "#SBATCH --open-mode=append",
        "#SBATCH --signal=B:USR1@120",
    }
    python = shlex.quote(sys.executable)
    command = f"{python} -m seqarch sweep --config sweep.yaml --out 'my 5% runs'"
    assert f'{command} --member "$SLURM_ARRAY_TASK_ID" &' in lines
    subprocess.run(["bash", "-n"], input="\n".join(lines), text=True, check=True)
    assert (file.parent / "my 5% runs" / ".sweep").is_dir()


def test_the_laptop_study():
    found = read_sweep(Path(__file__).parents[2] / "recipes" / "laptop" / "sweep.yaml")
    assert len(found) == 13 * 2 * 2


@pytest.mark.parametrize(("part", "runs"), [("limited", 13), ("seeds", 4), ("mixed", 4)])
def test_the_study_of_the_results(part, runs):
    found = read_sweep(Path(__file__).parents[2] / "recipes" / "study" / f"{part}.yaml")
    assert len({member.name for member in found}) == runs
    for member in found:
        files = [Path(text) for text in member.arguments[1::2] if text.endswith(".yaml")]
        assert [f.name for f in files[:2]] == ["base.yaml", "base.yaml"]
        _, config = parse(*files)
        assert (config.trainer.max_steps, config.data.init_args.batch_size) == (750, 4)
