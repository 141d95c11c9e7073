"""Checkpoints and configurations from elsewhere: whatever they name, none of their author's code runs."""

import sys
from pathlib import Path

import pytest
import torch
import yaml

from seqarch.class_paths import find_class
from seqarch.cli import main
from seqarch.mixer import TokenMixer
from seqarch.training.checkpoint import read_checkpoint
from seqarch.training.module import SequenceModule
from seqarch.training.rebuild import check_same_architecture, load_module
from tests.training.synthetic import SyntheticData, tiny, trainer

MIXER = """
from pathlib import Path
from seqarch_attention import Attention
Path(__file__).with_name("ran").touch()
class Foreign(Attention): pass
"""


@pytest.fixture
def foreign(tmp_path, monkeypatch):
    """A module within reach that leaves a file when it is imported; the path of that file."""
    (tmp_path / "foreign_module.py").write_text(MIXER)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path / "ran"
    sys.modules.pop("foreign_module", None)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("run")
    trainer(run_dir, max_steps=1, enable_progress_bar=False).fit(tiny(), datamodule=SyntheticData())
    return torch.load(run_dir / "checkpoints" / "last.ckpt", weights_only=True)


class Payload:
    def __init__(self, target):
        self.target = target

    def __reduce__(self):
        return Path.touch, (self.target,)


def test_a_pickle_with_code_in_it_is_refused_unread(checkpoint, tmp_path):
    ran, path = tmp_path / "ran", tmp_path / "a.ckpt"
    torch.save({**checkpoint, "callbacks": Payload(ran)}, path)
    for load in (read_checkpoint, load_module, SequenceModule.load_from_checkpoint):
        with pytest.raises(ValueError, match="cannot be read"):
            load(path)
    with pytest.raises(ValueError, match="cannot be read"):
        check_same_architecture(path, tiny())
    with pytest.raises(ValueError, match="cannot be read"):
        trainer(tmp_path / "run", max_steps=2).fit(tiny(), datamodule=SyntheticData(), ckpt_path=str(path))
    assert not ran.exists()
    torch.load(path, weights_only=False)
    assert ran.exists()  # the payload works, where it is let


@pytest.mark.parametrize("option", ["mixer", "channel_mixer", "schedule"])
@pytest.mark.parametrize("form", ["class", "string", "instantiator"])
def test_a_class_that_a_checkpoint_names_is_not_imported(checkpoint, foreign, tmp_path, option, form):
    value = "foreign_module.Foreign" if form == "string" else {"class_path": "foreign_module.Foreign"}
    options = {**checkpoint["hyper_parameters"], option: value}
    if form == "instantiator":  # with which Lightning would build it
        options["_instantiator"] = "lightning.pytorch.cli.instantiate_module"
    torch.save({**checkpoint, "hyper_parameters": options}, tmp_path / "a.ckpt")
    for load in (load_module, SequenceModule.load_from_checkpoint):
        with pytest.raises(ValueError, match=rf"a\.ckpt: {option} .*foreign_module\.Foreign"):
            load(tmp_path / "a.ckpt")
    assert not foreign.exists()


def test_a_class_of_another_kind_is_not_taken(checkpoint, tmp_path):
    options = {**checkpoint["hyper_parameters"], "mixer": {"class_path": "seqarch.model.SwiGLU"}}
    torch.save({**checkpoint, "hyper_parameters": options}, tmp_path / "a.ckpt")
    with pytest.raises(ValueError, match=r"mixer needs seqarch\.model\.SwiGLU, which is not installed"):
        load_module(tmp_path / "a.ckpt")


def test_a_class_that_the_user_allows_or_imported_is_found(foreign, monkeypatch):
    monkeypatch.setenv("SEQARCH_ALLOW_IMPORTS", "another, foreign_modul")
    with pytest.raises(ValueError, match="SEQARCH_ALLOW_IMPORTS"):
        find_class("foreign_module.Foreign", TokenMixer)
    assert not foreign.exists()
    monkeypatch.setenv("SEQARCH_ALLOW_IMPORTS", "another, foreign_module")
    found = find_class("foreign_module.Foreign", TokenMixer)
    assert found.__name__ == "Foreign"
    monkeypatch.delenv("SEQARCH_ALLOW_IMPORTS")
    assert find_class("foreign_module.Foreign", TokenMixer) is found


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("model.mixer", "foreign_module.Foreign"),
        ("model.mixer", {"class_path": "foreign_module.Foreign"}),
        ("model.mixer", [{"class_path": "foreign_module.Foreign"}]),
        ("model.channel_mixer", "foreign_module.Foreign"),
        ("model.schedule", {"class_path": "foreign_module.Foreign"}),
        ("data", {"class_path": "foreign_module.Foreign"}),
        ("trainer.callbacks", [{"class_path": "foreign_module.Foreign"}]),
        ("trainer.callbacks", {"class_path": "LambdaCallback", "init_args": {"setup": "foreign_module.Foreign"}}),
        ("trainer.logger", "foreign_module.Foreign"),
        ("trainer.plugins", ["foreign_module.Foreign"]),
    ],
)
def test_a_class_that_a_recipe_names_is_not_imported(foreign, tmp_path, capsys, option, value):
    recipe = yaml.safe_load(Path("recipes/quickstart.yaml").read_text())
    *folders, last = option.split(".")
    inner = recipe
    for folder in folders:
        inner = inner.setdefault(folder, {})
    inner[last] = value
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    with pytest.raises(SystemExit) as exit_:
        main(["fit", "--config", str(tmp_path / "recipe.yaml"), "--run_dir", str(tmp_path / "run")])
    assert exit_.value.code == 2
    message = capsys.readouterr().err.strip()
    assert "a file may not have foreign_module.Foreign imported" in message
    assert message.endswith("If you trust it, set SEQARCH_ALLOW_IMPORTS=foreign_module")
    assert not foreign.exists()
