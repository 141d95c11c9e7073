"""Evaluation batches: every token of every test document once, each with its document's own context.

Shape legend: B windows of a batch, T tokens of the batch's longest window, rounded up.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler
from torch.utils.data.distributed import DistributedSampler

from seqarch.data.corpus import TokenStream
from seqarch.data.permutation import KeyedPermutation, derive_key
from seqarch.data.steps import IGNORE
from seqarch.data.tokenizer import load_tokenizer

PAD_MULTIPLE = 64


def choose_documents(stream: TokenStream, max_tokens: int | None) -> list[int]:
    """The documents to evaluate: all, or as many as ``max_tokens`` allows, at least one.

    Which ones depends on the domain's name and size only, never on the seed, so that runs can be compared.
    """
    n = stream.n_documents
    if max_tokens is None:
        return list(range(n))
    permutation = KeyedPermutation(n, derive_key("test documents", stream.name))
    chosen: list[int] = []
    used = 0
    for rank in range(n):
        document = int(permutation(np.array([rank]))[0])
        used += stream.document_length(document)
        if chosen and used > max_tokens:
            break
        chosen.append(document)
    return sorted(chosen)


def count_bytes(stream: TokenStream, documents: list[int], tokenizer_path: Path, eos_id: int) -> list[int]:
    """UTF-8 bytes of each document's text: as recorded, or by decoding its tokens without the end of text."""
    recorded = [stream.document_bytes(d) for d in documents]
    missing = [i for i, n in enumerate(recorded) if n is None]
    if missing:
        tokenizer = load_tokenizer(tokenizer_path)
        for i in missing:
            ids = stream.document(documents[i])
            ids = ids[:-1] if len(ids) and ids[-1] == eos_id else ids
            recorded[i] = len(tokenizer.decode(ids.tolist(), skip_special_tokens=False).encode("utf-8", "replace"))
    return [n or 0 for n in recorded]


class EvalBatches(Dataset):
    """One domain's evaluation batches for one rank.

    A document of n tokens (its end of text included) gives n predictions: inputs are the end-of-text id, then the
    document without its last token. They are cut into windows of at most ``seq_len`` that do not overlap, sorted by
    length, and dealt to the ranks in turn. All ranks get the same number of batches, which sharded models need; one
    that has no windows left gets a batch without labels.

    A batch is a dict: ``input_ids`` and ``labels`` int64 ``[B, T]``, padded right with the end-of-text id and -100 to a
    multiple of 64 (or to ``seq_len``); ``bytes`` float64 ``[B]``, the document's bytes in proportion to the window's
    tokens; ``document`` int64 ``[B]``, its number in the domain (-1 where there is none).

    Args:
        stream: The domain's test split.
        documents: Which documents, see `choose_documents`.
        n_bytes: Their lengths in bytes, see `count_bytes`.
        seq_len: Longest window.
        batch_size: B.
        eos_id: The end-of-text id.
        rank: Of this process, among ``world_size``.
        world_size: Number of data-parallel ranks.
    """

    def __init__(
        self,
        stream: TokenStream,
        documents: list[int],
        n_bytes: list[int],
        *,
        seq_len: int,
        batch_size: int,
        eos_id: int,
        rank: int,
        world_size: int,
    ) -> None:
        self.stream = stream
        self.seq_len = seq_len
        self.batch_size = batch_size
        self.eos_id = eos_id
        lengths = np.array([stream.document_length(d) for d in documents], dtype=np.int64)
        windows = -(-lengths // seq_len)
        place = np.repeat(np.arange(len(documents)), windows)
        first = (np.arange(len(place)) - np.repeat(np.cumsum(windows) - windows, windows)) * seq_len
        length = np.minimum(lengths[place] - first, seq_len)
        order = np.argsort(-length, kind="stable")  # the longest first: too little memory shows at once
        mine = order[rank::world_size]
        self.n_windows = len(place)
        self.n_batches = math.ceil(math.ceil(len(place) / world_size) / batch_size)
        self._document = np.array(documents, dtype=np.int64)[place[mine]]
        self._first = first[mine]
        self._length = length[mine]
        self._bytes = np.array(n_bytes, dtype=np.float64)[place[mine]] * self._length / lengths[place[mine]]

    def __len__(self) -> int:
        return self.n_batches

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        if not 0 <= i < self.n_batches:
            raise IndexError(i)
        mine = slice(i * self.batch_size, (i + 1) * self.batch_size)
        lengths = self._length[mine]
        B = max(1, len(lengths))
        longest = int(lengths.max()) if len(lengths) else 1
        T = min(-(-longest // PAD_MULTIPLE) * PAD_MULTIPLE, self.seq_len)
        input_ids = np.full((B, T), self.eos_id, dtype=np.int64)
        labels = np.full((B, T), IGNORE, dtype=np.int64)
        n_bytes = np.zeros(B)
        documents = np.full(B, -1, dtype=np.int64)
        for b, (document, first, n) in enumerate(zip(self._document[mine], self._first[mine], lengths, strict=True)):
            tokens = self.stream.document(int(document))
            labels[b, :n] = tokens[first : first + n]
            input_ids[b, 1:n] = labels[b, : n - 1]
            input_ids[b, 0] = tokens[first - 1] if first else self.eos_id
        n_bytes[: len(lengths)] = self._bytes[mine]
        documents[: len(lengths)] = self._document[mine]
        return {
            "input_ids": torch.from_numpy(input_ids),
            "labels": torch.from_numpy(labels),
            "bytes": torch.from_numpy(n_bytes),
            "document": torch.from_numpy(documents),
        }


class _OwnBatches(DistributedSampler):
    """All of this rank's batches, in order. Being a `DistributedSampler` keeps Lightning from dealing them again."""

    def __init__(self, batches: Dataset) -> None:
        super().__init__(batches, num_replicas=1, rank=0, shuffle=False)


def loader(batches: Dataset, num_workers: int, pin_memory: bool) -> DataLoader:
    """The data loader of one domain's evaluation batches, each an item of ``batches``."""
    sampler: Sampler = _OwnBatches(batches)
    return DataLoader(batches, batch_size=None, sampler=sampler, num_workers=num_workers, pin_memory=pin_memory)
