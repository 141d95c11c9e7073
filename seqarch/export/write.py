"""A checkpoint as the folder of a model that transformers or flash-linear-attention loads."""

from __future__ import annotations

import shutil
from importlib.metadata import packages_distributions, version
from pathlib import Path
from typing import Any

from torch import nn

from seqarch import __version__
from seqarch.class_paths import class_path
from seqarch.discovery import plugins
from seqarch.export.card import Card
from seqarch.export.folder import CONFIG, check_size, dtype_of, write_json, write_tokenizer, write_weights
from seqarch.export.formats import HF, find_format
from seqarch.model.options import ARCHITECTURE
from seqarch.training.checkpoint import read_checkpoint
from seqarch.training.module import SequenceModule
from seqarch.training.rebuild import load_module
from seqarch.training.runs import checkpoint_of, tokenizer_of


def export_model(
    ckpt: str | Path,
    out: str | Path,
    *,
    format: str = HF,
    max_shard_size: str = "5GB",
    tokenizer: str | Path | None = None,
) -> Path:
    """Write a model's folder, whole or not at all.

    Args:
        ckpt: Checkpoint, a file or a folder; or run folder (its last checkpoint).
        out: The folder to write.
        format: hf, or a native format that the model's mixer has.
        max_shard_size: Weights larger than this become several files.
        tokenizer: A tokenizer.json; by default the run folder's.

    Raises:
        ValueError: If one of the files cannot be read, ``out`` exists, or the format cannot express the model.
    """
    plugins()
    native = None if format == HF else find_format(format)
    check_size(max_shard_size)
    source, target = checkpoint_of(ckpt), Path(out)
    if target.exists():
        raise ValueError(f"{out} exists already: remove it, or name another")
    vocabulary = Path(tokenizer) if tokenizer is not None else tokenizer_of(source)
    if not vocabulary.is_file():
        raise ValueError(f"{vocabulary}: there is no such tokenizer; name one with --tokenizer")
    state = read_checkpoint(source, options_only=True)
    module = load_module(source)
    card = Card.of(source, module, step=state["global_step"], tokens=int(state["seqarch"]["tokens"]))
    if native is None:
        config, weights = _own_config(module), {f"model.{n}": p for n, p in module.model.state_dict().items()}
    else:
        config, weights = native.config(module.model), native.to_theirs(module.model.state_dict())
    aside = target.with_name(f".{target.name}.tmp")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        special = write_tokenizer(aside, vocabulary, module.model.vocab_size)
        config |= special | {
            "dtype": dtype_of(weights),
            "max_position_embeddings": card.seq_len or 2048,
            "seqarch": {"version": __version__, "step": card.step, "tokens": card.tokens},
        }
        write_json(aside / CONFIG, config)
        write_json(aside / "generation_config.json", special)
        write_weights(aside, weights, max_shard_size)
        (aside / "README.md").write_text(card.text(native, target.name), encoding="utf-8")
        aside.rename(target)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return target


def _own_config(module: SequenceModule) -> dict[str, Any]:
    """What ``seqarch.hf.SeqArchConfig`` takes."""
    model = module.model
    return {
        "model_type": "seqarch",
        "architectures": ["SeqArchForCausalLM"],
        **{name: module.hparams[name] for name in ARCHITECTURE},
        "requires": requirements([*model.mixers, *model.channel_mixers]),
    }


def requirements(modules: list[nn.Module]) -> dict[str, str]:
    """By class path, name and version of the distribution that a class comes from, where that is known."""
    owners = packages_distributions()
    of_plugins: dict[type, str] = {p.mixer: p.distribution for p in plugins() if p.mixer is not None}
    out: dict[str, str] = {}
    for cls in {type(module) for module in modules}:
        path = class_path(cls)
        names = owners.get(cls.__module__.split(".")[0], [])
        if path is not None and (cls in of_plugins or names):
            out[path] = of_plugins.get(cls) or f"{names[0]} {version(names[0])}"
    return dict(sorted(out.items()))
