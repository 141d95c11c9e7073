from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from seqarch.data import LimitedDomainDataModule
from seqarch.data.corpus import Corpus, TokenStream
from seqarch.data.shards import DTYPES, Shard, token_dtype
from tests.data import megatron


def test_ours_is_megatrons(corpus_path: Path, records: dict[str, list[dict]]) -> None:
    tokenizer = Tokenizer.from_file(str(corpus_path / "tokenizer.json"))
    for split in ("train", "test"):
        for domain, label in (("cc", "RedPajamaCommonCrawl"), ("github", "RedPajamaGithub")):
            texts = [r["text"] for r in records[split] if r["meta"]["redpajama_set_name"] == label]
            sequences, bounds, dtype = megatron.read(corpus_path / split / domain)
            assert dtype is np.uint16
            assert bounds == list(range(len(texts) + 1))
            assert [s.tolist() for s in sequences] == [[*tokenizer.encode(t).ids, 0] for t in texts]
            n_bytes = np.fromfile(corpus_path / split / f"{domain}.bytes", "<i8")
            assert n_bytes.tolist() == [len(t.encode()) for t in texts]


@pytest.mark.parametrize("code", sorted(DTYPES))
def test_reads_megatrons_with_several_sequences_a_document(tmp_path: Path, code: int) -> None:
    documents = [[[1, 2, 3]], [[4], [5, 6]], [[7, 8, 9, 10], [11], [12]]]
    megatron.write(tmp_path / "x", documents, code)
    shard = pickle.loads(pickle.dumps(Shard(tmp_path / "x")))
    shard.check_contiguous()
    assert shard.dtype == np.dtype(megatron.CODES[code])
    assert (shard.n_documents, shard.n_tokens, shard.max_id()) == (3, 12, 12)
    assert [shard.document(i).tolist() for i in range(3)] == [[1, 2, 3], [4, 5, 6], [7, 8, 9, 10, 11, 12]]
    assert shard.documents_between(0, 12) == [3, 6]
    assert shard.documents_between(3, 6) == []
    assert shard.documents_between(2, 4) == [3]
    assert shard.document_bytes(0) is None


def test_stream_over_several_shards(tmp_path: Path) -> None:
    megatron.write(tmp_path / "a", [[[1, 2, 3]], [[4, 5]]], 8)
    megatron.write(tmp_path / "b", [[[6]], [[7, 8, 9]]], 4)
    stream = TokenStream("x", [Shard(tmp_path / "a"), Shard(tmp_path / "b")])
    assert (stream.n_tokens, stream.n_documents) == (9, 4)
    assert stream.tokens(0, 9).tolist() == list(range(1, 10))
    assert stream.tokens(2, 7).tolist() == [3, 4, 5, 6, 7]
    assert stream.tokens(6, 9).tolist() == [7, 8, 9]
    assert stream.document_bounds(0, 9) == [3, 5, 6]
    assert stream.document_bounds(5, 7) == [6]
    assert stream.document_bounds(3, 5) == []
    assert [stream.document(i).tolist() for i in range(4)] == [[1, 2, 3], [4, 5], [6], [7, 8, 9]]
    assert [stream.document_length(i) for i in range(4)] == [3, 2, 1, 3]
    # Windows of 3 + 1 tokens that share one: 0…3, 3…6; token 9 would be the last label of a third.
    assert stream.n_windows(3) == 2


def test_foreign_shards_are_used_as_they_are(tmp_path: Path, tokenizer_json: Path) -> None:
    tokenizer = Tokenizer.from_file(str(tokenizer_json))
    texts = ["the quick brown fox 東京", "naïve cats", "lazy dogs; x = f(y)"]
    documents = [[[*tokenizer.encode(t).ids, 0]] for t in texts]
    for split in ("train", "test"):
        megatron.write(tmp_path / split / "mine", documents, 4)
    shutil.copy(tokenizer_json, tmp_path / "tokenizer.json")
    data = LimitedDomainDataModule(tmp_path, seq_len=4, batch_size=2, micro_batch_size=2, train_domains=["mine"])
    data.prepare_data()
    data.setup("fit")
    assert data.val_domains == ["mine"]
    batches = list(data.val_dataloader()[0])
    measured: dict[int, float] = {}
    for batch in batches:
        for document, n in zip(batch["document"].tolist(), batch["bytes"].tolist(), strict=True):
            measured[document] = measured.get(document, 0.0) + n
    assert measured == pytest.approx({i: len(t.encode()) for i, t in enumerate(texts)})


def test_dtype_by_vocabulary() -> None:
    assert token_dtype(65536) == np.uint16
    assert token_dtype(65537) == np.int32
    with pytest.raises(ValueError, match="does not fit int32"):
        token_dtype((1 << 31) + 1)


def _copy(corpus_path: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(corpus_path, tmp_path / "copy"))


def test_truncated_bin(corpus_path: Path, tmp_path: Path) -> None:
    root = _copy(corpus_path, tmp_path)
    path = root / "train" / "cc.bin"
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(ValueError, match=r"train/cc\.bin has \d+ bytes.*truncated.*prepare it again"):
        Corpus(root)


def test_truncated_idx(corpus_path: Path, tmp_path: Path) -> None:
    root = _copy(corpus_path, tmp_path)
    path = root / "train" / "cc.idx"
    data = path.read_bytes()
    path.write_bytes(data[:-8])
    with pytest.raises(ValueError, match=r"train/cc\.idx has \d+ bytes.*truncated"):
        Corpus(root)
    path.write_bytes(data[:20])
    with pytest.raises(ValueError, match=r"train/cc\.idx is no Megatron index"):
        Corpus(root)


def test_corrupted_shard_fails_its_checksum(corpus_path: Path, tmp_path: Path) -> None:
    root = _copy(corpus_path, tmp_path)
    path = root / "test" / "c4.bin"
    data = bytearray(path.read_bytes())
    data[10] ^= 1
    path.write_bytes(data)
    module = LimitedDomainDataModule(root, seq_len=8, batch_size=1, micro_batch_size=1, train_domains=["cc"])
    with pytest.raises(ValueError, match=r"test/c4\.bin is corrupted.*SHA-256"):
        module.prepare_data()


def test_missing_file(corpus_path: Path, tmp_path: Path) -> None:
    root = _copy(corpus_path, tmp_path)
    (root / "train" / "c4.idx").unlink()
    with pytest.raises(ValueError, match=r"train/c4\.idx is missing"):
        Corpus(root)
    (root / "manifest.json").write_text('{"format": "seqarch-corpus"')
    with pytest.raises(ValueError, match=r"manifest\.json cannot be read"):
        Corpus(root)


def _edit(root: Path, change: Callable[[dict], None]) -> None:
    path = root / "manifest.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))


def _shard_with(**values: object) -> Callable[[dict], None]:
    return lambda manifest: manifest["splits"]["train"]["cc"][0].update(values)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_shard_with(tokens=12), r"says tokens: 12, but .*train/cc\.bin has \d+: the manifest was changed"),
        (_shard_with(documents=1), r"says documents: 1, but .*train/cc\.idx has \d+"),
        (_shard_with(dtype="int32"), r"says tokens of type int32, but .*train/cc\.idx has uint16"),
        (_shard_with(max_id=70000), r"train/cc\.bin holds id 70000, but the vocabulary"),
        (lambda m: m["tokenizer"].update(vocab_size=9), r"says a vocabulary of 9, but .*tokenizer\.json has \d+"),
        (
            lambda m: m["tokenizer"].update(eos_id=9),
            r"says for '<\|endoftext\|>' the id 9, but .*tokenizer\.json has 0",
        ),
        (lambda m: m["tokenizer"].update(eos_token="<s>"), r"says for '<s>' the id 0, but .*tokenizer\.json has None"),
    ],
)
def test_a_manifest_that_does_not_fit_its_shards(
    corpus_path: Path, tmp_path: Path, change: Callable[[dict], None], message: str
) -> None:
    root = _copy(corpus_path, tmp_path)
    Corpus(root)
    _edit(root, change)
    with pytest.raises(ValueError, match=message):
        Corpus(root)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_shard_with(bytes=12), r"says bytes of text: 12, but .*train/cc\.bytes has \d+"),
        (_shard_with(max_id=1), r"says as the largest id 1, but .*train/cc\.bin has \d+"),
    ],
)
def test_what_only_reading_everything_shows(
    corpus_path: Path, tmp_path: Path, change: Callable[[dict], None], message: str
) -> None:
    root = _copy(corpus_path, tmp_path)
    Corpus(root).verify()
    _edit(root, change)
    with pytest.raises(ValueError, match=message):
        Corpus(root).verify()


def test_tokenizer_that_does_not_match(corpus_path: Path, tmp_path: Path) -> None:
    root = _copy(corpus_path, tmp_path)
    path = root / "tokenizer.json"
    path.write_text(path.read_text() + "\n")
    with pytest.raises(ValueError, match=r"tokenizer\.json does not match the shards"):
        Corpus(root)
    path.unlink()
    with pytest.raises(ValueError, match=r"tokenizer\.json is missing"):
        Corpus(root)


def test_ids_outside_the_vocabulary(tmp_path: Path, tokenizer_json: Path) -> None:
    megatron.write(tmp_path / "train" / "mine", [[[1, 2, 50000, 0]]], 8)
    shutil.copy(tokenizer_json, tmp_path / "tokenizer.json")
    with pytest.raises(ValueError, match=r"train/mine\.bin holds id 50000, but the vocabulary"):
        Corpus(tmp_path).verify()


def test_no_corpus(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"path: .*nothing does not exist.*seqarch data prepare"):
        Corpus(tmp_path / "nothing")
    with pytest.raises(ValueError, match=r"path: .* is no corpus"):
        Corpus(tmp_path)
