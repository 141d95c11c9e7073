"""Multi-query associative recall: the task itself, its determinism, and training and validation on it."""

import csv
import itertools

import numpy as np
import pytest
import torch

from seqarch.cli import main
from seqarch.data import MQARDataModule
from seqarch.data.mqar import RecallTask, RecallValidation
from seqarch.data.steps import IGNORE

P, T, V = 16, 64, 256


def task(key=3, **options):
    return RecallTask(
        **{
            "vocab_size": V,
            "seq_len": T,
            "n_pairs": P,
            "power": 0.01,
            "random_non_queries": True,
            "key": key,
            **options,
        }
    )


def test_every_key_is_asked_for_once_and_the_label_is_its_value():
    batch = task(seq_len=100)(np.arange(50))
    for ids, labels in zip(batch["input_ids"].numpy(), batch["labels"].numpy(), strict=True):
        keys, values = ids[: 2 * P : 2], ids[1 : 2 * P : 2]
        assert len(set(keys)) == P
        assert len(set(values)) == P
        assert keys.min() >= 1
        assert keys.max() < V // 2 <= values.min()
        queries = np.flatnonzero(labels != IGNORE)
        assert len(queries) == P
        assert (queries >= 2 * P).all()
        assert (queries % 2 == 0).all()
        value_of = dict(zip(keys, values, strict=True))
        assert sorted(ids[queries]) == sorted(keys)
        assert [value_of[k] for k in ids[queries]] == labels[queries].tolist()
    assert batch["input_ids"].max() < V


def test_without_random_tokens_everything_between_the_queries_is_zero():
    noisy, plain = (task(random_non_queries=r)(np.arange(50)) for r in (True, False))
    between = noisy["labels"] == IGNORE
    between[:, : 2 * P] = False
    assert (plain["input_ids"][between] == 0).all()
    assert torch.equal(plain["input_ids"][~between], noisy["input_ids"][~between])
    assert torch.equal(plain["labels"], noisy["labels"])


def test_a_sequence_is_a_function_of_key_and_number():
    whole = task()(np.arange(8))
    again = task()(np.array([5, 2]))
    for name in ("input_ids", "labels"):
        assert torch.equal(again[name], whole[name][[5, 2]])
    assert not torch.equal(task(key=4)(np.arange(8))["input_ids"], whole["input_ids"])
    assert len({tuple(ids.tolist()) for ids in task()(np.arange(500))["input_ids"]}) == 500


def test_queries_come_in_any_order_and_mostly_soon():
    labels = task(seq_len=1024, n_pairs=4)(np.arange(2000))["labels"]
    distance = (labels != IGNORE).nonzero()[:, 1] - 8
    weights = np.arange(1, 509) ** (0.01 - 1)
    # Drawn without replacement, so that far places come a little more often than their weight says.
    assert weights[100:].sum() / weights.sum() < (distance >= 200).float().mean() < 0.4
    first = torch.stack([row[row != IGNORE] for row in task()(np.arange(500))["labels"]])
    assert first[:, 0].unique().numel() > 100


def test_all_tokens_occur():
    ids = task()(np.arange(2000))["input_ids"]
    keys = torch.bincount(ids[:, 0], minlength=V)
    values = torch.bincount(ids[:, 1], minlength=V)
    assert (keys[1 : V // 2] > 0).all()
    assert (values[V // 2 :] > 0).all()
    assert torch.bincount(ids[:, 33], minlength=V).count_nonzero() == V  # noise


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_pairs": 17}, "n_pairs 17 needs 68 tokens for pairs and queries, but seq_len is 64"),
        ({"vocab_size": 32}, "n_pairs 16 needs as many different keys, .* has only 15"),
        ({"n_pairs": 0}, "n_pairs must be at least 1"),
        ({"power": 0.0}, "power must be above 0"),
    ],
)
def test_what_does_not_fit_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        task(**options)


def test_training_batches_do_not_depend_on_micro_batches_or_workers():
    whole, parts, workers = (
        MQARDataModule(batch_size=8, micro_batch_size=m, num_workers=w) for m, w in ((8, 0), (2, 0), (2, 2))
    )
    steps = [b["input_ids"] for b in itertools.islice(whole.train_dataloader(), 3)]
    for data in (parts, workers):
        found = torch.cat([b["input_ids"] for b in itertools.islice(data.train_dataloader(), 12)])
        assert torch.equal(found, torch.cat(steps))
    assert not torch.equal(next(iter(MQARDataModule(8, seed=1).train_dataloader()))["input_ids"], steps[0])


def test_validation_is_dealt_to_the_ranks_once_each():
    n, B = 11, 2
    alone = RecallValidation(task(), n, B, 0, 1)
    rows = [row for batch in alone for row in batch["input_ids"].tolist()]
    assert len(rows) == n
    ranks = [RecallValidation(task(), n, B, rank, 4) for rank in range(4)]
    assert {len(r) for r in ranks} == {2}
    counted = [
        ids
        for r in ranks
        for batch in r
        for ids, labels in zip(batch["input_ids"].tolist(), batch["labels"], strict=True)
        if (labels != IGNORE).any()
    ]
    assert sorted(counted) == sorted(rows)
    few = [RecallValidation(task(), 1, B, rank, 2) for rank in range(2)]
    assert [(batch["labels"] != IGNORE).sum().item() for r in few for batch in r] == [P, 0]


def metrics(run_dir):
    with (run_dir / "metrics.csv").open() as file:
        return {(int(r["step"]), r["name"]): float(r["value"]) for r in csv.DictReader(file)}


def fit(run_dir, *arguments):
    shared = [
        "--config", "recipes/mqar/base.yaml", f"--run_dir={run_dir}", "--data.batch_size=8",
        "--data.val_sequences=20", "--model.val_every_n_steps=2", "--trainer.log_every_n_steps=1",
        "--checkpoint_every_n_steps=2", "--trainer.accelerator=cpu",
        "--model.schedule.warmup_steps=1",
    ]  # fmt: skip
    main(["fit", *shared, *arguments])
    return metrics(run_dir)


def test_a_resumed_run_goes_on_exactly(tmp_path, capsys):
    length = f"--model.max_tokens={6 * 8 * T}"
    whole = fit(tmp_path / "whole", length)
    assert 0 <= whole[6, "val/accuracy/mqar"] <= 1
    assert "accuracy" in capsys.readouterr().out
    assert not any(name.startswith("val/bpb") for _, name in whole)
    fit(tmp_path / "parts", length, "--trainer.max_steps=4")
    resumed = fit(tmp_path / "parts", length, "--ckpt_path=last", "--data.micro_batch_size=4")
    same = [key for key in whole if key[1].startswith(("train/loss", "val/"))]
    assert [resumed[key] for key in same] == pytest.approx([whole[key] for key in same], rel=1e-5)


def test_accuracy_is_that_of_the_logits(tmp_path):
    from seqarch.training.rebuild import load_module

    fit(tmp_path, "--trainer.max_steps=2")
    model = load_module(tmp_path / "checkpoints" / "last.ckpt").model
    batch = MQARDataModule(8, val_sequences=20).val_task(np.arange(20))
    logits, _ = model(batch["input_ids"])
    asked = batch["labels"] != IGNORE
    expected = (logits.argmax(-1) == batch["labels"])[asked].double().mean().item()
    assert metrics(tmp_path)[2, "val/accuracy/mqar"] == expected
