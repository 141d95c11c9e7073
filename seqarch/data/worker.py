"""The process that parses and tokenises blocks, one after another, as its standard input brings them."""

from __future__ import annotations

import os
import pickle
import signal
import struct
import sys
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np

from seqarch.data.records import Block, parse_block
from seqarch.data.tokenizer import load_tokenizer

_LENGTH = struct.Struct("<Q")
_BATCH_CHARS = 1 << 18
_PIECE_CHARS = 1 << 20


class Task(NamedTuple):
    """How to tokenise: the same for every block."""

    tokenizer: str
    eos_id: int
    dtype: str
    text_key: str
    domain: str | None


class Tokens(NamedTuple):
    """A domain's part of a block, as bytes ready for the files: token ids, lengths (int32) and text bytes (int64)."""

    tokens: bytes
    sizes: bytes
    text_bytes: bytes
    max_id: int


class BlockTokens(NamedTuple):
    """What became of a block: tokens by domain, and how many empty documents were left out."""

    domains: dict[str, Tokens]
    empty: int


def send(stream: IO[bytes], message: object) -> None:
    """Write one message."""
    data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    stream.write(_LENGTH.pack(len(data)))
    stream.write(data)
    stream.flush()


def receive(stream: IO[bytes]) -> object:
    """Read one message; ``EOFError`` if the other side has gone."""
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        raise EOFError
    (length,) = _LENGTH.unpack(head)
    data = stream.read(length)
    if len(data) < length:
        raise EOFError
    return pickle.loads(data)


def split_long(text: str) -> list[str]:
    """``text`` in pieces of about a million characters, so that one long document does not cost memory without bound.

    Cut before a line break that follows a character that is not blank: byte-level BPE never joins the two.
    """
    pieces = []
    start = 0
    while len(text) - start > _PIECE_CHARS:
        cut = start + _PIECE_CHARS
        low = start + _PIECE_CHARS // 2
        at = text.rfind("\n", low, cut)
        while at > low and text[at - 1].isspace():
            at = text.rfind("\n", low, at)
        cut = at if at > low else cut
        pieces.append(text[start:cut])
        start = cut
    pieces.append(text[start:])
    return pieces


class BlockTokenizer:
    """Turns blocks into tokens, according to a `Task`."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.tokenizer = load_tokenizer(Path(task.tokenizer))
        self.dtype = np.dtype(task.dtype)

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        """Ids of each text with the end-of-text id appended."""
        pieces = [split_long(t) for t in texts]
        encodings = iter(self.tokenizer.encode_batch_fast([p for ps in pieces for p in ps], add_special_tokens=False))
        out = []
        for ps in pieces:
            ids: list[int] = []
            for _ in ps:
                ids += next(encodings).ids
            ids.append(self.task.eos_id)
            out.append(np.array(ids, dtype=self.dtype))
        return out

    def __call__(self, block: Block) -> BlockTokens:
        """Tokenise a block; ``ValueError`` for bad input."""
        parts: dict[str, tuple[list[np.ndarray], list[int]]] = {}
        empty = 0
        batch: list[tuple[str, str, int]] = []
        chars = 0

        def flush() -> None:
            for (_, domain, n_bytes), ids in zip(batch, self.encode([t for t, _, _ in batch]), strict=True):
                arrays, text_bytes = parts.setdefault(domain, ([], []))
                arrays.append(ids)
                text_bytes.append(n_bytes)
            batch.clear()

        for document in parse_block(block, self.task.text_key, self.task.domain):
            if not document.text:
                empty += 1
                continue
            batch.append(document)
            chars += len(document.text)
            if chars >= _BATCH_CHARS:
                flush()
                chars = 0
        if batch:
            flush()
        return BlockTokens({d: _tokens(arrays, text_bytes) for d, (arrays, text_bytes) in parts.items()}, empty)


def _tokens(arrays: list[np.ndarray], text_bytes: list[int]) -> Tokens:
    tokens = np.concatenate(arrays)
    sizes = np.array([len(a) for a in arrays], dtype="<i4")
    return Tokens(tokens.tobytes(), sizes.tobytes(), np.array(text_bytes, dtype="<i8").tobytes(), int(tokens.max()))


def main() -> None:
    """Serve until standard input ends: a `Task`, then blocks; answer each with `BlockTokens` or a `ValueError`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    stdin, stdout = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # nothing that prints may disturb the messages
    try:
        task = receive(stdin)
        assert isinstance(task, Task)
        tokenise = BlockTokenizer(task)
        while True:
            block = receive(stdin)
            assert isinstance(block, Block)
            try:
                answer: BlockTokens | ValueError = tokenise(block)
            except ValueError as error:
                answer = ValueError(str(error))
            send(stdout, answer)
    except (EOFError, BrokenPipeError):
        return
