"""Each kind of bad input: an error that says where, what is wrong and what to do; and nothing stays behind."""

from __future__ import annotations

import gzip
import io
import json
import shutil
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from seqarch.data.prepare import prepare
from seqarch.data.tokenizer import train_tokenizer
from tests.data.raw import make_records

GOOD = "".join(json.dumps(r) + "\n" for r in make_records(3, seed=0))


def lines(*extra: str | bytes) -> bytes:
    return GOOD.encode() + b"".join((e if isinstance(e, bytes) else e.encode()) + b"\n" for e in extra)


def parquet(rows: list[dict], n: int | None = None) -> bytes:
    sink = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows).slice(0, n), sink)
    return sink.getvalue()


ZST = zstandard.compress(GOOD.encode() * 50)
GZ = gzip.compress(GOOD.encode() * 50)
META = {"redpajama_set_name": "RedPajamaC4"}
FILES: dict[str, tuple[str, bytes, str]] = {
    "empty": ("a.jsonl", b"", r"a\.jsonl is empty; leave it out"),
    "empty archive": ("a.jsonl.zst", zstandard.compress(b""), r"a\.jsonl\.zst is empty; leave it out"),
    "blank lines only": ("a.jsonl", b"\n\n \n", r"a\.jsonl holds no text"),
    "empty texts only": ("a.jsonl", b'{"text": "", "meta": {"domain": "x"}}\n', r"holds no text; 1 records were empty"),
    "truncated zst": ("a.jsonl.zst", ZST[:-20], r"a\.jsonl\.zst is truncated: .*fetch it again"),
    "corrupted zst": ("a.jsonl.zst", b"not zst" + ZST, r"a\.jsonl\.zst is corrupted .*fetch it again"),
    "truncated gz": ("a.jsonl.gz", GZ[:-20], r"a\.jsonl\.gz is truncated: .*fetch it again"),
    "corrupted gz": ("a.jsonl.gz", GZ[:30] + bytes(40) + GZ[70:], r"a\.jsonl\.gz is corrupted .*fetch it again"),
    "no gz": ("a.jsonl.gz", b"plain text", r"a\.jsonl\.gz is corrupted"),
    "truncated jsonl": ("a.jsonl", GOOD.encode()[:-30], r"a\.jsonl, line 3: not valid JSON .*truncated\?"),
    "not utf-8": (
        "a.jsonl",
        lines(b'{"text": "caf\xe9"}'),
        r"a\.jsonl, line 4: not UTF-8 \(byte 0xe9\)",
    ),
    "text not utf-8": ("a.txt", b"one\ntwo\xff", r"a\.txt, line 2: not UTF-8 \(byte 0xff\)"),
    "no text": ("a.jsonl", lines('{"content": "x"}'), r"line 4: no field 'text' \(fields: content\); pass --text_key"),
    "text is a number": ("a.jsonl", lines('{"text": 3}'), r"line 4: 'text' is int, not text"),
    "a list": ("a.json", b'[{"text": "x"}]', r"a\.json, line 1: not a JSON object but list; .*one JSON object a line"),
    "lone surrogate": ("a.jsonl", lines('{"text": "a\\ud800"}'), r"line 4: a lone surrogate \(\\ud800\)"),
    "no label": ("a.jsonl", lines('{"text": "x"}'), r"line 4: the record names no domain .*pass --domain NAME"),
    "unknown label": (
        "a.jsonl",
        lines('{"text": "x", "meta": {"redpajama_set_name": "RedPajamaNews"}}'),
        r"line 4: unknown meta\.redpajama_set_name 'RedPajamaNews' \(known: RedPajamaCommonCrawl",
    ),
    "bad domain": (
        "a.jsonl",
        lines('{"text": "x", "meta": {"domain": "a/b"}}'),
        r"line 4: meta\.domain: 'a/b' cannot name",
    ),
    "text without domain": ("a.txt", b"words", r"a\.txt: plain text names no domain; pass --domain NAME"),
    "unknown suffix": ("a.csv", b"x,y", r"a\.csv has a suffix that is not known \(known: \.jsonl"),
    "truncated parquet": (
        "a.parquet",
        parquet([{"text": "x", "meta": META}])[:-9],
        r"a\.parquet cannot be read as Parquet",
    ),
    "parquet without text": (
        "a.parquet",
        parquet([{"body": "x"}]),
        r"a\.parquet has no column 'text' \(it has: body\)",
    ),
    "parquet with null": (
        "a.parquet",
        parquet([{"text": "x", "meta": META}, {"text": None, "meta": META}]),
        r"a\.parquet, row 2: 'text' is NoneType, not text",
    ),
    "empty parquet": ("a.parquet", parquet([{"text": "x"}], n=0), r"a\.parquet is empty; leave it out"),
}


@pytest.mark.parametrize("case", FILES)
def test_bad_file(tmp_path: Path, tokenizer_json: Path, case: str) -> None:
    name, content, message = FILES[case]
    (tmp_path / name).write_bytes(content)
    domain = "x" if case == "text not utf-8" else None
    with pytest.raises(ValueError, match=message):
        prepare(str(tmp_path / name), tmp_path / "out", tokenizer=str(tokenizer_json), domain=domain, processes=1)
    assert sorted(p.name for p in tmp_path.iterdir()) == [name]


def test_bad_file_leaves_an_older_corpus_as_it_was(tmp_path: Path, corpus_path: Path) -> None:
    root = Path(shutil.copytree(corpus_path, tmp_path / "out"))
    before = {p: p.stat().st_mtime_ns for p in root.rglob("*")}
    (tmp_path / "a.jsonl").write_bytes(lines("{"))
    with pytest.raises(ValueError, match="line 4: not valid JSON"):
        prepare(str(tmp_path / "a.jsonl"), root, domain="more", processes=1)
    assert {p: p.stat().st_mtime_ns for p in root.rglob("*") if p != root}.items() <= before.items()
    assert {p for p in root.rglob("*")} == before.keys()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"input": "missing.jsonl"}, r"input: missing\.jsonl does not exist; pass a file"),
        ({"input": "/no/such/folder"}, r"input: /no/such/folder does not exist"),
        ({"input": "no*thing.jsonl"}, r"input: no file matches no\*thing\.jsonl"),
        ({"input": []}, "input: names nothing"),
        ({"input": "EMPTY"}, "holds no file that can be read"),
        ({"split": "dev"}, "split must be one of train, test, got 'dev'"),
        ({"text_documents": "page"}, "text_documents must be one of file, line, paragraph"),
        ({"domain": "a b"}, "domain: 'a b' cannot name a domain"),
        ({"part": "3/2"}, "part must be i/n"),
        ({"part": "x"}, "part must be i/n"),
        ({"processes": 0}, "processes must be at least 1"),
        ({"tokenizer": "missing.json"}, r"tokenizer: missing\.json does not exist; train one"),
        ({"tokenizer": None}, "tokenizer: not given, and .* does not exist; train one"),
        ({"tokenizer": "BROKEN"}, "is not a valid tokenizer.json"),
        ({"eos_token": "</nope>"}, "eos_token: '</nope>' is not in the tokenizer's vocabulary"),
    ],
)
def test_bad_option(
    tmp_path: Path, tokenizer_json: Path, monkeypatch: pytest.MonkeyPatch, options: dict, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "good.jsonl").write_text(GOOD)
    (tmp_path / "EMPTY").mkdir()
    (tmp_path / "BROKEN").mkdir()
    (tmp_path / "BROKEN" / "tokenizer.json").write_text("{}")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ValueError, match=message):
        prepare(**{"input": "good.jsonl", "output": "out", "tokenizer": str(tokenizer_json), "processes": 1, **options})
    assert sorted(tmp_path.rglob("*")) == before


def test_names_that_are_not_on_the_hub(tmp_path: Path, tokenizer_json: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets
    import huggingface_hub
    from datasets.exceptions import DatasetNotFoundError
    from huggingface_hub.errors import LocalEntryNotFoundError

    def load_dataset(*args, **kwargs) -> None:
        raise DatasetNotFoundError("offline")

    def download(*args) -> None:
        raise LocalEntryNotFoundError("offline")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    with pytest.raises(
        ValueError, match=r"input: 'owner/name' is no file or folder here, .*\(offline\).*HF_HUB_OFFLINE"
    ):
        prepare("owner/name", tmp_path / "out", tokenizer=str(tokenizer_json), processes=1)
    assert not (tmp_path / "out").exists()
    (tmp_path / "good.jsonl").write_text(GOOD)
    with pytest.raises(ValueError, match=r"tokenizer: 'owner/name' is no file, .*\(offline\)"):
        prepare(str(tmp_path / "good.jsonl"), tmp_path / "out", tokenizer="owner/name", processes=1)
    assert not (tmp_path / "out").exists()


def test_another_tokenizer_than_the_corpus_has(tmp_path: Path, corpus_path: Path) -> None:
    root = Path(shutil.copytree(corpus_path, tmp_path / "out"))
    (tmp_path / "good.jsonl").write_text(GOOD)
    train_tokenizer(str(tmp_path / "good.jsonl"), tmp_path / "other.json", vocab_size=260)
    with pytest.raises(
        ValueError, match=r"tokenizer: .*other\.json is not the tokenizer of .*prepare into another folder"
    ):
        prepare(str(tmp_path / "good.jsonl"), root, tokenizer=str(tmp_path / "other.json"), domain="x", processes=1)
    shutil.copy(tmp_path / "other.json", root / "tokenizer.json")
    with pytest.raises(ValueError, match="was prepared with another one"):
        prepare(str(tmp_path / "good.jsonl"), root, domain="x", processes=1)
