"""Files of results as `seqarch eval` writes them, from scores of documents."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

SETTINGS = {
    "version": 1.0,
    "num_fewshot": 0,
    "limit": None,
    "max_length": 2048,
    "add_bos_token": True,
    "precision": "32-true",
}


def write_scores(
    run: Path,
    task: str,
    scores: np.ndarray,
    *,
    step: int = 80,
    metric: str = "acc",
    samples: bool = True,
    **settings: Any,
) -> None:
    """Add a task with the scores ``[n]`` of its documents to the results of a run's step."""
    stderr = float(scores.std(ddof=1) / len(scores) ** 0.5)
    entry = {
        **SETTINGS,
        "documents": len(scores),
        "documents_sha256": f"{task}{len(scores)}",
        "higher_is_better": {metric: True},
        "scores": {metric: {"value": float(scores.mean()), "stderr": stderr}},
        "subtasks": {},
        **settings,
    }
    model = {"checkpoint": "last.ckpt", "step": step, "tokens": step * 1000}
    by_document = {"scores": {metric: scores.tolist()}}
    _add(run / "results" / f"tasks-step{step}.json", model, task, entry)
    if samples:
        _add(run / "results" / f"tasks-step{step}-samples.json", model, task, by_document)


def _add(file: Path, model: dict[str, Any], task: str, entry: dict[str, Any]) -> None:
    file.parent.mkdir(exist_ok=True)
    tasks = json.loads(file.read_text())["tasks"] if file.exists() else {}
    file.write_text(json.dumps({"model": model, "tasks": {**tasks, task: entry}}))
