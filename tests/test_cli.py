"""The command line as a user meets it."""

import subprocess
import sys
from pathlib import Path

import pytest

from seqarch.cli import COMMANDS, main

QUICKSTART = ["fit", "--config", "recipes/quickstart.yaml"]


def test_help_lists_every_command_with_one_line(capsys):
    main(["--help"])
    lines = capsys.readouterr().out.splitlines()
    for name, (_, line) in COMMANDS.items():
        assert sum(text.split()[:1] == [name] and text.endswith(line) for text in lines) == 1
        assert len(line) < 100


def test_starting_is_light():
    """``import seqarch`` and the help need no torch; listing what is slow to import keeps it so."""
    code = (
        "import sys, seqarch, seqarch.cli; seqarch.cli.main(['--help']);"
        "print([m for m in ('torch', 'lightning', 'datasets', 'tokenizers', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_a_misspelt_data_command_needs_no_torch():
    code = (
        "import sys, seqarch.cli\n"
        "try: seqarch.cli.main(['data', 'prepar'])\n"
        "except SystemExit: print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_output_that_nobody_reads_is_no_error():
    process = subprocess.Popen(
        [sys.executable, "-m", "seqarch", "mixers"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    process.stdout.close()
    _, err = process.communicate()
    assert (process.returncode in (1, 141), err) == (True, "")  # 1 is rich's


def test_the_contract_does_not_pull_in_the_trainer():
    code = (
        "import sys, seqarch; seqarch.TokenMixer;"
        "print([m for m in ('lightning', 'datasets', 'tokenizers', 'triton', 'flash_attn') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_mixers_says_what_can_run_here_and_why_not(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    main(["mixers"])
    out = capsys.readouterr().out
    for word in ("attention", "Attention", "top1_chunk", "Top1Chunk", "top1_element", "Top1Element", "seqarch 0.1.0"):
        assert word in out
    assert "torch*" in out
    assert "flash_attn (no: package flash_attn is not installed: pip install 'seqarch[cuda]')" in out


def error(arguments, capsys):
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 2
    _, mark, message = capsys.readouterr().err.partition("seqarch: error: ")
    assert mark  # what stands before are Lightning's notes
    return message


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fti"], "there is no command 'fti': did you mean 'fit'?"),
        ([*QUICKSTART, "--model.mixer.n_haeds", "3"], "no option 'n_haeds': did you mean 'n_heads'?"),
        ([*QUICKSTART, "--model.d_modl", "3"], "no option 'model.d_modl': did you mean 'model.d_model'?"),
        ([*QUICKSTART, "--trainer.max_step", "3"], "no option 'trainer.max_step': did you mean 'trainer.max_steps'?"),
        ([*QUICKSTART, "--data.seq_lenn", "3"], "no option 'seq_lenn': did you mean 'seq_len'?"),
        ([*QUICKSTART, "--model.schedule.warmup_step", "3"], "did you mean 'warmup_steps'?"),
        ([*QUICKSTART, "--model.mixer", "Atention"], "no mixer is called 'Atention': did you mean 'Attention'?"),
        (
            [*QUICKSTART, "--model.schedule", "Cosin"],
            "model.schedule: there is no class 'Cosin': did you mean 'Cosine'?",
        ),
        (
            [*QUICKSTART, "--data", "LimitedDomain"],
            "there is no class 'LimitedDomain': did you mean 'LimitedDomainData",
        ),
        ([*QUICKSTART, "--model.mixer.n_heads", "x"], "n_heads: Expected a int. Got value: x"),
        ([*QUICKSTART, "--model.mixer.n_heads", "5"], "n_heads (5) must divide d_model (192)"),
        ([*QUICKSTART, "--model.mixer", "Top1Chunk", "--model.mixer.chunk_size", "0"], "chunk_size must be at least 1"),
        ([*QUICKSTART, "--data.micro_batch_size", "3"], "batch_size 8 must be a multiple of micro_batch_size 3"),
        ([*QUICKSTART, "--model.mixer.n_heads", "0"], "n_heads must be at least 1"),
        ([*QUICKSTART, "--run_dir", "README.md"], "run_dir: README.md is a file"),
        (["fit", "--config", "nothing.yaml"], "File does not exist"),
        (["validate", "--config", "recipes/quickstart.yaml"], "give --ckpt_path"),
        (["data", "prepar"], "there is no 'prepar': did you mean 'prepare'? (`seqarch data --help` lists all)"),
        (["data"], "say what to do: prepare, tokenizer, inspect"),
        (
            ["data", "prepare", "a", "b", "--text_kee", "x"],
            "there is no option '--text_kee': did you mean '--text_key'?",
        ),
        (["data", "prepare", "a", "b", "--processes", "x"], "processes: must be one of int, null, got x"),
        (["mixers", "--all"], "there is no option '--all'"),
        (["generate", "--ckpt", "x", "--prompt", "y", "--temprature", "1"], "did you mean '--temperature'?"),
        (["generate", "--ckpt", "nowhere.ckpt", "--prompt", "x"], "nowhere.ckpt: there is no such checkpoint"),
    ],
)
def test_bad_input_gets_one_line(arguments, message, capsys):
    err = error(arguments, capsys)
    assert message in err
    assert len(err.splitlines()) <= 8
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: {mixer: {class_path: Attention, init_args: {n_hads: 4}}}", "'n_hads': did you mean 'n_heads'?"),
        ("modle: {d_model: 3}", "no option 'modle.d_model': did you mean"),
        ("model: {optimizer: {lrr: 4}}", "did you mean 'lr'?"),
        ("model: [", "Problems parsing config"),
    ],
)
def test_bad_files_too(text, message, tmp_path, capsys):
    (tmp_path / "bad.yaml").write_text(text)
    assert message in error([*QUICKSTART, "--config", str(tmp_path / "bad.yaml")], capsys)


def test_a_run_that_is_refused_leaves_no_folder(tmp_path, corpus_path, capsys):
    options = ["--data.path", str(corpus_path), "--data.train_domains", "[cc, c4]", "--run_dir", str(tmp_path / "run")]
    assert "model.vocab_size is 100" in error([*QUICKSTART, *options, "--model.vocab_size", "100"], capsys)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_holds_a_run_is_not_written_over(tmp_path, capsys):
    checkpoint = tmp_path / "checkpoints" / "last.ckpt"
    checkpoint.parent.mkdir()
    checkpoint.write_bytes(b"precious")
    err = error([*QUICKSTART, "--run_dir", str(tmp_path)], capsys)
    assert "already holds a run: continue it with --ckpt_path last, or name another with --run_dir" in err
    assert list(Path(tmp_path).rglob("*")) == [checkpoint.parent, checkpoint]
    assert "damaged, cut short, or no checkpoint" in error(
        [*QUICKSTART, "--run_dir", str(tmp_path), "--ckpt_path", "last"], capsys
    )
    assert checkpoint.read_bytes() == b"precious"
