"""The format hf: transformers computes what the trainer does, to the bit, and generates what seqarch does."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

import seqarch.hf
from seqarch.evaluation.generation import generate
from seqarch.export.read import import_model
from seqarch.export.write import export_model
from seqarch.model import SwiGLU
from seqarch.training.rebuild import load_module
from seqarch_attention import Attention
from seqarch_deltanet import DeltaNet, GatedDeltaNet
from seqarch_linear import Based
from seqarch_mamba import Mamba1, Mamba2
from seqarch_rwkv import RWKV5, RWKV6, RWKV7, RWKVChannelMix
from seqarch_top1 import Top1Chunk, Top1Element
from tests.export.models import tokens, write_model

MODELS = {
    "Attention": (partial(Attention, n_heads=4), SwiGLU),
    "Attention, window": (partial(Attention, n_heads=4, window=8, n_kv_heads=2), SwiGLU),
    "Top1Element": (partial(Top1Element, n_heads=4), SwiGLU),
    "Top1Chunk": (partial(Top1Chunk, n_heads=4, chunk_size=8), SwiGLU),
    "Mamba1": (Mamba1, None),
    "Mamba2": (partial(Mamba2, head_dim=16, state_dim=8), None),
    "RWKV5": (partial(RWKV5, n_heads=2), RWKVChannelMix),
    "RWKV6": (partial(RWKV6, n_heads=2), RWKVChannelMix),
    "RWKV7": (partial(RWKV7, n_heads=2), partial(RWKVChannelMix, gate=False)),
    "DeltaNet": (partial(DeltaNet, n_heads=2), SwiGLU),
    "GatedDeltaNet": (partial(GatedDeltaNet, n_heads=2), SwiGLU),
    "Based": (partial(Based, n_heads=2), SwiGLU),
    "Mamba2 and Attention": ([partial(Mamba2, head_dim=16, state_dim=8), partial(Attention, n_heads=4)], SwiGLU),
}


def exported(folder: Path, name: str = "Attention", **options):
    """The trainer's module and the folder of its export."""
    mixer, channel_mixer = MODELS[name]
    module = write_model(folder / "run", mixer, channel_mixer, **options)
    return module, export_model(folder / "run", folder / "out")


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_logits_and_greedy_text_are_the_trainer_s(tmp_path, name):
    module, out = exported(tmp_path, name)
    model = AutoModelForCausalLM.from_pretrained(out)
    assert type(model) is seqarch.hf.SeqArchForCausalLM
    x = tokens(40)
    assert torch.equal(model(x).logits, module.model(x)[0])

    prompt = x[:1, :11]
    text = model.generate(prompt, max_new_tokens=15, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert text[0, 11:].tolist() == list(generate(module.model, prompt[0].tolist(), 15, temperature=0))

    import_model(out, tmp_path / "back.safetensors")
    assert torch.equal(load_module(tmp_path / "back.safetensors").model(x)[0], module.model(x)[0])


@torch.no_grad()
def test_what_is_saved_and_loaded_again_is_the_same(tmp_path):
    module, out = exported(tmp_path, "GatedDeltaNet", tie_embeddings=False)
    first = AutoModelForCausalLM.from_pretrained(out)
    first.save_pretrained(tmp_path / "again")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert torch.equal(again(tokens(9)).logits, module.model(tokens(9))[0])
    assert again.config.mixer == first.config.mixer
    assert again.generation_config.eos_token_id == 0


@torch.no_grad()
def test_generation_without_a_cache_in_beams_and_in_batches(tmp_path):
    _, out = exported(tmp_path, "Mamba2 and Attention")
    model = AutoModelForCausalLM.from_pretrained(out)
    for options in ({}, {"num_beams": 3}, {"num_beams": 2, "num_return_sequences": 2}):
        options |= {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        assert torch.equal(
            model.generate(tokens(10), **options), model.generate(tokens(10), use_cache=False, **options)
        )


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
def test_loss_is_that_of_the_next_token_and_checkpointing_changes_no_gradient(tmp_path):
    module, out = exported(tmp_path, "RWKV7")
    model = AutoModelForCausalLM.from_pretrained(out).train()
    x = tokens(12)
    labels = x.clone()
    labels[:, 5] = -100
    loss = model(x, labels=labels).loss
    torch.testing.assert_close(loss, module.model(x[:, :-1], labels=labels[:, 1:]).nll)
    loss.backward()
    plain = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    model.gradient_checkpointing_enable()
    assert model.model.activation_checkpointing
    model(x, labels=labels).loss.backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, plain[name])


@torch.no_grad()
def test_padding_is_harmless_on_the_right_and_refused_elsewhere(tmp_path):
    _, out = exported(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(out)
    x, mask = tokens(10), torch.ones(2, 10, dtype=torch.int64)
    mask[1, 7:] = 0
    changed = torch.where(mask == 1, x, 0)
    torch.testing.assert_close(model(changed, attention_mask=mask).logits[1, :7], model(x).logits[1, :7])
    with pytest.raises(ValueError, match="pad on the right"):
        model(x, attention_mask=mask.flip(1))
    with pytest.raises(ValueError, match="prompts of unequal length"):
        model.generate(x, attention_mask=mask, max_new_tokens=2)
    with pytest.raises(ValueError, match="new_cache"):
        model(x, use_cache=True)


def test_parameters_that_stay_float32_do_so(tmp_path):
    _, out = exported(tmp_path, "RWKV7")
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.bfloat16)
    dtypes = {n: p.dtype for n, p in model.named_parameters()}
    assert dtypes["model.blocks.0.mixer.x_r"] == dtypes["model.blocks.1.mixer.g_norm.weight"] == torch.float32
    assert dtypes["model.blocks.0.mixer.r_proj.weight"] == dtypes["model.embedding.weight"] == torch.bfloat16
    assert model(tokens(5)).logits.dtype == torch.bfloat16


def test_nothing_that_a_config_names_is_imported(tmp_path, monkeypatch):
    _, out = exported(tmp_path)
    (tmp_path / "foreign_module.py").write_text("from pathlib import Path\nPath(__file__).with_name('ran').touch()\n")
    monkeypatch.syspath_prepend(tmp_path)
    config = json.loads((out / "config.json").read_text())
    for option in ("mixer", "channel_mixer"):
        changed = {**config, option: {"class_path": "foreign_module.Foreign"}}
        changed["requires"] = {"foreign_module.Foreign": "foreign-plugin 1.2"}
        (out / "config.json").write_text(json.dumps(changed))
        AutoConfig.from_pretrained(out)
        message = rf"{option} needs foreign_module\.Foreign.*trained with foreign-plugin 1\.2: install foreign-plugin"
        with pytest.raises(ValueError, match=message):
            AutoModelForCausalLM.from_pretrained(out)
        with pytest.raises(ValueError, match=rf"{option} needs foreign_module\.Foreign"):
            import_model(out, tmp_path / "back.safetensors")
    assert not (tmp_path / "ran").exists()


def test_a_pickle_is_not_read(tmp_path):
    _, out = exported(tmp_path)
    torch.save(load_file(out / "model.safetensors"), out / "pytorch_model.bin")
    (out / "model.safetensors").unlink()
    with pytest.raises(OSError, match=r"model\.safetensors"):
        AutoModelForCausalLM.from_pretrained(out)
    with pytest.raises(ValueError, match="can run code"):
        AutoModelForCausalLM.from_pretrained(out, use_safetensors=False)
    with pytest.raises(ValueError, match="only weights in safetensors are read"):
        import_model(out, tmp_path / "back.safetensors")


def test_a_file_without_some_weights_is_refused(tmp_path):
    _, out = exported(tmp_path, "RWKV7")
    from safetensors.torch import save_file

    weights = load_file(out / "model.safetensors")
    del weights["model.blocks.0.mixer.k_k"]
    save_file(weights, out / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match="some weights of a RWKV7, but not all"):
        AutoModelForCausalLM.from_pretrained(out)
    with pytest.raises(ValueError, match=r"lacks blocks\.0\.mixer\.k_k"):
        import_model(out, tmp_path / "back.safetensors")
