"""``seqarch check`` on mixers that keep their contract, and on others."""

import json

import pytest

from seqarch.cli import main

ATTENTION = ("seqarch", "attention", "seqarch_attention:Attention")


def check(capsys, *arguments, status=None):
    if status is None:
        main(["check", *arguments])
    else:
        with pytest.raises(SystemExit) as stopped:
            main(["check", *arguments])
        assert stopped.value.code == status
    out, err = capsys.readouterr()
    return out + err


def test_a_third_party_mixer_that_keeps_the_contract(installed, capsys, tmp_path):
    installed(ATTENTION, ("third-party", "ema", "tests.testing.toy_mixers:ToyEMA"))
    out = check(capsys, "ToyEMA", "--json_file", str(tmp_path / "r.json"), "--d_model", "16")
    assert "ToyEMA keeps the contract" in out
    assert "times attention's" in " ".join(out.split())
    report = json.loads((tmp_path / "r.json").read_text())
    assert (report["ok"], report["mixer"], report["d_model"]) == (True, "ToyEMA", 16)
    assert {row["status"] for row in report["rows"]} == {"passed", "skipped"}
    assert {row["check"]: row["status"] for row in report["rows"]}["check_compile"] == "skipped"
    rounds = report["timing"]["rounds"]
    assert len(rounds["mixer"]) == len(rounds["attention"]) == 5
    assert report["timing"]["ms"] == sorted(rounds["mixer"])[2] > 0


def test_one_that_breaks_it_gets_status_1_and_the_clause(installed, capsys):
    installed(("third-party", "leak", "tests.testing.broken_mixers:GrossLeak"))
    out = check(capsys, "GrossLeak", "--d_model", "16", status=1)
    assert "GrossLeak breaks the contract" in out
    assert "check_causality" in out
    assert "failed" in out
    assert "A layer of width" not in out


def test_what_is_expected_to_fail_may_and_what_passes_may_not_be_expected(installed, capsys):
    installed(("third-party", "late", "tests.testing.broken_mixers:TimeFirstState"))
    out = check(capsys, "TimeFirstState", "--d_model", "16", "--timing", "false", status=1)
    assert "check_state_batch_first" in out
    reason = "{check_state_batch_first: time first, check_lengths: none}"
    out = check(capsys, "TimeFirstState", "--d_model", "16", "--timing", "false", "--expect", reason, status=1)
    assert "expected failure" in out
    assert "unexpected pass" in out


def test_bad_names_are_bad_input(capsys):
    assert "did you mean 'Attention'" in check(capsys, "Attenton", status=2)
    assert "no option 'n_haeds'" in check(capsys, "Attention(n_haeds=1)", status=2)
    assert "which is no check" in check(capsys, "Attention", "--expect", "{check_speed: slow}", status=2)
