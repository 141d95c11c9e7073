"""Every command of the README, in its order, as it stands there; only sizes are added."""

import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
import zstandard

from seqarch.cli import main
from tests.data.raw import make_records
from tests.evaluation.folders import write_run
from tests.evaluation.local_tasks import write_tasks
from tests.evaluation.simulated import Truth, simulate
from tests.test_recipes import NARROW, arguments

README = Path("README.md").resolve()
SMALL = {
    "model.d_model": 32,
    "model.n_layers": 1,
    "model.val_every_n_steps": 2,
    "data.seq_len": 64,
    "data.batch_size": 2,
    "data.micro_batch_size": 2,
    "data.max_val_tokens": 200,
    "trainer.accelerator": "cpu",
}
EVALUATION = ("eval", "needle", "position", "probe")


def commands():
    """The lines of the README's code blocks that call seqarch."""
    text = README.read_text()
    lines = [line.strip() for line in re.findall(r"^ {4}(.*seqarch .*)$", text, flags=re.M)]
    return [shlex.split(line.split("&&")[-1]) for line in lines if "pytest" not in line]


def test_the_readme_shows_each_command():
    assert {words[1] for words in commands()} == {
        "fit",
        "validate",
        "generate",
        "mixers",
        "doctor",
        "data",
        "sweep",
        "compare",
        "bench",
        "check",
        *EVALUATION,
    }
    assert all(words[0] == "seqarch" for words in commands())


@pytest.mark.slow
def test_commands(tmp_path, monkeypatch, corpus_path, capsys):
    (tmp_path / "recipes").symlink_to(Path("recipes").resolve())
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "slimpajama").symlink_to(corpus_path)
    for split, n in (("train", 400), ("test", 60)):
        for domain in ("cc", "c4", "github"):
            raw = tmp_path / "raw" / split / f"{domain}.jsonl.zst"
            raw.parent.mkdir(parents=True, exist_ok=True)
            lines = "".join(json.dumps(r) + "\n" for r in make_records(n, seed=n, domains=(domain,)))
            raw.write_bytes(zstandard.compress(lines.encode()))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tasks").mkdir()
    write_tasks(tmp_path / "tasks")
    steps = 2
    for words in commands():
        given = words[1:]
        if "recipes/quickstart.yaml" in given:
            if "last" in given and given[0] == "fit":
                steps += 2  # a run that goes on needs somewhere to go
            given += arguments(**SMALL, **{"trainer.max_steps": steps})
        elif "recipes/mqar/base.yaml" in given:
            given += arguments(**{"trainer.max_steps": 2, "model.schedule.warmup_steps": 1, "data.val_sequences": 8})
        elif given[0] == "sweep":
            given.append("--list")
        elif given[0] == "compare":  # the runs above have one validation only
            for i, (run,) in enumerate(simulate(np.random.default_rng(0), [0.0, 0.1], [1, 1], Truth())):
                mixer = ("seqarch_attention.Attention", "seqarch_mamba.Mamba2")[i]
                write_run(tmp_path / "runs" / "laptop" / f"simulated-{i}", run["nats"], run["tokens"], mixer=mixer)
            given[1:2] = map(str, sorted(Path("runs/laptop").iterdir()))
        elif "recipes/laptop/base.yaml" in given:
            given += arguments(**SMALL, **{"trainer.max_steps": 2, "model.schedule.warmup_steps": 1})
        elif "recipes/110m_mamba2.yaml" in given:
            given += arguments(**{k: v for k, v in NARROW.items() if k != "model.mixer.n_heads"})
        elif "--config" in given and given[0] == "fit":
            given += arguments(**NARROW, **{"model.channel_mixer.d_ff": 64})
            if "top1chunk" in " ".join(given):
                given += ["--model.mixer.chunk_size", "16"]
        elif given[:2] == ["fit", "--model.mixer.help"]:
            with pytest.raises(SystemExit) as exit_:
                main(given)
            assert exit_.value.code == 0
            assert "chunk_size" in capsys.readouterr().out
            continue
        elif given == ["doctor"]:
            given += ["--device", "cpu", "--mixer", "Attention"]
        elif given[0] == "eval":
            given[given.index("--tasks") + 1 :] = ["local_choice", "--include_path", str(tmp_path / "tasks")]
        elif given[0] in EVALUATION:
            given += {
                "needle": ["--samples", "1"],
                "position": ["--documents", "2"],
                "probe": ["--length", "32", "--sequences", "2"],
            }[given[0]]
        elif given[0] == "bench":
            given += ["--d_model", "32", "--n_layers", "1", "--tokens", "1024", "--repeats", "1", "--device", "cpu"]
        elif given[0] == "generate":
            given += ["--max_new_tokens", "5", "--device", "cpu"]
        elif "--vocab_size" in given:
            given[given.index("--vocab_size") + 1] = "300"
        main(given)
    assert (tmp_path / "report" / "report.html").exists()
    assert (tmp_path / "runs" / "mine" / "checkpoints" / "last.ckpt").exists()
    assert (tmp_path / "runs" / "110m_transformer_mixed" / "metrics.csv").exists()
