"""Fixtures of a small corpus, for all tests (loaded by tests/conftest.py)."""

from __future__ import annotations

from pathlib import Path

import pytest

from seqarch.data.prepare import prepare
from seqarch.data.tokenizer import train_tokenizer
from tests.data.raw import make_records, write_jsonl


@pytest.fixture(scope="session")
def tokenizer_json(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_jsonl(folder / "raw.jsonl", make_records(200, seed=7))
    train_tokenizer(str(folder / "raw.jsonl"), folder / "tokenizer.json", vocab_size=400)
    return folder / "tokenizer.json"


@pytest.fixture(scope="session")
def records() -> dict[str, list[dict]]:
    return {"train": make_records(240, seed=1), "test": make_records(45, seed=2)}


@pytest.fixture(scope="session")
def corpus_path(tmp_path_factory: pytest.TempPathFactory, tokenizer_json: Path, records: dict[str, list[dict]]) -> Path:
    """A small corpus of cc, c4 and github. Read only."""
    root = tmp_path_factory.mktemp("corpus")
    for split in ("train", "test"):
        raw = write_jsonl(root / "raw" / f"{split}.jsonl", records[split])
        prepare(str(raw), root / "corpus", tokenizer=str(tokenizer_json), split=split, processes=1)
    return root / "corpus"
