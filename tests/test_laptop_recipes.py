"""The study at laptop scale: one architecture a file, over a base that holds everything else."""

import math
from pathlib import Path

import pytest

from seqarch.cli import main
from tests.test_recipes import parse, read_metrics

BASE = Path("recipes/laptop/base.yaml")
ARCHITECTURES = sorted(r for r in BASE.parent.glob("*.yaml") if r.stem not in ("base", "sweep"))


def build(recipe):
    parser, config = parse(BASE, recipe)
    return parser.instantiate(config).model.model


def test_the_thirteen_architectures_of_the_paper():
    built = [(type(m := build(r).mixers[0]).__name__, getattr(m, "window", None)) for r in ARCHITECTURES]
    names = "Attention Based DeltaNet GatedDeltaNet Mamba1 Mamba2 RWKV5 RWKV6 RWKV7 Top1Chunk Top1Chunk Top1Element"
    assert sorted(name for name, window in built if window is None) == names.split()
    assert [(name, window) for name, window in built if window is not None] == [("Attention", 64)]


@pytest.mark.parametrize("recipe", ARCHITECTURES, ids=lambda r: r.stem)
def test_parameters_are_equal_within_a_hundredth(recipe):
    count = sum(p.numel() for p in build(recipe).parameters())
    assert count == pytest.approx(1_460_000, rel=0.01)


@pytest.mark.parametrize("recipe", ARCHITECTURES, ids=lambda r: r.stem)
def test_a_recipe_changes_the_architecture_alone(recipe):
    before, after = (parse(*recipes)[1] for recipes in ((BASE,), (BASE, recipe)))
    for config in (before, after):
        for part in ("mixer", "channel_mixer", "n_layers"):
            config.model[part] = None
        config.config = None
    assert before == after


@pytest.mark.parametrize("name", ["mamba1", "rwkv7"])
def test_they_train_on_a_corpus_of_ones_own(name, tmp_path, corpus_path):
    options = {
        "data.path": corpus_path, "data.train_domains": "[cc,c4]", "model.vocab_size": 512, "data.seq_len": 32,
        "data.max_val_tokens": 300, "trainer.max_steps": 2, "model.schedule.warmup_steps": 1, "run_dir": tmp_path / "r",
    }  # fmt: skip
    words = [word for option, value in options.items() for word in (f"--{option}", str(value))]
    main(["fit", "--config", str(BASE), "--config", str(BASE.parent / f"{name}.yaml"), *words])
    values = {row["name"]: float(row["value"]) for row in read_metrics(tmp_path / "r")}
    assert values["train/loss"] == pytest.approx(math.log(512), abs=0.8)
    assert {"val/loss/cc", "val/loss/github", "val/loss/ood", "val/bpb/cc"} <= values.keys()
