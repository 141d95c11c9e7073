import os
import subprocess
import sys

import pytest
import torch

from seqarch.training.checkpoint import load_module
from seqarch.training.documents import read_documents
from tests.training.synthetic import SyntheticData, T, rows, tiny, trainer


def sharded(run_dir, steps, *arguments):
    """Train in two processes that shard everything between them."""
    command = [sys.executable, "-m", "tests.training.two_processes", str(run_dir), str(steps), *map(str, arguments)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=400, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    return rows(run_dir)


@pytest.mark.slow
def test_two_processes_train_as_one_does_and_resume_exactly(tmp_path):
    module = tiny(max_tokens=8 * 8 * T, val_every_n_steps=3)
    trainer(tmp_path / "one").fit(module, datamodule=SyntheticData(micro_batch_size=2))
    one = rows(tmp_path / "one")
    two = sharded(tmp_path / "two", 8)
    assert [r[:2] for r in two] == [r[:2] for r in one]
    assert [float(r[2]) for r in two] == pytest.approx([float(r[2]) for r in one], rel=1e-5)
    for a, b in zip(*(read_documents(tmp_path / name, 8) for name in ("one", "two")), strict=True):
        assert (a.ids.tolist(), a.tokens.tolist(), a.bytes.tolist()) == (
            b.ids.tolist(),
            b.tokens.tolist(),
            b.bytes.tolist(),
        )
        assert a.nats == pytest.approx(b.nats, rel=1e-5)

    loaded = load_module(tmp_path / "two" / "checkpoints" / "last.ckpt")
    assert loaded.state_dict().keys() == module.state_dict().keys()
    for a, b in zip(loaded.state_dict().values(), module.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)

    sharded(tmp_path / "resumed", 3)
    resumed = sharded(tmp_path / "resumed", 8, tmp_path / "resumed" / "checkpoints" / "last.ckpt")
    assert resumed == two

    # and one process goes on where two stopped
    sharded(tmp_path / "fewer", 3)
    last = tmp_path / "fewer" / "checkpoints" / "last.ckpt"
    module = tiny(max_tokens=8 * 8 * T, val_every_n_steps=3)
    trainer(tmp_path / "fewer").fit(module, datamodule=SyntheticData(micro_batch_size=2), ckpt_path=str(last))
    fewer = rows(tmp_path / "fewer")
    assert [r[:2] for r in fewer] == [r[:2] for r in one]
    assert [float(r[2]) for r in fewer] == pytest.approx([float(r[2]) for r in one], rel=1e-5)
