"""Documents out of a block of raw input, with errors that name the file and the line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import NamedTuple

from seqarch.data.domains import domain_of


class Block(NamedTuple):
    """A piece of a source: bytes cut at a record's end, or rows. ``first`` counts the lines or rows before it."""

    kind: str
    source: str
    data: bytes | list[dict]
    first: int


class Document(NamedTuple):
    """A document's text, its domain and its length in UTF-8 bytes."""

    text: str
    domain: str
    n_bytes: int


def parse_block(block: Block, text_key: str, domain: str | None) -> Iterator[Document]:
    """The documents of a block, empty ones included.

    Args:
        block: What `read_blocks` gave.
        text_key: Field that holds a record's text.
        domain: Domain of every document; None to take each record's label.

    Raises:
        ValueError: For bytes that are not UTF-8, a line that is no JSON object, a record without text or without a
            known domain. Names the file and the line (or row), from 1.
    """
    if block.kind == "rows":
        assert isinstance(block.data, list)
        for i, record in enumerate(block.data):
            yield _document(record, text_key, domain, f"{block.source}, row {block.first + i + 1}")
        return
    assert isinstance(block.data, bytes)
    try:
        text = block.data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = block.first + block.data.count(b"\n", 0, error.start) + 1
        raise ValueError(
            f"{block.source}, line {line}: not UTF-8 (byte 0x{block.data[error.start]:02x}); convert the file to UTF-8"
        ) from error
    if block.first == 0:
        text = text.removeprefix("\ufeff")  # a byte order mark is no text
    if block.kind == "jsonl":
        yield from _json_lines(block, text, text_key, domain)
        return
    if domain is None:
        raise ValueError(f"{block.source}: plain text names no domain; pass --domain NAME")
    if block.kind == "text-file":
        pieces = [text]
    else:
        separator = "\n\n" if block.kind == "text-paragraph" else "\n"
        pieces = [piece.strip("\r\n") for piece in text.split(separator) if piece.strip()]
    for piece in pieces:
        yield Document(piece, domain, len(piece.encode("utf-8")))


def _json_lines(block: Block, text: str, text_key: str, domain: str | None) -> Iterator[Document]:
    # Not splitlines: U+2028 and others are legal inside JSON strings.
    for i, line in enumerate(text.split("\n")):
        if not line or line.isspace():
            continue
        where = f"{block.source}, line {block.first + i + 1}"
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(
                f"{where}: not valid JSON ({error.msg}, column {error.colno}): truncated? Fix or drop the line"
            ) from error
        except (ValueError, RecursionError) as error:  # numbers too long, nesting too deep
            raise ValueError(f"{where}: JSON that cannot be read ({error}); fix or drop the line") from error
        if not isinstance(record, dict):
            hint = "; the file must have one JSON object a line" if isinstance(record, list) else ""
            raise ValueError(f"{where}: not a JSON object but {type(record).__name__}{hint}")
        yield _document(record, text_key, domain, where)


def _document(record: dict, text_key: str, domain: str | None, where: str) -> Document:
    text = record.get(text_key)
    if not isinstance(text, str):
        problem = f"'{text_key}' is {type(text).__name__}, not text" if text_key in record else f"no field '{text_key}'"
        fields = ", ".join(map(str, record)) or "none"
        raise ValueError(f"{where}: {problem} (fields: {fields}); pass --text_key, or fix or drop the record")
    try:
        n_bytes = len(text) if text.isascii() else len(text.encode("utf-8"))
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{where}: a lone surrogate (\\u{ord(text[error.start]):04x}) is not valid text; fix or drop the record"
        ) from error
    if domain is None:
        try:
            domain = domain_of(record)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
    return Document(text, domain, n_bytes)
