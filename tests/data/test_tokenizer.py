from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from seqarch.data.tokenizer import find_eos, load_tokenizer, train_tokenizer, vocabulary_size
from tests.data.raw import make_records, write_jsonl


def test_trained_tokenizer_is_byte_level_and_lossless(tokenizer_json: Path) -> None:
    tokenizer = load_tokenizer(tokenizer_json)
    assert vocabulary_size(tokenizer) == 400
    assert find_eos(tokenizer) == ("<|endoftext|>", 0)
    for text in ("plain", "東京 😀 naïve\n\n\ttabs  ", "<|endoftext|>", "\x00\x7f"):
        ids = tokenizer.encode(text).ids
        assert 0 not in ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_training_is_deterministic_and_counts_only_the_domains_asked_for(tmp_path: Path) -> None:
    records = make_records(60, seed=1)
    both = write_jsonl(tmp_path / "both.jsonl", records)
    only = write_jsonl(tmp_path / "only.jsonl", [r for r in records if "Crawl" in r["meta"]["redpajama_set_name"]])
    train_tokenizer(str(both), tmp_path / "a.json", vocab_size=300, domains=["cc"])
    train_tokenizer([str(only)], tmp_path / "b", vocab_size=300)
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b" / "tokenizer.json").read_bytes()
    train_tokenizer(str(both), tmp_path / "c.json", vocab_size=300)
    assert (tmp_path / "a.json").read_bytes() != (tmp_path / "c.json").read_bytes()


def test_max_bytes_stops_early(tmp_path: Path) -> None:
    records = make_records(60, seed=1)
    raw = write_jsonl(tmp_path / "all.jsonl", records)
    first = write_jsonl(tmp_path / "first.jsonl", records[:1])
    train_tokenizer(str(raw), tmp_path / "a.json", vocab_size=300, max_bytes=1)
    train_tokenizer(str(first), tmp_path / "b.json", vocab_size=300)
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()


def test_errors(tmp_path: Path) -> None:
    raw = write_jsonl(tmp_path / "raw.jsonl", make_records(6, seed=1))
    with pytest.raises(ValueError, match="vocab_size must be at least 257"):
        train_tokenizer(str(raw), tmp_path / "out.json", vocab_size=100)
    with pytest.raises(ValueError, match=r"holds no text of the domains wiki \(there are: c4, cc, github\)"):
        train_tokenizer(str(raw), tmp_path / "out.json", domains=["wiki"])
    with pytest.raises(ValueError, match="no field 'body'"):
        train_tokenizer(str(raw), tmp_path / "out.json", text_key="body")
    assert not (tmp_path / "out.json").exists()


def test_settings_that_would_cut_or_pad_are_turned_off(tmp_path: Path, tokenizer_json: Path) -> None:
    tokenizer = Tokenizer.from_file(str(tokenizer_json))
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=50)
    tokenizer.save(str(tmp_path / "t.json"))
    text = "the quick brown fox jumps"
    expected = Tokenizer.from_file(str(tokenizer_json)).encode(text).ids
    assert load_tokenizer(tmp_path / "t.json").encode(text).ids == expected
