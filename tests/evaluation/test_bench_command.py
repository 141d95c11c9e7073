"""``seqarch bench`` as a user meets it."""

from __future__ import annotations

import json

import pytest

from seqarch.cli import main

TINY = ["--d_model", "32", "--n_layers", "1", "--vocab_size", "64", "--tokens", "256", "--repeats", "2"]
TINY += ["--decode_tokens", "2", "--threads", "1", "--device", "cpu", "--n_heads", "2"]
SHORT = "Attention(relation=random_keys, max_len=200)"


def test_a_table_json_and_two_plots(tmp_path, capsys):
    """One mixer fails at the greater length: that is an entry, and the command succeeds."""
    out = tmp_path / "deep" / "results"
    arguments = ["bench", "Attention", SHORT, "--lengths", "256", "64", *TINY, "--out", str(out)]
    main([*arguments, "--peak_tflops", "0.5"])
    plain = json.loads((out / "results.json").read_text())
    assert plain["command"] == ["seqarch", *arguments, "--peak_tflops", "0.5"]
    assert (plain["peak_flops"], plain["peak_source"]) == (0.5e12, "as given by --peak_tflops")
    assert set(plain["environment"]) == {"device", "system", "python", "versions"}
    assert plain["settings"]["threads"] == 1
    assert plain["settings"]["memory_limit"] > 0  # what the machine has free
    assert plain["settings"]["mixers"]["Attention"] == {
        "class": "Attention",
        "options": {"n_heads": 2, "backend": "auto"},
    }
    entries = {(e["mixer"], e["phase"], e["length"]): e for e in plain["entries"]}
    assert list(entries) == [
        (m, p, n) for n in (64, 256) for p in ("training", "decoding") for m in ("Attention", SHORT)
    ]
    for (mixer, phase, length), e in entries.items():
        if mixer == SHORT and length == 256:
            assert (e["status"], e["tokens_per_s"]) == ("error", None)
            assert "max_len = 200" in e["reason"]
            continue
        assert e["status"] == "ok"
        assert len(e["samples"]) == 2
        assert e["spread"][0] <= e["tokens_per_s"] <= e["spread"][1]
        assert e["peak_memory"] > 0
        assert e["backend"] == "torch"
        assert e["batch"] == (256 // length if phase == "training" else 1)
        if phase == "training":
            assert e["share_of_peak"] == pytest.approx(e["tokens_per_s"] * e["flops_per_token"] / 0.5e12)
        else:
            assert e["share_of_peak"] is None
            assert e["state_bytes"] > 2 * 4 * 32 * length  # keys and values
    assert entries["Attention", "training", 64]["ratio"] == 1
    for phase in ("training", "decoding"):
        assert (out / f"{phase}.png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert printed.count("training at 64: ") == 2
    assert "peak arithmetic: 0.5 TFLOP/s, as given by --peak_tflops" in printed
    assert "| length | mixer " in printed
    assert f"{SHORT}, decoding at 256: error: ValueError" in printed

    with pytest.raises(SystemExit):
        main([*arguments, "--repeats", "1"])
    assert "results.json exists: name another folder with --out, or replace it with --overwrite" in (
        capsys.readouterr().err
    )


def test_the_peak_of_a_cpu_is_measured_and_old_results_are_replaced_when_asked(tmp_path, capsys):
    (tmp_path / "results.json").write_text("old")
    main(["bench", "attention", "--lengths", "8", *TINY, "--no-decode", "--overwrite", "--out", str(tmp_path)])
    plain = json.loads((tmp_path / "results.json").read_text())
    assert plain["peak_flops"] > 0
    assert plain["peak_source"] == "the best matrix product of 2048 in this run"
    (entry,) = plain["entries"]
    assert 0 < entry["share_of_peak"]
    assert not (tmp_path / "decoding.png").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["Atention"], "no mixer is called 'Atention': did you mean 'Attention'?"),
        (["Attention(n_haeds=2)"], "has no option 'n_haeds': did you mean 'n_heads'?"),
        (["Attention", "--d_model", "100", "--n_heads", "3"], "n_heads (3) must divide d_model (100)"),
        (["Attention", "--n_heads", "0"], "n_heads must be at least 1, got 0"),
        (["Attention", "--lengths", "0"], "lengths must be at least 1, got 0"),
        (["Attention", "--tokens", "0"], "tokens must be at least 1, got 0"),
        (["Attention", "Attention"], "Attention is named twice"),
        (["Attention", "--no-train", "--no-decode"], "there is nothing to measure"),
        (["Attention", "--memory_limit", "0"], "memory_limit must be above 0, got 0.0"),
        (["Attention", "--peak_tflops", "-1"], "peak_tflops must be above 0, got -1.0"),
        (["Attention", "--device", "tpu"], "device must be one of cpu, cuda, got 'tpu'"),
        (["Attention", "--backend", "magic"], "backend must be one of"),
        (["Attention", "--lenghts", "3"], "there is no option '--lenghts': did you mean '--lengths'?"),
        ([], "the following arguments are required: mixers"),
    ],
)
def test_bad_input_gets_one_line_and_leaves_nothing(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as exit_:
        main(["bench", *arguments])
    assert exit_.value.code == 2
    err = capsys.readouterr().err
    assert message in err
    assert len(err.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []
