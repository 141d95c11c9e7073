from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from seqarch.data import LimitedDomainDataModule
from seqarch.data.eval_batches import EvalBatches, choose_documents
from tests.data import megatron

SEQ_LEN = 96


@pytest.fixture
def data(corpus_path: Path) -> LimitedDomainDataModule:
    data = LimitedDomainDataModule(corpus_path, SEQ_LEN, 4, 4, train_domains=["cc", "c4"], val_batch_size=3)
    data.setup("validate")
    return data


def rank_batches(data: LimitedDomainDataModule, domain: str, rank: int, world_size: int) -> list[dict]:
    stream = data.corpus.stream("test", domain, "")
    documents = choose_documents(stream, None)
    n_bytes = [stream.document_bytes(d) or 0 for d in documents]
    batches = EvalBatches(
        stream,
        documents,
        n_bytes,
        seq_len=SEQ_LEN,
        batch_size=3,
        eos_id=data.eos_id,
        rank=rank,
        world_size=world_size,
    )
    return [batches[i] for i in range(len(batches))]


@pytest.mark.parametrize("world_size", [1, 2, 3, 7, 40])
def test_every_token_exactly_once_with_its_context(data: LimitedDomainDataModule, world_size: int) -> None:
    for domain in data.val_domains:
        sequences, _, _ = megatron.read(data.corpus.root / "test" / domain)
        ranks = [rank_batches(data, domain, r, world_size) for r in range(world_size)]
        assert len({len(batches) for batches in ranks}) == 1  # sharded models must run the same number of forwards
        predictions: dict[int, list[tuple[int, int]]] = {}
        for batch in (b for batches in ranks for b in batches):
            T = batch["input_ids"].shape[1]
            assert T == SEQ_LEN or T % 64 == 0
            assert T <= SEQ_LEN
            for row in range(len(batch["document"])):
                real = batch["labels"][row] != -100
                n = int(real.sum())
                assert real[:n].all()  # padding is on the right
                pairs = zip(batch["input_ids"][row, :n].tolist(), batch["labels"][row, :n].tolist(), strict=True)
                predictions.setdefault(int(batch["document"][row]), []).extend(pairs)
        predictions.pop(-1, None)
        assert set(predictions) == set(range(len(sequences)))
        for i, sequence in enumerate(sequences):
            expected = list(zip([data.eos_id, *sequence[:-1].tolist()], sequence.tolist(), strict=True))
            assert sorted(predictions[i]) == sorted(expected)


def test_windows_of_a_long_document_follow_one_another(data: LimitedDomainDataModule) -> None:
    domain = "cc"
    sequences, _, _ = megatron.read(data.corpus.root / "test" / domain)
    longest = max(range(len(sequences)), key=lambda i: len(sequences[i]))
    assert len(sequences[longest]) > 2 * SEQ_LEN
    rows = []
    for batch in rank_batches(data, domain, 0, 1):
        for row in (batch["document"] == longest).nonzero().flatten().tolist():
            n = int((batch["labels"][row] != -100).sum())
            rows.append((batch["input_ids"][row, :n].tolist(), batch["labels"][row, :n].tolist()))
    whole = sequences[longest].tolist()
    expected = [
        (([data.eos_id, *whole])[s : s + len(whole[s : s + SEQ_LEN])], whole[s : s + SEQ_LEN])
        for s in range(0, len(whole), SEQ_LEN)
    ]
    assert sorted(rows) == sorted(expected)


def test_bits_per_byte_by_hand(data: LimitedDomainDataModule, records: dict[str, list[dict]]) -> None:
    """A model that gives every token the same probability: the bits are n log2 V, the bytes those of the raw text."""
    tokenizer = Tokenizer.from_file(str(data.tokenizer_path))
    labels = {"cc": "RedPajamaCommonCrawl", "c4": "RedPajamaC4", "github": "RedPajamaGithub"}
    for domain, loader in zip(data.val_domains, data.val_dataloader(), strict=True):
        texts = [r["text"] for r in records["test"] if r["meta"]["redpajama_set_name"] == labels[domain]]
        tokens = sum(len(tokenizer.encode(t).ids) + 1 for t in texts)
        by_hand = tokens * math.log2(data.vocab_size) / sum(len(t.encode()) for t in texts)
        nats, n_bytes = 0.0, 0.0
        for batch in loader:
            logits = torch.zeros(*batch["labels"].shape, data.vocab_size)
            loss = torch.nn.functional.cross_entropy(
                logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100, reduction="sum"
            )
            nats += loss.item()
            n_bytes += batch["bytes"].sum().item()
            assert batch["bytes"].dtype == torch.float64
        assert nats / math.log(2) / n_bytes == pytest.approx(by_hand, rel=1e-6)


def test_bytes_are_in_proportion_to_tokens(data: LimitedDomainDataModule) -> None:
    stream = data.corpus.stream("test", "cc", "")
    for batch in rank_batches(data, "cc", 0, 1):
        n = (batch["labels"] != -100).sum(1)
        for row, document in enumerate(batch["document"].tolist()):
            share = n[row].item() / stream.document_length(document)
            assert batch["bytes"][row].item() == pytest.approx(share * (stream.document_bytes(document) or 0))


def test_cap_takes_whole_documents_whatever_the_seed(corpus_path: Path) -> None:
    def documents(seed: int) -> dict[str, set[int]]:
        data = LimitedDomainDataModule(corpus_path, SEQ_LEN, 4, 4, ["cc"], seed=seed, max_val_tokens=500)
        data.setup("validate")
        out = {}
        for domain, loader in zip(data.val_domains, data.val_dataloader(), strict=True):
            stream = data.corpus.stream("test", domain, "")
            chosen = {d for batch in loader for d in batch["document"].tolist()}
            tokens = sum(int((batch["labels"] != -100).sum()) for batch in loader)
            assert tokens == sum(stream.document_length(d) for d in chosen)
            assert 0 < tokens <= 500 or len(chosen) == 1
            assert len(chosen) < stream.n_documents
            out[domain] = chosen
        return out

    assert documents(0) == documents(1)


def test_one_token_document_and_document_of_exactly_one_window(tmp_path: Path, corpus_path: Path) -> None:
    megatron.write(tmp_path / "test" / "x", [[[0]], [[*list(range(1, 8)), 0]], [[*list(range(1, 9)), 0]]], 8)
    megatron.write(tmp_path / "train" / "x", [[[*list(range(50)), 0]]], 8)
    (tmp_path / "tokenizer.json").write_bytes((corpus_path / "tokenizer.json").read_bytes())
    data = LimitedDomainDataModule(tmp_path, 8, 1, 1, train_domains=["x"], val_batch_size=9)
    data.setup("validate")
    (batch,) = list(data.val_dataloader()[0])
    assert batch["input_ids"].shape == (4, 8)
    lengths = (batch["labels"] != -100).sum(1).tolist()
    assert sorted(lengths, reverse=True) == lengths == [8, 8, 1, 1]
    last = batch["document"].tolist().index(0)
    assert batch["input_ids"][last, 0] == 0
    assert batch["labels"][last].tolist() == [0, *[-100] * 7]
    assert np.isclose(batch["bytes"][last].item(), 0)


def test_beginnings_of_documents_are_more_documents_for_the_same_tokens(corpus_path: Path) -> None:
    def tested(cut: int | None) -> dict[str, dict[int, tuple[list[int], float]]]:
        data = LimitedDomainDataModule(
            corpus_path, SEQ_LEN, 4, 4, ["cc"], max_val_tokens=500, max_val_document_tokens=cut
        )
        data.setup("validate")
        out: dict[str, dict[int, tuple[list[int], float]]] = {}
        for domain, loader in zip(data.val_domains, data.val_dataloader(), strict=True):
            out[domain] = {}
            for batch in loader:
                for row, document in enumerate(batch["document"].tolist()):
                    labels = batch["labels"][row]
                    old = out[domain].get(document, ([], 0.0))
                    new = labels[labels != -100].tolist()
                    out[domain][document] = (old[0] + new, old[1] + batch["bytes"][row].item())
        return out

    data = LimitedDomainDataModule(corpus_path, SEQ_LEN, 4, 4, ["cc"])
    data.setup("validate")
    tokenizer = Tokenizer.from_file(str(data.tokenizer_path))
    whole, cut = tested(None), tested(20)
    for domain, documents in cut.items():
        assert len(documents) > len(whole[domain])
        stream = data.corpus.stream("test", domain, "")
        for document, (tokens, n_bytes) in documents.items():
            expected = stream.document(document)[:20].tolist()
            assert tokens == expected
            text = tokenizer.decode([t for t in expected if t != data.eos_id], skip_special_tokens=False)
            assert n_bytes == pytest.approx(len(text.encode("utf-8", "replace")))
