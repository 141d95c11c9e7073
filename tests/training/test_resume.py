import multiprocessing
import random
import signal

import pytest
import torch

from seqarch.training.optimizer import AdamWConfig
from seqarch.training.rebuild import load_module
from tests.training.killed import STEPS, run
from tests.training.synthetic import SyntheticData, T, rows, tiny, trainer


class KilledError(Exception):
    """Stands for a kill at an exact place: nothing after it happens."""


def fit(run_dir, *, micro_batch_size=4, resume=None, die_at=None, every_n_steps=2, steps=STEPS, **options):
    """Train with validation every three steps; ``die_at`` is (hook, how many calls of it)."""
    options = {"max_tokens": steps * 8 * T, "val_every_n_steps": 3, "optimizer": AdamWConfig(lr=1e-2), **options}
    module = tiny(**options)
    fitting = trainer(run_dir, every_n_steps=every_n_steps, enable_progress_bar=False)
    if die_at is not None:
        hook, left = die_at
        original = getattr(module, hook)

        def dying(*args, **kwargs):
            nonlocal left
            left -= 1
            if left < 0:
                raise KilledError
            return original(*args, **kwargs)

        setattr(module, hook, dying)
    data = SyntheticData(micro_batch_size=micro_batch_size)
    path = None if resume is None else str(run_dir / "checkpoints" / resume)
    if die_at is None:
        fitting.fit(module, datamodule=data, ckpt_path=path)
    else:
        with pytest.raises(KilledError):
            fitting.fit(module, datamodule=data, ckpt_path=path)
    return module


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that was never interrupted: its record, its weights, and its losses by document."""
    run_dir = tmp_path_factory.mktemp("whole")
    module = fit(run_dir)
    return rows(run_dir), module.model.state_dict(), documents(run_dir)


def documents(run_dir) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (run_dir / "documents").iterdir()}


def same(run_dir, module, whole) -> None:
    assert rows(run_dir) == whole[0]
    assert documents(run_dir) == whole[2]
    assert all(torch.equal(a, b) for a, b in zip(module.model.state_dict().values(), whole[1].values(), strict=True))


def test_the_record_is_as_expected(whole):
    assert [s for s, name, _ in whole[0] if name == "train/loss"] == list(range(1, STEPS + 1))
    assert [s for s, name, _ in whole[0] if name == "val/loss/ood"] == [3, 6, 9, 12]


@pytest.mark.parametrize(
    "die_at",
    [
        ("training_step", 9),  # within an accumulation, after a checkpoint
        ("training_step", 12),  # right after a validation that saved the best
        ("training_step", 16),  # right after a checkpoint
        ("configure_gradient_clipping", 7),  # with all gradients, before the step
        ("validation_step", 8),  # in a validation at a step that is due for a checkpoint
        ("on_validation_epoch_end", 1),
        ("on_train_batch_end", 11),  # a checkpoint of this step exists, if no validation follows
    ],
)
def test_a_resumed_run_is_bit_for_bit_the_same(tmp_path, whole, die_at):
    fit(tmp_path, die_at=die_at)
    module = fit(tmp_path, resume="last.ckpt")
    same(tmp_path, module, whole)


@pytest.mark.parametrize("step", [2, 6, 8])
def test_resuming_from_an_older_checkpoint_drops_what_came_later(tmp_path, whole, step):
    fit(tmp_path)
    module = fit(tmp_path, resume=f"step-{step:08d}.ckpt")
    same(tmp_path, module, whole)


def test_a_finished_run_can_be_made_longer(tmp_path):
    options = {"schedule": tiny().schedule.__class__(warmup_steps=0, min_ratio=1.0)}
    fit(tmp_path / "a", steps=5, every_n_steps=5, **options)
    fit(tmp_path / "a", steps=8, resume="last.ckpt", **options)
    fit(tmp_path / "b", steps=8, **options)
    # the shorter run validated at its end
    extra = ("val/", "train/smoothed_loss")
    assert [r for r in rows(tmp_path / "a") if not (r[0] == 5 and r[1].startswith(extra))] == rows(tmp_path / "b")


def test_another_micro_batch_size_goes_on_with_the_same_batches(tmp_path, whole):
    fit(tmp_path, die_at=("training_step", 15))
    module = fit(tmp_path, resume="last.ckpt", micro_batch_size=1)
    assert module.trainer.accumulate_grad_batches == 8
    found, expected = rows(tmp_path), whole[0]
    assert [r[:2] for r in found] == [r[:2] for r in expected]
    assert [float(r[2]) for r in found] == pytest.approx([float(r[2]) for r in expected], rel=1e-4)


def test_skipped_steps_are_counted_across_a_resume(tmp_path):
    module = fit(tmp_path, steps=4)
    state = torch.load(tmp_path / "checkpoints" / "last.ckpt", weights_only=True)
    kept = {"smoothed_loss", "seen_tokens"}
    assert {k: v for k, v in state["seqarch"].items() if k not in kept} == {
        "seed": 1,
        "skipped_steps": 0,
        "skipped_in_a_row": 0,
        "tokens": 4 * 8 * T,
    }
    state["seqarch"].update(skipped_steps=7, skipped_in_a_row=2)
    torch.save(state, tmp_path / "checkpoints" / "changed.ckpt")
    module = fit(tmp_path, steps=5, resume="changed.ckpt")
    assert (module.skipped_steps, module.skipped_in_a_row) == (7, 0)


def test_a_resumed_run_takes_the_optimizer_of_its_configuration(tmp_path):
    fit(tmp_path, steps=4)
    module = fit(
        tmp_path, steps=5, resume="last.ckpt", optimizer=AdamWConfig(lr=1e-3, weight_decay=0.5, betas=(0.8, 0.9))
    )
    groups = module.trainer.optimizers[0].param_groups
    assert [g["weight_decay"] for g in groups] == [0.5, 0.0]
    assert all(g["betas"] == (0.8, 0.9) and g["lr"] <= 1e-3 for g in groups)


def test_a_checkpoint_of_another_architecture_is_refused(tmp_path):
    fit(tmp_path, steps=2)
    with pytest.raises(ValueError, match=r"another architecture(.|\n)*d_model: 16 in the checkpoint, 32 here"):
        fit(tmp_path, steps=2, resume="last.ckpt", d_model=32)


def test_a_run_that_is_killed_again_and_again_is_the_same(tmp_path):
    context = multiprocessing.get_context("forkserver")  # a clean process that has already imported everything
    context.set_forkserver_preload(["tests.training.killed"])
    calls = context.Value("q", 0)

    def start(name: str, kill_at: int | None) -> bool:
        """Run it, and say whether it was killed."""
        process = context.Process(target=run, args=(tmp_path / name, calls, kill_at))
        process.start()
        process.join()
        assert process.exitcode in (0, -signal.SIGKILL)
        return process.exitcode != 0

    assert not start("whole", None)
    total = calls.value
    generator = random.Random(0)
    # Two kills at the most a third on leave work for a third process.
    killed = [start("killed", int(generator.uniform(0.15, 0.33) * total)) for _ in range(4)]
    assert killed[:2] == [True, True]
    assert not start("killed", None)
    assert rows(tmp_path / "killed") == rows(tmp_path / "whole")
    weights = [load_module(tmp_path / name / "checkpoints" / "last.ckpt").state_dict() for name in ("killed", "whole")]
    assert all(torch.equal(a, b) for a, b in zip(*(w.values() for w in weights), strict=True))
