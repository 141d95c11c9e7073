from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from seqarch.data import LimitedDomainDataModule, MixedDomainDataModule
from seqarch.data.steps import TrainLoader
from seqarch.data.train_batches import TrainBatches
from tests.data import megatron

SEQ_LEN = 16
BATCH = 8


def module(path: Path, **options) -> MixedDomainDataModule:
    data = MixedDomainDataModule(path, seq_len=SEQ_LEN, batch_size=BATCH, micro_batch_size=2, seed=3, **options)
    data.setup("fit")
    return data


def batches_of(data: MixedDomainDataModule, rank: int, world_size: int, micro: int, mask: bool = False) -> TrainBatches:
    return TrainBatches(
        data.order,
        data._train_streams,
        seq_len=SEQ_LEN,
        batch_size=BATCH,
        micro_batch_size=micro,
        rank=rank,
        world_size=world_size,
        document_mask=mask,
    )


def steps(
    data: MixedDomainDataModule, n: int, world_size: int, micro: int, workers: int, first_step: int = 0
) -> list[Tensor]:
    """``[batch_size, 2, T]`` of each step, put together from all ranks and micro batches."""
    accumulation = BATCH // (micro * world_size)
    streams = []
    for rank in range(world_size):
        loader = TrainLoader(
            batches_of(data, rank, world_size, micro), lambda: first_step, num_workers=workers, pin_memory=False
        )
        taken = itertools.islice(loader, n * accumulation)
        streams.append([torch.stack([b["input_ids"], b["labels"]], 1) for b in taken])
    out = []
    for step in range(n):
        parts = [streams[r][step * accumulation + a] for a in range(accumulation) for r in range(world_size)]
        out.append(torch.cat(parts))
    return out


def test_order_does_not_depend_on_ranks_workers_or_accumulation(corpus_path: Path) -> None:
    data = module(corpus_path)
    expected = steps(data, 6, world_size=1, micro=BATCH, workers=0)
    assert expected[0].shape == (BATCH, 2, SEQ_LEN)
    for world_size, micro, workers in itertools.product((1, 2, 4), (1, 2), (0, 2)):
        got = steps(data, 6, world_size, micro, workers)
        assert torch.equal(torch.stack(got), torch.stack(expected)), (world_size, micro, workers)


def test_starting_later_is_the_same_stream(corpus_path: Path) -> None:
    data = module(corpus_path)
    whole = steps(data, 9, world_size=1, micro=4, workers=0)
    rest = steps(data, 4, world_size=2, micro=2, workers=2, first_step=5)
    assert torch.equal(torch.stack(whole[5:]), torch.stack(rest))


def test_windows_are_the_stream_and_an_epoch_has_each_once(corpus_path: Path) -> None:
    data = LimitedDomainDataModule(corpus_path, SEQ_LEN, BATCH, BATCH, train_domains=["cc"])
    data.setup("fit")
    sequences, _, _ = megatron.read(corpus_path / "train" / "cc")
    tokens = np.concatenate(sequences).astype(np.int64)
    assert data.train_tokens == {"cc": len(tokens)}
    n = (len(tokens) - 1) // SEQ_LEN
    assert data.tokens_per_epoch == {"cc": n * SEQ_LEN}
    expected = {tuple(tokens[i * SEQ_LEN : (i + 1) * SEQ_LEN + 1].tolist()) for i in range(n)}
    seen: dict[tuple, int] = {}
    loader = iter(data.train_dataloader())
    # A block of samples is 4096 long and a single domain's: two blocks are 8192 // n whole epochs, at least.
    for _ in range(2 * 4096 // BATCH):
        batch = next(loader)
        for x, y in zip(batch["input_ids"].tolist(), batch["labels"].tolist(), strict=True):
            assert x[1:] == y[:-1]
            key = (*x, y[-1])
            seen[key] = seen.get(key, 0) + 1
    assert set(seen) == expected
    if len(expected) == n:
        assert min(seen.values()) >= 8192 // n
        assert max(seen.values()) <= 8192 // n + 1


def test_mixture_is_by_tokens_or_as_given(corpus_path: Path) -> None:
    data = module(corpus_path)
    total = sum(data.train_tokens.values())
    for domain, count in zip(data.order.domains, data.order.counts, strict=True):
        assert abs(count / 4096 - data.train_tokens[domain] / total) <= 1 / 4096
    data = module(corpus_path, weights={"cc": 1, "c4": 1, "github": 2})
    assert dict(zip(data.order.domains, data.order.counts, strict=True)) == {"c4": 1024, "cc": 1024, "github": 2048}


def test_document_mask(corpus_path: Path) -> None:
    data = module(corpus_path, document_mask=True)
    plain, masked = batches_of(data, 0, 1, 4), batches_of(data, 0, 1, 4, mask=True)
    starts_seen = 0
    for step in range(60):
        a, b = plain.micro_batch(step, 1), masked.micro_batch(step, 1)
        assert b["input_ids"].shape == b["labels"].shape == (1, 4 * SEQ_LEN)
        assert b["cu_seqlens"].dtype == torch.int32
        assert b["cu_seqlens"].device.type == "cpu"
        assert torch.equal(a["input_ids"].reshape(1, -1), b["input_ids"])
        # In this corpus the end-of-text id is at the end of every document and nowhere else.
        ids, labels = a["input_ids"].flatten().tolist(), a["labels"].flatten().tolist()
        expected = [-100 if x == data.eos_id else y for x, y in zip(ids, labels, strict=True)]
        assert b["labels"][0].tolist() == expected
        bounds = {0, 4 * SEQ_LEN, *range(0, 4 * SEQ_LEN, SEQ_LEN)}
        bounds |= {i + 1 for i, x in enumerate(ids) if x == data.eos_id}
        assert b["cu_seqlens"].tolist() == sorted(bounds)
        starts_seen += len(bounds) - 5
    assert starts_seen > 5


def test_seed_changes_the_order(corpus_path: Path) -> None:
    first = steps(module(corpus_path), 1, 1, BATCH, 0)[0]
    other = MixedDomainDataModule(corpus_path, SEQ_LEN, BATCH, 2, seed=4)
    other.setup("fit")
    assert not torch.equal(first, steps(other, 1, 1, BATCH, 0)[0])


def test_fewer_tokens_than_a_window(corpus_path: Path) -> None:
    data = MixedDomainDataModule(corpus_path, seq_len=100_000, batch_size=1, micro_batch_size=1)
    with pytest.raises(
        ValueError, match=r"domain c4 .* has \d+ tokens, fewer than one window of 100001: lower seq_len"
    ):
        data.setup("fit")
