"""Checkpoints on disk: written atomically, and read whole or not at all."""

from __future__ import annotations

import os
import re
import shutil
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO

from seqarch.training.consolidated import is_consolidated, read_consolidated
from seqarch.training.files import written_aside
from seqarch.training.sharded import check_sharded, is_sharded, read_options, read_sharded
from seqarch.training.together import ranks

CHECKPOINT_NAME = re.compile(r"step-(\d+)\.ckpt")
"""Of a checkpoint in a run's folder: the step at whose end it stands."""


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
        with written_aside(Path(path)) as aside, aside.open("wb") as file:
            torch.save(checkpoint, file)

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


def read_checkpoint(
    path: str | os.PathLike, map_location: Any = "cpu", *, weights_only: bool = True, options_only: bool = False
) -> dict[str, Any]:
    """Read a checkpoint: a file, one of safetensors too, or a folder of shards.

    Args:
        path: Where it lies.
        map_location: The device to put its tensors on.
        weights_only: Nothing but tensors and plain values.
        options_only: What is no weight is enough: ``state_dict`` may be empty, and is not checked.

    Raises:
        ValueError: If it does not exist, is damaged, or is not a checkpoint of this program; with the newest older
            one beside it that is whole.
    """
    path = Path(path)
    if not path.exists():
        raise ValueError(f"{path}: there is no such checkpoint file")
    with or_offer(path):
        if is_sharded(path):
            checkpoint = read_options(path) if options_only else read_sharded(path)
        elif path.is_dir():
            raise ValueError(f"{path} is a folder, but not one of a checkpoint's shards: it has no meta.pt")
        elif is_consolidated(path):
            checkpoint = read_consolidated(path, map_location, options_only=options_only)
        else:
            checkpoint = _read_file(path, map_location, weights_only, options_only)
    missing = {"state_dict", "hyper_parameters", "seqarch"} - set(checkpoint if isinstance(checkpoint, dict) else ())
    if missing:
        raise ValueError(f"{path} is no checkpoint of seqarch: it has no {', '.join(sorted(missing))}")
    return checkpoint


def check_resumable(path: str | os.PathLike, checkpoint: dict[str, Any]) -> None:
    """See whether a checkpoint has what training goes on with.

    Raises:
        ValueError: If it holds weights only.
    """
    if "optimizer_states" not in checkpoint:
        raise ValueError(
            f"{path} holds weights only, and training cannot go on without the optimiser's state: use the run's own "
            "checkpoint, or one made by `seqarch consolidate --with_optimizer true`"
        )


def _read_file(path: Path, map_location: Any, weights_only: bool, options_only: bool) -> dict[str, Any]:
    try:
        if not options_only:
            with zipfile.ZipFile(path) as archive:
                if damaged := archive.testzip():  # torch writes checksums but does not compare them
                    raise ValueError(f"the checksum of {damaged} in it does not match")
        return torch.load(path, map_location=map_location, weights_only=weights_only, mmap=options_only)
    except Exception as error:  # torch.load fails in many ways on a file that is not its own
        raise ValueError(f"{path} cannot be read: it is damaged, cut short, or no checkpoint ({error})") from error


@contextmanager
def or_offer(path: str | os.PathLike) -> Iterator[None]:
    """Complete an error about a checkpoint by the newest older one beside it that is whole, if there is one."""
    try:
        yield
    except ValueError as error:
        whole = _whole_before(Path(path)) if ranks()[0] == 0 else None
        if whole is None:
            raise
        raise ValueError(f"{error}\nThe newest older checkpoint that is whole: --ckpt_path {whole}") from error


def _whole_before(path: Path) -> Path | None:
    """The newest checkpoint of the same folder that is older than ``path`` and whole."""
    damaged = CHECKPOINT_NAME.fullmatch(path.resolve().name)
    if damaged is None:
        return None
    steps = [m for other in path.resolve().parent.iterdir() if (m := CHECKPOINT_NAME.fullmatch(other.name))]
    for match in sorted(steps, key=lambda m: -int(m[1])):
        older = path.parent / match[0]
        if int(match[1]) < int(damaged[1]) and _is_whole(older):
            return older
    return None


def _is_whole(path: Path) -> bool:
    try:
        if is_sharded(path):
            check_sharded(path)
        else:
            _read_file(path, "cpu", weights_only=True, options_only=False)
    except ValueError:
        return False
    return True
