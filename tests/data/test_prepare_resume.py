"""Stopping and starting again loses nothing and doubles nothing."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import seqarch.data.prepare
import seqarch.data.reading
from seqarch.data.corpus import Corpus
from seqarch.data.prepare import prepare
from seqarch.data.staging import Staging
from tests.data.raw import make_records, write_jsonl
from tests.data.test_prepare import snapshot

SCRIPT = """
import os, signal, sys
import seqarch.data.prepare as prepare
import seqarch.data.reading as reading
reading.BLOCK_BYTES = 10000
prepare.COMMIT_SECONDS = 0.0
raw, out, tokenizer, kill_at = sys.argv[1:]
left = None

def tick(frame, event, _):
    # kill this process at one of the staging's own events, kill_at of them after the first commit
    global left
    code = frame.f_code
    if not code.co_filename.endswith(("staging.py", "manifest.py")):
        return
    if left is None:
        left = int(kill_at) if (code.co_name, event) == ("commit", "return") else None
    else:
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

if int(kill_at):
    sys.setprofile(tick)
prepare.prepare(raw, out, tokenizer=tokenizer, processes=2)
"""


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("raw")
    for i in range(3):
        write_jsonl(folder / f"{i}.jsonl", make_records(200, seed=i))
    return folder


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory, raw: Path, tokenizer_json: Path) -> dict[str, bytes]:
    out = tmp_path_factory.mktemp("whole") / "out"
    prepare(str(raw), out, tokenizer=str(tokenizer_json), processes=2)
    return snapshot(out)


def test_kill_9_and_run_again(tmp_path: Path, raw: Path, tokenizer_json: Path, uninterrupted: dict[str, bytes]) -> None:
    out = tmp_path / "out"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}

    def run(kill_at: int) -> int:
        command = [sys.executable, "-c", SCRIPT, str(raw), str(out), str(tokenizer_json), str(kill_at)]
        return subprocess.run(command, env=environment).returncode

    sizes = []
    for kill_at in (1, 20, 45):  # right after a commit, while more is appended, in the next commit
        assert run(kill_at) == -signal.SIGKILL
        sizes.append(committed(out))
        assert not (out / "manifest.json").exists()
        assert not (out / "train").exists()
    assert run(0) == 0
    assert sizes == sorted(set(sizes))  # each attempt went on where the last one stopped
    assert snapshot(out) == uninterrupted
    Corpus(out).verify()
    assert not (out / ".prepare").exists()


def committed(out: Path) -> int:
    """Bytes of tokens that the journal has."""
    for journal in out.glob(".prepare/*/journal.json"):
        try:
            text = journal.read_text()
        except FileNotFoundError:
            continue
        return sum(c["tokens"] for c in json.loads(text)["counts"].values())
    return 0


class StoppedError(RuntimeError):
    pass


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seqarch.data.reading, "BLOCK_BYTES", 10000)
    monkeypatch.setattr(seqarch.data.prepare, "COMMIT_SECONDS", 0.0)


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("where", ["append", "commit", "seal", "publish", "after publish", "discard"])
def test_stop_at_each_stage(
    tmp_path: Path,
    raw: Path,
    tokenizer_json: Path,
    uninterrupted: dict[str, bytes],
    monkeypatch: pytest.MonkeyPatch,
    where: str,
) -> None:
    """As a kill would leave it: the cleaning-up that follows an exception is left out as well."""
    out = tmp_path / "out"
    method = where.removeprefix("after ")
    original = getattr(Staging, method)
    calls = 0

    def stop(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls == (9 if method in ("append", "commit") else 1):
            if where.startswith("after"):
                original(*args, **kwargs)
            raise StoppedError
        return original(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(Staging, method, stop)
        patch.setattr(seqarch.data.prepare, "_keep_committed", lambda staging: staging._close())
        with pytest.raises(StoppedError):
            prepare(str(raw), out, tokenizer=str(tokenizer_json), processes=1)
    assert (out / "manifest.json").exists() == (where == "discard")
    prepare(str(raw), out, tokenizer=str(tokenizer_json), processes=1)
    assert snapshot(out) == uninterrupted
    assert not (out / ".prepare").exists()


@pytest.mark.usefixtures("eager")
def test_disk_full(
    tmp_path: Path, raw: Path, tokenizer_json: Path, uninterrupted: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    original, left = Staging.append, 7

    def append(self: Staging, *args) -> int:
        nonlocal left
        left -= 1
        if left < 0:
            self._files["cc"][0].write(b"half")  # what a disk that fills up leaves behind
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return original(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(Staging, "append", append)
        with pytest.raises(ValueError, match=r"output: no space left for .*: make room and run the same command again"):
            prepare(str(raw), out, tokenizer=str(tokenizer_json), processes=1)
    assert not (out / "train").exists()
    assert not (out / "manifest.json").exists()
    prepare(str(raw), out, tokenizer=str(tokenizer_json), processes=1)
    assert snapshot(out) == uninterrupted


def test_disk_full_before_the_first_commit_leaves_nothing(
    tmp_path: Path, raw: Path, tokenizer_json: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def append(self: Staging, *args) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Staging, "append", append)
    with pytest.raises(ValueError, match="no space left"):
        prepare(str(raw), tmp_path / "new" / "out", tokenizer=str(tokenizer_json), processes=1)
    assert not (tmp_path / "new").exists()


@pytest.mark.usefixtures("eager")
def test_an_input_that_is_mended_is_read_again(tmp_path: Path, tokenizer_json: Path) -> None:
    records = make_records(200, seed=0)
    write_jsonl(tmp_path / "raw" / "0.jsonl", records[:50])
    good = write_jsonl(tmp_path / "raw" / "1.jsonl", records[50:]).read_text()
    (tmp_path / "raw" / "1.jsonl").write_text(good[:-40])
    out = tmp_path / "out"
    with pytest.raises(ValueError, match=r"1\.jsonl, line 150: not valid JSON"):
        prepare(str(tmp_path / "raw"), out, tokenizer=str(tokenizer_json), processes=1)
    assert not (out / "train").exists()
    assert not (out / "manifest.json").exists()
    (tmp_path / "raw" / "1.jsonl").write_text(good)
    prepare(str(tmp_path / "raw"), out, tokenizer=str(tokenizer_json), processes=1)
    whole = write_jsonl(tmp_path / "whole.jsonl", records)
    prepare(str(whole), tmp_path / "expected", tokenizer=str(tokenizer_json), processes=1)
    assert snapshot(out) == snapshot(tmp_path / "expected")


def test_two_at_once_are_refused(tmp_path: Path, raw: Path, tokenizer_json: Path) -> None:
    refused = []

    def during(*args) -> None:
        with pytest.raises(ValueError, match="is in use by another process") as info:
            prepare(str(raw), tmp_path / "out", tokenizer=str(tokenizer_json), processes=1)
        refused.append(info.value)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(seqarch.data.prepare, "_run", during)
        prepare(str(raw), tmp_path / "out", tokenizer=str(tokenizer_json), processes=1)
    assert len(refused) == 1


def test_a_changed_input_is_not_taken_for_the_old_one(tmp_path: Path, tokenizer_json: Path) -> None:
    raw = write_jsonl(tmp_path / "a.jsonl", make_records(9, seed=1))
    prepare(str(raw), tmp_path / "out", tokenizer=str(tokenizer_json), processes=1)
    write_jsonl(raw, make_records(12, seed=1))
    with pytest.raises(ValueError, match=r"a\.jsonl has changed since .* was prepared from it"):
        prepare(str(raw), tmp_path / "out", tokenizer=str(tokenizer_json), processes=1)
