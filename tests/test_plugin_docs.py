"""docs/plugins.md: its mixer keeps the contract, its table knows every check, and its commands run."""

import importlib
import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from seqarch.testing import CHECKS, check_mixer
from tests.test_recipes import arguments
from tests.wheels import environment, wheel

PAGE = Path(__file__).parents[1] / "docs" / "plugins.md"
SMALL = {
    "model.d_model": 32,
    "model.n_layers": 1,
    "model.val_every_n_steps": 2,
    "data.seq_len": 64,
    "data.batch_size": 2,
    "data.micro_batch_size": 2,
    "data.train_domains": "[cc, c4]",
    "data.max_val_tokens": 2000,
    "trainer.accelerator": "cpu",
    "trainer.max_steps": 4,
}


def steps():
    """Commands as they stand there, and files as pairs of name and content, in the page's order."""
    pattern = r"^ {4}(\S[^\n]*)$|`([\w/]+\.py)`:\n\n```python\n(.*?)```"
    for command, file, content in re.findall(pattern, PAGE.read_text(), flags=re.M | re.S):
        yield command or (file, content)


def blocks():
    return re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.S)


def test_the_mixer_keeps_the_contract(tmp_path, monkeypatch):
    (tmp_path / "mingru_of_the_docs.py").write_text(blocks()[0])
    monkeypatch.syspath_prepend(tmp_path)
    report = check_mixer(importlib.import_module("mingru_of_the_docs").MinGru)
    assert report.ok, str(report)


def test_the_backend_is_one():
    scope = {}
    exec(blocks()[2], scope)
    first, last = scope["backends"]
    assert first.unavailable("cpu") is not None
    assert last.unavailable("cpu") is None


def test_the_table_knows_every_check():
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| `check_")]
    named = [name for row in rows for name in re.findall(r"`(check_\w+)`", row.split("|")[1])]
    assert sorted(named) == sorted(check.name for check in CHECKS)


@pytest.mark.slow
def test_a_newcomer_follows_the_page(tmp_path, corpus_path):
    """In a fresh environment, where seqarch is installed from its wheel; only sizes are added."""
    python = environment(tmp_path / "venv", wheel(PAGE.parents[1], tmp_path / "wheels"))
    folder = tmp_path / "empty"
    folder.mkdir()
    variables = {
        **os.environ,
        "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}",
        "PIP_NO_INDEX": "1",
        "PIP_NO_BUILD_ISOLATION": "0",  # pip's way to say that there is none
    }
    variables.pop("PYTHONPATH", None)
    ran, said = [], {}
    for step in steps():
        if isinstance(step, tuple):
            file, content = step
            assert (folder / file).exists()  # the template's, which is replaced
            (folder / file).write_text(content)
            continue
        command = step
        if step.startswith("cd "):
            folder = folder / step.removeprefix("cd ")
            continue
        if step.startswith("seqarch fit --config"):
            words = arguments(**SMALL, **{"data.path": corpus_path})
            command += "".join(f" '{word}'" for word in words)
        elif step.startswith("seqarch probe"):
            command += " --length 32 --sequences 2"
        elif step.startswith("seqarch bench"):
            command += " --d_model 32 --n_layers 1 --tokens 512 --repeats 1 --device cpu"
        elif step.startswith("seqarch generate"):
            command += " --max_new_tokens 5 --device cpu"
        done = subprocess.run(command, shell=True, cwd=folder, env=variables, capture_output=True, text=True)
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        ran.append(step.split()[0])
        said[step] = done.stdout + done.stderr
    assert ran.count("seqarch") == 12
    assert ran.count("pip") == 2
    assert ran.count("pytest") == 2
    assert "MinGru keeps the contract" in said["seqarch check MinGru"]
    assert "bias" in said["seqarch fit --model.mixer.help MinGru"]
    assert re.search(r"MinGru +│ min-gru", said["seqarch mixers"])
    assert (folder / "report" / "report.html").exists()
    assert [path.name for path in (folder / "dist").iterdir()] == ["min_gru-0.1.0-py3-none-any.whl"]
    assert json.loads((folder / "check.json").read_text())["ok"]
