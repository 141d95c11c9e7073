"""Megatron's indexed format, read and written independently of seqarch.data.shards: plain struct and slices."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np

CODES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 6: np.float64, 7: np.float32, 8: np.uint16}


def read(prefix: Path) -> tuple[list[np.ndarray], list[int], type]:
    """The sequences, the document bounds (as sequence numbers) and the dtype."""
    raw = Path(f"{prefix}.idx").read_bytes()
    assert raw[:9] == b"MMIDIDX\x00\x00"
    (version,) = struct.unpack("<Q", raw[9:17])
    assert version == 1
    dtype = CODES[raw[17]]
    n_sequences, n_documents = struct.unpack("<QQ", raw[18:34])
    sizes = np.frombuffer(raw, "<i4", n_sequences, 34)
    pointers = np.frombuffer(raw, "<i8", n_sequences, 34 + 4 * n_sequences)
    documents = np.frombuffer(raw, "<i8", n_documents, 34 + 12 * n_sequences)
    assert len(raw) == 34 + 12 * n_sequences + 8 * n_documents
    data = Path(f"{prefix}.bin").read_bytes()
    sequences = [np.frombuffer(data, dtype, int(s), int(p)) for s, p in zip(sizes, pointers, strict=True)]
    return sequences, documents.tolist(), dtype


def write(prefix: Path, documents: list[list[list[int]]], code: int) -> None:
    """Documents, each a list of sequences of ids."""
    dtype = np.dtype(CODES[code])
    sequences = [s for document in documents for s in document]
    sizes = [len(s) for s in sequences]
    pointers = [0]
    for size in sizes:
        pointers.append(pointers[-1] + size * dtype.itemsize)
    bounds = [0]
    for document in documents:
        bounds.append(bounds[-1] + len(document))
    prefix.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{prefix}.bin", "wb") as f:
        for s in sequences:
            f.write(np.array(s, dtype).tobytes())
    with open(f"{prefix}.idx", "wb") as f:
        f.write(b"MMIDIDX\x00\x00" + struct.pack("<Q", 1) + struct.pack("<B", code))
        f.write(struct.pack("<QQ", len(sizes), len(bounds)))
        f.write(np.array(sizes, np.int32).tobytes())
        f.write(np.array(pointers[:-1], np.int64).tobytes())
        f.write(np.array(bounds, np.int64).tobytes())
