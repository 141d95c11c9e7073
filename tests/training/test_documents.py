"""Losses by test document, and what else a run records for comparisons."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from seqarch.training.callbacks.documents import DocumentLosses
from seqarch.training.documents import (
    DomainDocuments,
    forget_documents,
    read_documents,
    recorded_steps,
    write_documents,
)
from seqarch.training.optimizer import AdamWConfig
from seqarch.training.seen_tokens import SeenTokens
from seqarch.training.smoothing import HORIZON, SmoothedLoss
from tests.training.synthetic import SyntheticData, T, V, Windows, rows, sample, tiny, trainer


def domain(name, nats, ids=(3, 7), inside=True):
    ids = np.array(ids)
    return DomainDocuments(name, inside, ids, ids * 10, ids * 35.5, np.array(nats))


def test_what_is_written_reads_back(tmp_path):
    for step in (5, 10):
        write_documents(tmp_path, step, [domain("cc", [1.5, step]), domain("github", [4.0], ids=[2], inside=False)])
    assert recorded_steps(tmp_path) == [5, 10]
    cc, github = read_documents(tmp_path, 10)
    assert (cc.name, cc.in_domain, github.name, github.in_domain) == ("cc", True, "github", False)
    assert (cc.ids.tolist(), cc.tokens.tolist(), cc.bytes.tolist()) == ([3, 7], [30, 70], [106.5, 248.5])
    assert (cc.nats.tolist(), github.nats.tolist()) == ([1.5, 10.0], [4.0])
    assert cc.nats.dtype == np.float32
    assert sorted(p.name for p in (tmp_path / "documents").iterdir()) == [
        "index.npz", "step-00000005.npy", "step-00000010.npy",
    ]  # fmt: skip


def test_a_resumed_run_drops_what_came_later(tmp_path):
    for step in (1, 2, 3):
        write_documents(tmp_path, step, [domain("cc", [1.0, 2.0])])
    forget_documents(tmp_path, 2)
    assert recorded_steps(tmp_path) == [1, 2]


def test_another_test_set_starts_anew(tmp_path):
    write_documents(tmp_path, 1, [domain("cc", [1.0, 2.0])])
    write_documents(tmp_path, 2, [domain("cc", [1.0, 2.0], ids=[3, 8])])
    assert recorded_steps(tmp_path) == [2]
    assert read_documents(tmp_path, 2)[0].ids.tolist() == [3, 8]


def test_files_that_are_missing_damaged_or_not_of_one_run_are_named(tmp_path):
    with pytest.raises(ValueError, match="losses by document after step 1 cannot be read"):
        read_documents(tmp_path, 1)
    write_documents(tmp_path, 1, [domain("cc", [1.0, 2.0])])
    np.save(tmp_path / "documents" / "step-00000002.npy", np.zeros(3, np.float32))
    with pytest.raises(ValueError, match="lists 2 documents, step 2 has 3"):
        read_documents(tmp_path, 2)
    (tmp_path / "documents" / "step-00000001.npy").write_bytes(b"\x93NUMPY")
    with pytest.raises(ValueError, match="cannot be read"):
        read_documents(tmp_path, 1)


def test_a_run_records_the_sums_over_each_document_s_windows(tmp_path):
    module = tiny(max_tokens=4 * 8 * T, val_every_n_steps=2)
    trainer(tmp_path).fit(module, datamodule=SyntheticData())
    assert recorded_steps(tmp_path) == [2, 4]
    for d, found in enumerate(read_documents(tmp_path, 4)):
        assert (found.name, found.in_domain) == (["books", "web", "code"][d], d == 1)
        nats, tokens = np.zeros(4), np.zeros(4, int)
        for i in range(4):  # each document is in all four batches
            batch = Windows(d, 0, 1)[i]
            log_p = module.model(batch["input_ids"])[0].double().log_softmax(-1)
            keep = batch["labels"] != -100
            picked = log_p.gather(-1, batch["labels"].clamp(min=0)[..., None])[..., 0]
            nats -= (picked * keep).sum(1).detach().numpy()
            tokens += keep.sum(1).numpy()
        assert found.ids.tolist() == [0, 1, 2, 3]
        assert found.tokens.tolist() == tokens.tolist()
        assert found.nats == pytest.approx(nats, rel=1e-5)
        assert found.bytes.tolist() == [14.0] * 4
    logged = {name: float(value) for step, name, value in rows(tmp_path) if step == 4}
    total = read_documents(tmp_path, 4)[0]
    assert logged["val/loss/books"] == pytest.approx(total.nats.sum() / total.tokens.sum(), rel=1e-5)


def test_validation_outside_training_and_data_without_documents_leave_nothing(tmp_path, monkeypatch):
    trainer(tmp_path).validate(tiny(), datamodule=SyntheticData(), verbose=False)
    assert not (tmp_path / "documents").exists()
    item = Windows.__getitem__
    monkeypatch.setattr(
        Windows, "__getitem__", lambda self, i: {k: v for k, v in item(self, i).items() if k != "document"}
    )
    run = trainer(tmp_path, max_steps=1)
    module = tiny()
    run.fit(module, datamodule=SyntheticData())
    assert any(isinstance(c, DocumentLosses) for c in run.callbacks)
    assert module.domain_losses[0].tokens > 0
    assert not (tmp_path / "documents").exists()


def test_the_share_of_tokens_unseen_in_training(tmp_path):
    """One step on eight sequences: labels that are not among theirs are unseen."""
    module = tiny()
    trainer(tmp_path, max_steps=1).fit(module, datamodule=SyntheticData())
    seen = set(torch.stack([sample(n) for n in range(8)])[:, 1:].flatten().tolist())
    assert 0 < len(seen) < V
    for d, found in enumerate(module.domain_losses):
        nats = unseen = 0.0
        for i in range(4):
            batch = Windows(d, 0, 1)[i]
            log_p = module.model(batch["input_ids"])[0].double().log_softmax(-1)
            for row, labels in zip(log_p, batch["labels"].tolist(), strict=True):
                for t, label in enumerate(labels):
                    if label >= 0:
                        nats -= row[t, label].item()
                        unseen -= row[t, label].item() * (label not in seen)
        assert found.unseen_share == pytest.approx(unseen / nats, rel=1e-5)
        logged = {name: float(value) for _, name, value in rows(tmp_path)}
        assert logged[f"val/unseen_share/{found.name}"] == found.unseen_share


def test_marks_survive_a_checkpoint():
    device = torch.device("cpu")
    seen = SeenTokens(6, device)
    seen.add(torch.tensor([[1, 4], [-100, 1]]))
    labels = torch.tensor([0, 1, 2, 4, 5, -100])
    assert seen.unseen(labels).tolist() == [True, False, True, False, True, False]
    again = SeenTokens(6, device, seen.state())
    assert again.unseen(labels).tolist() == seen.unseen(labels).tolist()
    assert not SeenTokens(6, device).unseen(torch.tensor([-100])).any()


def test_a_checkpoint_s_share_is_that_of_its_training(tmp_path):
    module = tiny()
    trainer(tmp_path, max_steps=1).fit(module, datamodule=SyntheticData())
    trained = [d.unseen_share for d in module.domain_losses]
    other = tiny()
    last = str(tmp_path / "checkpoints" / "last.ckpt")
    trainer(tmp_path / "v").validate(other, datamodule=SyntheticData(), ckpt_path=last, verbose=False)
    assert [d.unseen_share for d in other.domain_losses] == pytest.approx(trained)
    fresh = tiny()
    trainer(tmp_path / "w").validate(fresh, datamodule=SyntheticData(), verbose=False)
    assert [d.unseen_share for d in fresh.domain_losses] == [None] * 3


def test_the_smoothed_loss_is_a_weighted_mean_by_hand():
    smoothed = SmoothedLoss()
    assert smoothed.value is None
    losses = [5.0, 4.0, 3.5]
    for loss in losses:
        smoothed.add(loss)
    weights = [(1 - 1 / HORIZON) ** age for age in (2, 1, 0)]
    expected = sum(w * loss for w, loss in zip(weights, losses, strict=True)) / sum(weights)
    assert smoothed.value == pytest.approx(expected)
    again = SmoothedLoss()
    again.load(smoothed.state())
    assert again.value == smoothed.value


def test_the_smoothed_loss_is_recorded_at_validations(tmp_path):
    module = tiny(max_tokens=6 * 8 * T, val_every_n_steps=3, optimizer=AdamWConfig(lr=1e-2))
    trainer(tmp_path).fit(module, datamodule=SyntheticData())
    found = rows(tmp_path)
    losses = [float(v) for _, name, v in found if name == "train/loss"]
    smoothed = {step: float(v) for step, name, v in found if name == "train/smoothed_loss"}
    expected = SmoothedLoss()
    for loss in losses:
        expected.add(loss)
    assert list(smoothed) == [3, 6]
    assert smoothed[6] == expected.value
    assert math.isfinite(smoothed[3])
