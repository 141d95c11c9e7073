"""The files of an export: shards, tokenizer, card; and the commands' errors."""

import json
from functools import partial

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

import seqarch.hf  # noqa: F401  (registers)
from seqarch.cli import main
from seqarch.data.tokenizer import load_tokenizer
from seqarch.export.card import Card
from seqarch.export.write import export_model
from seqarch.training.checkpoint import read_checkpoint
from seqarch_attention import Attention
from tests.evaluation.folders import write_run
from tests.evaluation.simulated import Truth, simulate
from tests.export.models import tokens, write_model

MIXER = partial(Attention, n_heads=4)
FILES = ["README.md", "config.json", "generation_config.json", "special_tokens_map.json", "tokenizer.json"]


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """The folder of a run with configuration and metrics; its checkpoint is older than the last validation."""
    run_dir = tmp_path_factory.mktemp("runs") / "small"
    ((run,),) = simulate(np.random.default_rng(0), [0.0], [1], Truth())
    write_run(run_dir, run["nats"], run["tokens"], model_options={"channel_mixer": None})
    write_model(run_dir, MIXER, step=15)
    return run_dir


@pytest.fixture(scope="module")
def out(run_dir, tmp_path_factory):
    """Its export by the command."""
    out = tmp_path_factory.mktemp("out") / "model"
    main(["export", str(run_dir), str(out)])
    return out


def error(capsys, *arguments):
    with pytest.raises(SystemExit) as exit_:
        main([str(a) for a in arguments])
    assert exit_.value.code == 2
    return capsys.readouterr().err


def test_files(out):
    assert sorted(p.name for p in out.iterdir()) == sorted([*FILES, "model.safetensors", "tokenizer_config.json"])
    config = json.loads((out / "config.json").read_text())
    assert config["architectures"] == ["SeqArchForCausalLM"]
    assert config["requires"]["seqarch_attention.Attention"].startswith("seqarch ")
    assert config["max_position_embeddings"] == 100  # the sequences of the run
    assert config["seqarch"]["step"] == 15
    assert config["dtype"] == "float32"
    assert GenerationConfig.from_pretrained(out).eos_token_id == 0


def test_the_tokenizer_is_the_run_s(run_dir, out):
    tokenizer, own = AutoTokenizer.from_pretrained(out), load_tokenizer(run_dir / "tokenizer.json")
    text = "the grey horse ran over old hills"
    assert tokenizer(text).input_ids == own.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert tokenizer.bos_token_id == tokenizer.eos_token_id == tokenizer.pad_token_id == 0
    assert tokenizer(tokenizer.bos_token + text).input_ids[0] == 0


@torch.no_grad()
@pytest.mark.parametrize("fmt", ["hf", "llama"])
def test_shards(run_dir, tmp_path, fmt):
    one, many = tmp_path / "one", tmp_path / "many"
    export_model(run_dir, one, format=fmt)
    main(["export", str(run_dir), str(many), "--format", fmt, "--max_shard_size", "20KB"])
    shards = sorted(many.glob("model-*-of-*.safetensors"))
    assert len(shards) > 2
    assert all(p.stat().st_size < 40_000 for p in shards)
    assert not (many / "model.safetensors").exists()
    together = {name: t for p in shards for name, t in load_file(p).items()}
    whole = load_file(one / "model.safetensors")
    assert together.keys() == whole.keys()
    models = [AutoModelForCausalLM.from_pretrained(folder) for folder in (one, many)]
    assert torch.equal(models[0](tokens(9)).logits, models[1](tokens(9)).logits)
    main(["import", str(many), str(tmp_path / "back.safetensors")])
    back = read_checkpoint(tmp_path / "back.safetensors")
    original = read_checkpoint(run_dir / "checkpoints" / "last.ckpt")
    assert back["global_step"] == 15
    assert back["seqarch"]["tokens"] == 15_000
    assert all(torch.equal(t, back["state_dict"][n]) for n, t in original["state_dict"].items())


def test_what_is_imported_generates(out, tmp_path, capsys):
    main(["import", str(out), str(tmp_path / "back.safetensors")])
    assert "--tokenizer" in capsys.readouterr().out
    given = ["--ckpt", str(tmp_path / "back.safetensors"), "--tokenizer", str(out / "tokenizer.json")]
    main(["generate", *given, "--prompt", "grey", "--max_new_tokens", "3", "--device", "cpu"])
    assert capsys.readouterr().out.startswith("grey")


def test_card(run_dir, out):
    text = (out / "README.md").read_text()
    _, front, body = text.split("---\n", 2)
    assert yaml.safe_load(front) == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["seqarch", "Attention"],
    }
    lines = (run_dir / "metrics.csv").read_text().splitlines()
    at_ten = {r.split(",")[2]: float(r.split(",")[3]) for r in lines[1:] if r.startswith("10,")}
    assert "Of the validation at step 10." in body  # not of one after the checkpoint
    domains = [n for n in at_ten if n.startswith("val/loss/") and not n.endswith(("/id", "/ood"))]
    assert len(domains) > 2
    for name in domains:
        assert f"| {name.removeprefix('val/loss/')} | {at_ten[name]:.4f} |" in body
    assert "15,000 tokens in 15 optimiser steps" in body
    n = sum(t.numel() for t in load_file(out / "model.safetensors").values())
    assert f"{n:,} parameters" in body
    assert "seq_len: 100" in body
    assert "import seqarch.hf" in body
    assert "torch " in body


def test_the_card_of_a_checkpoint_alone(tmp_path):
    write_model(tmp_path / "run", MIXER)
    out = export_model(tmp_path / "run", tmp_path / "out", format="llama")
    body = (out / "README.md").read_text()
    assert "None were recorded" in body
    assert "Its data is not known" in body
    assert "seqarch.hf" not in body


def test_the_card_shows_no_folder_of_the_author():
    options = {"path": "/home/someone/corpora/slim", "weights": {"cc": 0.5}}
    card = Card(["A"], None, 1, 1, 1, 1, 1, 1, {"data": {"class_path": "D", "init_args": options}}, {}, 0)
    text = card.text(None, "a")
    assert "someone" not in text
    assert "path: slim" in text
    assert "Shares: cc 0.5" in text


def test_errors(run_dir, out, tmp_path, capsys):
    assert "exists already" in error(capsys, "export", run_dir, out)
    assert "there is no such checkpoint" in error(capsys, "export", tmp_path / "none", tmp_path / "a")
    assert "max_shard_size must be a number and" in error(
        capsys, "export", run_dir, tmp_path / "a", "--max_shard_size", "5 apples"
    )
    assert "there is no such tokenizer" in error(capsys, "export", run_dir, tmp_path / "a", "--tokenizer", "none.json")
    assert "--format must be one of hf" in error(capsys, "export", run_dir, tmp_path / "a", "--format", "gguf")
    assert "must end in .safetensors" in error(capsys, "import", out, tmp_path / "a")
    assert "no folder of an exported model" in error(capsys, "import", run_dir, tmp_path / "a.safetensors")
    assert list(tmp_path.iterdir()) == []


def test_a_tokenizer_of_another_model_is_refused(run_dir, tmp_path, capsys):
    text = json.loads((run_dir / "tokenizer.json").read_text())
    text["added_tokens"].append({**text["added_tokens"][0], "id": 400, "content": "<more>"})
    (tmp_path / "tokenizer.json").write_text(json.dumps(text))
    message = error(capsys, "export", run_dir, tmp_path / "a", "--tokenizer", tmp_path / "tokenizer.json")
    assert "and the model only 300" in message
    assert not (tmp_path / "a").exists()


def test_damaged_weights_are_refused(out, tmp_path, capsys):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_bytes((out / "config.json").read_bytes())
    (tmp_path / "model" / "model.safetensors").write_bytes((out / "model.safetensors").read_bytes()[:-10])
    assert "damaged or cut short" in error(capsys, "import", tmp_path / "model", tmp_path / "a.safetensors")
