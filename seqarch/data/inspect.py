"""`seqarch data inspect`: what a prepared corpus holds, a few pieces of it decoded, and whether it is intact."""

from __future__ import annotations

import os
from pathlib import Path

from seqarch.data.corpus import Corpus, TokenStream
from seqarch.data.manifest import SPLITS
from seqarch.data.permutation import KeyedPermutation, derive_key
from seqarch.data.tokenizer import load_tokenizer


def inspect(
    path: str | os.PathLike,
    *,
    windows: int = 2,
    window_tokens: int = 64,
    domains: list[str] | None = None,
    seed: int = 0,
    verify: bool = True,
) -> None:
    """Show counts by domain and some decoded windows of a corpus, and check its files.

    Args:
        path: Folder of a prepared corpus, or builtin.
        windows: How many windows of each domain and split to decode.
        window_tokens: Length of a window in tokens.
        domains: Which domains; all if not given.
        seed: Another seed shows other windows.
        verify: Check every shard's checksum, which reads all of it.
    """
    for option, value, least in (("windows", windows, 0), ("window_tokens", window_tokens, 1)):
        if value < least:
            raise ValueError(f"{option} must be at least {least}, got {value}")
    if str(path) == "builtin":
        from seqarch.data.builtin import builtin_corpus

        path = builtin_corpus()
    corpus = Corpus(Path(path))
    record = corpus.tokenizer
    print(f"{corpus.root}")
    print(f"tokenizer {record.hash[:12]}: {record.vocab_size} ids, end of text {record.eos_token} (id {record.eos_id})")
    print(f"{'split':6} {'domain':16} {'documents':>12} {'tokens':>16} {'bytes':>16} {'bytes/token':>12}")
    chosen: list[tuple[str, TokenStream]] = []
    known = {d for split in SPLITS for d in corpus.domains(split)}
    unknown = sorted(set(domains or []) - known)
    if unknown:
        raise ValueError(f"domains: {corpus.root} has no {', '.join(unknown)} (it has: {', '.join(sorted(known))})")
    for split in SPLITS:
        for domain in corpus.domains(split):
            if domains is None or domain in domains:
                stream = corpus.stream(split, domain, "domains")
                chosen.append((split, stream))
                print(_row(split, stream, corpus.recorded_bytes(split, domain)))
    if windows:
        tokenizer = load_tokenizer(corpus.tokenizer_path)
        for split, stream in chosen:
            for start in _starts(stream, windows, window_tokens, seed):
                ids = stream.tokens(start, min(start + window_tokens, stream.n_tokens)).tolist()
                text = tokenizer.decode(ids, skip_special_tokens=False)
                print(f"\n--- {split}/{stream.name}, tokens {start} to {start + len(ids) - 1}\n{text}")
    if verify:
        corpus.verify()
        what = (
            "sizes and checksums match the manifest" if corpus.manifest else "the shards are consistent (no manifest)"
        )
        print(f"\nverified: {what}")


def _row(split: str, stream: TokenStream, n_bytes: int | None) -> str:
    size, ratio = ("?", "?") if n_bytes is None else (f"{n_bytes:,}", f"{n_bytes / max(1, stream.n_tokens):.3f}")
    return f"{split:6} {stream.name:16} {stream.n_documents:>12,} {stream.n_tokens:>16,} {size:>16} {ratio:>12}"


def _starts(stream: TokenStream, windows: int, window_tokens: int, seed: int) -> list[int]:
    n = -(-stream.n_tokens // window_tokens)
    if n == 0:
        return []
    permutation = KeyedPermutation(n, derive_key(seed, "inspect", stream.name))
    return [int(permutation(i)) * window_tokens for i in range(min(windows, n))]
