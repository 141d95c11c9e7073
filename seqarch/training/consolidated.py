"""A checkpoint as one safetensors file: weights under their names, everything else as JSON in the file's metadata."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from seqarch.training.files import written_aside

SUFFIX = ".safetensors"
_REST, _SUMS = "seqarch", "crc32"  # keys of the metadata
_KIND = "__kind__"  # marks what JSON has no form of its own for


def is_consolidated(path: str | os.PathLike) -> bool:
    """Whether a path names a safetensors file."""
    return Path(path).suffix == SUFFIX


def write_consolidated(path: str | os.PathLike, checkpoint: Mapping[str, Any], *, with_optimizer: bool = False) -> None:
    """Write a checkpoint of one process as a safetensors file, whole or not at all.

    Args:
        path: Where to; an older file is replaced.
        checkpoint: As ``read_checkpoint`` gives it.
        with_optimizer: Keep the optimiser's state, which training needs to go on; three times the size.

    Raises:
        ValueError: If it holds something other than tensors, numbers, texts, lists and dictionaries.
        OSError: If it cannot be written.
    """
    tensors: dict[str, Tensor] = dict(checkpoint["state_dict"])
    left_out = {"state_dict"} if with_optimizer else {"state_dict", "optimizer_states"}
    rest = _encode({name: value for name, value in checkpoint.items() if name not in left_out}, (), tensors)
    # the format holds each tensor once and dense; parameters that mixers share are written under each of their names
    tensors = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
    sums = {name: _sum(tensor) for name, tensor in tensors.items()}
    metadata = {"format": "pt", _REST: json.dumps(rest), _SUMS: json.dumps(sums)}
    with written_aside(Path(path)) as aside:
        try:
            aside.touch()
            mode = aside.stat().st_mode
            save_file(tensors, aside, metadata)
            aside.chmod(mode)  # safetensors hides it from everyone else
        except SafetensorError as error:
            raise OSError(str(error)) from error


def read_consolidated(path: str | os.PathLike, map_location: Any = "cpu", *, options_only: bool = False) -> dict:
    """The checkpoint that such a file was made from; without ``optimizer_states`` if those were left out.

    Args:
        path: The file.
        map_location: The device to put its tensors on.
        options_only: Leave ``state_dict`` and ``optimizer_states`` empty.

    Raises:
        ValueError: If it is damaged, or a safetensors file of another origin.
    """
    try:
        with safe_open(path, framework="pt", device=str(map_location)) as file:
            metadata = file.metadata() or {}
            if not {_REST, _SUMS} <= metadata.keys():
                raise ValueError(f"{path} is no checkpoint of seqarch: its metadata lacks an entry {_REST!r}")
            sums = json.loads(metadata[_SUMS])

            def get(name: str) -> Tensor:
                tensor = file.get_tensor(name)
                if _sum(tensor) != sums[name]:
                    raise ValueError(f"{path}: the checksum of {name} does not match: it is damaged")
                return tensor

            names = set(sums)
            rest = json.loads(metadata[_REST])
            if options_only and "optimizer_states" in rest:
                rest["optimizer_states"] = []
            checkpoint = _decode(rest, get, names)
            checkpoint["state_dict"] = {} if options_only else {name: get(name) for name in sums if name in names}
            return checkpoint
    except (SafetensorError, OSError, json.JSONDecodeError, KeyError) as error:
        raise ValueError(f"{path} cannot be read: it is damaged, cut short, or no checkpoint ({error})") from error


def _sum(tensor: Tensor) -> int:
    return zlib.crc32(tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().data)


def _encode(value: Any, place: tuple[str, ...], tensors: dict[str, Tensor]) -> Any:
    """A value as JSON has it; tensors go into ``tensors`` under the name of their place."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor):
        name = ".".join(place)
        if name in tensors:
            raise ValueError(f"two tensors of the checkpoint would be called {name}")
        tensors[name] = value
        return {_KIND: "tensor", "name": name}
    if isinstance(value, list | tuple):
        items = [_encode(item, (*place, str(i)), tensors) for i, item in enumerate(value)]
        return items if isinstance(value, list) else {_KIND: "tuple", "items": items}
    if isinstance(value, Mapping):
        pairs = [(key, _encode(item, (*place, str(key)), tensors)) for key, item in value.items()]
        if all(isinstance(key, str) and key != _KIND for key, _ in pairs):
            return dict(pairs)
        return {_KIND: "dict", "items": pairs}
    raise ValueError(f"{'.'.join(place)} of the checkpoint is a {type(value).__name__}, which JSON has no form for")


def _decode(value: Any, get: Callable[[str], Tensor], names: set[str]) -> Any:
    """The opposite; what it takes from the file is taken out of ``names``."""
    if isinstance(value, list):
        return [_decode(item, get, names) for item in value]
    if not isinstance(value, dict):
        return value
    kind = value.get(_KIND)
    if kind == "tensor":
        names.discard(value["name"])
        return get(value["name"])
    if kind == "tuple":
        return tuple(_decode(value["items"], get, names))
    if kind == "dict":
        return {key: _decode(item, get, names) for key, item in value["items"]}
    return {key: _decode(item, get, names) for key, item in value.items()}
