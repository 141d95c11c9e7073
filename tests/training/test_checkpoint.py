import errno
import multiprocessing
import resource
import sys
from functools import partial

import pytest
import torch

from seqarch.training.callbacks.checkpoints import Checkpoints
from seqarch.training.checkpoint import AtomicCheckpointIO, read_checkpoint
from seqarch.training.module import SequenceModule
from seqarch.training.rebuild import check_same_architecture, load_module
from seqarch_attention import Attention
from tests.training.synthetic import SyntheticData, V, tiny, trainer


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A trained module and its last checkpoint."""
    run_dir = tmp_path_factory.mktemp("run")
    module = tiny(tie_embeddings=False)
    trainer(run_dir, max_steps=3).fit(module, datamodule=SyntheticData())
    return module, run_dir / "checkpoints" / "last.ckpt"


def names(folder):
    return sorted(p.name for p in folder.iterdir())


class InterruptedWriteError(Exception):
    pass


class Fails:
    """Pickles as something that cannot be written."""

    def __reduce__(self):
        raise InterruptedWriteError


def test_a_write_that_fails_leaves_the_old_file_and_no_other(tmp_path):
    path = tmp_path / "a.ckpt"
    io = AtomicCheckpointIO()
    io.save_checkpoint({"x": torch.arange(3)}, path)
    with pytest.raises(InterruptedWriteError):
        io.save_checkpoint({"x": torch.arange(4), "y": Fails()}, path)
    assert names(tmp_path) == ["a.ckpt"]
    assert torch.load(path, weights_only=True)["x"].tolist() == [0, 1, 2]


def _write_too_much(path, messages):
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))  # as if the disk were full; SIGXFSZ is ignored
    try:
        AtomicCheckpointIO().save_checkpoint({"x": torch.zeros(1_000_000)}, path)
    except OSError as error:
        messages.put(str(error))


@pytest.mark.skipif(sys.platform == "win32", reason="no resource limits there")
def test_a_full_disk_is_an_error_that_names_the_path_and_the_space(tmp_path):
    path = tmp_path / "a.ckpt"
    AtomicCheckpointIO().save_checkpoint({"x": torch.arange(3)}, path)
    context = multiprocessing.get_context("forkserver")
    messages = context.Queue()
    process = context.Process(target=_write_too_much, args=(path, messages))
    process.start()
    message = messages.get(timeout=120)
    process.join()
    assert str(path) in message
    assert "MiB free" in message
    assert names(tmp_path) == ["a.ckpt"]
    assert torch.load(path, weights_only=True)["x"].tolist() == [0, 1, 2]


def test_the_system_error_is_kept(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match=r"a.ckpt \([\d,]+ MiB free there\): .*No space left"):
        AtomicCheckpointIO().save_checkpoint({"x": 1}, tmp_path / "a.ckpt")
    assert names(tmp_path) == []


def test_what_a_killed_write_left_is_overwritten(tmp_path):
    (tmp_path / ".a.ckpt.tmp").write_bytes(b"half")
    AtomicCheckpointIO().save_checkpoint({"x": 1}, tmp_path / "a.ckpt")
    assert names(tmp_path) == ["a.ckpt"]


def test_load_module_rebuilds_the_model_from_the_file_alone(trained):
    module, path = trained
    loaded = load_module(path)
    assert not loaded.training
    assert loaded.hparams == module.hparams
    ids = torch.arange(2 * 7).view(2, 7) % V
    module.eval()
    with torch.no_grad():
        assert torch.equal(loaded(ids)[0], module(ids)[0])


def test_lightning_can_load_it_too(trained):
    module, path = trained
    loaded = SequenceModule.load_from_checkpoint(path)
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), module.parameters(), strict=True))


def test_a_missing_a_damaged_and_a_strange_file(trained, tmp_path):
    _, path = trained
    content = path.read_bytes()
    (tmp_path / "short.ckpt").write_bytes(content[: len(content) // 2])
    (tmp_path / "text.ckpt").write_text("not a checkpoint")
    flipped = bytearray(content)
    flipped[len(content) // 3] ^= 1  # among the tensors
    (tmp_path / "flipped.ckpt").write_bytes(flipped)
    torch.save({"state_dict": {}}, tmp_path / "other.ckpt")
    torch.save([1, 2], tmp_path / "list.ckpt")
    (tmp_path / "folder.ckpt").mkdir()
    for name, message in (
        ("none.ckpt", "there is no such checkpoint file"),
        ("short.ckpt", "cannot be read: it is damaged, cut short, or no checkpoint"),
        ("flipped.ckpt", r"the checksum of .* does not match"),
        ("text.ckpt", "cannot be read: it is damaged, cut short, or no checkpoint"),
        ("other.ckpt", "is no checkpoint of seqarch: it has no hyper_parameters, seqarch"),
        ("folder.ckpt", "is a folder, but not one of a checkpoint's shards"),
        ("list.ckpt", "is no checkpoint of seqarch"),
    ):
        with pytest.raises(ValueError, match=message) as error:
            load_module(tmp_path / name)
        assert name in str(error.value)


def test_nothing_but_plain_data_is_read(tmp_path):
    torch.save({"state_dict": {}, "hyper_parameters": partial(print), "seqarch": {}}, tmp_path / "code.ckpt")
    with pytest.raises(ValueError, match="cannot be read"):
        read_checkpoint(tmp_path / "code.ckpt")


def changed(path, target, **options):
    checkpoint = torch.load(path, weights_only=True)
    checkpoint["hyper_parameters"].update(options)
    torch.save(checkpoint, target)
    return target


@pytest.mark.parametrize("name", ["seqarch_gone.Gone", "seqarch_attention.Gone"])
def test_a_plugin_that_is_missing_is_named(trained, tmp_path, name):
    path = changed(trained[1], tmp_path / "a.ckpt", mixer={"class_path": name, "init_args": {}})
    with pytest.raises(ValueError, match=f"a.ckpt: mixer needs {name}, which is not installed here: install"):
        load_module(path)


def test_an_option_that_a_plugin_no_longer_has_is_named(trained, tmp_path):
    mixer = {"class_path": "seqarch_attention.Attention", "init_args": {"n_hats": 2}}
    path = changed(trained[1], tmp_path / "a.ckpt", mixer=mixer)
    with pytest.raises(ValueError, match=r"a.ckpt cannot be rebuilt(.|\n)*n_hats"):
        load_module(path)


def test_weights_that_do_not_fit_are_an_error(trained, tmp_path):
    path = changed(trained[1], tmp_path / "a.ckpt", d_model=32)
    with pytest.raises(ValueError, match=r"a.ckpt: its weights are not those of its own hyper-parameters"):
        load_module(path)


def test_check_same_architecture_names_what_differs(trained):
    module, path = trained
    check_same_architecture(path, module)
    check_same_architecture(path, tiny(tie_embeddings=False, mixer=[partial(Attention, n_heads=2, backend="torch")]))
    other = tiny(tie_embeddings=True, mixer=partial(Attention, n_heads=4), channel_mixer=None)
    with pytest.raises(ValueError, match="another architecture") as error:
        check_same_architecture(path, other)
    assert str(error.value).splitlines()[1:] == [
        "  mixer.n_heads: 2 in the checkpoint, 4 here",
        "  channel_mixer: 'seqarch.model.SwiGLU' in the checkpoint, None here",
        "  channel_mixer.d_ff: None in the checkpoint, nothing here",
        "  tie_embeddings: False in the checkpoint, True here",
    ]


def test_a_model_built_by_a_function_trains_and_saves_but_cannot_be_rebuilt(tmp_path):
    module = tiny(mixer=lambda d, **options: Attention(d, n_heads=2, **options))
    trainer(tmp_path, max_steps=1).fit(module, datamodule=SyntheticData())
    path = tmp_path / "checkpoints" / "last.ckpt"
    with pytest.raises(ValueError, match=r"does not say how to build its mixer \(.*<lambda> is no importable class\)"):
        load_module(path)
    trainer(tmp_path / "again", max_steps=2).fit(
        tiny(mixer=lambda d, **options: Attention(d, n_heads=2, **options)),
        datamodule=SyntheticData(),
        ckpt_path=str(path),
    )


def checkpoints_of(run):
    (found,) = (callback for callback in run.callbacks if isinstance(callback, Checkpoints))
    return found


def step_files(run_dir):
    return {int(p.name[5:13]) for p in (run_dir / "checkpoints").glob("step-*.ckpt")}


def test_which_checkpoints_are_kept(tmp_path):
    module = tiny(max_tokens=10 * 8 * 16, val_every_n_steps=3)
    run = trainer(tmp_path)
    checkpoints = checkpoints_of(run)
    checkpoints.every_n_steps, checkpoints.keep = 2, 2
    run.fit(module, datamodule=SyntheticData())
    assert step_files(tmp_path) == {8, 10} | {checkpoints.best_step}
    folder = tmp_path / "checkpoints"
    assert (folder / "last.ckpt").resolve().name == "step-00000010.ckpt"
    assert (folder / "best.ckpt").resolve().name == f"step-{checkpoints.best_step:08d}.ckpt"
    lines = (tmp_path / "metrics.csv").read_text().splitlines()
    scores = {int(line.split(",")[0]): float(line.split(",")[3]) for line in lines if ",val/loss/id," in line}
    assert checkpoints.best_step == min(scores, key=lambda step: scores[step])


def test_only_the_best_and_the_last_without_regular_ones(tmp_path):
    module = tiny(max_tokens=7 * 8 * 16, val_every_n_steps=3)
    run = trainer(tmp_path, every_n_steps=None)
    run.fit(module, datamodule=SyntheticData())
    assert step_files(tmp_path) == {7, checkpoints_of(run).best_step}


@pytest.mark.parametrize(
    ("options", "message"), [({"every_n_steps": 0}, "every_n_steps must be"), ({"keep": -1}, "keep must be at least 0")]
)
def test_options_are_checked(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        Checkpoints(tmp_path, **options)
