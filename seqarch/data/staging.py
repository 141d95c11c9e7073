"""Where prepare writes before it publishes: files that only grow, and a journal that says how much of them counts.

A commit makes the files' content durable, then replaces the journal. What was written after the last commit is cut off
when the folder is opened again, so a process may be killed at any moment.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from dataclasses import asdict, dataclass, field
from io import BufferedWriter
from pathlib import Path

import numpy as np

from seqarch.data.manifest import ShardRecord, file_sha256, write_aside
from seqarch.data.reading import Progress
from seqarch.data.shards import sibling, write_index
from seqarch.data.worker import Tokens

_SUFFIXES = (".bin", ".sizes", ".bytes")


@dataclass
class Counts:
    """What has been written of a domain."""

    documents: int = 0
    tokens: int = 0
    bytes: int = 0
    max_id: int = -1


@dataclass
class Journal:
    """What has been committed: sources finished, where the next one stands, counts by domain (and at its start)."""

    key: str
    finished: list[list] = field(default_factory=list)
    current: list | None = None
    progress: Progress = field(default_factory=Progress)
    empty: int = 0
    counts: dict[str, Counts] = field(default_factory=dict)
    counts_at_start: dict[str, Counts] = field(default_factory=dict)
    empty_at_start: int = 0
    publishing: bool = False

    def to_json(self) -> bytes:
        """The journal as JSON."""
        return json.dumps(asdict(self)).encode()

    @staticmethod
    def from_json(data: bytes) -> Journal:
        """The journal that `to_json` wrote."""
        raw = json.loads(data)
        raw["progress"] = Progress(**raw["progress"])
        for name in ("counts", "counts_at_start"):
            raw[name] = {d: Counts(**c) for d, c in raw[name].items()}
        return Journal(**raw)


class Staging:
    """The folder of one unfinished run.

    Args:
        folder: Made if it is not there; its journal is taken up if it is.
        key: Identity of the run; a journal with another one is an error.
        dtype: Dtype of the tokens.
    """

    def __init__(self, folder: Path, key: str, dtype: np.dtype) -> None:
        self.folder = folder
        self.dtype = dtype
        self._files: dict[str, list[BufferedWriter]] = {}
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "journal.json"
        self.journal = Journal.from_json(path.read_bytes()) if path.exists() else Journal(key)
        if self.journal.key != key:
            raise ValueError(
                f"{folder} holds an unfinished run with another input or other options; finish it with the same "
                "command, or delete that folder to start over"
            )
        if not self.journal.publishing:
            self.roll_back()

    def _lengths(self, counts: Counts) -> tuple[int, int, int]:
        return counts.tokens * self.dtype.itemsize, counts.documents * 4, counts.documents * 8

    def roll_back(self) -> None:
        """Cut the files to what the journal says, and drop those it does not know."""
        self._close()
        path = self.folder / "journal.json"
        if path.exists():
            self.journal = Journal.from_json(path.read_bytes())
        else:
            self.journal = Journal(self.journal.key)
        for file in self.folder.iterdir():
            if file.suffix in _SUFFIXES and file.stem not in self.journal.counts:
                file.unlink()
        for domain, counts in self.journal.counts.items():
            for suffix, length in zip(_SUFFIXES, self._lengths(counts), strict=True):
                file = self.folder / (domain + suffix)
                if file.stat().st_size < length:
                    raise ValueError(f"{file} is shorter than its journal says; delete {self.folder} to start over")
                os.truncate(file, length)

    def rewind_source(self) -> None:
        """Forget what was read of the unfinished source."""
        journal = self.journal
        journal.counts = journal.counts_at_start
        journal.empty = journal.empty_at_start
        journal.current, journal.progress = None, Progress()
        write_aside(self.folder / "journal.json", journal.to_json())
        self.roll_back()

    def start_source(self, identity: list) -> None:
        """The blocks that follow are of this source."""
        journal = self.journal
        if journal.current is None:
            journal.current = identity
            journal.progress = Progress()
            journal.counts_at_start = {d: Counts(**asdict(c)) for d, c in journal.counts.items()}
            journal.empty_at_start = journal.empty

    def finish_source(self) -> None:
        """The current source has been read to its end."""
        assert self.journal.current is not None
        self.journal.finished.append(self.journal.current)
        self.journal.current = None
        self.journal.progress = Progress()

    def append(self, domain: str, block: Tokens) -> int:
        """Write a block's documents of a domain; returns the number of tokens."""
        files = self._files.get(domain)
        if files is None:
            files = self._files[domain] = [(self.folder / (domain + suffix)).open("ab") for suffix in _SUFFIXES]
        for file, data in zip(files, (block.tokens, block.sizes, block.text_bytes), strict=True):
            file.write(data)
        counts = self.journal.counts.setdefault(domain, Counts())
        tokens = len(block.tokens) // self.dtype.itemsize
        counts.documents += len(block.sizes) // 4
        counts.tokens += tokens
        counts.bytes += int(np.frombuffer(block.text_bytes, dtype="<i8").sum())
        counts.max_id = max(counts.max_id, block.max_id)
        return tokens

    def commit(self) -> None:
        """Make everything written so far count."""
        for files in self._files.values():
            for file in files:
                file.flush()
                os.fsync(file.fileno())
        write_aside(self.folder / "journal.json", self.journal.to_json())

    def seal(self, split: str, suffix: str) -> list[ShardRecord]:
        """Close the files, write the indices and describe the shards; publishing can then be repeated."""
        self.commit()
        self._close()
        records = []
        for domain in sorted(self.journal.counts):
            counts = self.journal.counts[domain]
            sizes = self.folder / f"{domain}.sizes"
            write_index(self.folder / f"{domain}.idx", sizes, self.dtype)
            files: dict[str, dict[str, int | str]] = {
                s: {"size": path.stat().st_size, "sha256": file_sha256(path)}
                for s in (".bin", ".idx", ".bytes")
                for path in [self.folder / (domain + s)]
            }
            name = f"{split}/{domain}{suffix}"
            records.append(ShardRecord(name, **asdict(counts), dtype=self.dtype.name, files=files))
        write_aside(self.folder / "shards.json", json.dumps([asdict(r) for r in records]).encode())
        self.journal.publishing = True
        write_aside(self.folder / "journal.json", self.journal.to_json())
        return records

    def sealed(self) -> list[ShardRecord]:
        """What `seal` described."""
        return [ShardRecord(**r) for r in json.loads((self.folder / "shards.json").read_bytes())]

    def publish(self, root: Path, records: list[ShardRecord]) -> None:
        """Move the shards to their places; can be repeated after an interruption."""
        for record in records:
            target = root / record.name
            target.parent.mkdir(parents=True, exist_ok=True)
            domain = Path(record.name).name.split(".")[0]
            for suffix in record.files:
                source = self.folder / (domain + suffix)
                if source.exists():
                    os.replace(source, sibling(target, suffix))

    def discard(self) -> None:
        """Remove the folder and all in it."""
        self._close()
        shutil.rmtree(self.folder)

    def _close(self) -> None:
        for files in self._files.values():
            for file in files:
                with contextlib.suppress(OSError):  # what was not committed is cut off anyway
                    file.close()
        self._files.clear()
