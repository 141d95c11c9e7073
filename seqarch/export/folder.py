"""The files of an exported model: weights, tokenizer and settings of generation."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict
from safetensors import SafetensorError, safe_open
from torch import Tensor

from seqarch.data.tokenizer import find_eos, load_tokenizer, vocabulary_size

WEIGHTS = "model.safetensors"
CONFIG = "config.json"
_INDEX = "model.safetensors.index.json"
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]B)", re.IGNORECASE)


def check_size(size: str) -> str:
    """A size such as 5GB, as it is.

    Raises:
        ValueError: If it is none.
    """
    if not _SIZE.fullmatch(size) or float(_SIZE.fullmatch(size)[1]) == 0:  # pyright: ignore[reportOptionalSubscript]
        raise ValueError(f"max_shard_size must be a number and KB, MB, GB or TB, such as 5GB, got '{size}'")
    return size


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a file of settings."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_weights(folder: Path, weights: Mapping[str, Tensor], max_shard_size: str) -> None:
    """Write ``model.safetensors``, or shards and their index where it would be larger than ``max_shard_size``."""
    # each name gets a tensor of its own, also where layers share one: a reader looks for every name
    own = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in weights.items()}
    save_torch_state_dict(own, folder, max_shard_size=max_shard_size, metadata={"format": "pt"})


def read_weights(folder: Path) -> dict[str, Tensor]:
    """The weights of a model's folder, from ``model.safetensors`` or its shards.

    Raises:
        ValueError: If there are none, or they are damaged; files of other kinds, which can hold code, are not read.
    """
    names = [WEIGHTS]
    if (folder / _INDEX).is_file():
        names = sorted(set(read_json(folder / _INDEX).get("weight_map", {}).values()))
    weights: dict[str, Tensor] = {}
    for name in names:
        path = folder / Path(name).name  # in this folder, whatever the index says
        if not path.is_file():
            raise ValueError(f"{folder} has no {path.name}: only weights in safetensors are read")
        try:
            with safe_open(path, framework="pt") as file:
                weights.update({key: file.get_tensor(key) for key in file.keys()})  # noqa: SIM118
        except SafetensorError as error:
            raise ValueError(f"{path} cannot be read: it is damaged or cut short ({error})") from error
    return weights


def read_json(path: Path) -> dict[str, Any]:
    """A file of settings.

    Raises:
        ValueError: If it is missing or none.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist: this is no folder of an exported model") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} is no set of entries")
    return content


def write_tokenizer(folder: Path, source: Path, vocab_size: int) -> dict[str, int]:
    """Copy a tokenizer.json as it is, with the files that transformers reads beside it.

    Returns:
        Ids of the special tokens. There is one, which ends a document, and starts one, and fills up.

    Raises:
        ValueError: If it is no tokenizer, has no such token, or more ids than the model.
    """
    tokenizer = load_tokenizer(source)
    if (size := vocabulary_size(tokenizer)) > vocab_size:
        raise ValueError(f"tokenizer: {source} has {size} ids, and the model only {vocab_size}: it is another's")
    token, token_id = find_eos(tokenizer)
    special = {"bos_token": token, "eos_token": token, "pad_token": token}
    (folder / "tokenizer.json").write_bytes(source.read_bytes())
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            "model_input_names": ["input_ids", "attention_mask"],
            "padding_side": "right",
            **special,
        },
    )
    write_json(folder / "special_tokens_map.json", special)
    return {"bos_token_id": token_id, "eos_token_id": token_id, "pad_token_id": token_id}


def dtype_of(weights: Mapping[str, Tensor]) -> str:
    """The type that most numbers have, as config.json names it."""
    counts: dict[torch.dtype, int] = {}
    for tensor in weights.values():
        counts[tensor.dtype] = counts.get(tensor.dtype, 0) + tensor.numel()
    return str(max(counts, key=lambda dtype: counts[dtype])).removeprefix("torch.")
