"""The folder of a run: where its checkpoints, its tokenizer and its results lie."""

from __future__ import annotations

from pathlib import Path

CHECKPOINTS = "checkpoints"
TOKENIZER = "tokenizer.json"
RESULTS = "results"


def checkpoint_of(path: str | Path) -> Path:
    """A checkpoint file, given as itself or as the run folder whose last one is meant.

    Raises:
        ValueError: If there is none.
    """
    path = Path(path)
    if path.is_file():
        return path
    if not path.is_dir():
        raise ValueError(f"{path}: there is no such checkpoint, nor a run folder of that name")
    last = path / CHECKPOINTS / "last.ckpt"
    if not last.is_file():
        raise ValueError(f"{path} has no {CHECKPOINTS}/last.ckpt: no run has written a checkpoint there yet")
    return last


def tokenizer_of(checkpoint: Path) -> Path:
    """Where the tokenizer of a checkpoint's run lies."""
    return checkpoint.resolve().parent.parent / TOKENIZER
