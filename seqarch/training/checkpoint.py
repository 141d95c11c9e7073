"""Checkpoints on disk: written atomically, and read back into a model by themselves."""

from __future__ import annotations

import os
import shutil
import zipfile
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO

from seqarch.model.options import ARCHITECTURE
from seqarch.training.hyperparameters import NOT_STORED, differences, from_plain
from seqarch.training.module import SequenceModule


class AtomicCheckpointIO(CheckpointIO):
    """Writes a checkpoint beside its place, forces it to the disk, and moves it there in one operation.

    So a file with a checkpoint's name is complete, whenever the process, the machine or the disk gives up. (Lightning's
    own way goes through the system's folder for temporary files, from where a move is a copy if it is another disk.)
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike, storage_options: Any | None = None
    ) -> None:
        """Write ``checkpoint`` to ``path``.

        Raises:
            OSError: If it cannot be written, with the path and the space that is left. An older file at ``path`` is
                left as it was.
        """
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.tmp")
        try:
            with temporary.open("wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except (OSError, RuntimeError) as error:  # torch wraps some errors of the file system
            free = shutil.disk_usage(path.parent).free / 2**20
            raise OSError(f"cannot write the checkpoint {path} ({free:,.0f} MiB free there): {error}") from error
        finally:
            temporary.unlink(missing_ok=True)
        sync_folder(path.parent)

    def load_checkpoint(
        self, path: str | os.PathLike, map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read a checkpoint; nothing but tensors and plain values unless ``weights_only`` is False.

        Raises:
            ValueError: If the file is no checkpoint.
        """
        return read_checkpoint(path, map_location or "cpu", weights_only=weights_only is not False)

    def remove_checkpoint(self, path: str | os.PathLike) -> None:
        """Remove a checkpoint, a file or a folder."""
        path = Path(path)
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Force a folder's entries to the disk, so that a renamed file survives a loss of power."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_checkpoint(
    path: str | os.PathLike, map_location: Any = "cpu", *, weights_only: bool = True, mmap: bool = False
) -> dict[str, Any]:
    """Read a checkpoint's file.

    Raises:
        ValueError: If it does not exist, is damaged, or is not a checkpoint of this program.
    """
    path = Path(path)
    if path.is_dir():
        raise ValueError(f"{path} is a folder, not a checkpoint file; FSDP2Strategy gathers shards into one file")
    if not path.exists():
        raise ValueError(f"{path}: there is no such checkpoint file")
    try:
        if not mmap:  # which is asked for where a look at the options is enough
            with zipfile.ZipFile(path) as archive:
                if damaged := archive.testzip():  # torch writes checksums but does not compare them
                    raise ValueError(f"the checksum of {damaged} in it does not match")
        checkpoint = torch.load(path, map_location=map_location, weights_only=weights_only, mmap=mmap)
    except Exception as error:  # torch.load fails in many ways on a file that is not its own
        raise ValueError(f"{path} cannot be read: it is damaged, cut short, or no checkpoint ({error})") from error
    missing = {"state_dict", "hyper_parameters", "seqarch"} - set(checkpoint if isinstance(checkpoint, dict) else ())
    if missing:
        raise ValueError(f"{path} is no checkpoint of seqarch: it has no {', '.join(sorted(missing))}")
    return checkpoint


def load_module(path: str | os.PathLike, map_location: str | torch.device = "cpu") -> SequenceModule:
    """Rebuild a trained model from a checkpoint alone, whoever made it: no code runs but that of installed plugins.

    Args:
        path: A checkpoint file.
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


def check_same_architecture(path: str | os.PathLike, module: SequenceModule) -> None:
    """Compare a checkpoint with a module that is to be resumed from it, before anything large is read.

    Raises:
        ValueError: If the file is no checkpoint, or of another architecture: which hyper-parameters differ.
    """
    stored = read_checkpoint(path, mmap=True)["hyper_parameters"]
    if lines := differences(stored, module.hparams):
        raise ValueError(
            f"{path} is of another architecture than model (its own is in the config.yaml of its run folder):\n  "
            + "\n  ".join(lines)
        )


def _check_stored(path: Path, options: dict[str, Any]) -> None:
    for name in ARCHITECTURE:
        value = options.get(name)
        for note in value if isinstance(value, list) else [value]:
            if isinstance(note, str) and note.startswith(NOT_STORED):
                raise ValueError(
                    f"{path} does not say how to build its {name} ({note.removeprefix(NOT_STORED)}): build the "
                    "SequenceModule yourself and load the checkpoint's state_dict"
                )
