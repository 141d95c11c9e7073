"""Raw text in: which files an input option means, and their content in blocks of bounded size.

A block is cut from its source without looking inside (JSON is parsed where it is tokenised, in another process), so
that one process can feed many. JSON lines, text and Parquet are read here rather than through `datasets`, which cannot
say in which file and line a record is bad; Hub names go through `datasets`.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from seqarch.data.decompress import open_chunks
from seqarch.data.records import Block, Document, parse_block

BLOCK_BYTES = 2 << 20
MAX_DOCUMENT_BYTES = 256 << 20
_KINDS = {
    ".jsonl": "jsonl",
    ".json": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
    ".txt": "text",
    ".text": "text",
    ".md": "text",
}
_SUFFIXES = f"{', '.join(_KINDS)}; .gz and .zst of all but Parquet"


@dataclass(frozen=True)
class Source:
    """One input file, or a data set of the Hugging Face Hub. ``size`` is in bytes on disk, 0 for the Hub."""

    kind: str
    name: str
    size: int = 0


@dataclass(frozen=True)
class Progress:
    """Where reading of a source has come to: ``offset`` in decompressed bytes (or rows), ``line`` lines (or rows) read,
    ``consumed`` of the source's size on disk.
    """

    offset: int = 0
    line: int = 0
    consumed: int = 0


def _kind(path: Path) -> str | None:
    suffixes = path.suffixes
    compressed = suffixes and suffixes[-1] in (".gz", ".zst")
    suffix = suffixes[-2] if compressed and len(suffixes) > 1 else suffixes[-1] if suffixes else ""
    kind = _KINDS.get(suffix)
    return None if compressed and kind == "parquet" else kind


def _is_hub_name(name: str) -> bool:
    return name.count("/") <= 1 and not name.startswith((".", "/", "~")) and _kind(Path(name)) is None


def resolve_inputs(inputs: str | list[str]) -> list[Source]:
    """The sources that the option names, in sorted order for each entry, none twice.

    Args:
        inputs: Each a file, a folder (searched through for known suffixes), a glob, or a Hub name (``owner/name``).

    Raises:
        ValueError: For an entry that does not exist, is empty, matches nothing, or has an unknown suffix.
    """
    sources: dict[str, Source] = {}
    names = [inputs] if isinstance(inputs, str) else inputs
    if not names:
        raise ValueError("input: names nothing to read")
    for name in names:
        path = Path(name).expanduser()
        if path.is_dir():
            found = sorted(p for p in path.rglob("*") if p.is_file() and _kind(p))
            if not found:
                raise ValueError(f"input: {name} holds no file that can be read ({_SUFFIXES})")
        elif path.exists():
            found = [path]
        elif glob.has_magic(name):
            found = sorted(Path(p) for p in glob.glob(str(path), recursive=True) if Path(p).is_file())
            if not found:
                raise ValueError(f"input: no file matches {name}")
        elif _is_hub_name(name):
            sources.setdefault(name, Source("hub", name))
            continue
        else:
            raise ValueError(f"input: {name} does not exist; pass a file, a folder, a glob or a Hub name")
        for file in found:
            kind = _kind(file)
            if kind is None:
                raise ValueError(
                    f"input: {file} has a suffix that is not known (known: {_SUFFIXES}); rename or convert it"
                )
            size = file.stat().st_size
            if size == 0:
                raise ValueError(f"{file} is empty; leave it out of the input or fetch it again")
            full = os.path.abspath(file)
            sources.setdefault(full, Source(kind, full, size))
    return list(sources.values())


def read_blocks(
    source: Source, text_key: str, text_documents: str, start: Progress | None = None, part: tuple[int, int] = (1, 1)
) -> Iterator[tuple[Block, Progress]]:
    """The blocks of a source from ``start``, each with where reading stands after it.

    Args:
        source: What to read.
        text_key: Column of a Parquet file or Hub data set that holds the text.
        text_documents: ``file``, ``line`` or ``paragraph``.
        start: Where to go on.
        part: ``(i, n)`` for a Hub data set: the i-th of n.

    Raises:
        ValueError: If the source cannot be read; names it and says what to do.
    """
    start = start or Progress()
    if source.kind == "parquet":
        return _parquet_blocks(source, text_key, start)
    if source.kind == "hub":
        return _hub_blocks(source, text_key, start, part)
    if source.kind == "jsonl":
        return _byte_blocks(source, b"\n", "jsonl", start)
    separator = {"file": None, "line": b"\n", "paragraph": b"\n\n"}[text_documents]
    return _byte_blocks(source, separator, f"text-{text_documents}", start)


def _byte_blocks(
    source: Source, separator: bytes | None, kind: str, start: Progress
) -> Iterator[tuple[Block, Progress]]:
    offset, line = start.offset, start.line
    buffer = bytearray()
    consumed = start.consumed

    def take(end: int) -> tuple[Block, Progress]:
        nonlocal offset, line
        data = bytes(buffer[:end])
        del buffer[:end]
        block = Block(kind, source.name, data, line)
        offset += end
        line += data.count(b"\n")
        return block, Progress(offset, line, consumed)

    for chunk, consumed in open_chunks(Path(source.name), start.offset):  # noqa: B007
        buffer += chunk
        while len(buffer) >= BLOCK_BYTES and separator is not None:
            end = buffer.rfind(separator, 0, BLOCK_BYTES)
            if end < 0:  # a record longer than a block
                end = buffer.find(separator, BLOCK_BYTES - len(separator))
            if end < 0:
                break
            yield take(end + len(separator))
        if len(buffer) > MAX_DOCUMENT_BYTES:
            way_out = "split it" if kind == "jsonl" else "pass --text_documents line or paragraph"
            raise ValueError(f"{source.name}: a document is longer than {MAX_DOCUMENT_BYTES >> 20} MiB; {way_out}")
    if buffer:
        yield take(len(buffer))
    elif offset == 0:
        raise ValueError(f"{source.name} is empty; leave it out of the input or fetch it again")


def _parquet_blocks(source: Source, text_key: str, start: Progress) -> Iterator[tuple[Block, Progress]]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(source.name) as file:
            names = file.schema_arrow.names
            if text_key not in names:
                raise ValueError(
                    f"{source.name} has no column '{text_key}' (it has: {', '.join(names)}); pass --text_key"
                )
            total = file.metadata.num_rows
            if total == 0:
                raise ValueError(f"{source.name} is empty; leave it out of the input or fetch it again")
            columns = [text_key, *(["meta"] if "meta" in names and text_key != "meta" else [])]
            first = 0  # first row of the row group
            for group in range(file.metadata.num_row_groups):
                rows_in_group = file.metadata.row_group(group).num_rows
                if first + rows_in_group <= start.offset:
                    first += rows_in_group
                    continue
                row = first
                for batch in file.iter_batches(batch_size=256, row_groups=[group], columns=columns):
                    skip = min(max(start.offset - row, 0), len(batch))
                    rows = batch.slice(skip).to_pylist()
                    row += skip
                    if rows:
                        block = Block("rows", source.name, rows, row)
                        row += len(rows)
                        yield block, Progress(row, row, source.size * row // total)
                first += rows_in_group
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(
            f"{source.name} cannot be read as Parquet ({error}): truncated or corrupted; fetch it again"
        ) from error


def _hub_blocks(
    source: Source, text_key: str, start: Progress, part: tuple[int, int]
) -> Iterator[tuple[Block, Progress]]:
    import datasets
    from datasets.exceptions import DatasetsError

    name, _, split = source.name.partition(":")
    try:
        data: Any = datasets.load_dataset(name, split=split or "train", streaming=True)
        if part[1] > 1:
            if data.num_shards < part[1]:
                raise ValueError(f"--part: '{name}' has {data.num_shards} files; at most as many parts can be made")
            data = data.shard(num_shards=part[1], index=part[0] - 1)
        rows: list[dict] = []
        size, row = 0, start.offset
        for record in data.skip(start.offset) if start.offset else data:
            rows.append({k: record[k] for k in (text_key, "meta") if k in record})
            text = rows[-1].get(text_key)
            size += len(text) if isinstance(text, str) else 0
            if size >= BLOCK_BYTES:
                yield Block("rows", source.name, rows, row), Progress(row + len(rows), row + len(rows))
                row += len(rows)
                rows, size = [], 0
        if rows:
            yield Block("rows", source.name, rows, row), Progress(row + len(rows), row + len(rows))
    except (OSError, DatasetsError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"input: '{source.name}' is no file or folder here, and could not be had from the Hugging Face Hub "
            f"({reason}); check the name and the network (HF_HUB_OFFLINE)"
        ) from error


def read_documents(
    sources: list[Source], text_key: str, text_documents: str, domain: str | None = None, by_label: bool = True
) -> Iterator[Document]:
    """All documents of ``sources``, in this process. Without ``by_label``, ``domain`` may stay empty."""
    for source in sources:
        for block, _ in read_blocks(source, text_key, text_documents):
            yield from parse_block(block, text_key, domain if by_label else domain or "all")
