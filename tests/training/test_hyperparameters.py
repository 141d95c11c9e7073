from collections.abc import Callable
from functools import partial

import pytest
import torch
from jsonargparse import ArgumentParser
from lightning.pytorch.cli import LightningCLI

from seqarch.class_paths import class_path
from seqarch.model import SwiGLU
from seqarch.training.hyperparameters import differences, to_plain
from seqarch.training.module import SequenceModule
from seqarch.training.optimizer import AdamWConfig
from seqarch.training.schedule import Cosine, Schedule, WarmupStableDecay
from seqarch_attention import Attention
from tests.training.synthetic import tiny

ATTENTION = {
    "n_heads": 8,
    "n_kv_heads": None,
    "head_dim": None,
    "window": None,
    "position": "rope",
    "rope_base": 10000.0,
    "relation": "qk",
    "max_len": 2048,
    "temperature": 1.0,
    "qk_norm": False,
    "backend": "auto",
}


def attention(**options):
    return {"class_path": "seqarch_attention.Attention", "init_args": {**ATTENTION, **options}}


@pytest.fixture(autouse=True)
def no_arguments_of_pytest(monkeypatch):
    monkeypatch.setattr("sys.argv", ["seqarch"])


def build(arguments: list[str]) -> SequenceModule:
    """The module of a command line, as LightningCLI builds it."""
    base = ["--model.vocab_size=32", "--model.d_model=16", "--model.n_layers=2"]
    cli = LightningCLI(
        SequenceModule,
        run=False,
        args=[*base, *arguments],
        save_config_callback=None,
        seed_everything_default=False,
        auto_configure_optimizers=False,
        trainer_defaults={"logger": False, "accelerator": "cpu", "enable_checkpointing": False},
    )
    return cli.model


def test_a_class_and_its_options_on_the_command_line():
    module = build(["--model.mixer=Attention", "--model.mixer.n_heads=4", "--model.channel_mixer.d_ff=24"])
    assert module.model.mixers[1].n_heads == 4
    assert module.model.mixers[1].layer_idx == 1
    assert module.hparams.mixer == [attention(n_heads=4)]
    assert module.hparams.channel_mixer == {"class_path": "seqarch.model.SwiGLU", "init_args": {"d_ff": 24}}


def test_a_hybrid_and_a_schedule_in_a_recipe(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        """
model:
  mixer:
    - {class_path: Attention, init_args: {n_heads: 2}}
    - {class_path: Attention, init_args: {n_heads: 4, window: 3}}
  channel_mixer: null
  optimizer: {lr: 0.01, betas: [0.8, 0.9]}
  schedule: {class_path: WarmupStableDecay, init_args: {warmup_steps: 3, decay_tokens: 1000}}
"""
    )
    module = build([f"--config={recipe}"])
    assert [m.n_heads for m in module.model.mixers] == [2, 4]
    assert module.model.channel_mixers == []
    assert module.optimizer_config == AdamWConfig(lr=0.01, betas=(0.8, 0.9))
    assert module.schedule == WarmupStableDecay(warmup_steps=3, decay_tokens=1000)
    assert module.hparams.mixer == [attention(n_heads=2), attention(n_heads=4, window=3)]


def test_a_schedule_on_the_command_line():
    module = build(["--model.mixer=Attention", "--model.schedule=Cosine", "--model.schedule.min_ratio=0.25"])
    assert module.schedule == Cosine(min_ratio=0.25)


def test_the_command_line_and_python_store_the_same():
    command_line = build(["--model.mixer=Attention", "--model.mixer.n_heads=2"])
    python = tiny(mixer=partial(Attention, n_heads=2))
    a, b = dict(command_line.hparams), dict(python.hparams)
    assert a.pop("mixer") == [b.pop("mixer")]
    assert a == b
    assert differences(command_line.hparams, python.hparams) == []


@pytest.mark.parametrize(
    ("factory", "options"),
    [
        (Attention, {}),
        (partial(Attention, n_heads=4), {"n_heads": 4}),
        (partial(partial(Attention, n_heads=4, window=7), n_heads=2), {"n_heads": 2, "window": 7}),
    ],
)
def test_classes_and_partials_have_a_class_path(factory: Callable, options: dict):
    assert to_plain({"mixer": factory}) == {"mixer": attention(**options)}


@pytest.mark.parametrize(
    "factory",
    [lambda d: None, partial(lambda d, n: None, n=1), partial(Attention, 16), partial(Attention, dtype=torch.float32)],
)
def test_what_cannot_be_named_is_noted(factory):
    stored = to_plain({"mixer": factory})["mixer"]
    assert isinstance(stored, str)
    assert stored.startswith("not stored: ")


def test_hyper_parameters_are_plain_data(tmp_path):
    module = tiny(schedule=WarmupStableDecay(warmup_steps=1), optimizer=AdamWConfig(lr=0.5))
    torch.save(dict(module.hparams), tmp_path / "hp.pt")
    assert torch.load(tmp_path / "hp.pt", weights_only=True) == module.hparams
    assert module.hparams.optimizer == {
        "lr": 0.5,
        "betas": [0.9, 0.95],
        "eps": 1e-8,
        "weight_decay": 0.1,
        "fused": None,
    }
    assert module.hparams.schedule["class_path"] == "seqarch.training.schedule.WarmupStableDecay"


def test_the_shortest_path_that_is_this_class():
    assert class_path(SwiGLU) == "seqarch.model.SwiGLU"
    assert class_path(Attention) == "seqarch_attention.Attention"
    assert class_path(Schedule) == "seqarch.training.schedule.Schedule"
    assert class_path(type("Attention", (), {"__module__": "seqarch_attention"})) is None


def test_differences_are_of_the_architecture_only():
    a = tiny()
    assert differences(a.hparams, tiny(optimizer=AdamWConfig(lr=9.0), z_loss=0.1, max_tokens=5).hparams) == []
    two = [partial(Attention, n_heads=2), partial(Attention, n_heads=4)]
    found = differences(a.hparams, tiny(n_layers=3, mixer=two).hparams)
    assert found[0] == "n_layers: 2 in the checkpoint, 3 here"
    assert "mixer[1].n_heads: nothing in the checkpoint, 4 here" in found


def test_help_explains_each_option():
    parser = ArgumentParser()
    parser.add_class_arguments(SequenceModule, "model")
    text = " ".join(parser.format_help().split())
    for phrase in (
        "Number of token ids V",
        "Length of training in tokens",
        "Peak learning rate",
        "Stop training after so many steps in a row",
    ):
        assert phrase in text
