"""Files that are complete wherever they exist."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def written_aside(path: Path) -> Iterator[Path]:
    """Give a file beside ``path`` to write to; at the end it is forced to the disk and moved there in one operation.

    So a file at ``path`` is complete, whenever the process, the machine or the disk gives up.

    Raises:
        OSError: If it cannot be written, with the path and the space that is left. An older file is left as it was.
    """
    aside = path.with_name(f".{path.name}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield aside
        with aside.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(aside, path)
    except (OSError, RuntimeError) as error:  # torch wraps some errors of the file system
        raise OSError(f"cannot write the checkpoint {path}{free_space(path)}: {error}") from error
    finally:
        aside.unlink(missing_ok=True)
    sync_folder(path.parent)


def free_space(path: Path) -> str:
    """How much room is left where a file was to be written, for a message."""
    return f" ({shutil.disk_usage(path.parent).free / 2**20:,.0f} MiB free there)" if path.parent.exists() else ""


def sync_folder(folder: Path) -> None:
    """Force a folder's entries to the disk, so that a renamed file survives a loss of power."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
