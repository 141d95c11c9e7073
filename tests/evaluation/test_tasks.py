"""`seqarch eval`: local task files, tasks that cannot be had, and what is written."""

import json

import pytest

from seqarch.cli import main
from seqarch.evaluation.tasks import GROUPS, shots_of, tasks_for
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

    main([*arguments, "local_choice", "--num_fewshot", "0", "--max_length", "64", "--batch_size", "3"])
    assert list(json.loads(file.read_text())["tasks"]) == ["local_choice"]  # scores of another setting are not mixed in


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
