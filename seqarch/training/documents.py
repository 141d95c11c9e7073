"""Losses by test document: what the comparison of runs resamples.

A run folder keeps them in ``documents/``: ``index.npz`` says which documents the test sets hold, and for each
validation ``step-<n>.npy`` holds the nats of each, float32, in the index's order. So two runs can be paired document by
document, at any two validations.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from zipfile import BadZipFile

import numpy as np

from seqarch.data.manifest import write_aside

FOLDER = "documents"
_STEP = re.compile(r"step-(\d+)\.npy")


@dataclass(frozen=True)
class DomainDocuments:
    """What a validation found for each document of one domain. Arrays are ``[n]``, in order of ``ids``.

    Attributes:
        name: The domain.
        in_domain: Whether it is one that is trained on.
        ids: Numbers of the documents in the domain's test split, increasing.
        tokens: Predictions of each document.
        bytes: Length of each document's text in bytes; 0 where the tokens stand for no text.
        nats: Negative log-likelihood of each document.
    """

    name: str
    in_domain: bool
    ids: np.ndarray
    tokens: np.ndarray
    bytes: np.ndarray
    nats: np.ndarray


def write_documents(run_dir: Path, step: int, domains: Sequence[DomainDocuments]) -> None:
    """Keep what the validation after ``step`` found. Each file is replaced at once, or not at all.

    If the test sets are other ones than those of earlier validations, these are dropped: they cannot be compared.
    """
    folder = Path(run_dir) / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    index = _index(domains)
    path = folder / "index.npz"
    old = _load(path) if path.exists() else {}
    if not all(name in old and np.array_equal(array, old[name]) for name, array in index.items()):
        forget_documents(run_dir, -1)
        out = io.BytesIO()
        np.savez_compressed(out, **index)  # pyright: ignore[reportArgumentType]  (the stub takes them for its options)
        write_aside(path, out.getvalue())
    out = io.BytesIO()
    np.save(out, np.concatenate([d.nats for d in domains]).astype("<f4"))
    write_aside(folder / f"step-{step:08d}.npy", out.getvalue())


def _index(domains: Sequence[DomainDocuments]) -> dict[str, np.ndarray]:
    return {
        "domains": np.array([d.name for d in domains]),
        "in_domain": np.array([d.in_domain for d in domains]),
        "counts": np.array([len(d.ids) for d in domains], dtype="<i8"),
        "ids": np.concatenate([d.ids for d in domains]).astype("<i8"),
        "tokens": np.concatenate([d.tokens for d in domains]).astype("<i8"),
        "bytes": np.concatenate([d.bytes for d in domains]).astype("<f8"),
    }


def _load(path: Path) -> dict[str, np.ndarray]:
    with np.load(path) as file:
        return {name: file[name] for name in file.files}


def recorded_steps(run_dir: Path) -> list[int]:
    """The steps whose validations are kept, in order."""
    folder = Path(run_dir) / FOLDER
    return sorted(int(m[1]) for p in folder.glob("step-*.npy") if (m := _STEP.fullmatch(p.name)))


def forget_documents(run_dir: Path, step: int) -> None:
    """Drop the validations after ``step``: a run that goes on from there makes them again."""
    for later in recorded_steps(run_dir):
        if later > step:
            (Path(run_dir) / FOLDER / f"step-{later:08d}.npy").unlink()


def read_documents(run_dir: Path, step: int) -> list[DomainDocuments]:
    """What the validation after ``step`` found, by domain.

    Raises:
        ValueError: If the run folder does not hold it, or its files do not belong together.
    """
    folder = Path(run_dir) / FOLDER
    try:
        index = _load(folder / "index.npz")
        nats = np.load(folder / f"step-{step:08d}.npy")
    except (OSError, ValueError, EOFError, BadZipFile) as error:
        raise ValueError(f"{folder}: the losses by document after step {step} cannot be read ({error})") from error
    if len(nats) != len(index["ids"]):
        raise ValueError(f"{folder}: index.npz lists {len(index['ids'])} documents, step {step} has {len(nats)}")
    ends = np.cumsum(index["counts"])
    parts = [slice(end - count, end) for end, count in zip(ends, index["counts"], strict=True)]
    return [
        DomainDocuments(
            str(name), bool(inside), index["ids"][part], index["tokens"][part], index["bytes"][part], nats[part]
        )
        for name, inside, part in zip(index["domains"], index["in_domain"], parts, strict=True)
    ]
