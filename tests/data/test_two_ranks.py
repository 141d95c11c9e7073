from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = """
import sys, warnings
import lightning as L, torch
from seqarch.data import LimitedDomainDataModule
from tests.data.test_datamodule import Recorder

warnings.filterwarnings("ignore")
path, out, devices = sys.argv[1], sys.argv[2], int(sys.argv[3])
torch.set_num_threads(1)
model = Recorder()
trainer = L.Trainer(
    accelerator="cpu", devices=devices, strategy="ddp" if devices > 1 else "auto", max_steps=4, logger=False,
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
    val_check_interval=16 // devices, check_val_every_n_epoch=None,
)
data = LimitedDomainDataModule(path, 16, 8, 2, ["cc", "c4"], val_batch_size=3)
trainer.fit(model, datamodule=data)
torch.save({"steps": model.steps, "validated": model.validated}, f"{out}.{trainer.global_rank}")
"""


@pytest.mark.slow
def test_two_ranks_share_each_step_and_each_test_domain(corpus_path: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    (tmp_path / "run.py").write_text(SCRIPT)
    for devices in (1, 2):
        command = [
            sys.executable,
            str(tmp_path / "run.py"),
            str(corpus_path),
            str(tmp_path / str(devices)),
            str(devices),
        ]
        subprocess.run(command, env=environment, check=True, capture_output=True, timeout=300)
    whole, a, b = (torch.load(tmp_path / name, weights_only=True) for name in ("1.0", "2.0", "2.1"))
    assert set(whole["steps"]) == set(a["steps"]) == set(b["steps"]) == set(range(4))
    for step, parts in whole["steps"].items():
        shared = [part for pair in zip(a["steps"][step], b["steps"][step], strict=True) for part in pair]
        assert len(shared) == len(parts) == 4
        assert torch.equal(torch.cat(shared), torch.cat(parts))
    assert whole["validated"]
    for domain, tokens in whole["validated"].items():
        assert a["validated"][domain] + b["validated"][domain] == tokens
        assert abs(a["validated"][domain] - b["validated"][domain]) <= 64
