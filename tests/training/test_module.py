import math

import pytest
import torch
from torch import Tensor

from seqarch.mixer import keep_float32
from seqarch.model import Loss
from seqarch.training.module import SequenceModule, TrainingDivergedError
from seqarch.training.optimizer import AdamWConfig
from seqarch.training.schedule import Cosine
from tests.training.synthetic import SyntheticData, T, V, Windows, rows, sample, tiny, trainer


def poison(module: SequenceModule, what: str) -> None:
    """Make a batch that carries ``poison`` give a loss, or only a gradient, that is not finite."""
    forward = module.training_step

    def training_step(batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        objective = forward(batch, batch_idx)
        if "poison" not in batch:
            return objective
        if what == "loss":
            assert module._window is not None
            module._window += math.nan
            return objective
        return objective + torch.sqrt(0.0 * module.model.embedding.weight.square().sum())  # value 0, gradient NaN

    module.training_step = training_step  # pyright: ignore[reportAttributeAccessIssue]


def test_training_learns_and_validates_at_the_end(tmp_path):
    module = tiny(max_tokens=40 * 8 * T, val_every_n_steps=15, optimizer=AdamWConfig(lr=1e-2))
    trainer(tmp_path).fit(module, datamodule=SyntheticData())
    found = rows(tmp_path)
    losses = [float(v) for _, name, v in found if name == "train/loss"]
    assert len(losses) == 40
    assert losses[-1] < losses[0] - 0.5
    assert [s for s, name, _ in found if name == "val/loss/id"] == [15, 30, 40]


def test_a_recorded_step_is_loss_norm_and_rate(tmp_path):
    module = tiny(schedule=Cosine(warmup_steps=2), optimizer=AdamWConfig(lr=0.01), max_tokens=4 * 8 * T)
    trainer(tmp_path, max_steps=1, limit_val_batches=0).fit(module, datamodule=SyntheticData())
    fresh = tiny()
    fresh.configure_model()
    ids = torch.stack([sample(n) for n in range(8)])
    loss = fresh.model(ids[:, :-1], labels=ids[:, 1:])
    assert isinstance(loss, Loss)
    loss.objective.backward()
    norm = torch.cat([p.grad.flatten() for p in fresh.model.parameters() if p.grad is not None]).norm()
    values = {name: float(v) for _, name, v in rows(tmp_path)}
    assert values["train/loss"] == pytest.approx(loss.nll.item(), rel=1e-6)
    assert values["train/grad_norm"] == pytest.approx(norm.item(), rel=1e-5)
    assert values["train/lr"] == 0.005
    assert values["train/skipped_steps"] == 0
    assert (tmp_path / "metrics.csv").read_text().splitlines()[1].startswith(f"1,{8 * T},")


@pytest.mark.parametrize("clip", [None, 0.1])
def test_clipping_scales_the_gradient_to_the_norm(tmp_path, clip):
    module = tiny()
    seen = {}
    original = module.configure_gradient_clipping

    def clipping(optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        gradient = torch.cat([p.grad.flatten() for p in module.model.parameters() if p.grad is not None])
        original(optimizer, gradient_clip_val, gradient_clip_algorithm)
        after = torch.cat([p.grad.flatten() for p in module.model.parameters() if p.grad is not None])
        seen.update(before=gradient, after=after)

    module.configure_gradient_clipping = clipping  # pyright: ignore[reportAttributeAccessIssue]
    trainer(tmp_path, max_steps=1, limit_val_batches=0, gradient_clip_val=clip).fit(module, datamodule=SyntheticData())
    norm = seen["before"].norm().item()
    assert norm > 0.2
    expected = seen["before"] if clip is None else seen["before"] * (clip / norm)
    torch.testing.assert_close(seen["after"], expected, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_a_step_that_is_not_finite_changes_nothing_and_is_counted(tmp_path, what):
    module = tiny()
    poison(module, what)
    states = []

    def remember(*_):
        optimizer = module.trainer.optimizers[0]
        moments = [v.clone() for s in optimizer.state.values() for v in s.values()]
        states.append([*(p.detach().clone() for p in module.model.parameters()), *moments])

    module.on_train_batch_end = remember  # pyright: ignore[reportAttributeAccessIssue]
    data = SyntheticData(micro_batch_size=4, poisoned=(2,))
    trainer(tmp_path, max_steps=4, limit_val_batches=0).fit(module, datamodule=data)
    # two micro batches a step
    before, skipped, after = states[3], states[5], states[7]
    assert len(before) == len(skipped) > len(list(module.model.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(before, skipped, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(skipped, after, strict=True))
    assert [v for _, name, v in rows(tmp_path) if name == "train/skipped_steps"] == ["0", "0", "1", "1"]


def test_training_stops_after_too_many_steps_in_a_row(tmp_path):
    module = tiny(max_skipped_steps=3)
    poison(module, "gradient")
    data = SyntheticData(poisoned=(1, 2, 4, 5, 6))
    with pytest.raises(
        TrainingDivergedError, match=r"3 steps in a row, up to step 7 \(loss .*lower model.optimizer.lr"
    ):
        trainer(tmp_path, max_steps=20, limit_val_batches=0).fit(module, datamodule=data)
    assert [v for _, name, v in rows(tmp_path) if name == "train/skipped_steps"] == list("0122345")


def test_no_checkpoint_is_written_while_steps_are_skipped(tmp_path):
    """They would push out the last good ones, with nothing new in them."""
    module = tiny(max_skipped_steps=3)
    poison(module, "gradient")
    run = trainer(tmp_path, max_steps=20, limit_val_batches=0, every_n_steps=1)
    with pytest.raises(TrainingDivergedError):
        run.fit(module, datamodule=SyntheticData(poisoned=(4, 5, 6)))
    names = sorted(p.name for p in (tmp_path / "checkpoints").glob("step-*"))
    assert names == [f"step-{step:08d}.ckpt" for step in (1, 2, 3, 4)]


def test_accumulation_changes_rounding_only(tmp_path):
    losses, weights = [], []
    for micro_batch_size in (8, 2):
        module = tiny()
        data = SyntheticData(micro_batch_size=micro_batch_size)
        run = trainer(tmp_path / str(micro_batch_size), max_steps=4, limit_val_batches=0)
        run.fit(module, datamodule=data)
        assert run.accumulate_grad_batches == 8 // micro_batch_size
        losses.append([float(v) for _, name, v in rows(tmp_path / str(micro_batch_size)) if name == "train/loss"])
        weights.append(torch.cat([p.detach().flatten() for p in module.model.parameters()]))
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    torch.testing.assert_close(weights[0], weights[1], rtol=1e-3, atol=2e-5)


def test_validation_is_the_exact_mean_over_tokens(tmp_path):
    module = tiny()
    trainer(tmp_path).validate(module, datamodule=SyntheticData(), verbose=False)
    for domain, found in enumerate(module.domain_losses):
        nats, tokens = 0.0, 0
        for i in range(4):
            batch = Windows(domain, 0, 1)[i]
            logits, _ = module.model(batch["input_ids"])
            log_p = logits.double().log_softmax(-1)
            keep = batch["labels"] != -100
            picked = log_p.gather(-1, batch["labels"].clamp(min=0)[..., None])[..., 0]
            nats -= picked[keep].sum().item()
            tokens += int(keep.sum())
        assert found.tokens == tokens
        assert found.nats == pytest.approx(nats, rel=1e-5)
        assert found.bytes == 56
        assert found.bpb == pytest.approx(nats / math.log(2) / 56, rel=1e-5)
    assert [(d.name, d.in_domain) for d in module.domain_losses] == [("books", False), ("web", True), ("code", False)]


def test_validation_means_are_over_domains(tmp_path):
    module = tiny()
    run = trainer(tmp_path)
    run.validate(module, datamodule=SyntheticData(), verbose=False)
    books, web, code = (d.loss for d in module.domain_losses)
    logged = {k: v.item() for k, v in run.callback_metrics.items()}
    assert logged["val/loss/id"] == pytest.approx(web)
    assert logged["val/loss/ood"] == pytest.approx((books + code) / 2)
    assert logged["val/loss/code"] == pytest.approx(code)
    assert {"val/bpb/books", "val/bpb/web", "val/bpb/code"} < logged.keys()
    assert not (tmp_path / "metrics.csv").exists()  # the record is of training


def test_max_tokens_sets_the_number_of_steps(tmp_path):
    run = trainer(tmp_path, limit_val_batches=0)
    module = tiny(max_tokens=5 * 8 * T - 1)
    run.fit(module, datamodule=SyntheticData())
    assert (run.global_step, module.length.steps, module.tokens) == (5, 5, 5 * 8 * T)


def test_max_steps_stops_earlier_but_the_schedule_is_that_of_max_tokens(tmp_path):
    run = trainer(tmp_path, limit_val_batches=0, max_steps=2)
    module = tiny(max_tokens=10 * 8 * T, schedule=Cosine(warmup_steps=4), optimizer=AdamWConfig(lr=1.0))
    run.fit(module, datamodule=SyntheticData())
    assert [float(v) for _, name, v in rows(tmp_path) if name == "train/lr"] == [0.25, 0.5]


def test_bf16_mixed_trains_on_a_cpu(tmp_path):
    module = tiny(max_tokens=12 * 8 * T, optimizer=AdamWConfig(lr=2e-2))
    trainer(tmp_path, precision="bf16-mixed").fit(module, datamodule=SyntheticData())
    losses = [float(v) for _, name, v in rows(tmp_path) if name == "train/loss"]
    assert losses[-1] < losses[0] - 0.2
    assert all(p.dtype == torch.float32 for p in module.parameters())


def test_activation_checkpointing_changes_nothing(tmp_path):
    found = []
    for on in (False, True):
        trainer(tmp_path / str(on), max_steps=3).fit(tiny(activation_checkpointing=on), datamodule=SyntheticData())
        found.append(rows(tmp_path / str(on)))
    assert found[0] == found[1]


def test_initial_values_depend_on_the_seed_alone():
    def weights(seed):
        module = tiny(seed)
        torch.rand(7)  # what else was drawn before does not matter
        module.configure_model()
        return torch.cat([p.detach().flatten() for p in module.model.parameters()])

    assert torch.equal(weights(3), weights(3))
    assert not torch.equal(weights(3), weights(4))


def test_configure_model_is_idempotent():
    module = tiny()
    assert all(p.is_meta for p in module.model.parameters())
    module.configure_model()
    before = [p.detach().clone() for p in module.model.parameters()]
    for p in module.model.parameters():
        p.data.add_(1.0)
    module.configure_model()
    assert all(torch.equal(a + 1.0, b) for a, b in zip(before, module.model.parameters(), strict=True))


def drawn(run_dir, *, global_seed, micro_batch_size=4):
    """What a layer would draw in each micro batch of two steps, whatever the state of the global generator."""
    module = tiny()
    values = []
    forward = module.model.forward

    def spy(*args, **kwargs):
        values.append(torch.rand(()).item())
        return forward(*args, **kwargs)

    module.model.forward = spy
    torch.manual_seed(global_seed)
    data = SyntheticData(micro_batch_size=micro_batch_size)
    trainer(run_dir, max_steps=2, limit_val_batches=0).fit(module, datamodule=data)
    return values


def test_randomness_is_a_function_of_the_place_in_training(tmp_path):
    first = drawn(tmp_path / "a", global_seed=1)
    assert len(set(first)) == len(first) == 4
    assert drawn(tmp_path / "b", global_seed=2) == first


@pytest.mark.parametrize(
    ("options", "trainer_options", "message"),
    [
        ({}, {}, "set model.max_tokens or trainer.max_steps"),
        ({"vocab_size": V - 1}, {"max_steps": 1}, f"the tokenizer has {V} tokens, but model.vocab_size is {V - 1}"),
        ({"schedule": Cosine(warmup_steps=9)}, {"max_steps": 5}, "warmup takes 9 steps, but training has 5"),
        (
            {},
            {"max_steps": 5, "val_check_interval": 3, "check_val_every_n_epoch": None},
            "use model.val_every_n_steps",
        ),
    ],
)
def test_configurations_that_cannot_work_are_refused(tmp_path, options, trainer_options, message):
    with pytest.raises(ValueError, match=message):
        trainer(tmp_path, **trainer_options).fit(tiny(**options), datamodule=SyntheticData(micro_batch_size=4))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens": 0}, "max_tokens must be at least 1"),
        ({"val_every_n_steps": 0}, "val_every_n_steps must be at least 1"),
        ({"max_skipped_steps": 0}, "max_skipped_steps must be at least 1"),
        ({"z_loss": -1.0}, "z_loss must be at least 0"),
        ({"d_model": 15}, "n_heads"),
    ],
)
def test_options_are_checked_at_construction(options, message):
    with pytest.raises(ValueError, match=message):
        tiny(**options)


def test_half_precision_parameters_are_refused_where_some_must_stay_float32(tmp_path):
    module = tiny()
    keep_float32(module.model.blocks[1].mixer.o_proj.weight)
    with pytest.raises(ValueError, match=r"bf16-true would cast .*blocks.1.mixer.o_proj.weight: use"):
        trainer(tmp_path, max_steps=1, precision="bf16-true").fit(module, datamodule=SyntheticData())


def test_half_precision_parameters_train(tmp_path):
    module = tiny(max_tokens=10 * 8 * T, optimizer=AdamWConfig(lr=2e-2))
    trainer(tmp_path, precision="bf16-true").fit(module, datamodule=SyntheticData())
    losses = [float(v) for _, name, v in rows(tmp_path) if name == "train/loss"]
    assert losses[-1] < losses[0] - 0.1
    assert all(p.dtype == torch.bfloat16 for p in module.parameters())


def test_a_data_module_is_needed(tmp_path):
    with pytest.raises(ValueError, match="needs a data module"):
        trainer(tmp_path, max_steps=1).fit(tiny(), train_dataloaders=[{}], val_dataloaders=[{}])
