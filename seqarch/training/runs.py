"""The folder of a run: where its checkpoints, its tokenizer and its results lie."""

from __future__ import annotations

from pathlib import Path

from seqarch.training.sharded import is_sharded

CHECKPOINTS = "checkpoints"
TOKENIZER = "tokenizer.json"
RESULTS = "results"


def checkpoint_of(path: str | Path) -> Path:
    """A checkpoint, given as itself (a file or a folder of shards) or as the run folder whose last one is meant.

    Raises:
        ValueError: If there is none.
    """
    path = Path(path)
    if path.is_file() or is_sharded(path):
        return path
    if not path.is_dir():
        raise ValueError(f"{path}: there is no such checkpoint, nor a run folder of that name")
    last = path / CHECKPOINTS / "last.ckpt"
    if not last.exists():
        raise ValueError(f"{path} has no {CHECKPOINTS}/last.ckpt: no run has written a checkpoint there yet")
    return last


def tokenizer_of(checkpoint: Path) -> Path:
    """Where the tokenizer of a checkpoint's run lies."""
    return checkpoint.resolve().parent.parent / TOKENIZER
