"""The manifest of a prepared corpus: what its shards hold, from what they were made, and their checksums."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

SPLITS = ("train", "test")
_FORMAT = "seqarch-corpus"
_VERSION = 1


@dataclass
class ShardRecord:
    """One shard: its files by suffix with size and SHA-256, and what they hold."""

    name: str
    documents: int
    tokens: int
    bytes: int
    max_id: int
    dtype: str
    files: dict[str, dict[str, int | str]]


@dataclass
class Run:
    """One finished call of prepare, or one part of it: what was read, with which options, into which domains.

    ``key`` is a hash of the input's names and the options, ``sizes`` one of the input's sizes.
    """

    key: str
    part: list[int]
    sizes: str
    options: dict
    domains: list[str]
    skipped_empty: int = 0


@dataclass
class TokenizerRecord:
    """The tokenizer that made the shards. ``hash`` is the SHA-256 of ``tokenizer.json``."""

    hash: str
    vocab_size: int
    eos_token: str
    eos_id: int
    file: str = "tokenizer.json"


@dataclass
class Manifest:
    """All that is known of a prepared corpus; ``splits[split][domain]`` are the domain's shards, in order."""

    tokenizer: TokenizerRecord
    splits: dict[str, dict[str, list[ShardRecord]]] = field(default_factory=dict)
    runs: list[Run] = field(default_factory=list)

    def missing_parts(self) -> list[str]:
        """What is lacking of runs that were split over machines, in words."""
        have: dict[tuple[str, int], set[int]] = {}
        for run in self.runs:
            have.setdefault((run.key, run.part[1]), set()).add(run.part[0])
        return [
            f"--part {i}/{n} of {run_options(self, key)}"
            for (key, n), parts in have.items()
            for i in range(1, n + 1)
            if i not in parts
        ]


def run_options(manifest: Manifest, key: str) -> str:
    """The input and split of the run with this key, in words."""
    options = next(run.options for run in manifest.runs if run.key == key)
    return f"{options['input']} ({options['split']})"


def manifest_path(root: Path) -> Path:
    """Where the manifest of the corpus at ``root`` is."""
    return root / "manifest.json"


def load_manifest(root: Path) -> Manifest | None:
    """The manifest of the corpus at ``root``, or None if there is none.

    Raises:
        ValueError: If it cannot be read.
    """
    path = manifest_path(root)
    if not path.exists():
        return None
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["format"] != _FORMAT or data["version"] != _VERSION:
            raise ValueError(f"format {data['format']} version {data['version']}")
        splits = {
            split: {domain: [ShardRecord(**s) for s in shards] for domain, shards in domains.items()}
            for split, domains in data["splits"].items()
        }
        return Manifest(TokenizerRecord(**data["tokenizer"]), splits, [Run(**r) for r in data["runs"]])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} cannot be read as a manifest of this version ({error}); prepare the corpus again"
        ) from error


def save_manifest(root: Path, manifest: Manifest) -> None:
    """Replace the manifest at ``root`` at once, or not at all."""
    text = json.dumps({"format": _FORMAT, "version": _VERSION, **asdict(manifest)}, indent=1, ensure_ascii=False)
    write_aside(manifest_path(root), (text + "\n").encode())


def write_aside(path: Path, data: bytes) -> None:
    """Write a file so that a reader sees the old content or the new, never a part."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with aside.open("wb") as f:
            f.write(data)
            f.flush()
            os.fsync(f.fileno())
        os.replace(aside, path)
    except OSError:
        aside.unlink(missing_ok=True)
        raise


@contextmanager
def locked(path: Path, wait: bool = True) -> Iterator[None]:
    """Hold an exclusive lock on ``path``; it ends with the process, however that ends.

    Raises:
        ValueError: If another process has it and ``wait`` is false.
    """
    with path.open("a") as f:
        try:
            fcntl.flock(f, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(f"{path.parent} is in use by another process; wait for it, or stop it") from error
        try:
            yield
        finally:
            fcntl.flock(f, fcntl.LOCK_UN)


def file_sha256(path: Path) -> str:
    """SHA-256 of a file's content, as hexadecimal."""
    digest = hashlib.sha256()  # Python 3.10 has no hashlib.file_digest
    with path.open("rb") as f:
        while chunk := f.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def check_files(root: Path, record: ShardRecord, checksums: bool = True) -> None:
    """Compare a shard's files with the manifest: their sizes, and with ``checksums`` every byte.

    Raises:
        ValueError: For a file that is missing, truncated or corrupted.
    """
    for suffix, expected in record.files.items():
        path = root / (record.name + suffix)
        if not path.is_file():
            raise ValueError(f"{path} is missing, though the manifest lists it; prepare the corpus again")
        size = path.stat().st_size
        if size != expected["size"]:
            raise ValueError(
                f"{path} has {size} bytes, the manifest says {expected['size']}: truncated; prepare it again"
            )
        if checksums and file_sha256(path) != expected["sha256"]:
            raise ValueError(f"{path} is corrupted: its SHA-256 is not the manifest's; prepare the corpus again")
