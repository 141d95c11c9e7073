"""The functions as commands: jsonargparse makes the command line from their signatures and docstrings."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from jsonargparse import auto_cli

from seqarch.data.inspect import inspect
from seqarch.data.prepare import prepare
from seqarch.data.tokenizer import train_tokenizer
from tests.data.raw import make_records, write_jsonl

COMMANDS = {"prepare": prepare, "tokenizer": train_tokenizer, "inspect": inspect}


def run(*args: str) -> None:
    auto_cli(COMMANDS, args=list(args), as_positional=False)


def test_from_raw_text_to_inspection(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = make_records(30, seed=1)
    a = write_jsonl(tmp_path / "raw" / "a.jsonl", records[:15])
    b = write_jsonl(tmp_path / "raw" / "b.jsonl", records[15:])
    out = tmp_path / "out"
    run("tokenizer", f"--input=[{a}, {b}]", f"--output={out}", "--vocab_size=300", "--domains=[cc, c4]")
    run("prepare", f"--input={tmp_path}/raw/*.jsonl", f"--output={out}", "--processes=1")
    capsys.readouterr()
    run("inspect", f"--path={out}", "--windows=1", "--window_tokens=16", "--domains=[cc]")
    shown = capsys.readouterr().out
    texts = [r["text"] for r in records[::3]]
    row = next(line.split() for line in shown.splitlines() if line.startswith("train"))
    assert row[1:3] == ["cc", "10"]
    assert row[4] == f"{sum(len(t.encode()) for t in texts):,}"
    assert "c4" not in shown
    window = shown.split("--- train/cc, tokens ")[1].split("\n", 1)[1].split("\n\nverified")[0]
    joined = "<|endoftext|>".join(texts) + "<|endoftext|>"
    assert window.strip("\n").strip("\ufffd") in joined
    assert "sizes and checksums match the manifest" in shown


def test_inspect_finds_corruption(tmp_path: Path, corpus_path: Path) -> None:
    root = Path(shutil.copytree(corpus_path, tmp_path / "copy"))
    path = root / "train" / "cc.bytes"
    data = bytearray(path.read_bytes())
    data[0] ^= 255
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"train/cc\.bytes is corrupted"):
        run("inspect", f"--path={root}", "--windows=0")
    run("inspect", f"--path={root}", "--windows=0", "--verify=false")
    with pytest.raises(ValueError, match=r"domains: .* has no wiki"):
        run("inspect", f"--path={root}", "--domains=[wiki]")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run(command, "--help")
    shown = capsys.readouterr().out
    options = [line for line in shown.splitlines() if line.startswith("  --") and "--help" not in line]
    assert len(options) >= 6
    arguments = shown.split("  --")[1:]
    for text in arguments:
        words = " ".join(text.split("(")[0].split())
        if not text.startswith(("help", "config", "print_config")):
            assert len(words.split()) > 3, words


def test_importing_the_package_is_light() -> None:
    code = (
        "import sys, seqarch.data, seqarch.data.prepare, seqarch.data.tokenizer, seqarch.data.inspect\n"
        "heavy = {'torch', 'lightning', 'datasets', 'tokenizers', 'pyarrow', 'transformers', 'huggingface_hub'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    environment_path = ":".join(filter(None, sys.path))
    out = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": environment_path}, capture_output=True, text=True, check=True
    )
    assert out.stdout.strip() == "[]"
