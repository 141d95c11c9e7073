from __future__ import annotations

import gzip
import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from tokenizers import Tokenizer

import seqarch.data.reading
from seqarch.data.corpus import Corpus
from seqarch.data.manifest import load_manifest
from seqarch.data.prepare import prepare
from seqarch.data.worker import split_long
from tests.data import megatron
from tests.data.raw import make_records, write_jsonl


def snapshot(root: Path) -> dict[str, bytes]:
    """All files of a corpus but the manifest, whose record of the input differs."""
    return {
        str(p.relative_to(root)): p.read_bytes()
        for p in sorted(root.rglob("*"))
        if p.is_file() and p.name != "manifest.json"
    }


def texts_of(root: Path, domain: str, split: str = "train") -> list[str]:
    tokenizer = Tokenizer.from_file(str(root / "tokenizer.json"))
    sequences, _, _ = megatron.read(root / split / domain)
    assert all(s[-1] == 0 for s in sequences)
    return [tokenizer.decode(s[:-1].tolist(), skip_special_tokens=False) for s in sequences]


def test_every_format_gives_the_same_shards(tmp_path: Path, tokenizer_json: Path) -> None:
    records = make_records(30, seed=3)
    plain = write_jsonl(tmp_path / "a.jsonl", records)
    data = plain.read_bytes()
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(data))
    half = data.index(b"\n", len(data) // 2) + 7  # two frames that meet inside a line
    frames = [zstandard.compress(data[:half]), zstandard.compress(data[half:])]
    (tmp_path / "c.jsonl.zst").write_bytes(b"".join(frames))
    table = pyarrow.Table.from_pylist(records)
    pyarrow.parquet.write_table(table, tmp_path / "d.parquet", row_group_size=11)
    results = []
    for name in ("a.jsonl", "b.jsonl.gz", "c.jsonl.zst", "d.parquet"):
        out = tmp_path / f"out-{name}"
        prepare(str(tmp_path / name), out, tokenizer=str(tokenizer_json), processes=1)
        results.append(snapshot(out))
    assert set(results[0]) == {
        "tokenizer.json",
        *(f"train/{d}{s}" for d in ("cc", "c4", "github") for s in (".bin", ".idx", ".bytes")),
    }
    assert all(result == results[0] for result in results)


def test_round_trip_and_counts(corpus_path: Path, records: dict[str, list[dict]]) -> None:
    manifest = load_manifest(corpus_path)
    assert manifest is not None
    for split in ("train", "test"):
        for domain, label in (("cc", "RedPajamaCommonCrawl"), ("c4", "RedPajamaC4"), ("github", "RedPajamaGithub")):
            texts = [r["text"] for r in records[split] if r["meta"]["redpajama_set_name"] == label]
            assert texts_of(corpus_path, domain, split) == texts
            (shard,) = manifest.splits[split][domain]
            assert shard.documents == len(texts)
            assert shard.bytes == sum(len(t.encode()) for t in texts)
            assert shard.tokens == sum(len(s) for s in megatron.read(corpus_path / split / domain)[0])
    Corpus(corpus_path).verify()


def test_processes_and_block_size_do_not_matter(
    tmp_path: Path, tokenizer_json: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for i in range(3):
        write_jsonl(tmp_path / "raw" / f"{i}.jsonl", make_records(40, seed=i))
    prepare(str(tmp_path / "raw"), tmp_path / "one", tokenizer=str(tokenizer_json), processes=1)
    monkeypatch.setattr(seqarch.data.reading, "BLOCK_BYTES", 2000)
    prepare(str(tmp_path / "raw" / "*.jsonl"), tmp_path / "many", tokenizer=str(tokenizer_json), processes=3)
    assert snapshot(tmp_path / "one") == snapshot(tmp_path / "many")


def test_parts_make_one_corpus(tmp_path: Path, tokenizer_json: Path) -> None:
    files = [str(write_jsonl(tmp_path / f"{i}.jsonl", make_records(20, seed=i))) for i in range(5)]
    out = tmp_path / "out"
    for part in ("2/3", "1/3"):
        prepare(files, out, tokenizer=str(tokenizer_json), part=part, processes=1)
    with pytest.raises(ValueError, match=r"is not complete: run `seqarch data prepare` with --part 3/3 of"):
        Corpus(out)
    prepare(files, out, tokenizer=str(tokenizer_json), part="3/3", processes=1)
    prepare(files, out, tokenizer=str(tokenizer_json), part="3/3", processes=1)  # again: nothing is doubled
    corpus = Corpus(out)
    corpus.verify()
    stream = corpus.stream("train", "cc", "")
    assert [s.prefix.name for s in stream.shards] == [f"cc.{i:05d}-of-00003" for i in (1, 2, 3)]
    tokenizer = Tokenizer.from_file(str(tokenizer_json))
    # Part i has files i, i + 3, …
    texts = [
        r["text"]
        for i in (0, 3, 1, 4, 2)
        for r in make_records(20, seed=i)
        if r["meta"]["redpajama_set_name"] == "RedPajamaCommonCrawl"
    ]
    assert stream.n_documents == len(texts)
    assert [tokenizer.decode(stream.document(i)[:-1].tolist()) for i in range(len(texts))] == texts
    with pytest.raises(ValueError, match="cannot be dealt to 9 parts"):
        prepare(files, tmp_path / "other", tokenizer=str(tokenizer_json), part="1/9")


def test_twice_is_once_and_other_input_is_refused(tmp_path: Path, tokenizer_json: Path) -> None:
    a = write_jsonl(tmp_path / "a.jsonl", make_records(9, seed=1))
    out = tmp_path / "out"
    prepare(str(a), out, tokenizer=str(tokenizer_json), processes=1)
    before = snapshot(out)
    prepare(str(a), out, processes=1)  # the tokenizer in the folder serves
    assert snapshot(out) == before
    b = write_jsonl(tmp_path / "b.jsonl", make_records(9, seed=2))
    with pytest.raises(ValueError, match=r"already holds domain cc \(train\) from .*a\.jsonl"):
        prepare(str(b), out, processes=1)
    assert snapshot(out) == before
    prepare(str(b), out, domain="book", processes=1)
    assert set(Corpus(out).splits["train"]) == {"cc", "c4", "github", "book"}


def test_text_files(tmp_path: Path, tokenizer_json: Path) -> None:
    raw = tmp_path / "raw"
    raw.mkdir()
    (raw / "a.txt").write_text("one\nline\n\n\ntwo 東京\n", encoding="utf-8")
    (raw / "b.txt").write_text("three", encoding="utf-8")
    expected = {
        "file": ["one\nline\n\n\ntwo 東京\n", "three"],
        "paragraph": ["one\nline", "two 東京", "three"],
        "line": ["one", "line", "two 東京", "three"],
    }
    for mode, texts in expected.items():
        out = tmp_path / mode
        prepare(str(raw), out, tokenizer=str(tokenizer_json), domain="x", text_documents=mode, processes=1)
        assert texts_of(out, "x") == texts


def test_special_tokens_in_a_text_are_text_and_empty_records_are_counted(tmp_path: Path, tokenizer_json: Path) -> None:
    raw = write_jsonl(tmp_path / "a.jsonl", [{"text": "a<|endoftext|>b"}, {"text": ""}, {"text": "c\u2028d"}])
    prepare(str(raw), tmp_path / "out", tokenizer=str(tokenizer_json), domain="x", processes=1)
    assert texts_of(tmp_path / "out", "x") == ["a<|endoftext|>b", "c\u2028d"]
    sequences, _, _ = megatron.read(tmp_path / "out" / "train" / "x")
    assert [s.tolist().count(0) for s in sequences] == [1, 1]
    manifest = load_manifest(tmp_path / "out")
    assert manifest is not None
    assert manifest.runs[0].skipped_empty == 1


def test_long_documents_are_cut_where_tokens_do_not_join(tokenizer_json: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("seqarch.data.worker._PIECE_CHARS", 100)
    tokenizer = Tokenizer.from_file(str(tokenizer_json))
    text = "".join(r["text"] + "\n \n" for r in make_records(30, seed=5))
    pieces = split_long(text)
    assert "".join(pieces) == text
    assert len(pieces) > 20
    assert max(map(len, pieces)) <= 100
    at_lines = [p for p in pieces[1:] if p.startswith("\n")]
    assert len(at_lines) > 5
    text = "\n".join("the quick brown fox " * 3 + "end" for _ in range(50))
    assert [i for p in split_long(text) for i in tokenizer.encode(p).ids] == tokenizer.encode(text).ids


def test_wide_vocabulary_takes_int32(tmp_path: Path, tokenizer_json: Path) -> None:
    raw = json.loads(tokenizer_json.read_text())
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    raw["added_tokens"].append({"id": 70000, "content": "<far>", **special})
    # The library numbers added tokens after the vocabulary: put one there that is far away.
    raw["model"]["vocab"]["<far>"] = 70000
    wide = tmp_path / "tokenizer.json"
    wide.write_text(json.dumps(raw))
    records = write_jsonl(tmp_path / "a.jsonl", make_records(6, seed=1))
    prepare(str(records), tmp_path / "out", tokenizer=str(wide), processes=1)
    sequences, _, dtype = megatron.read(tmp_path / "out" / "train" / "cc")
    assert dtype.__name__ == "int32"
    assert len(sequences) == 2
    assert texts_of(tmp_path / "out", "cc") == [r["text"] for r in make_records(6, seed=1)[::3]]


def test_hub_names_go_through_datasets(tmp_path: Path, tokenizer_json: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    records = make_records(20, seed=4)
    asked = []

    def load_dataset(name: str, split: str, streaming: bool) -> datasets.IterableDataset:
        asked.append((name, split, streaming))
        return datasets.Dataset.from_list(records).to_iterable_dataset(num_shards=2)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(seqarch.data.reading, "BLOCK_BYTES", 1000)
    prepare("owner/name:validation", tmp_path / "hub", tokenizer=str(tokenizer_json), processes=1)
    raw = write_jsonl(tmp_path / "a.jsonl", records)
    prepare(str(raw), tmp_path / "file", tokenizer=str(tokenizer_json), processes=1)
    assert snapshot(tmp_path / "hub") == snapshot(tmp_path / "file")
    assert asked == [("owner/name", "validation", True)]
