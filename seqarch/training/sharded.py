"""Checkpoints in shards: a folder into which every process writes what it holds, and from which any number can read.

The folder holds the shards of ``torch.distributed.checkpoint``, ``meta.pt`` with everything that is no weight and no
moment (Lightning's name for it), and ``files.json`` with the size and the CRC-32 of every file.
"""

from __future__ import annotations

import json
import os
import pathlib
import pickle
import shutil
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from lightning.fabric.utilities.load import _METADATA_FILENAME as META
from torch import Tensor, nn
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer

from seqarch.training.files import free_space, sync_folder
from seqarch.training.together import ranks, together

FILES = "files.json"
_GROUPS = "optimizer_groups"  # in meta.pt, the groups of each optimiser, with names for parameters


def is_sharded(path: str | os.PathLike) -> bool:
    """Whether a checkpoint is a folder of shards, whole or not."""
    return (Path(path) / META).is_file() or (Path(path) / FILES).is_file()


# --- writing ----------------------------------------------------------------------------------------------------------


def write_sharded(path: str | os.PathLike, checkpoint: Mapping[str, Any]) -> None:
    """Write a checkpoint, on every process what it holds, beside its place, and move it there when all is on the disk.

    Args:
        path: The folder to write; one that exists is replaced.
        checkpoint: As Lightning makes it, ``state_dict`` and ``optimizer_states`` with names for parameters.

    Raises:
        OSError: On every process, if one cannot write. What was at ``path`` is left as it was.
    """
    path = Path(path)
    rank, world_size = ranks()
    aside = path.with_name(f".{path.name}.tmp")
    rest = dict(checkpoint)
    states = rest.pop("optimizer_states", [])
    tensors = _flat(rest.pop("state_dict"), [state["state"] for state in states])
    rest[_GROUPS] = [state["param_groups"] for state in states]

    def begin() -> None:
        if rank == 0:
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir(parents=True)

    def describe() -> dict[str, tuple[int, int]]:
        if rank == 0:
            with (aside / META).open("wb") as file:
                torch.save(rest, file)
                _to_disk(file)
        mine = sorted(file for file in aside.iterdir() if file.name != META)[rank::world_size]
        return {file.name: _sum(file) for file in (*mine, *([aside / META] if rank == 0 else []))}

    def publish() -> None:
        if rank != 0:
            return
        with (aside / FILES).open("w") as file:
            json.dump({name: found for part in sums for name, found in part.items()}, file)
            _to_disk(file)
        replaced = path.with_name(f".{path.name}.old")
        shutil.rmtree(replaced, ignore_errors=True)
        if path.exists():
            os.replace(path, replaced)
        os.replace(aside, path)
        shutil.rmtree(replaced, ignore_errors=True)
        sync_folder(path.parent)

    try:
        together(begin)
        with _quiet(), _dcp_errors(OSError):
            dcp.save(tensors, storage_writer=dcp.FileSystemWriter(aside))
        sums = together(describe)
        together(publish)
    except (OSError, ValueError) as error:
        if rank == 0:
            shutil.rmtree(aside, ignore_errors=True)
        raise OSError(f"cannot write the checkpoint {path}{free_space(path)}: {error}") from error


def _to_disk(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())


def _flat(state_dict: Mapping[str, Any], states: Sequence[Mapping[str, Mapping[str, Any]]]) -> dict[str, Any]:
    """Weights, and moments of each optimiser, under one key each."""
    found = {f"model/{name}": value for name, value in state_dict.items()}
    for i, state in enumerate(states):
        for name, values in state.items():
            found |= {f"optimizer_{i}/{name}/{kind}": torch.as_tensor(value) for kind, value in values.items()}
    return found


# --- checking ---------------------------------------------------------------------------------------------------------


def check_sharded(path: str | os.PathLike, part: tuple[int, int] = (0, 1), *, contents: bool = True) -> None:
    """See whether all files of a checkpoint are there and as they were written.

    Args:
        path: The checkpoint's folder.
        part: Which of how many parts of the files to read.
        contents: Read the files; else only their sizes are compared.

    Raises:
        ValueError: If one is missing, cut short or changed, with its name.
    """
    path = Path(path)
    try:
        files: dict[str, tuple[int, int]] = json.loads((path / FILES).read_text())
    except (OSError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: {FILES}, which lists its shards, is missing or damaged ({error})") from error
    missing = [name for name in sorted(files) if not (path / name).is_file()]
    if missing:
        raise ValueError(f"{path} lacks {', '.join(missing)} ({len(missing)} of {len(files)} files)")
    for name, (size, _) in sorted(files.items()):
        if (found := (path / name).stat().st_size) != size:
            raise ValueError(f"{path}: {name} has {found:,} bytes, of {size:,} that were written: it was cut short")
    for name in sorted(files)[part[0] :: part[1]] if contents else ():
        if _sum(path / name) != tuple(files[name]):
            raise ValueError(f"{path}: the checksum of {name} does not match: it is damaged")


def _sum(path: Path) -> tuple[int, int]:
    """Size and CRC-32 of a file."""
    size, crc = 0, 0
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            size, crc = size + len(block), zlib.crc32(block, crc)
    return size, crc


# --- reading ----------------------------------------------------------------------------------------------------------


def read_options(path: str | os.PathLike) -> dict[str, Any]:
    """Everything but the weights and the moments: the same keys as in a checkpoint of one file, with those empty.

    Raises:
        ValueError: If a file is missing or cut short, with its name.
    """
    check_sharded(path, contents=False)
    found = torch.load(Path(path) / META, weights_only=True)
    found.pop(_GROUPS)
    return {"state_dict": {}, "optimizer_states": [], **found}


def read_sharded(path: str | os.PathLike) -> dict[str, Any]:
    """A checkpoint whole, as if it had been written into one file.

    Raises:
        ValueError: If it is damaged, with the name of the file.
    """
    check_sharded(path)
    checkpoint = torch.load(Path(path) / META, weights_only=True)
    reader = _PlainReader(path)
    tensors: dict[str, Any] = {
        name: torch.empty(stored.size, dtype=stored.properties.dtype)
        for name, stored in reader.read_metadata().state_dict_metadata.items()
        if isinstance(stored, metadata.TensorStorageMetadata)
    }
    with _quiet(), _dcp_errors(ValueError):
        dcp.load(tensors, storage_reader=reader)
    prefix = "model/"
    checkpoint["state_dict"] = {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
    checkpoint["optimizer_states"] = [
        by_index({"state": _nested(tensors, i), "param_groups": groups})
        for i, groups in enumerate(checkpoint.pop(_GROUPS))
    ]
    return checkpoint


def load_sharded(path: str | os.PathLike, model: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, Any]:
    """Read into a sharded model and its optimisers, on every process what it holds.

    Returns:
        What else the checkpoint holds.

    Raises:
        ValueError: On every process, if the checkpoint is damaged, with the name of the file.
    """
    path = Path(path)
    together(lambda: check_sharded(path, ranks()))
    rest = torch.load(path / META, weights_only=True)
    weights = get_model_state_dict(model)
    states: list[Any] = [get_optimizer_state_dict(model, optimizer) for optimizer in optimizers]
    tensors = _flat(weights, [state["state"] for state in states])
    with _quiet(), _dcp_errors(ValueError):
        dcp.load(tensors, storage_reader=_PlainReader(path))
    set_model_state_dict(model, {name: tensors[f"model/{name}"] for name in weights})
    for i, (optimizer, groups) in enumerate(zip(optimizers, rest.pop(_GROUPS), strict=False)):
        state: Any = {"state": _nested(tensors, i), "param_groups": groups}
        set_optimizer_state_dict(model, optimizer, state)
    return rest


def load_whole(read: Callable[[], dict[str, Any]], model: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, Any]:
    """Spread a checkpoint of one file over a sharded model and its optimisers.

    Args:
        read: Gives the checkpoint; called in the first process only.
        model: The model.
        optimizers: Its optimisers.

    Returns:
        What else the checkpoint holds, on every process.

    Raises:
        ValueError: On every process, if it cannot be read.
    """
    weights: dict[str, Any] = {}
    states: list[dict[str, Any]] = [{} for _ in optimizers]

    def first() -> dict[str, Any] | None:
        if ranks()[0] != 0:
            return None
        checkpoint = read()
        weights.update(checkpoint.pop("state_dict"))
        for i, (state, optimizer) in enumerate(zip(checkpoint.pop("optimizer_states", ()), optimizers, strict=False)):
            states[i] = by_name(state, model, optimizer)
        return checkpoint

    rest = together(first)[0]
    assert rest is not None
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, weights, options=options)
    for optimizer, state in zip(optimizers, states, strict=True):
        set_optimizer_state_dict(model, optimizer, state, options=options)
    return rest


def by_index(state: Mapping[str, Any]) -> dict[str, Any]:
    """An optimiser's state, with the numbers that torch gives the parameters in place of their names."""
    numbers = count()
    index = {name: next(numbers) for group in state["param_groups"] for name in group["params"]}
    groups = [{**group, "params": [index[name] for name in group["params"]]} for group in state["param_groups"]]
    return {"state": {index[name]: values for name, values in state["state"].items()}, "param_groups": groups}


def by_name(state: Mapping[str, Any], model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """The opposite of ``by_index``."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    groups, known = [], {}
    for group, parameters in zip(state["param_groups"], (g["params"] for g in optimizer.param_groups), strict=True):
        named = [names[p] for p in parameters]
        known |= dict(zip(group["params"], named, strict=True))
        groups.append({**group, "params": named})
    return {"state": {known[number]: values for number, values in state["state"].items()}, "param_groups": groups}


def _nested(tensors: Mapping[str, Tensor], i: int) -> dict[str, dict[str, Tensor]]:
    """The moments of optimiser ``i`` by parameter."""
    found: dict[str, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        kind, name, *moment = key.split("/")
        if kind == f"optimizer_{i}":
            found.setdefault(name, {})[moment[0]] = value
    return found


class _PlainReader(dcp.FileSystemReader):
    """Reads tensors and nothing else: torch's own would run what a stranger's pickled index asks for."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> metadata.Metadata:
        index = Path(self.path) / ".metadata"
        try:
            with index.open("rb") as file:
                found: metadata.Metadata = _PlainUnpickler(file).load()
            kinds = {type(stored) for stored in found.state_dict_metadata.values()}
        except Exception as error:  # pickle fails in many ways
            raise ValueError(f"{index} cannot be read: {error}") from error
        if not kinds <= {metadata.TensorStorageMetadata}:
            raise ValueError(f"{index} lists something other than tensors, which is not read")
        found.storage_meta = found.storage_meta or metadata.StorageMeta()
        found.storage_meta.load_id = self.load_id
        return found


class _PlainUnpickler(pickle.Unpickler):
    """Knows the classes of a checkpoint's index only."""

    def find_class(self, module_name: str, name: str, /) -> Any:
        for module in (metadata, filesystem):
            found = getattr(module, name, None)
            if module_name == module.__name__ and isinstance(found, type) and found.__module__ == module_name:
                return found
        if module_name == "torch" and (name == "Size" or isinstance(getattr(torch, name, None), torch.dtype)):
            return getattr(torch, name)
        if (module_name, name) == ("torch.serialization", "_get_layout"):
            return lambda layout: getattr(torch, layout.removeprefix("torch."))
        if module_name.startswith("pathlib"):
            return pathlib.PurePosixPath
        raise pickle.UnpicklingError(f"it asks for {module_name}.{name}, which no checkpoint needs")


@contextmanager
def _quiet() -> Iterator[None]:
    """One process without a process group is no accident here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*single process", category=UserWarning)
        yield


@contextmanager
def _dcp_errors(kind: type[Exception]) -> Iterator[None]:
    """torch's account of which ranks failed, which is no ``Exception``, as one that is."""
    try:
        yield
    except CheckpointException as error:
        lines = [f"rank {rank}: {failure[0]}" for rank, failure in sorted(error.failures.items())]
        raise kind("; ".join(lines)) from error
