"""Run folders as training leaves them, from simulated losses by document."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import yaml

from seqarch.training.documents import DomainDocuments, write_documents
from seqarch.training.metrics import MetricsFile
from tests.evaluation.simulated import DOMAINS

TOKENS_PER_STEP = 1000


def write_run(
    path: Path,
    nats: dict[str, np.ndarray],
    size: dict[str, np.ndarray],
    *,
    mixer: str = "seqarch_attention.Attention",
    seed: int = 1,
    trained: tuple[str, ...] = tuple(d for d, inside in DOMAINS.items() if inside),
    bytes_per_token: float = 4.0,
    tokenizer: str = "{}",
    max_steps: int | None = None,
    mixer_options: dict[str, Any] | None = None,
    model_options: dict[str, Any] | None = None,
    bytes_of: dict[str, np.ndarray] | None = None,
) -> Path:
    """Write a run with a validation every ten steps; ``nats`` are ``[K, n]`` by domain."""
    path.mkdir(parents=True)
    steps = [10 * (k + 1) for k in range(len(next(iter(nats.values()))))]
    config = {
        "seed_everything": seed,
        "trainer": {"max_steps": max_steps or steps[-1]},
        "model": {
            "d_model": 64,
            "mixer": {"class_path": mixer, "init_args": {"layer_idx": 0, "n_heads": 4, **(mixer_options or {})}},
            "optimizer": {"lr": 0.003, "betas": [0.9, 0.95]},
            "compile": seed % 2 == 0,
            **(model_options or {}),
        },
        "data": {"class_path": "LimitedDomainDataModule", "init_args": {"seq_len": 100, "batch_size": 10}},
    }
    (path / "config.yaml").write_text(yaml.safe_dump(config))
    (path / "tokenizer.json").write_text(tokenizer)
    metrics = MetricsFile(path)
    for k, step in enumerate(steps):
        losses = {d: float(nats[d][k].sum() / size[d].sum()) for d in nats}
        values = {f"val/loss/{d}": loss for d, loss in losses.items()}
        values |= {f"val/unseen_share/{d}": 0.01 for d in nats}
        values["val/loss/id"] = float(np.mean([losses[d] for d in trained]))
        values["train/smoothed_loss"] = values["val/loss/id"] + 0.1
        metrics.log_metrics({**values, "train/tokens": step * TOKENS_PER_STEP}, step=step)
        documents = [
            DomainDocuments(
                d,
                d in trained,
                np.arange(len(size[d])) * 3,
                size[d],
                size[d] * bytes_per_token if bytes_of is None else bytes_of[d],
                nats[d][k],
            )
            for d in nats
        ]
        write_documents(path, step, documents)
    return path
