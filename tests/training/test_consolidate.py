"""One safetensors file of a checkpoint, and back: nothing is lost, and what is damaged is said."""

import json
import shutil
import struct
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from seqarch.cli import main
from seqarch.training.checkpoint import read_checkpoint
from seqarch.training.consolidated import read_consolidated, write_consolidated
from seqarch.training.rebuild import load_module
from tests.training.ranks import Ranks
from tests.training.sharded import Job
from tests.training.synthetic import rows
from tests.training.test_sharded import difference


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """A sharded run of two processes, four steps of eight."""
    job = Job(tmp_path_factory.mktemp("run"), 4, 8, every_n_steps=4)
    job.on(2)
    return job


@pytest.fixture(scope="module")
def files(job, tmp_path_factory):
    """The run as one file, with the weights alone and with everything."""
    folder = tmp_path_factory.mktemp("files")
    weights, everything = folder / "weights.safetensors", folder / "everything.safetensors"
    main(["consolidate", str(job.run_dir), str(weights)])
    main(["consolidate", str(job.run_dir), str(everything), "--with_optimizer", "true"])
    return weights, everything


def same(found, expected):
    """Whether two nested values are equal, in types, order of keys and bits."""
    if isinstance(expected, torch.Tensor):
        return found.dtype == expected.dtype and torch.equal(found, expected)
    if isinstance(expected, dict):
        return list(found) == list(expected) and all(same(found[key], value) for key, value in expected.items())
    if isinstance(expected, list | tuple):
        return type(found) is type(expected) and len(found) == len(expected) and all(map(same, found, expected))
    return type(found) is type(expected) and found == expected


def sorted_top(checkpoint):
    return dict(sorted(checkpoint.items()))


def test_nothing_is_lost(job, files):
    whole = read_checkpoint(job.run_dir / "checkpoints" / "last.ckpt")
    found = read_checkpoint(files[1])
    assert same(sorted_top(found) | {"state_dict": 0}, sorted_top(whole) | {"state_dict": 0})
    assert same(sorted_top(found["state_dict"]), sorted_top(whole["state_dict"]))


def test_the_weights_lie_under_their_names_for_every_reader(job, files):
    weights = load_file(files[0])
    state_dict = read_checkpoint(job.run_dir / "checkpoints" / "last.ckpt")["state_dict"]
    assert set(weights) == {*state_dict, "seqarch.seen_tokens"}
    assert all(torch.equal(weights[name], value) for name, value in state_dict.items())


def test_it_is_read_as_any_checkpoint_is(job, files):
    ids = torch.arange(8).view(1, 8)
    expected = load_module(job.run_dir / "checkpoints" / "last.ckpt")(ids)[0]
    for file in files:
        assert torch.equal(load_module(file)(ids)[0], expected)
        options = read_checkpoint(file, options_only=True)
        assert (options["global_step"], options["state_dict"]) == (4, {})


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The record of a training that was never interrupted."""
    job = Job(tmp_path_factory.mktemp("whole"), strategy=None)
    job.run()
    return rows(job.run_dir)


@pytest.mark.parametrize("form", ["file", "shards", "file in one process"])
def test_training_goes_on_from_it_and_from_what_it_becomes(job, files, whole, tmp_path, form):
    source = files[1]
    if form == "shards":
        source = tmp_path / "shards"
        main(["consolidate", str(files[1]), str(source)])
    part = replace(job, run_dir=tmp_path / "run", steps=8, resume=str(source))
    shutil.copytree(job.run_dir, part.run_dir, symlinks=True, ignore=shutil.ignore_patterns("checkpoints"))
    if form == "file in one process":
        replace(part, strategy=None).run()
    else:
        part.on(2)
    found = [r for r in rows(part.run_dir) if not (r[0] == 4 and r[1].startswith(("val/", "train/smoothed")))]
    assert difference(found, whole) < 1e-4


def test_weights_alone_are_no_training_that_can_go_on(job, files, tmp_path, capsys):
    part = replace(job, run_dir=tmp_path, steps=8, resume=str(files[0]))
    ranks = Ranks(2, tmp_path / "logs", part.run)
    assert ranks.wait() == [1, 1]
    for log in ranks.logs:
        assert f"{files[0]} holds weights only, and training cannot go on" in log.read_text()
    with pytest.raises(SystemExit):
        main(["consolidate", str(files[0]), str(tmp_path / "shards")])
    assert "consolidate --with_optimizer true" in capsys.readouterr().err
    assert not (tmp_path / "shards").exists()


def test_an_error_of_the_process_that_reads_is_one_of_all(job, files, tmp_path):
    broken = tmp_path / "broken.safetensors"
    broken.write_bytes(files[1].read_bytes()[:-1])
    ranks = Ranks(2, tmp_path / "logs", replace(job, run_dir=tmp_path, steps=8, resume=str(broken)).run)
    assert ranks.wait() == [1, 1]
    assert all(f"{broken} cannot be read" in log.read_text() for log in ranks.logs)


def changed(content, where):
    return content[:where] + bytes([content[where] ^ 1]) + content[where + 1 :]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda content: b"", "cannot be read: it is damaged, cut short"),
        (lambda content: content[:-1], "cannot be read: it is damaged, cut short"),
        (lambda content: content[:100], "cannot be read: it is damaged, cut short"),
        (lambda content: changed(content, len(content) - 5), "the checksum of .* does not match: it is damaged"),
        (lambda content: content.replace(b'\\"__kind__\\"', b'\\"__kind_\\"'), "cannot be read|damaged"),
    ],
)
def test_damage_is_said(files, tmp_path, damage, message):
    path = tmp_path / "a.safetensors"
    path.write_bytes(damage(files[1].read_bytes()))
    with pytest.raises(ValueError, match=message):
        read_checkpoint(path)


def test_anothers_safetensors_file_is_not_taken_for_one(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file({"weight": torch.zeros(2)}, path, {"format": "pt"})
    with pytest.raises(ValueError, match="is no checkpoint of seqarch: its metadata lacks an entry 'seqarch'"):
        read_checkpoint(path)


def test_every_kind_of_value_comes_back(tmp_path):
    shared = torch.arange(6.0).view(2, 3)
    checkpoint = {
        "state_dict": {
            "a": shared,
            "b": shared,
            "transposed": shared.T,
            "none": torch.zeros(0),
            "scalar": shared[0, 1],
        },
        "dict": {1: "one", "two": (1, 2.5, None, [True, float("inf")]), "__kind__": "tuple"},
        "deep": [{"x": {0: torch.tensor([True]), "y": torch.tensor(3, dtype=torch.bfloat16)}}],
        "text": 'ü\n"',
    }
    write_consolidated(tmp_path / "a.safetensors", checkpoint)
    found = read_consolidated(tmp_path / "a.safetensors")
    assert same({name: found[name] for name in checkpoint}, checkpoint)
    with pytest.raises(ValueError, match=r"callbacks\.Odd of the checkpoint is a complex, which JSON has no form for"):
        write_consolidated(tmp_path / "b.safetensors", {"state_dict": {}, "callbacks": {"Odd": 1j}})
    assert [path.name for path in tmp_path.iterdir()] == ["a.safetensors"]


def test_nothing_is_overwritten(job, files, capsys):
    before = files[0].read_bytes()
    with pytest.raises(SystemExit):
        main(["consolidate", str(job.run_dir), str(files[0])])
    assert f"{files[0]} exists already" in capsys.readouterr().err
    assert files[0].read_bytes() == before


def test_the_file_is_others_to_read_as_any_is(files, tmp_path):
    (tmp_path / "any").touch()
    assert files[0].stat().st_mode == (tmp_path / "any").stat().st_mode


def test_the_header_is_plain_json(files):
    content = files[0].read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    metadata = json.loads(content[8 : 8 + length])["__metadata__"]
    assert metadata["format"] == "pt"
    assert json.loads(metadata["seqarch"])["hyper_parameters"]["d_model"] == 16
