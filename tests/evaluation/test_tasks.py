"""`seqarch eval`: local task files, tasks that cannot be had, and what is written."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from seqarch.cli import main
from seqarch.evaluation.downstream import read_results
from seqarch.evaluation.lm_eval_model import SeqarchLM
from seqarch.evaluation.tasks import GROUPS, evaluate, shots_of, tasks_for, write_results
from tests.evaluation.local_tasks import write_tasks
from tests.evaluation.trained_models import write_run


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("runs") / "tiny")


@pytest.fixture
def offline(tmp_path, monkeypatch):
    """No network and an empty cache."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))


@pytest.mark.usefixtures("offline")
def test_local_tasks_go_on_beside_one_that_cannot_be_had(run_dir, tmp_path, capsys):
    tasks = write_tasks(tmp_path)
    (tasks / "remote.yaml").write_text(
        "{task: local_remote, dataset_path: no/such, test_split: test, output_type: multiple_choice, doc_to_text: a, "
        "doc_to_choice: [a], doc_to_target: 0}"
    )
    arguments = ["eval", str(run_dir), "--include_path", str(tasks), "--device", "cpu", "--tasks"]
    with pytest.raises(SystemExit) as exit_:
        main([*arguments, "local_remote", "local_choice", "local_generate"])
    assert exit_.value.code == 1
    output = capsys.readouterr()
    lines = [line for line in output.err.splitlines() if line.startswith("seqarch:")]
    assert len(lines) == 1
    assert lines[0].startswith("seqarch: local_remote cannot be evaluated: Couldn't reach 'no/such'")
    file = run_dir / "results" / "tasks-step1.json"
    assert "local_choice (0 shots, 7 documents): acc 0." in output.out
    assert output.out.splitlines()[-1] == str(file)
    found = json.loads(file.read_text())
    assert found["model"]["step"] == 1
    assert list(found["tasks"]) == ["local_choice", "local_generate"]
    acc = found["tasks"]["local_choice"]["scores"]["acc"]
    assert round(acc["value"] * 7) == pytest.approx(acc["value"] * 7)
    assert 0 < acc["stderr"] < 0.25

    main([*arguments, "local_rolling", "--limit", "3"])
    found = json.loads(file.read_text())["tasks"]
    assert list(found) == ["local_choice", "local_generate", "local_rolling"]
    assert found["local_rolling"]["documents"] == found["local_rolling"]["limit"] == 3
    # about log2(300) bits a token at the start, of 1 to 9 bytes
    assert 1 < found["local_rolling"]["scores"]["bits_per_byte"]["value"] < 9

    main([*arguments, "local_choice", "--max_length", "64", "--batch_size", "3"])
    again = json.loads(file.read_text())["tasks"]
    assert list(again) == list(found)
    assert (found["local_choice"]["max_length"], again["local_choice"]["max_length"]) == (2048, 64)


@pytest.mark.usefixtures("offline")
def test_the_scores_of_documents_are_kept(run_dir, tmp_path):
    """In the documents' order, whatever the batches; their mean is the score."""
    tasks = write_tasks(tmp_path)
    file = tmp_path / "out.json"
    main(
        [
            *("eval", str(run_dir), "--include_path", str(tasks), "--device", "cpu", "--out", str(file)),
            *("--tasks", "local_choice", "local_rolling"),
        ]
    )
    found = json.loads(file.read_text())["tasks"]
    kept = json.loads((tmp_path / "out-samples.json").read_text())["tasks"]
    assert kept["local_rolling"] == {"scores": {}}  # a quotient of sums, no mean
    acc = kept["local_choice"]["scores"]["acc"]
    assert len(acc) == 7
    assert set(acc) <= {0.0, 1.0}
    assert sum(acc) / 7 == pytest.approx(found["local_choice"]["scores"]["acc"]["value"])
    assert found["local_choice"]["higher_is_better"] == {"acc": True}
    assert found["local_rolling"]["higher_is_better"] == {"bits_per_byte": False}
    hashes = {found[task]["documents_sha256"] for task in found}
    assert {len(h) for h in hashes} == {64}
    assert "samples" not in found["local_choice"]


@pytest.mark.usefixtures("offline")
def test_a_group_keeps_the_documents_of_its_tasks(run_dir, tmp_path):
    """As mmlu: what it scores is the mean over all of them, though one task has fewer."""
    tasks = write_tasks(tmp_path)
    few = tmp_path / "few.jsonl"
    few.write_text("".join((tmp_path / "documents.jsonl").read_text().splitlines(keepends=True)[:3]))
    choice = (tasks / "choice.yaml").read_text()
    (tasks / "few.yaml").write_text(choice.replace("local_choice", "a_few").replace("documents.jsonl", "few.jsonl"))
    (tasks / "group.yaml").write_text(
        "{group: local_group, task: [local_choice, a_few], "
        "aggregate_metric_list: [{metric: acc, weight_by_size: true}]}"
    )
    out = tmp_path / "results" / "tasks-step1.json"
    main(
        [
            *("eval", str(run_dir), "--include_path", str(tasks), "--device", "cpu", "--out", str(out)),
            *("--tasks", "local_group", "local_choice", "a_few"),
        ]
    )
    by_task = {result.task: result for result in read_results(tmp_path)[0]}
    group = by_task["local_group"]
    assert (len(group.samples["acc"]), group.settings["documents"], group.higher_is_better["acc"]) == (10, 10, True)
    apart = [by_task[task].samples["acc"].tolist() for task in ("a_few", "local_choice")]
    assert group.samples["acc"].tolist() == apart[0] + apart[1]
    assert group.scores["acc"][0] == pytest.approx(sum(apart[0] + apart[1]) / 10)


@pytest.mark.usefixtures("offline")
def test_a_task_that_fails_on_the_way_does_not_stop_the_rest(run_dir, tmp_path, capsys):
    """More examples than there are documents to take them from."""
    tasks = write_tasks(tmp_path)
    with pytest.raises(SystemExit) as exit_:
        main(
            [
                *("eval", str(run_dir), "--include_path", str(tasks), "--device", "cpu", "--num_fewshot", "50"),
                *("--out", str(tmp_path / "out.json"), "--tasks", "local_choice", "local_generate"),
            ]
        )
    assert exit_.value.code == 1
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("seqarch:")]
    assert [line.split(" cannot")[0] for line in lines] == ["seqarch: local_choice", "seqarch: local_generate"]
    assert all(line.endswith("Sample larger than population or is negative") for line in lines)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--limit", "0"], "limit must be at least 1, got 0"),
        (["--num_fewshot", "-1"], "num_fewshot must be at least 0, got -1"),
        (["--out", "{other}"], "other.json is there, but holds no results of tasks"),
    ],
)
def test_bad_options_are_refused_before_anything_is_evaluated(run_dir, tmp_path, capsys, options, message):
    (tmp_path / "other.json").write_text("[]")
    options = [option.format(other=tmp_path / "other.json") for option in options]
    tasks = ["--tasks", "local_choice"]
    with pytest.raises(SystemExit) as exit_:
        main(["eval", str(run_dir), "--include_path", str(write_tasks(tmp_path)), "--device", "cpu", *tasks, *options])
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err


def test_tasks_of_another_checkpoint_are_dropped(tmp_path):
    file = tmp_path / "results" / "tasks.json"
    for step, task in ((1, "a"), (1, "b"), (2, "c")):
        write_results(file, {"step": step}, {task: {"scores": {}, "samples": {}}})
        if task == "b":
            assert list(json.loads(file.read_text())["tasks"]) == ["a", "b"]
    assert json.loads(file.read_text()) == {"model": {"step": 2}, "tasks": {"c": {"scores": {}}}}


@pytest.mark.slow
@pytest.mark.usefixtures("offline")
def test_ruler_with_the_runs_own_tokenizer(run_dir, capsys):
    ruler = Path(find_spec("lm_eval").origin).parent / "tasks" / "ruler"
    arguments = ["eval", str(run_dir), "--include_path", str(ruler), "--device", "cpu", "--tasks", "niah_single_1"]
    main([*arguments, "--limit", "2", "--max_seq_lengths", "4096"])
    found = json.loads((run_dir / "results" / "tasks-step1.json").read_text())["tasks"]["niah_single_1"]
    assert found["scores"] == {"4096": {"value": 0.0, "stderr": None}}
    assert found["max_length"] == 4097
    assert found["documents"] == 2
    with pytest.raises(SystemExit):
        main([*arguments, "--max_seq_lengths", "1000"])
    assert "max_seq_lengths: 1000 is none of RULER's 4096, 8192" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_lm_evals_own_command_line(run_dir, tmp_path, processes):
    """On two processes with the results of one."""
    tasks = write_tasks(tmp_path)
    launcher = [] if processes == 1 else ["-m", "torch.distributed.run", f"--nproc_per_node={processes}"]
    command = [
        *(sys.executable, *launcher, "-m", "seqarch.evaluation.lm_eval_model"),
        *("--model", "seqarch", "--model_args", f"ckpt={run_dir}", "--device", "cpu"),
        *("--tasks", "local_choice,local_generate", "--include_path", str(tasks)),
        *("--output_path", str(tmp_path / "out.json"), "--batch_size", "4"),
    ]
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf"), "OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, env={**os.environ, **offline}, capture_output=True)
    [file] = tmp_path.glob("out*.json")
    found = json.loads(file.read_text())
    lm = SeqarchLM(run_dir, device="cpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
        manager = tasks_for(["local_choice", "local_generate"], str(tasks))
        expected = dict(evaluate(lm, {"local_choice": None, "local_generate": None}, manager))
    assert found["results"]["local_choice"]["acc,none"] == expected["local_choice"]["scores"]["acc"]["value"]
    assert found["n-samples"]["local_choice"]["effective"] == 7
    assert found["config"]["step"] == 1


def test_groups_are_resolved():
    assert shots_of(["base", "local"], ["local"]) == {**GROUPS["base"], "local": None}
    with pytest.raises(ValueError, match="tasks: there is no task 'locl': did you mean 'local'"):
        shots_of(["locl"], ["local"])


@pytest.mark.slow
def test_groups_are_tasks_of_lm_eval(tmp_path):
    known = tasks_for(["local_choice", "base"], str(write_tasks(tmp_path))).all_tasks
    assert "local_choice" in known
    assert all(name in known for group in GROUPS.values() for name in group)


def test_a_missing_folder_is_refused(run_dir, capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["eval", str(run_dir), "--tasks", "sciq", "--include_path", "nowhere"])
    assert exit_.value.code == 2
    assert "include_path: there is no folder nowhere" in capsys.readouterr().err
