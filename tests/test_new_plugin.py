"""``seqarch new-plugin``: what it writes works at once, and what it refuses it says how to mend."""

import importlib
from pathlib import Path

import pytest
import yaml

from seqarch.cli import main
from tests.test_recipes import arguments

SMALL = {
    "model.d_model": 32,
    "model.n_layers": 1,
    "model.val_every_n_steps": 2,
    "data.seq_len": 64,
    "data.batch_size": 2,
    "data.micro_batch_size": 2,
    "data.max_val_tokens": 200,
    "trainer.accelerator": "cpu",
    "trainer.max_steps": 2,
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refused(capsys, *arguments):
    with pytest.raises(SystemExit) as stopped:
        main(["new-plugin", *arguments])
    assert stopped.value.code == 2
    return capsys.readouterr().err


def test_the_package_is_found_keeps_the_contract_and_trains(folder, installed, monkeypatch, corpus_path, capsys):
    main(["new-plugin", "seqarch-gentle-mean"])
    said = capsys.readouterr().out
    package = folder / "seqarch-gentle-mean"
    files = {str(p.relative_to(package)): p.read_text() for p in package.rglob("*") if p.is_file()}
    assert set(files) == {
        "README.md",
        "pyproject.toml",
        "recipes/seqarch_gentle_mean.yaml",
        "seqarch_gentle_mean/__init__.py",
        "seqarch_gentle_mean/mixer.py",
        "tests/test_contract.py",
    }
    assert not [name for name, text in files.items() if "MyMixer" in text or "my-mixer" in text or "my_mixer" in text]
    assert 'seqarch_gentle_mean = "seqarch_gentle_mean:GentleMean"' in files["pyproject.toml"]

    monkeypatch.syspath_prepend(package)
    installed(("seqarch-gentle-mean", "seqarch_gentle_mean", "seqarch_gentle_mean:GentleMean"))
    assert "seqarch check GentleMean" in said
    main(["check", "GentleMean", "--timing", "false"])
    assert "GentleMean keeps the contract" in capsys.readouterr().out
    assert "seqarch fit --config seqarch-gentle-mean/recipes/seqarch_gentle_mean.yaml" in said
    data = {"data.path": corpus_path, "data.train_domains": "[cc, c4]"}
    main(["fit", *arguments("seqarch-gentle-mean/recipes/seqarch_gentle_mean.yaml", **SMALL, **data)])
    config = yaml.safe_load((folder / "runs" / "seqarch_gentle_mean" / "config.yaml").read_text())
    assert config["model"]["mixer"]["class_path"] == "seqarch_gentle_mean.GentleMean"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("my mixer", "must be letters and digits in words joined by -, like my-mixer"),
        ("../escape", "must be letters and digits"),
        ("2mix", "must be letters and digits"),
        ("class", "cannot be the name of a Python package"),
        ("random", "cannot be the name of a Python package"),
        ("seqarch", "cannot be the name of a Python package"),
        ("seqarch-2", "cannot be the name of a Python package"),
        ("torch", "there is already a package 'torch' here"),
        ("Attention", "already has a mixer 'Attention'"),
        ("seqarch-attention", "already has a mixer 'Attention'"),
    ],
)
def test_bad_names(folder, capsys, name, message):
    assert message in refused(capsys, name)
    assert not list(folder.iterdir())


def test_nothing_is_overwritten(folder, capsys):
    Path("full").mkdir()
    Path("full", "thesis.txt").write_text("years of work")
    assert "full already holds something: name another folder with --folder" in refused(
        capsys, "my-mixer", "--folder", "full"
    )
    assert "full/thesis.txt is a file" in refused(capsys, "my-mixer", "--folder", "full/thesis.txt")
    assert [p.name for p in folder.rglob("*")] == ["full", "thesis.txt"]


def test_the_folder_may_be_empty_or_deep(folder, capsys):
    Path("empty").mkdir()
    main(["new-plugin", "My_Mixer", "--folder", "empty"])
    main(["new-plugin", "my-mixer", "--folder", "a/b c"])
    assert "pip install -e 'a/b c'" in capsys.readouterr().out
    template = Path(importlib.import_module("seqarch").__file__).parent / "plugin_template"
    for copy in ("empty", "a/b c"):
        for path in (p for p in template.rglob("*") if p.is_file() and "__pycache__" not in p.parts):
            assert (folder / copy / path.relative_to(template)).read_text() == path.read_text()
