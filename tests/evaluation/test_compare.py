"""From run folders to the report, as a user calls it."""

from __future__ import annotations

import csv
import json
import re
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from seqarch.cli import main
from seqarch.evaluation.comparison import compare_runs
from seqarch.evaluation.runs import read_run
from tests.evaluation.folders import TOKENS_PER_STEP, write_run
from tests.evaluation.simulated import DOMAINS, Truth, simulate

MIXED = tuple(DOMAINS)


@pytest.fixture(scope="module")
def study(tmp_path_factory) -> Path:
    """Two seeds of the reference, two of an architecture 0.3 nats worse, one run in another window, and two mixed."""
    root = tmp_path_factory.mktemp("study")
    rng = np.random.default_rng(0)
    truth = Truth(documents=60, seeds=0.01)
    reference, worse, window = simulate(rng, [0.0, 0.3, 0.0], [3, 3, 1], truth)
    for i in range(2):
        write_run(root / f"attention-{i}", reference[i]["nats"], reference[i]["tokens"], seed=i)
        write_run(root / f"mamba2-{i}", worse[i]["nats"], worse[i]["tokens"], mixer="seqarch_mamba.Mamba2", seed=i)
    write_run(root / "window", window[0]["nats"], window[0]["tokens"], mixer_options={"window": 64})
    nats, size = reference[2]["nats"], reference[2]["tokens"]
    write_run(root / "mixed-attention", nats, size, trained=MIXED)
    slower = {d: n + 0.001 * size[d] for d, n in nats.items()}
    write_run(root / "mixed-mamba2", slower, size, mixer="seqarch_mamba.Mamba2", trained=MIXED)
    return root


@pytest.fixture(autouse=True)
def _without_plots(request, monkeypatch):
    """They take longer than all the rest."""
    if request.node.name != "test_plots" and find_spec("matplotlib") is not None:
        monkeypatch.setattr("seqarch.evaluation.comparison_plots.write_plots", lambda *_: [])


def folders(study: Path, *patterns: str) -> list[str]:
    return [str(p) for pattern in patterns for p in sorted(study.glob(pattern))]


def compare(paths, out, *options):
    main(["compare", *map(str, paths), "--out", str(out), "--replicates", "400", *options])


def test_the_report(study, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    compare(folders(study, "*"), tmp_path / "report")
    printed = capsys.readouterr().out
    report = json.loads((tmp_path / "report" / "report.json").read_text())
    limited, mixed = report["settings"]
    assert (limited["title"], limited["targets"], mixed["title"]) == ("limited to in", ["far", "out"], "mixed")
    assert mixed["targets"] == ["far", "out"]
    reference, *others = limited["architectures"]
    assert (reference["name"], reference["gap"], len(reference["runs"])) == ("Transformer++", None, 2)
    assert [a["name"] for a in others] == ["Transformer++ (window 64)", "Mamba-2"]
    worse = others[1]["gap"]
    mean = worse["targets"]["mean"]
    assert (worse["verdict"], worse["seeds"], worse["covers"]) == ("degraded", [2, 2], "documents and seeds")
    assert mean["low"] < 0.3 < mean["high"]
    assert mean["value"] == pytest.approx(np.mean([worse["targets"][d]["value"] for d in ("far", "out")]))
    assert mixed["architectures"][1]["gap"]["covers"] == "documents"
    assert mixed["architectures"][1]["gap"]["verdict"] == "equal"
    assert "Mamba-2" in printed
    assert "degraded" in printed
    assert "equal*" in printed
    assert report["differing_options"] == {
        "mixer": {"Transformer++": "Attention", "Mamba-2": "Mamba2", "Transformer++ (window 64)": "Attention"},
        "mixer.window": {"Transformer++": None, "Mamba-2": None, "Transformer++ (window 64)": 64},
    }
    found = {p.name for p in (tmp_path / "report").iterdir()}
    assert found >= {"report.json", "report.html", "gaps.csv", "curves.csv"}


def test_values_are_those_of_the_runs(study):
    found = compare_runs([Path(p) for p in folders(study, "attention-0", "mamba2-0")], replicates=200)
    (setting,) = found.settings
    for name, folder in (("Transformer++", "attention-0"), ("Mamba-2", "mamba2-0")):
        (points,) = setting.points[name]
        logged = list(csv.DictReader((study / folder / "metrics.csv").read_text().splitlines()))
        for domain in DOMAINS:
            values = [float(r["value"]) for r in logged if r["name"] == f"val/loss/{domain}"]
            assert points.losses[domain] == pytest.approx(values)
        assert points.x == pytest.approx(points.losses["in"])
        assert points.out == pytest.approx((points.losses["out"] + points.losses["far"]) / 2)
    assert setting.gaps["Mamba-2"].at == pytest.approx(max(p[0].x[-1] for p in setting.points.values()))


def test_tables_hold_every_target_run_and_validation(study, tmp_path):
    compare(folders(study, "attention-*", "mamba2-*"), tmp_path)
    report = json.loads((tmp_path / "report.json").read_text())
    gaps = list(csv.DictReader((tmp_path / "gaps.csv").read_text().splitlines()))
    assert [(r["architecture"], r["target"]) for r in gaps] == [("Mamba-2", t) for t in ("mean", "far", "out")]
    expected = report["settings"][0]["architectures"][1]["gap"]["targets"]["far"]
    assert (float(gaps[1]["gap"]), float(gaps[1]["low"])) == (expected["value"], expected["low"])
    curves = list(csv.DictReader((tmp_path / "curves.csv").read_text().splitlines()))
    assert len(curves) == 4 * 4 * Truth().validations
    assert int(curves[0]["tokens"]) == 10 * TOKENS_PER_STEP


def test_the_page_needs_nothing_else(study, tmp_path):
    path = write_run(
        tmp_path / "</script><b>", *_first(study / "mamba2-0"), mixer="x.Odd", mixer_options={"note": "</script><i>"}
    )
    compare([*folders(study, "attention-*"), path], tmp_path / "report")
    page = (tmp_path / "report" / "report.html").read_text()
    assert re.findall(r"""(?:src|href)\s*=|url\(|@import|https?://(?!www\.w3\.org/2000/svg)""", page) == []
    assert page.count("</script>") == 2
    assert "<i>" not in page.replace("<\\/script><i>", "")
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, flags=re.S)
    assert data is not None
    assert json.loads(data[1]) == json.loads((tmp_path / "report" / "report.json").read_text())


def _first(folder: Path):
    run = read_run(folder)
    return {d: run.nats_of(d) for d in run.domains}, {d.name: d.tokens.astype(float) for d in run.documents}


def test_plots(study, tmp_path):
    pytest.importorskip("matplotlib")
    compare(folders(study, "*"), tmp_path)
    assert (tmp_path / "limited.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "mixed.pdf").read_bytes().startswith(b"%PDF")
    first = (tmp_path / "limited.pdf").read_bytes()
    compare(folders(study, "*"), tmp_path)
    assert (tmp_path / "limited.pdf").read_bytes() == first


def test_another_reference_turns_the_gap_around(study):
    paths = [Path(p) for p in folders(study, "attention-*", "mamba2-*")]
    there, back = (compare_runs(paths, reference=name, replicates=400) for name in ("transformer", "mamba"))
    gap = there.settings[0].gaps["Mamba-2"].targets[0]
    turned = back.settings[0].gaps["Transformer++"].targets[0]
    assert turned.value == pytest.approx(-gap.value)
    assert (turned.low, turned.high) == pytest.approx((-gap.high, -gap.low), abs=0.02)


def test_names_can_be_given(study, capsys, tmp_path):
    compare(folders(study, "attention-*", "mamba2-*"), tmp_path, "--names", '{"Mamba-2": "SSM"}', "--reference", "SSM")
    assert json.loads((tmp_path / "report.json").read_text())["reference"] == "SSM"
    with pytest.raises(ValueError, match=r"names: no architecture is called 'X'; there are Transformer\+\+, Mamba-2"):
        compare_runs([Path(p) for p in folders(study, "attention-0", "mamba2-0")], names={"X": "Y"})


def test_the_smoothed_training_loss_as_axis(study):
    paths = [Path(p) for p in folders(study, "attention-*", "mamba2-*")]
    by = {axis: compare_runs(paths, axis=axis, replicates=200).settings[0] for axis in ("held-out", "train")}
    for name, points in by["train"].points.items():
        assert points[0].x == pytest.approx(by["held-out"].points[name][0].x + 0.1)


def variant(study, tmp_path, **options):
    return write_run(tmp_path / "variant", *_first(study / "mamba2-0"), **{"mixer": "x.Other", **options})


def test_other_tokenizers_are_compared_in_bits_per_byte(study, tmp_path):
    """The same losses per byte, in a tokenizer with half as many tokens: no gap in bits per byte."""
    nats, size = _first(study / "attention-0")
    half = {d: n / 2 for d, n in size.items()}
    other = write_run(
        tmp_path / "other",
        nats,
        half,
        mixer="x.Other",
        tokenizer='{"v": 2}',
        bytes_of={d: 4 * n for d, n in size.items()},
    )
    found = compare_runs([study / "attention-0", other], replicates=200)
    assert found.unit_name == "bits per byte"
    assert found.notes == ["the runs have different tokenizers: losses are in bits per byte"]
    points = found.settings[0].points["Transformer++"][0]
    expected = nats["in"].sum(axis=1) / np.log(2) / (4 * size["in"]).sum()
    assert points.x == pytest.approx(expected)
    assert found.settings[0].gaps["Other"].targets[0].value == pytest.approx(0.0, abs=1e-6)
    with pytest.raises(ValueError, match="x: the smoothed training loss is not there"):
        compare_runs([study / "attention-0", other], axis="train")


def refused(paths, **options) -> str:
    found = compare_runs(list(map(Path, paths)), replicates=200, **options)
    (reason,) = found.refused.values()
    return reason


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"max_steps": 200}, "it is not finished: 80,000 of 200,000 tokens; --keep_all compares it nevertheless"),
        ({"bytes_per_token": 5.0}, "(their texts are of other lengths: another corpus)"),
    ],
)
def test_what_cannot_be_compared_is_refused_with_the_reason(study, tmp_path, options, reason):
    paths = [*folders(study, "attention-*", "mamba2-*"), variant(study, tmp_path, **options)]
    assert refused(paths).endswith(reason)


def test_a_shorter_run_is_refused_or_kept_on_demand(study, tmp_path):
    nats, size = _first(study / "mamba2-0")
    short = write_run(tmp_path / "short", {d: n[:5] for d, n in nats.items()}, size, mixer="x.Other")
    paths = [*folders(study, "attention-*", "mamba2-*"), short]
    assert "it trains on 50,000 tokens, most runs on 80,000" in refused(paths)
    kept = compare_runs(list(map(Path, paths)), replicates=200, keep_all=True)
    assert not kept.refused
    assert kept.notes == [f"{short}: it trains on 50,000 tokens, most runs on 80,000"]
    assert "Other" in kept.settings[0].gaps


def test_other_documents_and_twins_are_refused(study, tmp_path):
    nats, size = _first(study / "mamba2-0")
    fewer = write_run(
        tmp_path / "fewer",
        {d: n[:, :50] for d, n in nats.items()},
        {d: n[:50] for d, n in size.items()},
        mixer="x.Other",
    )
    paths = folders(study, "attention-*", "mamba2-*")
    assert "(50 of in instead of 60: max_val_tokens or the corpus differ)" in refused([*paths, fewer])
    assert "it is the same run as" in refused([*paths, variant(study, tmp_path, mixer="seqarch_mamba.Mamba2")])


def test_folders_that_are_no_runs(study, tmp_path):
    (tmp_path / "empty").mkdir()
    old = variant(study, tmp_path)
    for file in (old / "documents").iterdir():
        file.unlink()
    paths = [*folders(study, "attention-0", "mamba2-0"), tmp_path / "empty", tmp_path / "none", old]
    found = compare_runs(list(map(Path, paths)), replicates=200).refused
    assert found[tmp_path / "empty"] == "it has no config.yaml: it is not the folder of a run"
    assert found[tmp_path / "none"] == "there is no such folder"
    assert found[old].startswith("it holds no losses by document for its last validation")


@pytest.mark.parametrize(
    ("file", "content", "reason"),
    [
        ("metrics.csv", b"1,2,loss,3\n", "metrics.csv is damaged (it begins with '1,2,loss,3' instead of 'step,tokens"),
        ("metrics.csv", b'step,tokens,name,value\n1,1,"val/loss/id,3\n', "metrics.csv is damaged (float()"),
        ("metrics.csv", b"\xff\xfe", "metrics.csv is damaged ('utf-8'"),
        ("metrics.csv", b"step,tokens,name,value\n", "it has not been validated yet"),
        ("config.yaml", b"model: [", "config.yaml cannot be read (while parsing a flow node"),
        ("config.yaml", b"\xff\xfe", "config.yaml cannot be read ("),
        ("config.yaml", b"model:\ndata:\ntrainer:\n", "config.yaml is not the configuration of a run"),
        ("config.yaml", b"model: {mixer: x}\ndata: {}\ntrainer: {}\n", "config.yaml is not the configuration of a run"),
        ("documents/index.npz", b"PK", "the losses by document after step 10 cannot be read"),
        ("documents/step-00000080.npy", b"", "the losses by document after step 80 cannot be read"),
    ],
)
def test_damaged_runs_are_left_out(study, tmp_path, file, content, reason):
    path = variant(study, tmp_path)
    (path / file).write_bytes(content)
    assert reason in refused([*folders(study, "attention-0", "mamba2-0"), path])


def test_a_line_that_is_just_being_written_is_not_read(study, tmp_path):
    path = variant(study, tmp_path, max_steps=200)
    whole = read_run(path)
    with (path / "metrics.csv").open("a") as file:
        file.write("80,8")
    again = read_run(path)
    assert again.tokens.tolist() == whole.tokens.tolist() == [10_000 * k for k in range(1, 9)]
    assert not again.finished


def test_a_missing_tokenizer_is_named(study, tmp_path):
    path = variant(study, tmp_path)
    (path / "tokenizer.json").unlink()
    found = compare_runs([study / "attention-0", path], replicates=200)
    assert found.notes == [f"{path}: without a tokenizer.json; so losses are in bits per byte"]


def test_a_domain_with_few_documents_is_left_out(study, tmp_path):
    paths = []
    for folder in ("attention-0", "mamba2-0"):
        nats, size = _first(study / folder)
        nats["far"], size["far"] = nats["far"][:, :4], size["far"][:4]
        paths.append(write_run(tmp_path / folder, nats, size, mixer=f"x.{folder.split('-')[0].title()}"))
    found = compare_runs(paths, replicates=200)
    assert found.settings[0].targets == ("out",)
    assert found.notes == [
        "domain far: left out everywhere, for it has 4 test documents, fewer than 5; raise data.max_val_tokens"
    ]


@pytest.mark.parametrize(
    ("patterns", "options", "message"),
    [
        (["attention-*"], [], "all runs that can be compared are of one architecture, Transformer++"),
        (["attention-*", "mamba2-*"], ["--reference", "rwkv"], "reference: no architecture is 'rwkv'; there are"),
        (["mixed-*"], [], "no test domain is out of domain for any run: add runs of the limited setting"),
        (["mamba2-*", "mixed-attention"], [], "there is nothing to compare: setting limited to in: left out"),
        (["*"], ["--margin", "0"], "margin must be above 0"),
        (["*"], ["--level", "2"], "level must be at least 0.5 and below 1"),
        (["*"], ["--replicates", "10"], "replicates must be at least 200"),
        (["*"], ["--keepall"], "there is no option '--keepall': did you mean '--keep_all'?"),
    ],
)
def test_bad_input_gets_one_line(study, tmp_path, capsys, patterns, options, message):
    with pytest.raises(SystemExit) as exit_:
        main(["compare", *folders(study, *patterns), "--out", str(tmp_path / "report"), *options])
    assert exit_.value.code == 2
    err = capsys.readouterr().err
    assert message in err
    assert len(err.splitlines()) == 1
    assert not (tmp_path / "report").exists()
