"""Checkpoints in shards: any number of processes goes on from them, what is damaged is named, none is half written."""

import json
import os
import pickle
import resource
import shutil
import zlib
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import Callback

from seqarch.training.checkpoint import read_checkpoint
from seqarch.training.rebuild import load_module
from seqarch.training.runs import checkpoint_of
from tests.training.ranks import Ranks
from tests.training.sharded import Job
from tests.training.synthetic import rows
from tests.training.test_sharded import difference

LAST = "step-00000004.ckpt"


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    """The same training in one process without a strategy, and in two processes; checkpoints at steps 2 and 4."""
    one = Job(tmp_path_factory.mktemp("one"), 4, 8, strategy=None, every_n_steps=2)
    one.run()
    two = replace(one, run_dir=tmp_path_factory.mktemp("two"), strategy={})
    two.on(2)
    return one, two


@pytest.fixture
def copy(jobs, tmp_path):
    """A copy of the sharded run, to be damaged."""
    return Path(shutil.copytree(jobs[1].run_dir, tmp_path / "run", symlinks=True))


def test_the_folder_is_what_a_single_file_would_be(jobs):
    one, two = (job.run_dir / "checkpoints" / LAST for job in jobs)
    assert sorted(path.name for path in two.iterdir()) == [
        ".metadata",
        "__0_0.distcp",
        "__1_0.distcp",
        "files.json",
        "meta.pt",
    ]
    expected, found = read_checkpoint(one), read_checkpoint(two)
    assert found.keys() == expected.keys()
    assert found["hyper_parameters"] == expected["hyper_parameters"]
    assert found["state_dict"].keys() == expected["state_dict"].keys()
    for name, value in expected["state_dict"].items():
        torch.testing.assert_close(found["state_dict"][name], value, rtol=1e-4, atol=1e-6)
    (a,), (b,) = found["optimizer_states"], expected["optimizer_states"]
    assert [group["params"] for group in a["param_groups"]] == [group["params"] for group in b["param_groups"]]
    assert a["state"].keys() == b["state"].keys()
    for number, moments in b["state"].items():
        torch.testing.assert_close(a["state"][number], moments, rtol=1e-3, atol=1e-6)


def test_it_is_read_as_any_checkpoint_is(jobs):
    job = jobs[1]
    path = checkpoint_of(job.run_dir)
    assert path == job.run_dir / "checkpoints" / "last.ckpt"
    assert checkpoint_of(path.resolve()) == path.resolve()
    assert read_checkpoint(path, options_only=True)["global_step"] == 4
    module = load_module(path)
    ids = torch.arange(8).view(1, 8)
    assert torch.equal(module(ids)[0], load_module(path.resolve())(ids)[0])


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The record of a training that was never interrupted."""
    job = Job(tmp_path_factory.mktemp("whole"), strategy=None)
    job.run()
    return rows(job.run_dir)


@pytest.mark.parametrize(("first", "then"), [(2, 1), (2, None), (1, 2), (None, 2)])
def test_another_number_of_processes_goes_on(tmp_path, whole, first, then):
    job = Job(tmp_path, 5, 8, every_n_steps=5)
    for processes, part in ((first, job), (then, replace(job, steps=8, resume="last.ckpt"))):
        if processes is None:
            replace(part, strategy=None).run()
        else:
            part.on(processes)
    # the first part validates at its end
    found = [r for r in rows(tmp_path) if not (r[0] == 5 and r[1].startswith(("val/", "train/smoothed")))]
    assert difference(found, whole) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("mixer", ["Attention", "Top1Chunk", "Mamba2", "RWKV7", "GatedDeltaNet"])
def test_four_then_two_then_one_then_four(tmp_path, mixer):
    steps = 20
    job = Job(tmp_path / "whole", steps, steps, mixer, strategy=None)
    job.run()
    parts = replace(job, run_dir=tmp_path / "parts", strategy={}, every_n_steps=1)
    for i, processes in enumerate((4, 2, 1, 4)):
        part = replace(parts, steps=5 * (i + 1), resume="last.ckpt" if i else None)
        part.on(processes, nodes=2 if i == 3 else 1)
    expected = rows(job.run_dir)
    names = {r[:2] for r in expected}
    found = [r for r in rows(parts.run_dir) if r[:2] in names]
    difference_of_losses = difference([r for r in found if "loss" in r[1]], [r for r in expected if "loss" in r[1]])
    print(mixer, difference_of_losses)
    assert difference_of_losses < 1e-5


def damage(run_dir, name, how):
    path = run_dir / "checkpoints" / LAST / name
    content = path.read_bytes()
    if how == "missing":
        path.unlink()
    elif how == "short":
        path.write_bytes(content[:-1])
    else:
        path.write_bytes(
            content[: len(content) // 2] + bytes([content[len(content) // 2] ^ 1]) + content[len(content) // 2 + 1 :]
        )


@pytest.mark.parametrize(
    ("name", "how", "message"),
    [
        ("__1_0.distcp", "missing", r"lacks __1_0.distcp \(1 of 4 files\)"),
        ("meta.pt", "missing", r"lacks meta.pt \(1 of 4 files\)"),
        ("__0_0.distcp", "short", r"__0_0.distcp has [\d,]+ bytes, of [\d,]+ that were written: it was cut short"),
        ("__0_0.distcp", "changed", "the checksum of __0_0.distcp does not match"),
        ("meta.pt", "changed", "the checksum of meta.pt does not match"),
        (".metadata", "changed", "the checksum of .metadata does not match"),
        ("files.json", "missing", "files.json, which lists its shards, is missing"),
        ("files.json", "short", "files.json, which lists its shards, is missing or damaged"),
    ],
)
def test_what_is_damaged_is_named_and_the_one_before_offered(copy, name, how, message):
    damage(copy, name, how)
    offer = f"The newest older checkpoint that is whole: --ckpt_path {copy / 'checkpoints' / 'step-00000002.ckpt'}"
    for file in ("last.ckpt", LAST):
        with pytest.raises(ValueError, match=message) as error:
            read_checkpoint(copy / "checkpoints" / file)
        assert str(error.value).endswith(offer)
    damage_other = copy / "checkpoints" / "step-00000002.ckpt" / "__0_0.distcp"
    damage_other.write_bytes(b"")
    with pytest.raises(ValueError, match=message) as error:
        read_checkpoint(copy / "checkpoints" / LAST)
    assert "newest older" not in str(error.value)


def test_files_of_single_processes_are_offered_too(jobs, tmp_path):
    run = shutil.copytree(jobs[0].run_dir, tmp_path / "run", symlinks=True)
    (run / "checkpoints" / LAST).write_bytes(b"half")
    with pytest.raises(ValueError, match=r"--ckpt_path .*step-00000002.ckpt"):
        read_checkpoint(run / "checkpoints" / "last.ckpt")


def test_all_processes_give_up_on_a_damaged_checkpoint(copy):
    damage(copy, "__1_0.distcp", "changed")
    ranks = Ranks(2, copy / "again", Job(copy, resume="last.ckpt").run)
    assert ranks.wait() == [1, 1]
    for log in ranks.logs:
        assert "the checksum of __1_0.distcp does not match" in log.read_text()
    assert "--ckpt_path" in ranks.logs[0].read_text()


class Evil:
    def __reduce__(self):
        return os.system, ("exit 1",)


@pytest.mark.parametrize("found", [Evil(), {"state_dict_metadata": {}}, partial(print)])
def test_a_strangers_index_runs_nothing(copy, found):
    folder = copy / "checkpoints" / LAST
    (folder / ".metadata").write_bytes(pickle.dumps(found))
    files = json.loads((folder / "files.json").read_text())
    content = (folder / ".metadata").read_bytes()
    files[".metadata"] = [len(content), zlib.crc32(content)]
    (folder / "files.json").write_text(json.dumps(files))
    with pytest.raises(ValueError, match=r"\.metadata cannot be read"):
        read_checkpoint(folder)


def test_what_a_killed_write_left_is_removed(copy):
    folder = copy / "checkpoints"
    for name in (".step-00000004.ckpt.tmp", ".step-00000006.ckpt.tmp", ".step-00000002.ckpt.old"):
        (folder / name).mkdir()
        (folder / name / "__0_0.distcp").write_bytes(b"half")
    (folder / ".step-00000008.ckpt.tmp").write_bytes(b"half")
    Job(copy, 5, 8, resume="last.ckpt").on(2)
    assert not list(folder.glob(".*"))
    assert read_checkpoint(folder / "last.ckpt", options_only=True)["global_step"] == 5


def test_processes_that_do_not_see_the_same_folder_are_named(copy):
    ranks = Ranks(2, copy / "again", Job(copy, resume="last.ckpt", blind=1).run)
    assert ranks.wait() == [1, 1]
    for log in ranks.logs:
        assert "sees checkpoints of the steps [2, 4]" in log.read_text()
        assert "but rank 1 on " in log.read_text()
        assert "run_dir must lie on a disk that all nodes share" in log.read_text()


class Full(Callback):
    """From a step on, files can no longer grow on one rank."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def on_train_batch_start(self, trainer, module, batch, batch_idx) -> None:
        if trainer.global_step == 3 and trainer.global_rank == self.rank:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_full_disk_stops_all_processes_and_leaves_what_was_there(tmp_path, rank):
    job = Job(tmp_path, 8, 8, every_n_steps=2, model={"d_model": 64}, callbacks=(Full(rank),))
    ranks = Ranks(2, tmp_path / "logs", job.run)
    assert ranks.wait() == [1, 1]
    for log in ranks.logs:
        text = log.read_text()
        assert f"cannot write the checkpoint {tmp_path / 'checkpoints' / LAST}" in text
        assert f"rank {rank}: " in text
        assert "MiB free there" in text
    names = ["best.ckpt", "last.ckpt", "step-00000002.ckpt", "step-00000003.ckpt"]  # the best of step 3 is whole
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == names
    whole = replace(job, run_dir=tmp_path / "whole", strategy=None, every_n_steps=None, callbacks=())
    whole.run()
    replace(job, every_n_steps=None, callbacks=(), resume="last.ckpt").on(2)
    assert difference(rows(tmp_path), rows(whole.run_dir)) < 1e-4
