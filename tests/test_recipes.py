"""Every recipe: parsed and built whole, and trained for two steps at a reduced width through the command line."""

import csv
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.cli import LightningArgumentParser

from seqarch.cli import main
from seqarch.data import StepDataModule
from seqarch.discovery import plugins
from seqarch.training.module import SequenceModule

RECIPES = sorted(Path("recipes").glob("*.yaml"))
MODELS = [r for r in RECIPES if r.stem != "mixed"]
SIZES = {"110m": 110e6, "1.3b": 1.3e9}
HYBRIDS = ("mamba2_top1chunk", "gateddeltanet_w256")
SHARDED = Path("recipes/1.3b_top1chunk.yaml")
NARROW = {
    "model.d_model": 32,
    "model.n_layers": 2,
    "model.vocab_size": 512,
    "model.compile": "false",
    "model.mixer.n_heads": 2,
    "model.max_tokens": "null",
    "model.val_every_n_steps": 2,
    "model.schedule.warmup_tokens": "null",
    "model.schedule.warmup_steps": 1,
    "data.seq_len": 48,
    "data.batch_size": 4,
    "data.micro_batch_size": 2,
    "data.max_val_tokens": 500,
    "data.num_workers": 0,
    "trainer.max_steps": 2,
    "trainer.log_every_n_steps": 1,
    "trainer.accelerator": "cpu",
    "trainer.devices": 1,
    "trainer.precision": "32-true",
    "trainer.strategy": "auto",
}


def arguments(*recipes, **options):
    config = [word for recipe in recipes for word in ("--config", str(recipe))]
    return config + [word for name, value in options.items() for word in (f"--{name}", str(value))]


def parse(*recipes):
    plugins()
    parser = LightningArgumentParser()
    parser.add_argument("--config", action="config")
    parser.add_argument("--seed_everything", type=int)
    parser.add_argument("--checkpoint_every_n_steps", type=int)
    parser.add_lightning_class_args(Trainer, "trainer")
    parser.add_lightning_class_args(SequenceModule, "model")
    parser.add_lightning_class_args(StepDataModule, "data", subclass_mode=True)
    return parser, parser.parse_args(arguments(*recipes))


def parameters(recipe):
    parser, config = parse(recipe)
    model = parser.instantiate(config).model.model
    assert all(p.is_meta for p in model.parameters())
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("recipe", [r for r in MODELS if r.stem != "quickstart"], ids=lambda r: r.stem)
def test_parameter_counts(recipe):
    size = recipe.stem.split("_")[0]
    assert parameters(recipe) == pytest.approx(SIZES[size], rel=0.02)
    base = parameters(Path("recipes") / f"{size}_transformer.yaml")
    assert parameters(recipe) == pytest.approx(base, rel=0.02)


def test_the_recipes_of_this_set_exist():
    mixers = (
        *("transformer", "transformer_w256", "top1element", "top1chunk", "top1chunk_exact", "mamba1", "mamba2"),
        *("rwkv5", "rwkv6", "rwkv7", "deltanet", "gateddeltanet", "based", *HYBRIDS),
    )
    assert {r.stem for r in MODELS} >= {f"{size}_{mixer}" for size in SIZES for mixer in mixers} | {"quickstart"}


@pytest.mark.parametrize("recipe", [r for r in MODELS if r.stem != "quickstart"], ids=lambda r: r.stem)
def test_hyper_parameters_of_practice(recipe):
    _, config = parse(recipe)
    optimizer, data = config.model.optimizer, config.data.init_args
    assert tuple(optimizer.betas) == (0.9, 0.95)
    assert optimizer.weight_decay == 0.1
    assert optimizer.lr == {"110m": 1e-3, "1.3b": 4e-4}[recipe.stem.split("_")[0]]
    assert config.trainer.gradient_clip_val == 1.0
    assert data.batch_size * data.seq_len == 2**19
    assert config.model.max_tokens == 100e9
    assert data.train_domains == ["cc", "c4"]


def test_mixed_is_the_other_setting_of_any_recipe():
    _, config = parse("recipes/110m_transformer.yaml", "recipes/mixed.yaml")
    assert config.data.class_path.endswith("MixedDomainDataModule")
    assert config.data.init_args.seq_len == 2048
    assert "train_domains" not in config.data.init_args or config.data.init_args.train_domains is None


def test_the_approximate_recipe_is_approximate_and_sharded():
    _, config = parse("recipes/1.3b_top1chunk.yaml")
    assert config.model.mixer.class_path.endswith("Top1Chunk")
    assert (config.model.mixer.init_args.selection, config.model.mixer.init_args.chunk_size) == ("approx", 128)
    assert config.trainer.strategy.class_path.endswith("FSDP2Strategy")


def read_metrics(run_dir):
    with (run_dir / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


def narrow(recipe):
    """What else makes a recipe small; None takes an option out of ``NARROW``."""
    if recipe.stem == "quickstart":
        return {"data.train_domains": "[cc, c4]"}
    mixer = recipe.stem.split("_", 1)[1]
    without_mlp = mixer.startswith("mamba")
    own = {} if without_mlp else {"model.channel_mixer.d_ff": 64}
    if mixer in HYBRIDS:  # a list: its members' options cannot be set by name
        return {**own, "model.d_model": 192, "model.n_layers": 4, "model.mixer.n_heads": None}
    if mixer == "rwkv7":
        return {**own, "model.d_model": 64, "model.mixer.n_heads": None}
    return {**own, "model.mixer.n_heads": None} if without_mlp else own


def train(tmp_path, recipes, corpus_path, **options):
    options = {**NARROW, "data.path": corpus_path, "run_dir": tmp_path / "run", **options}
    options = {name: value for name, value in options.items() if value is not None}
    main(["fit", *arguments(*recipes, **options)])
    return read_metrics(tmp_path / "run")


@pytest.mark.parametrize(
    ("recipe", "setting"),
    [(r, s) for r in MODELS for s in ("limited", "mixed") if (r.stem, s) != ("quickstart", "mixed")],
    ids=lambda x: getattr(x, "stem", x),
)
def test_two_steps_at_reduced_width(recipe, setting, tmp_path, corpus_path, capsys):
    recipes = [recipe] if setting == "limited" else [recipe, Path("recipes/mixed.yaml")]
    rows = train(tmp_path, recipes, corpus_path, **narrow(recipe))
    losses = [float(row["value"]) for row in rows if row["name"] == "train/loss"]
    assert len(losses) == 2
    assert losses[0] == pytest.approx(math.log(512), abs=0.1)
    validated = {row["name"] for row in rows if row["name"].startswith("val/loss/")}
    assert validated >= {"val/loss/cc", "val/loss/c4", "val/loss/github", "val/loss/id"}
    assert ("val/loss/ood" in validated) == (setting == "limited")
    assert re.search(r"github", capsys.readouterr().out)


def test_the_sharded_recipe_trains_on_two_processes(tmp_path, corpus_path):
    """FSDP2 over gloo: the same losses as one process."""
    own = {"model.channel_mixer.d_ff": 64, "model.mixer.chunk_size": 16}
    alone = train(tmp_path / "alone", [SHARDED], corpus_path, **own)
    options = {**NARROW, **own, "data.path": corpus_path, "run_dir": tmp_path / "two", "trainer.devices": 2}
    del options["trainer.strategy"]
    command = [sys.executable, "-m", "seqarch", "fit", *arguments(SHARDED, **options)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    two = read_metrics(tmp_path / "two")
    for name in ("train/loss", "val/loss/cc", "val/loss/ood"):
        one, other = ([float(r["value"]) for r in rows if r["name"] == name] for rows in (alone, two))
        assert one == pytest.approx(other, rel=1e-5)
        assert len(one) >= 1
