import math

import pytest

from seqarch.training.metrics import MetricsFile, run_loggers


def lines(folder):
    return (folder / "metrics.csv").read_text().splitlines()


def test_rows_are_long_and_values_read_back_exactly(tmp_path):
    file = MetricsFile(tmp_path / "run")
    file.log_metrics({"train/loss": 0.1 + 0.2, "train/skipped_steps": 3, "train/tokens": 640.0}, step=5)
    file.log_metrics({"val/loss/id": math.inf, "val/bpb/a,b": 1 / 3}, step=6)
    assert lines(tmp_path / "run") == [
        "step,tokens,name,value",
        "5,640,train/loss,0.30000000000000004",
        "5,640,train/skipped_steps,3",
        "6,,val/loss/id,inf",
        '6,,"val/bpb/a,b",0.3333333333333333',
    ]


def test_what_was_logged_is_in_the_file(tmp_path):
    file = MetricsFile(tmp_path)
    for step in range(3):
        file.log_metrics({"a": 1.0}, step=step)
        assert len(lines(tmp_path)) == 2 + step


def test_a_resumed_run_drops_later_rows_and_a_torn_line(tmp_path):
    file = MetricsFile(tmp_path)
    for step in range(1, 6):
        file.log_metrics({"a": float(step)}, step=step)
    with (tmp_path / "metrics.csv").open("a") as f:
        f.write("3,,a,7")
    again = MetricsFile(tmp_path)
    again.resume(3)
    again.log_metrics({"a": 40.0}, step=4)
    assert lines(tmp_path) == ["step,tokens,name,value", "1,,a,1.0", "2,,a,2.0", "3,,a,3.0", "4,,a,40.0"]
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.csv"]


def test_a_new_run_starts_anew(tmp_path):
    file = MetricsFile(tmp_path)
    file.log_metrics({"a": 1.0}, step=0)
    file.resume(0)
    assert lines(tmp_path) == ["step,tokens,name,value"]


@pytest.mark.filterwarnings("ignore:.*distutils Version classes are deprecated.*:DeprecationWarning")
def test_tensorboard_hides_what_came_after_the_checkpoint(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for first, resumed in ((1, 0), (4, 3)):
        csv, tensorboard = run_loggers(tmp_path)
        for logger in (csv, tensorboard):
            logger.resume(resumed)
            for step in range(first, 6):
                logger.log_metrics({"a": float(step * first)}, step=step)
            logger.save()
            logger.finalize("success")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["metrics.csv", "tensorboard"]
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("a")] == [(1, 1), (2, 2), (3, 3), (4, 16), (5, 20)]
    assert [line.split(",")[0::3] for line in lines(tmp_path)[1:]] == [
        ["1", "1.0"], ["2", "2.0"], ["3", "3.0"], ["4", "16.0"], ["5", "20.0"],
    ]  # fmt: skip
