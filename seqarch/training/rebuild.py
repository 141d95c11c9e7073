"""A model from a checkpoint alone, and whether a checkpoint is of a given model."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from seqarch.model.options import ARCHITECTURE
from seqarch.training.checkpoint import check_resumable, read_checkpoint
from seqarch.training.hyperparameters import NOT_STORED, differences, from_plain
from seqarch.training.module import SequenceModule
from seqarch.training.optimizer import build_adamw
from seqarch.training.sharded import by_name, write_sharded


def load_module(path: str | os.PathLike, map_location: str | torch.device = "cpu") -> SequenceModule:
    """Rebuild a trained model from a checkpoint alone, whoever made it: no code runs but that of installed plugins.

    Args:
        path: A checkpoint, a file or a folder of shards.
        map_location: The device to put it on.

    Raises:
        ValueError: If the file is no checkpoint or damaged, if a plugin that it needs is not installed, or if its
            model was built by a function that a checkpoint cannot name.
    """
    checkpoint = read_checkpoint(path, map_location)
    options = {name: v for name, v in checkpoint["hyper_parameters"].items() if name != "_instantiator"}
    _check_stored(Path(path), options)
    try:
        built = from_plain(options)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    try:
        module = SequenceModule(**built)
    except Exception as error:  # whatever a plugin's class raises
        raise ValueError(
            f"{path} cannot be rebuilt with the versions installed here of what it was trained with: {error}"
        ) from error
    module.seed = checkpoint["seqarch"]["seed"]
    module.configure_model()
    try:
        module.load_state_dict(checkpoint["state_dict"])
    except RuntimeError as error:
        raise ValueError(f"{path}: its weights are not those of its own hyper-parameters: {error}") from error
    return module.to(map_location).eval()


def check_same_architecture(path: str | os.PathLike, module: SequenceModule, *, training: bool = False) -> None:
    """Compare a checkpoint with a module that is to be given its weights, before anything large is read.

    Args:
        path: The checkpoint.
        module: The module.
        training: It is to be trained further.

    Raises:
        ValueError: If the file is no checkpoint, holds weights only and is to be trained further, or is of another
            architecture: which hyper-parameters differ.
    """
    stored = read_checkpoint(path, options_only=True)
    if training:
        check_resumable(path, stored)
    if lines := differences(stored["hyper_parameters"], module.hparams):
        raise ValueError(
            f"{path} is of another architecture than model (its own is in the config.yaml of its run folder):\n  "
            + "\n  ".join(lines)
        )


def to_shards(source: str | os.PathLike, target: str | os.PathLike) -> None:
    """Write a checkpoint as the folder of shards of one process, which any number of processes goes on from.

    Raises:
        ValueError: If ``source`` is no checkpoint, is damaged, or holds weights only.
        OSError: If it cannot be written.
    """
    checkpoint = read_checkpoint(source)
    check_resumable(source, checkpoint)
    module = load_module(source)
    optimizer = build_adamw(module.optimizer_config, module.model, loss_scaling=False)
    checkpoint["optimizer_states"] = [by_name(state, module, optimizer) for state in checkpoint["optimizer_states"]]
    write_sharded(target, checkpoint)


def _check_stored(path: Path, options: dict[str, Any]) -> None:
    for name in ARCHITECTURE:
        value = options.get(name)
        for note in value if isinstance(value, list) else [value]:
            if isinstance(note, str) and note.startswith(NOT_STORED):
                raise ValueError(
                    f"{path} does not say how to build its {name} ({note.removeprefix(NOT_STORED)}): build the "
                    "SequenceModule yourself and load the checkpoint's state_dict"
                )
