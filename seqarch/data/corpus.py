"""A prepared corpus, opened for reading: each domain's shards as one stream of tokens and one list of documents."""

from __future__ import annotations

from bisect import bisect_right
from pathlib import Path

import numpy as np

from seqarch.data.manifest import (
    SPLITS,
    Manifest,
    ShardRecord,
    TokenizerRecord,
    check_files,
    load_manifest,
    manifest_path,
)
from seqarch.data.shards import Shard, sibling
from seqarch.data.tokenizer import find_eos, hash_bytes, load_tokenizer, vocabulary_size


class TokenStream:
    """The shards of one domain and split, one after another.

    Args:
        name: The domain.
        shards: In order.
    """

    def __init__(self, name: str, shards: list[Shard]) -> None:
        self.name = name
        self.shards = shards
        self._token_starts = [0]
        self._document_starts = [0]
        for shard in shards:
            self._token_starts.append(self._token_starts[-1] + shard.n_tokens)
            self._document_starts.append(self._document_starts[-1] + shard.n_documents)

    @property
    def n_tokens(self) -> int:
        """Number of tokens."""
        return self._token_starts[-1]

    @property
    def n_documents(self) -> int:
        """Number of documents."""
        return self._document_starts[-1]

    def n_windows(self, seq_len: int) -> int:
        """Windows of ``seq_len + 1`` tokens; neighbours share one, a last label that is the next one's first input."""
        return max(0, (self.n_tokens - 1) // seq_len)

    def _pieces(self, start: int, end: int) -> list[tuple[Shard, int, int, int]]:
        """Shards under ``start … end``: each with the bounds inside it and its own first token in the stream."""
        pieces = []
        i = bisect_right(self._token_starts, start) - 1
        while i < len(self.shards) and self._token_starts[i] < end:
            base = self._token_starts[i]
            low, high = max(start - base, 0), min(end - base, self.shards[i].n_tokens)
            if low < high:
                pieces.append((self.shards[i], low, high, base))
            i += 1
        return pieces

    def tokens(self, start: int, end: int) -> np.ndarray:
        """Tokens ``start … end - 1`` as int64."""
        pieces = [shard.tokens[low:high] for shard, low, high, _ in self._pieces(start, end)]
        return np.concatenate(pieces, dtype=np.int64, casting="unsafe") if pieces else np.empty(0, np.int64)

    def document_bounds(self, start: int, end: int) -> list[int]:
        """The tokens in ``start < t < end`` at which a document starts."""
        bounds = []
        for shard, low, high, base in self._pieces(start, end):
            if low == 0 and base > start:
                bounds.append(base)
            bounds.extend(base + t for t in shard.documents_between(low, high))
        return bounds

    def _locate(self, i: int) -> tuple[Shard, int]:
        k = bisect_right(self._document_starts, i) - 1
        return self.shards[k], i - self._document_starts[k]

    def document(self, i: int) -> np.ndarray:
        """The tokens of document ``i`` as int64, its end of text included."""
        shard, k = self._locate(i)
        return shard.document(k)

    def document_length(self, i: int) -> int:
        """Number of tokens of document ``i``."""
        shard, k = self._locate(i)
        return shard.document_start(k + 1) - shard.document_start(k)

    def document_bytes(self, i: int) -> int | None:
        """UTF-8 bytes of document ``i``, or None if that was not recorded."""
        shard, k = self._locate(i)
        return shard.document_bytes(k)


class Beginnings(TokenStream):
    """The same documents, of which only the first ``n`` tokens are there; what is not asked for by document is not cut.

    Args:
        stream: The whole ones.
        n: Tokens.
    """

    def __init__(self, stream: TokenStream, n: int) -> None:
        super().__init__(stream.name, stream.shards)
        self.n = n

    def document(self, i: int) -> np.ndarray:
        """The first tokens of document ``i`` as int64, its end of text included if it is among them."""
        return super().document(i)[: self.n]

    def document_length(self, i: int) -> int:
        """Number of tokens that there are of document ``i``."""
        return min(super().document_length(i), self.n)

    def document_bytes(self, i: int) -> int | None:
        """UTF-8 bytes of document ``i`` if it is whole, else None: nobody recorded those of its beginning."""
        return super().document_bytes(i) if super().document_length(i) <= self.n else None


class Corpus:
    """A folder with ``tokenizer.json`` and shards ``train/<domain>`` and ``test/<domain>``.

    One that `prepare` made has a manifest. Without one, the shards are taken as Megatron's tools left them, and the
    end-of-text token is the usual one that the tokenizer has.

    Args:
        root: The folder.

    Raises:
        ValueError: If there is no corpus, if a part or file of it is missing or truncated, its tokenizer another, or
            its manifest that of other shards.
    """

    def __init__(self, root: Path) -> None:
        self.root = Path(root)
        if not self.root.is_dir():
            raise ValueError(
                f"path: {root} does not exist; prepare a corpus with `seqarch data prepare`, or use 'builtin'"
            )
        self.tokenizer_path = self.root / "tokenizer.json"
        self.manifest: Manifest | None = load_manifest(self.root)
        if self.manifest is not None:
            missing = self.manifest.missing_parts()
            if missing:
                raise ValueError(
                    f"{self.root} is not complete: run `seqarch data prepare` with {'; '.join(missing)} first"
                )
            names = {
                split: {d: [s.name for s in shards] for d, shards in domains.items()}
                for split, domains in self.manifest.splits.items()
            }
        else:
            names = self._find_shards()
        self.tokenizer = self._check_tokenizer()
        self.splits: dict[str, dict[str, TokenStream]] = {}
        for split in SPLITS:
            self.splits[split] = {
                domain: TokenStream(domain, [Shard(self.root / name) for name in shards])
                for domain, shards in names.get(split, {}).items()
            }
        if self.manifest is not None:
            self._check(checksums=False)

    def _find_shards(self) -> dict[str, dict[str, list[str]]]:
        names: dict[str, dict[str, list[str]]] = {}
        for split in SPLITS:
            for idx in sorted((self.root / split).glob("*.idx")):
                shards = names.setdefault(split, {}).setdefault(idx.name.split(".")[0], [])
                shards.append(f"{split}/{idx.name.removesuffix('.idx')}")
        if not names:
            raise ValueError(
                f"path: {self.root} holds neither {manifest_path(self.root).name} nor train/*.idx or test/*.idx: "
                "it is no corpus; make one with `seqarch data prepare`"
            )
        return names

    def _check_tokenizer(self) -> TokenizerRecord:
        if not self.tokenizer_path.is_file():
            raise ValueError(f"{self.tokenizer_path} is missing: put the tokenizer.json that made the shards there")
        found = hash_bytes(self.tokenizer_path.read_bytes())
        if self.manifest is None:
            tokenizer = load_tokenizer(self.tokenizer_path)
            return TokenizerRecord(found, vocabulary_size(tokenizer), *find_eos(tokenizer))
        record = self.manifest.tokenizer
        if found != record.hash:
            raise ValueError(
                f"{self.tokenizer_path} does not match the shards: its hash is {found[:12]}…, that of the one that "
                f"made them {record.hash[:12]}…; put that one back, or prepare the corpus again"
            )
        tokenizer = load_tokenizer(self.tokenizer_path)
        self._check_record("a vocabulary of", record.vocab_size, vocabulary_size(tokenizer), self.tokenizer_path)
        id_of_eos = tokenizer.token_to_id(record.eos_token)
        self._check_record(f"for {record.eos_token!r} the id", record.eos_id, id_of_eos, self.tokenizer_path)
        return record

    def _check(self, checksums: bool) -> None:
        """Hold the manifest against the shards: what costs nothing, and with ``checksums`` all of it."""
        assert self.manifest is not None
        for split, domains in self.manifest.splits.items():
            for domain, records in domains.items():
                for record, shard in zip(records, self.splits[split][domain].shards, strict=True):
                    check_files(self.root, record, checksums)
                    self._check_ids(record.name, record.max_id)
                    self._check_shard(record, shard, checksums)

    def _check_shard(self, record: ShardRecord, shard: Shard, everything: bool) -> None:
        index, tokens, texts = (sibling(shard.prefix, suffix) for suffix in (".idx", ".bin", ".bytes"))
        self._check_record("tokens:", record.tokens, shard.n_tokens, tokens)
        self._check_record("documents:", record.documents, shard.n_documents, index)
        self._check_record("tokens of type", record.dtype, shard.dtype.name, index)
        if everything:
            shard.check_contiguous()
            self._check_record("as the largest id", record.max_id, shard.max_id(), tokens)
            if (found := shard.n_bytes()) is not None:
                self._check_record("bytes of text:", record.bytes, found, texts)

    def _check_record(self, what: str, recorded: object, found: object, file: Path) -> None:
        if recorded != found:
            raise ValueError(
                f"{manifest_path(self.root)} says {what} {recorded}, but {file} has {found}: the manifest was changed, "
                "or is that of other shards; put the right one back, or prepare the corpus again"
            )

    def _check_ids(self, name: str, max_id: int) -> None:
        size = self.tokenizer.vocab_size
        if max_id >= size:
            raise ValueError(
                f"{self.root / name}.bin holds id {max_id}, but the vocabulary of {self.tokenizer_path} has only "
                f"{size} ids: another tokenizer made these shards; use that one"
            )

    def verify(self) -> None:
        """Read everything once: checksums and counts where there is a manifest, else the index and the largest id.

        Raises:
            ValueError: For a shard that is corrupted or holds ids outside the vocabulary.
        """
        if self.manifest is not None:
            self._check(checksums=True)
            return
        for domains in self.splits.values():
            for stream in domains.values():
                for shard in stream.shards:
                    shard.check_contiguous()
                    self._check_ids(str(shard.prefix.relative_to(self.root)), shard.max_id())

    def domains(self, split: str) -> list[str]:
        """Names of the domains of a split, sorted."""
        return sorted(self.splits[split])

    def recorded_bytes(self, split: str, domain: str) -> int | None:
        """UTF-8 bytes of a domain's text, or None where that was not recorded."""
        if self.manifest is None:
            return None
        return sum(s.bytes for s in self.manifest.splits[split][domain])

    def stream(self, split: str, domain: str, option: str) -> TokenStream:
        """A domain's tokens; ``ValueError`` names ``option`` and the domains that there are."""
        streams = self.splits[split]
        if domain not in streams:
            known = ", ".join(sorted(streams)) or "none"
            raise ValueError(f"{option}: {self.root} has no domain '{domain}' in its {split} split (it has: {known})")
        return streams[domain]
