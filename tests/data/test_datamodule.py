from __future__ import annotations

import logging
from pathlib import Path

import lightning as L
import pytest
import torch
from jsonargparse import ArgumentParser
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

from seqarch.data import LimitedDomainDataModule, MixedDomainDataModule, TokenDataModule

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*You defined a `validation_step` but have no `val_dataloader`"),
    pytest.mark.filterwarnings("ignore:.*Checkpoint directory .* exists and is not empty"),
    pytest.mark.filterwarnings("ignore:.*isinstance\\(treespec, LeafSpec\\):FutureWarning"),
]


class Recorder(L.LightningModule):
    """A tiny model that keeps the batches of each optimiser step."""

    def __init__(self, fail_after: int | None = None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(400, 4)
        self.head = nn.Linear(4, 400)
        self.steps: dict[int, list[Tensor]] = {}
        self.validated: dict[int, int] = {}
        self.fail_after = fail_after
        self.micro = 0

    def _loss(self, batch: dict[str, Tensor]) -> Tensor:
        logits = self.head(self.embedding(batch["input_ids"]))
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        if self.micro == self.fail_after:
            raise KeyError("stop here")
        self.micro += 1
        self.steps.setdefault(self.trainer.global_step, []).append(batch["input_ids"].clone())
        return self._loss(batch)

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        n = int((batch["labels"] != -100).sum())
        self.validated[dataloader_idx] = self.validated.get(dataloader_idx, 0) + n

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def module(path: Path, micro: int = 2, workers: int = 0, **options) -> LimitedDomainDataModule:
    return LimitedDomainDataModule(path, 16, 8, micro, ["cc", "c4"], num_workers=workers, **options)


def trainer(folder: Path, steps: int, every: int | None = None, **options) -> L.Trainer:
    callbacks: list[L.Callback] = []
    if every is not None:
        callbacks.append(ModelCheckpoint(folder, every_n_train_steps=every, save_top_k=-1, filename="{step}"))
    settings = {"limit_val_batches": 0, "num_sanity_val_steps": 0, **options}
    return L.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=steps,
        callbacks=callbacks,
        enable_checkpointing=every is not None,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **settings,
    )


def whole_steps(recorder: Recorder) -> dict[int, Tensor]:
    return {step: torch.cat(parts) for step, parts in recorder.steps.items()}


def same(a: dict[int, Tensor], b: dict[int, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def test_accumulation_is_set_and_steps_take_batch_size(corpus_path: Path, tmp_path: Path) -> None:
    recorder, fit = Recorder(), trainer(tmp_path, 3)
    fit.fit(recorder, datamodule=module(corpus_path))
    assert fit.accumulate_grad_batches == 4
    assert [len(recorder.steps[s]) for s in range(3)] == [4, 4, 4]
    assert all(len(s) == 8 for s in whole_steps(recorder).values())


@pytest.mark.parametrize(("micro", "workers"), [(2, 0), (4, 2), (8, 0)])
def test_resume_sees_the_batches_of_an_uninterrupted_run(
    corpus_path: Path, tmp_path: Path, micro: int, workers: int
) -> None:
    whole = Recorder()
    trainer(tmp_path / "a", 9).fit(whole, datamodule=module(corpus_path))
    expected = whole_steps(whole)

    first = Recorder()
    trainer(tmp_path / "b", 5, every=5).fit(first, datamodule=module(corpus_path))
    # The micro batch, and with it the accumulation, may change on resume, as with another number of ranks.
    second = Recorder()
    resumed = trainer(tmp_path / "b", 9, every=5)
    resumed.fit(
        second,
        datamodule=module(corpus_path, micro, workers),
        ckpt_path=str(tmp_path / "b" / "step=5.ckpt"),
        weights_only=True,
    )
    assert resumed.global_step == 9
    assert same(whole_steps(first), {k: expected[k] for k in range(5)})
    assert same(whole_steps(second), {k: expected[k] for k in range(5, 9)})


def test_resume_after_a_crash_inside_an_accumulation(corpus_path: Path, tmp_path: Path) -> None:
    whole = Recorder()
    trainer(tmp_path / "a", 6).fit(whole, datamodule=module(corpus_path))
    broken, fit = Recorder(fail_after=4 * 3 + 2), trainer(tmp_path, 6)
    with pytest.raises(KeyError, match="stop here"):
        fit.fit(broken, datamodule=module(corpus_path))
    fit.save_checkpoint(tmp_path / "crash.ckpt")  # two micro batches into step 3
    second = Recorder()
    trainer(tmp_path, 6).fit(
        second, datamodule=module(corpus_path), ckpt_path=str(tmp_path / "crash.ckpt"), weights_only=True
    )
    assert same(whole_steps(second), {k: v for k, v in whole_steps(whole).items() if k >= 3})


def test_epochs_cut_by_limit_train_batches_go_on(corpus_path: Path, tmp_path: Path) -> None:
    whole, cut = Recorder(), Recorder()
    trainer(tmp_path, 6).fit(whole, datamodule=module(corpus_path))
    trainer(tmp_path, 6, limit_train_batches=8).fit(cut, datamodule=module(corpus_path))
    assert same(whole_steps(whole), whole_steps(cut))


def test_validation_has_a_loader_for_each_domain(corpus_path: Path, tmp_path: Path) -> None:
    recorder, data = Recorder(), module(corpus_path, workers=2)
    trainer(tmp_path, 2, limit_val_batches=1.0, val_check_interval=4, check_val_every_n_epoch=None).fit(
        recorder, datamodule=data
    )
    assert data.val_domains == ["c4", "cc", "github"]
    assert [data.in_domain(d) for d in data.val_domains] == [True, True, False]
    tokens = [data.corpus.stream("test", d, "").n_tokens for d in data.val_domains]
    assert recorder.validated == {i: n for i, n in enumerate(tokens)} or recorder.validated == {
        i: 2 * n for i, n in enumerate(tokens)
    }


def test_attributes(corpus_path: Path) -> None:
    data = module(corpus_path, test_domains=["github", "cc"])
    data.setup("fit")
    assert data.tokens_per_step == 8 * 16
    assert (data.vocab_size, data.eos_id) == (400, 0)
    assert data.tokenizer_path == corpus_path / "tokenizer.json"
    assert len(data.tokenizer_hash) == 64
    assert data.val_domains == ["github", "cc"]
    assert len(data.val_dataloader()) == 2
    mixed = MixedDomainDataModule(corpus_path, 16, 8, 2)
    mixed.setup("fit")
    assert set(mixed.train_tokens) == {"cc", "c4", "github"}
    assert all(mixed.in_domain(d) for d in mixed.val_domains)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seq_len": 1}, "seq_len must be at least 2"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"batch_size": 9}, "batch_size 9 must be a multiple of micro_batch_size 2"),
        ({"num_workers": -1}, "num_workers must be at least 0"),
        ({"max_val_tokens": 0}, "max_val_tokens must be at least 1"),
        ({"max_val_document_tokens": 0}, "max_val_document_tokens must be at least 1"),
        ({"train_domains": []}, "train_domains is empty"),
        ({"train_domains": ["cc", "cc"]}, "train_domains names a domain twice"),
        ({"weights": {"cc": -1.0, "c4": 1.0}}, "weights: cc has weight -1"),
        ({"weights": {"cc": 0.0, "c4": 0.0}}, "weights: all are zero"),
        ({"weights": {"cc": 1.0, "c4": 1.0, "wiki": 1.0}}, "weights: wiki is no training domain"),
    ],
)
def test_bad_options_at_construction(tmp_path: Path, options: dict, message: str) -> None:
    good = {"seq_len": 16, "batch_size": 8, "micro_batch_size": 2, "train_domains": ["cc", "c4"]}
    with pytest.raises(ValueError, match=message):
        LimitedDomainDataModule(tmp_path, **{**good, **options})


def test_unknown_domain(corpus_path: Path) -> None:
    with pytest.raises(ValueError, match=r"train_domains: .* has no domain 'wiki' in its train split .*c4, cc, github"):
        LimitedDomainDataModule(corpus_path, 16, 8, 2, ["cc", "wiki"]).setup("fit")
    with pytest.raises(ValueError, match=r"test_domains: .* has no domain 'wiki'"):
        LimitedDomainDataModule(corpus_path, 16, 8, 2, ["cc"], test_domains=["wiki"]).setup("fit")
    with pytest.raises(ValueError, match="weights: wiki is no training domain"):
        MixedDomainDataModule(corpus_path, 16, 8, 2, weights={"cc": 1, "c4": 1, "github": 1, "wiki": 1}).setup("fit")


def test_the_trainers_own_accumulation_must_agree(corpus_path: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"trainer\.accumulate_grad_batches is 3, but .* make it 4: leave it out"):
        trainer(tmp_path, 1, accumulate_grad_batches=3).fit(Recorder(), datamodule=module(corpus_path))


def test_base_class_is_abstract(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="use LimitedDomainDataModule or MixedDomainDataModule"):
        TokenDataModule(tmp_path, 16, 8, 2)


def test_checkpoint_of_other_data(corpus_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = module(corpus_path)
    data.setup("fit")
    state = data.state_dict()
    data.load_state_dict(state)
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        data.load_state_dict({**state, "order": {**state["order"], "seed": 1}})
    assert "in seed" in caplog.text
    with pytest.raises(ValueError, match="trained with another tokenizer"):
        data.load_state_dict({**state, "tokenizer_hash": "0" * 64})


def test_options_are_shown_with_their_meaning() -> None:
    parser = ArgumentParser()
    parser.add_subclass_arguments(TokenDataModule, "data")
    given = parser.parse_args(
        [
            "--data=seqarch.data.LimitedDomainDataModule",
            "--data.path=builtin",
            "--data.seq_len=64",
            "--data.batch_size=8",
            "--data.micro_batch_size=4",
            "--data.train_domains=[docs, readme]",
        ]
    )
    data = parser.instantiate(given).data
    assert isinstance(data, LimitedDomainDataModule)
    assert (data.path, data.train_domains, data.val_batch_size) == ("builtin", ["docs", "readme"], 4)
    parser = ArgumentParser()
    parser.add_class_arguments(LimitedDomainDataModule, "data")
    shown = " ".join(parser.format_help().split())
    assert "Keep packed documents apart (cu_seqlens)" in shown
    assert "About how many tokens of each test domain" in shown
