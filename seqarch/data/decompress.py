"""Bytes of a plain, gzip or zstandard file, in chunks, with errors that tell truncation from corruption."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path

_CHUNK = 1 << 18
_COMPRESSED_CHUNK = 1 << 16


def open_chunks(path: Path, start: int = 0) -> Iterator[tuple[bytes, int]]:
    """The decompressed content from byte ``start``, each chunk with how much of the file itself has been read.

    Raises:
        ValueError: If the file is missing, truncated or corrupted.
    """
    if path.suffix == ".zst":
        chunks = _zstd(path)
    elif path.suffix == ".gz":
        chunks = _gzip(path)
    else:
        chunks, start = _plain(path, start), 0
    for chunk, consumed in chunks:
        if start >= len(chunk):
            start -= len(chunk)
            continue
        yield chunk[start:] if start else chunk, consumed
        start = 0


def _plain(path: Path, start: int) -> Iterator[tuple[bytes, int]]:
    with path.open("rb") as f:
        f.seek(start)
        while chunk := f.read(_CHUNK):
            yield chunk, f.tell()


def _gzip(path: Path) -> Iterator[tuple[bytes, int]]:
    with path.open("rb") as raw, gzip.GzipFile(fileobj=raw) as f:
        while True:
            try:
                chunk = f.read(_CHUNK)
            except EOFError as error:
                raise ValueError(f"{path} is truncated: its gzip stream has no end; fetch it again") from error
            except (gzip.BadGzipFile, zlib.error) as error:
                raise ValueError(f"{path} is corrupted ({error}); fetch it again") from error
            if not chunk:
                return
            yield chunk, raw.tell()


def _zstd(path: Path) -> Iterator[tuple[bytes, int]]:
    import zstandard

    # Not `stream_reader`: it takes a truncated frame for the end of the file.
    frame = None
    with path.open("rb") as f:
        while data := f.read(_COMPRESSED_CHUNK):
            while data:
                if frame is None:
                    frame = zstandard.ZstdDecompressor().decompressobj()
                try:
                    chunk = frame.decompress(data)
                except zstandard.ZstdError as error:
                    raise ValueError(f"{path} is corrupted ({error}); fetch it again") from error
                if chunk:
                    yield chunk, f.tell()
                data = b""
                if frame.eof:
                    data, frame = frame.unused_data, None
    if frame is not None:
        raise ValueError(f"{path} is truncated: its zstandard frame has no end; fetch it again")
