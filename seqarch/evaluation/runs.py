"""Run folders, read for a comparison: configuration, curves, and losses by document at each validation."""

from __future__ import annotations

import csv
import hashlib
import math
import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from seqarch.training.documents import DomainDocuments, read_documents, recorded_steps
from seqarch.training.runs import TOKENIZER

_MODEL_ASIDE = ("compile", "activation_checkpointing", "val_every_n_steps", "max_tokens", "max_skipped_steps")
_MIXER_ASIDE = ("layer_idx", "n_layers", "backend", "max_len")
_DATA = ("seq_len", "batch_size", "document_mask")
_COLUMNS = "step,tokens,name,value"
_CONFIG = re.compile(r"config(?:-(\d+))?\.yaml")


class RunError(ValueError):
    """A run that cannot take part in a comparison; the message is the reason, without the folder."""


@dataclass(frozen=True)
class Run:
    """What a finished or unfinished run has left behind.

    Shape legend: K validations, N test documents of all domains together.

    Attributes:
        path: Its folder.
        mixer: Class names of its token mixers, joined by ``+``.
        options: What makes two runs replicates of each other if it is the same for both: the options of the model
            and of its optimiser, sequence length and batch size; flat, by dotted names.
        seed: ``seed_everything``.
        tokenizer: SHA-256 of its tokenizer, empty if there is none.
        tokens: Tokens trained on at each validation, ``[K]``.
        planned_tokens: Tokens of the whole training.
        documents: The test documents by domain; ``nats`` are those of the last validation.
        nats: Nats of each document at each validation, float32 ``[K, N]``, domains one after another.
        smoothed: Smoothed training loss at each validation, ``[K]``; NaN where it was not recorded.
        unseen_share: By domain: share of the last loss on tokens that were never a label in training.
    """

    path: Path
    mixer: str
    options: dict[str, Any]
    seed: int
    tokenizer: str
    tokens: np.ndarray
    planned_tokens: int
    documents: list[DomainDocuments]
    nats: np.ndarray
    smoothed: np.ndarray
    unseen_share: dict[str, float]

    @property
    def domains(self) -> list[str]:
        """All test domains."""
        return [d.name for d in self.documents]

    @property
    def setting(self) -> tuple[str, ...]:
        """The test domains that were trained on."""
        return tuple(d.name for d in self.documents if d.in_domain)

    @property
    def finished(self) -> bool:
        """Whether the last validation stands at the end of the planned training."""
        return int(self.tokens[-1]) >= self.planned_tokens

    def nats_of(self, domain: str) -> np.ndarray:
        """Nats of the documents of one domain, ``[K, n]``."""
        start = 0
        for d in self.documents:
            if d.name == domain:
                return self.nats[:, start : start + len(d.ids)]
            start += len(d.ids)
        raise KeyError(domain)


def read_run(path: Path) -> Run:
    """Read a run folder.

    Raises:
        RunError: If it is none, or lacks what a comparison needs.
    """
    if not path.is_dir():
        raise RunError("there is no such folder")
    config = _config(path)
    metrics = _metrics(path)
    kept = set(recorded_steps(path))
    validated = sorted(metrics["val/loss/id"])
    steps = [step for step in validated if step in kept]
    if not validated:
        raise RunError("it has not been validated yet")
    if validated[-1] not in kept:
        raise RunError(
            "it holds no losses by document for its last validation: it was trained by an earlier version of seqarch, "
            "or on data without documents; train it again"
        )
    try:
        validations = [read_documents(path, step) for step in steps]
    except ValueError as error:
        raise RunError(str(error)) from error
    nats = np.stack([np.concatenate([d.nats for d in v]) for v in validations])
    if not np.isfinite(nats).all():
        raise RunError("some of its losses by document are not finite: it diverged")
    last, documents = steps[-1], validations[-1]
    shares = {d.name: metrics[f"val/unseen_share/{d.name}"].get(last, (math.nan, 0))[0] for d in documents}
    tokenizer = path / TOKENIZER
    tokens = np.array([metrics["val/loss/id"][step][1] for step in steps], dtype=np.int64)
    return Run(
        path=path,
        mixer=_mixer_name(config["model"]["mixer"]),
        options=_options(config),
        seed=int(config.get("seed_everything") or 0),
        tokenizer=hashlib.sha256(tokenizer.read_bytes()).hexdigest() if tokenizer.is_file() else "",
        tokens=tokens,
        planned_tokens=_planned_tokens(config, int(tokens[-1]) // last),
        documents=documents,
        nats=nats,
        smoothed=np.array([metrics["train/smoothed_loss"].get(step, (math.nan, 0))[0] for step in steps]),
        unseen_share={name: share for name, share in shares.items() if math.isfinite(share)},
    )


def _config(path: Path) -> dict[str, Any]:
    """The configuration a run was last continued with."""
    found = {int(m[1] or 1): p for p in path.glob("config*.yaml") if (m := _CONFIG.fullmatch(p.name))}
    if not found:
        raise RunError("it has no config.yaml: it is not the folder of a run")
    file = found[max(found)]
    try:
        config = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise RunError(f"{file.name} cannot be read ({' '.join(str(error).split())})") from error
    whole = isinstance(config, dict) and all(
        isinstance(config.get(part), dict) for part in ("model", "data", "trainer")
    )
    if not whole or not all(isinstance(m, dict) and "class_path" in m for m in _mixers(config["model"].get("mixer"))):
        raise RunError(f"{file.name} is not the configuration of a run")
    return config


def _metrics(path: Path) -> dict[str, dict[int, tuple[float, int]]]:
    """By name and step: the value and the tokens."""
    metrics: dict[str, dict[int, tuple[float, int]]] = defaultdict(dict)
    try:
        lines = (path / "metrics.csv").read_text(encoding="utf-8").splitlines(keepends=True)
        if lines and not lines[-1].endswith("\n"):
            lines.pop()  # just being written
        if lines and lines[0].strip() != _COLUMNS:
            raise ValueError(f"it begins with {lines[0][:40].strip()!r} instead of {_COLUMNS!r}")
        for row in csv.DictReader(lines):
            metrics[row["name"]][int(row["step"])] = (float(row["value"]), int(row["tokens"] or 0))
    except FileNotFoundError:
        raise RunError("it has no metrics.csv: it has not begun to train") from None
    except (OSError, TypeError, ValueError, csv.Error) as error:
        raise RunError(f"metrics.csv is damaged ({error})") from error
    return metrics


def _planned_tokens(config: dict[str, Any], per_step: int) -> int:
    """The shorter of model.max_tokens and trainer.max_steps, in whole steps."""
    steps = []
    if max_tokens := config["model"].get("max_tokens"):
        steps.append(math.ceil(max_tokens / per_step))
    if (max_steps := config["trainer"].get("max_steps", -1)) > 0:
        steps.append(max_steps)
    return min(steps, default=0) * per_step


def _mixer_name(mixer: Any) -> str:
    return "+".join(dict.fromkeys(str(p["class_path"]).rsplit(".", 1)[-1] for p in _mixers(mixer)))


def _mixers(mixer: Any) -> list[Any]:
    return mixer if isinstance(mixer, list) else [mixer]


def _options(config: dict[str, Any]) -> dict[str, Any]:
    model = {name: value for name, value in config["model"].items() if name not in _MODEL_ASIDE}
    data = config["data"].get("init_args", {})
    flat = _flat(model, "")
    flat |= {f"data.{name}": data[name] for name in _DATA if name in data}
    return {name: v for name, v in flat.items() if name.rsplit(".", 1)[-1] not in _MIXER_ASIDE or name == "n_layers"}


def _flat(value: Any, prefix: str) -> dict[str, Any]:
    if isinstance(value, dict):
        if "class_path" in value:
            own = {prefix: str(value["class_path"]).rsplit(".", 1)[-1]}
            return own | _flat(value.get("init_args") or {}, prefix)
        dot = f"{prefix}." if prefix else ""
        return {k: v for name, inner in value.items() for k, v in _flat(inner, f"{dot}{name}").items()}
    if isinstance(value, list) and any(isinstance(v, dict) for v in value):
        return {k: v for i, inner in enumerate(value) for k, v in _flat(inner, f"{prefix}[{i}]").items()}
    return {prefix: tuple(value) if isinstance(value, list) else value}
