import io
import math
import re
import sys
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from seqarch.training.callbacks import progress, throughput
from seqarch.training.callbacks.progress import StepProgress
from seqarch.training.callbacks.table import domain_table
from seqarch.training.callbacks.throughput import Throughput, peak_flops, peak_memory
from seqarch.training.validation import DomainLoss, domain_metrics
from tests.training.synthetic import SyntheticData, T, rows, tiny, trainer

LOSSES = [
    DomainLoss("books", False, nats=300.0, tokens=100, bytes=400.0),
    DomainLoss("web", True, nats=100.0, tokens=100, bytes=200.0),
    DomainLoss("code", False, nats=500.0, tokens=100, bytes=100.0),
]


def test_domain_metrics():
    assert domain_metrics(LOSSES) == {
        "val/loss/books": 3.0,
        "val/loss/web": 1.0,
        "val/loss/code": 5.0,
        "val/bpb/books": pytest.approx(300 / math.log(2) / 400),
        "val/bpb/web": pytest.approx(100 / math.log(2) / 200),
        "val/bpb/code": pytest.approx(500 / math.log(2) / 100),
        "val/loss/id": 1.0,
        "val/loss/ood": 4.0,
    }


def test_a_mean_over_no_domain_is_left_out():
    assert "val/loss/ood" not in domain_metrics(LOSSES[1:2])
    assert "val/loss/id" not in domain_metrics(LOSSES[:1])


def test_a_domain_without_tokens_is_not_a_number_and_a_huge_loss_overflows():
    assert math.isnan(DomainLoss("a", True, 0.0, 0, 0.0).loss)
    assert math.isnan(DomainLoss("a", True, 0.0, 0, 0.0).bpb)
    assert DomainLoss("a", True, 1e6, 1, 1.0).perplexity == math.inf


def render(width):
    console = Console(file=io.StringIO(), width=width)
    console.print(domain_table(LOSSES, "Validation"))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_table_holds_each_domain_once_and_the_means():
    text = render(100)
    lines = [line.split() for line in text.splitlines()]
    assert ["web", "yes", "1.0000", "0.7213", "2.72", "100"] in lines
    assert ["code", "no", "5.0000", "7.2135", "148.41", "100"] in lines
    assert ["mean", "in", "domain", "1.0000"] in lines
    assert ["mean", "out", "of", "domain", "4.0000"] in lines
    assert [line[0] for line in lines if line and line[0] in ("web", "books", "code")] == ["web", "books", "code"]


def test_the_table_fits_a_narrow_terminal_and_keeps_its_numbers():
    text = render(62)
    assert max(map(len, text.splitlines())) <= 62
    assert all(number in text for number in ("0.7213", "148.41", "7.2135"))


def fit(tmp_path, capsys, **options):
    module = tiny(max_tokens=6 * 8 * T, val_every_n_steps=4)
    trainer(tmp_path, **options).fit(module, datamodule=SyntheticData(micro_batch_size=4))
    return capsys.readouterr().out


def test_tables_come_at_each_validation_and_at_the_end(tmp_path, capsys):
    out = fit(tmp_path, capsys)
    assert re.findall(r"Validation at step (\d+) of 6, ([\d,]+) tokens", out) == [("4", "512"), ("6", "768")]
    assert "\x1b" not in out  # no colours where it is no terminal
    final = float(next(v for s, n, v in rows(tmp_path) if (s, n) == (6, "val/loss/code")))
    assert f"{final:.4f}" in out.split("step 6 of 6")[1]


def test_tables_come_without_a_progress_bar_too(tmp_path, capsys):
    assert "Validation at step 6 of 6" in fit(tmp_path, capsys, enable_progress_bar=False)


def test_lines_instead_of_a_bar_where_there_is_no_terminal(tmp_path, capsys):
    out = fit(tmp_path, capsys)
    lines = [line for line in out.splitlines() if line.startswith("step ")]
    assert [line.split()[1] for line in lines] == ["1/6", "6/6"]  # the first and the last; 30 s between others
    assert re.fullmatch(r"step 6/6  loss \d\.\d{4}  tokens/s [\d,]+  left 0:00:00", lines[-1])


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_the_bar_counts_steps_and_starts_where_a_resumed_run_does(tmp_path, monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("COLUMNS", "120")
    run = trainer(tmp_path, every_n_steps=2, max_steps=4)
    run.fit(tiny(), datamodule=SyntheticData(micro_batch_size=2))
    assert run.progress_bar_callback.train_progress_bar.total == 4
    assert re.search(r"Training: 100%.*4/4 .*loss=\d\.\d{4}, tokens/s=[\d,]+", terminal.getvalue())
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    run = trainer(tmp_path, every_n_steps=2, max_steps=8)
    run.fit(tiny(), datamodule=SyntheticData(micro_batch_size=2), ckpt_path=str(tmp_path / "checkpoints" / "last.ckpt"))
    shown = [int(n) for n in re.findall(r"Training: .*?(\d+)/8 ", terminal.getvalue())]
    assert shown[0] == 4
    assert shown[-1] == 8


def test_time_left_is_that_of_this_run_alone(monkeypatch):
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: 1020.0))
    bar = StepProgress()

    class Trainer:
        global_step, max_steps, progress_bar_metrics = 60, 100, {}

    bar._start = (50, 1000.0)  # ten steps took twenty seconds, forty are left
    assert re.search(r"left 0:01:20", bar._describe(Trainer(), None))  # pyright: ignore[reportArgumentType]


def test_throughput_is_recorded_with_the_steps(tmp_path):
    run = trainer(tmp_path, max_steps=6, log_every_n_steps=2, limit_val_batches=0)
    run.callbacks[0].peak_flops = 1e9
    module = tiny()
    run.fit(module, datamodule=SyntheticData(micro_batch_size=4))
    found = rows(tmp_path, timed=True)
    speed = {s: float(v) for s, name, v in found if name == "train/tokens_per_s"}
    mfu = {s: float(v) for s, name, v in found if name == "train/mfu"}
    assert list(speed) == list(mfu) == [2, 4, 6]
    per_token = 3 * module.model.flops(T) / T
    assert [mfu[s] for s in mfu] == pytest.approx([v * per_token / 1e9 for v in speed.values()])


def test_flops_are_those_that_the_parts_declare():
    module = tiny()
    parts = sum(m.flops(T) for m in [*module.model.mixers, *module.model.channel_mixers])
    assert module.model.flops(T) == parts + 2 * T * 16 * 32


def test_no_utilisation_without_a_known_peak(tmp_path):
    trainer(tmp_path, max_steps=2, limit_val_batches=0).fit(tiny(), datamodule=SyntheticData())
    assert not [r for r in rows(tmp_path, timed=True) if r[1] == "train/mfu"]


def test_validation_and_checkpoints_do_not_count_as_training_time(tmp_path, monkeypatch):
    now = 0.0
    monkeypatch.setattr(throughput, "time", SimpleNamespace(perf_counter=lambda: now))
    run = trainer(tmp_path, every_n_steps=1, max_steps=3, log_every_n_steps=3, val_check_interval=1)
    module = tiny(val_every_n_steps=1)

    def takes(seconds, method):
        def wrapped(*args, **kwargs):
            nonlocal now
            now += seconds
            return method(*args, **kwargs)

        return wrapped

    module.training_step = takes(2.0, module.training_step)
    module.validation_step = takes(100.0, module.validation_step)
    module.on_save_checkpoint = takes(100.0, module.on_save_checkpoint)
    run.fit(module, datamodule=SyntheticData())
    (speed,) = (float(v) for _, name, v in rows(tmp_path, timed=True) if name == "train/tokens_per_s")
    assert run.accumulate_grad_batches == 1
    assert now > 900
    assert speed == pytest.approx(8 * T / 2.0)


def test_peaks_by_name_and_precision():
    assert peak_flops("NVIDIA H100 80GB HBM3", "bf16-mixed", tf32=False) == 989.4e12
    assert peak_flops("NVIDIA H100 PCIe", "bf16-true", tf32=True) == 756e12
    assert peak_flops("NVIDIA A100-SXM4-80GB", "32-true", tf32=True) == 156e12
    assert peak_flops("NVIDIA A100-SXM4-80GB", "32-true", tf32=False) == 19.5e12
    assert peak_flops("Some other device", "bf16-mixed", tf32=False) is None


def test_peak_memory_of_a_cpu_is_that_of_the_process():
    before = peak_memory(torch.device("cpu"))
    assert before > 50e6
    block = torch.ones(100_000_000 // 4)
    assert peak_memory(torch.device("cpu")) >= before
    del block


def test_a_peak_must_be_positive():
    with pytest.raises(ValueError, match="peak_flops must be above 0"):
        Throughput(peak_flops=0.0)
