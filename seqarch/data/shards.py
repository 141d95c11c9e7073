"""Token shards on disk: Megatron's indexed format, a ``.bin`` with the tokens and an ``.idx`` with the documents.

The layout follows ``megatron/core/datasets/indexed_dataset.py``: ``.idx`` is the magic ``MMIDIDX``, a version, a dtype
code, the number of sequences and of document bounds, then each sequence's length (int32) and byte offset into ``.bin``
(int64), then the first sequence of each document (int64, with the end). All little-endian.
A third file, ``.bytes``, is ours: the UTF-8 bytes of each document's text (int64), so that bits per byte are exact.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np

MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<QBQQ")
DTYPES: dict[int, np.dtype] = {
    1: np.dtype("u1"),
    2: np.dtype("i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    8: np.dtype("<u2"),
}
"""Megatron's codes of integer dtypes."""
_CHUNK = 1 << 20


def token_dtype(vocab_size: int) -> np.dtype:
    """The dtype for ids below ``vocab_size``: uint16 where it fits, else int32 (Megatron has no uint32)."""
    if vocab_size <= 1 << 16:
        return np.dtype("<u2")
    if vocab_size <= 1 << 31:
        return np.dtype("<i4")
    raise ValueError(f"vocabulary of {vocab_size} ids does not fit int32: use a tokenizer with at most {1 << 31} ids")


def sibling(prefix: Path, suffix: str) -> Path:
    """``prefix`` with ``suffix`` added (domain names may hold no dot, but parts' do)."""
    return prefix.parent / (prefix.name + suffix)


def write_index(path: Path, sizes_file: Path, dtype: np.dtype) -> None:
    """Write the ``.idx`` for documents of the lengths in ``sizes_file`` (raw int32), a sequence each, in chunks."""
    code = next(c for c, d in DTYPES.items() if d == dtype)
    n = sizes_file.stat().st_size // 4

    def chunks() -> Iterator[np.ndarray]:
        with sizes_file.open("rb") as f:
            while data := f.read(4 * _CHUNK):
                yield np.frombuffer(data, dtype="<i4")

    with path.open("wb") as out:
        out.write(MAGIC + _HEADER.pack(1, code, n, n + 1))
        for sizes in chunks():
            out.write(sizes.tobytes())
        offset = 0
        for sizes in chunks():
            ends = offset + np.cumsum(sizes, dtype=np.int64) * dtype.itemsize
            out.write((ends - sizes.astype(np.int64) * dtype.itemsize).astype("<i8").tobytes())
            offset = int(ends[-1])
        for start in range(0, n + 1, _CHUNK):
            out.write(np.arange(start, min(start + _CHUNK, n + 1), dtype="<i8").tobytes())


def _read_header(f: BinaryIO, path: Path) -> tuple[np.dtype, int, int]:
    head = f.read(len(MAGIC) + _HEADER.size)
    if len(head) < len(MAGIC) + _HEADER.size or not head.startswith(MAGIC):
        raise ValueError(f"{path} is no Megatron index (.idx): truncated or another format; prepare it again")
    version, code, n_sequences, n_bounds = _HEADER.unpack(head[len(MAGIC) :])
    if version != 1 or code not in DTYPES:
        raise ValueError(
            f"{path}: version {version} with dtype code {code} is not supported (version 1, integer tokens)"
        )
    return DTYPES[code], n_sequences, n_bounds


class Shard:
    """A read-only view of one ``.bin``/``.idx`` pair, memory-mapped: it costs no memory, whatever its size.

    Args:
        prefix: Path without the suffix.

    Raises:
        ValueError: If a file is missing, truncated, of another format, or does not fit the other.
    """

    def __init__(self, prefix: Path) -> None:
        self.prefix = Path(prefix)
        bin_path, idx_path = sibling(self.prefix, ".bin"), sibling(self.prefix, ".idx")
        for path in (bin_path, idx_path):
            if not path.is_file():
                raise ValueError(f"{path} is missing: a shard is a .bin and an .idx; prepare it again")
        with idx_path.open("rb") as f:
            self.dtype, n, n_bounds = _read_header(f, idx_path)
        offset = len(MAGIC) + _HEADER.size
        expected = offset + 12 * n + 8 * n_bounds
        actual = idx_path.stat().st_size
        if actual != expected or n_bounds < 2:
            raise ValueError(f"{idx_path} has {actual} bytes, its header says {expected}: truncated; prepare it again")
        index = np.memmap(idx_path, mode="r")
        self._sizes = index[offset : offset + 4 * n].view("<i4")
        self._pointers = index[offset + 4 * n : offset + 12 * n].view("<i8")
        self._bounds = index[offset + 12 * n :].view("<i8")
        item = self.dtype.itemsize
        end = int(self._pointers[n - 1]) + int(self._sizes[n - 1]) * item if n else 0
        actual = bin_path.stat().st_size
        if actual != end:
            raise ValueError(
                f"{bin_path} has {actual} bytes, its index says {end}: truncated or of another run; prepare it again"
            )
        if int(self._bounds[0]) != 0 or int(self._bounds[n_bounds - 1]) != n:
            raise ValueError(
                f"{idx_path}: the document bounds do not span the {n} sequences: corrupted; prepare it again"
            )
        self.n_tokens = end // item
        self.n_documents = n_bounds - 1
        self._n_sequences = n
        self.tokens: np.ndarray = np.memmap(bin_path, dtype=self.dtype, mode="r") if end else np.empty(0, self.dtype)
        bytes_path = sibling(self.prefix, ".bytes")
        self._bytes: np.ndarray | None = None
        if bytes_path.exists():
            if bytes_path.stat().st_size != 8 * self.n_documents:
                raise ValueError(
                    f"{bytes_path} does not have 8 bytes for each of {self.n_documents} documents; prepare it again"
                )
            self._bytes = np.memmap(bytes_path, dtype="<i8", mode="r") if self.n_documents else np.empty(0, "<i8")

    def __reduce__(self) -> tuple:
        return Shard, (self.prefix,)

    def document_start(self, i: int) -> int:
        """The first token of document ``i``; for ``i = n_documents``, the number of tokens."""
        first = int(self._bounds[i])
        if first == self._n_sequences:
            return self.n_tokens
        return int(self._pointers[first]) // self.dtype.itemsize

    def documents_between(self, start: int, end: int) -> list[int]:
        """The starts of documents in ``start < token < end``, found by bisection."""
        i = bisect_right(range(self.n_documents), start, key=self.document_start)
        starts = []
        while i < self.n_documents and (first := self.document_start(i)) < end:
            if not starts or first > starts[-1]:
                starts.append(first)
            i += 1
        return starts

    def document(self, i: int) -> np.ndarray:
        """The tokens of document ``i`` as int64."""
        return self.tokens[self.document_start(i) : self.document_start(i + 1)].astype(np.int64)

    def document_bytes(self, i: int) -> int | None:
        """UTF-8 bytes of document ``i``, or None where the shard came without ``.bytes``."""
        return None if self._bytes is None else int(self._bytes[i])

    def n_bytes(self) -> int | None:
        """UTF-8 bytes of all documents, or None where the shard came without ``.bytes`` (reads that file)."""
        return None if self._bytes is None else int(self._bytes.sum())

    def check_contiguous(self) -> None:
        """Raise ``ValueError`` if the sequences do not follow one another in ``.bin`` (reads the whole index)."""
        offset = 0
        for start in range(0, self._n_sequences, _CHUNK):
            sizes = self._sizes[start : start + _CHUNK].astype(np.int64) * self.dtype.itemsize
            pointers = self._pointers[start : start + _CHUNK]
            ends = offset + np.cumsum(sizes)
            if not np.array_equal(pointers, ends - sizes):
                raise ValueError(
                    f"{sibling(self.prefix, '.idx')}: its sequences are not stored one after another, so it is "
                    "corrupted or of a kind that is not supported; prepare it again"
                )
            offset = int(ends[-1])

    def max_id(self) -> int:
        """The largest token id (reads every token)."""
        step = 1 << 22
        chunks = range(0, self.n_tokens, step)
        return max((int(self.tokens[i : i + step].max()) for i in chunks), default=-1)
