"""The model card: what a run's folder says about a model, as the README.md of its export."""

from __future__ import annotations

import csv
import platform
import re
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import yaml

from seqarch.export.formats import NativeFormat
from seqarch.training.module import SequenceModule

_VERSIONS = ("seqarch", "torch", "lightning", "tokenizers", "safetensors")
_CONFIG = re.compile(r"config(?:-(\d+))?\.yaml")
_LOSS, _BPB = "val/loss/", "val/bpb/"
_USED_BY_TRAINER = ("max_steps", "gradient_clip_val", "precision", "accumulate_grad_batches")


@dataclass(frozen=True)
class Card:
    """What a card tells.

    Attributes:
        mixers: Class names of the token mixers, in the order of their first layer.
        channel_mixer: Class name, or None.
        n_parameters: All of them, each once.
        d_model: Width.
        n_layers: Blocks.
        vocab_size: Token ids.
        step: Optimiser steps.
        tokens: Tokens trained on.
        config: The run's config.yaml; empty if there is none.
        validation: Values of the last validation up to that step, by name; empty if there is none.
        validated: Its step.
    """

    mixers: list[str]
    channel_mixer: str | None
    n_parameters: int
    d_model: int
    n_layers: int
    vocab_size: int
    step: int
    tokens: int
    config: dict[str, Any]
    validation: dict[str, float]
    validated: int

    @classmethod
    def of(cls, checkpoint: Path, module: SequenceModule, *, step: int, tokens: int) -> Card:
        """The card of a checkpoint in the folder of its run; elsewhere it says what the checkpoint alone knows."""
        run, model = checkpoint.resolve().parent.parent, module.model
        validated, values = _last_validation(run / "metrics.csv", step)
        channel_mixers = model.channel_mixers
        return cls(
            mixers=list(dict.fromkeys(type(m).__name__ for m in model.mixers)),
            channel_mixer=type(channel_mixers[0]).__name__ if channel_mixers else None,
            n_parameters=sum(p.numel() for p in model.parameters()),
            d_model=model.d_model,
            n_layers=model.n_layers,
            vocab_size=model.vocab_size,
            step=step,
            tokens=tokens,
            config=_read_config(run),
            validation=values,
            validated=validated,
        )

    @property
    def data(self) -> dict[str, Any]:
        """Options of the data module."""
        data = self.config.get("data")
        return (data.get("init_args") or {}) if isinstance(data, dict) else {}

    @property
    def seq_len(self) -> int | None:
        """Tokens of a training sequence, if the run's folder says."""
        return self.data.get("seq_len")

    def text(self, native: NativeFormat | None, name: str) -> str:
        """The card in Markdown, with front matter.

        Args:
            native: The format, None for seqarch's own.
            name: The model's.
        """
        library = "transformers" if native is None else native.library
        front = {
            "library_name": "fla" if library == "flash-linear-attention" else library,
            "pipeline_tag": "text-generation",
            "tags": ["seqarch", *self.mixers, *([] if native is None else [native.model_type])],
        }
        parts = [
            f"---\n{yaml.safe_dump(front, sort_keys=False)}---\n\n# {name}",
            self._summary(),
            "## Use\n\n" + _usage(native),
            "## Training\n\n" + self._training(),
            "## Losses by domain\n\n" + self._losses(),
            "## Options\n\n" + self._options(),
            "## Versions\n\nOf the export: " + ", ".join(_versions()) + ".",
        ]
        return "\n\n".join(parts) + "\n"

    def _summary(self) -> str:
        channel = "no channel mixer" if self.channel_mixer is None else f"channel mixer `{self.channel_mixer}`"
        mixers = ", ".join(f"`{m}`" for m in self.mixers)
        return (
            f"A causal language model of {self.n_parameters:,} parameters, trained with seqarch. Token mixer {mixers}, "
            f"{channel}; {self.n_layers} layers of width {self.d_model}, {self.vocab_size:,} token ids."
        )

    def _training(self) -> str:
        lines = [f"- {self.tokens:,} tokens in {self.step:,} optimiser steps"]
        if self.data:
            lines.append(
                f"- Data: {self.config['data'].get('class_path')} on `{_shown_path(self.data.get('path', '?'))}`"
            )
            for option, label in (("train_domains", "Trained on"), ("test_domains", "Tested on")):
                domains = self.data.get(option)
                lines.append(f"- {label}: {', '.join(domains) if domains else 'all domains of the corpus'}")
            if weights := self.data.get("weights"):
                lines.append("- Shares: " + ", ".join(f"{domain} {share:g}" for domain, share in weights.items()))
        else:
            lines.append("- Its data is not known: the checkpoint was not in the folder of its run")
        return "\n".join(lines)

    def _losses(self) -> str:
        domains = sorted(n.removeprefix(_LOSS) for n in self.validation if n.startswith(_LOSS))
        domains = [d for d in domains if d not in ("id", "ood")]
        if not domains:
            return "None were recorded up to this checkpoint."
        trained = self.data.get("train_domains")
        rows = ["| domain | nats per token | bits per byte |", "|---|---|---|"]
        for domain in domains:
            inside = " (trained on)" if trained and domain in trained else ""
            rows.append(f"| {domain}{inside} | {self._value(_LOSS + domain)} | {self._value(_BPB + domain)} |")
        for mean, label in (("id", "mean of the domains trained on"), ("ood", "mean of the others")):
            if _LOSS + mean in self.validation:
                rows.append(f"| {label} | {self._value(_LOSS + mean)} | |")
        return f"Of the validation at step {self.validated:,}.\n\n" + "\n".join(rows)

    def _value(self, name: str) -> str:
        return f"{self.validation[name]:.4f}" if name in self.validation else ""

    def _options(self) -> str:
        if not self.config:
            return "The run's config.yaml was not there."
        shown: dict[str, Any] = {"seed_everything": self.config.get("seed_everything")}
        shown |= {part: self.config[part] for part in ("model", "data") if part in self.config}
        trainer = self.config.get("trainer") or {}
        shown["trainer"] = {name: trainer[name] for name in _USED_BY_TRAINER if name in trainer}
        return f"From the run's config.yaml:\n\n```yaml\n{yaml.safe_dump(_without_folders(shown), sort_keys=False)}```"


def _usage(native: NativeFormat | None) -> str:
    if native is None:
        install, first = "seqarch[hf]", "import seqarch.hf\n"
    else:
        install, first = native.library, "import fla\n" if native.library == "flash-linear-attention" else ""
    return (
        f"    pip install '{install}'\n\n```python\n{first}"
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        'folder = "."\n'
        "tokenizer = AutoTokenizer.from_pretrained(folder)\n"
        "model = AutoModelForCausalLM.from_pretrained(folder)\n"
        'ids = tokenizer(tokenizer.bos_token + "Once", return_tensors="pt").input_ids\n'
        "print(tokenizer.decode(model.generate(ids, max_new_tokens=50)[0]))\n```\n\n"
        "In training every document follows the token that ends one; so should a prompt, which is why it starts with "
        "`bos_token`."
    )


def _versions() -> list[str]:
    out = [f"Python {platform.python_version()}"]
    for package in _VERSIONS:
        try:
            out.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    return out


def _read_config(run: Path) -> dict[str, Any]:
    """The configuration that the run was last continued with."""
    found = {int(m[1] or 1): p for p in run.glob("config*.yaml") if (m := _CONFIG.fullmatch(p.name))}
    if not found:
        return {}
    try:
        config = yaml.safe_load(found[max(found)].read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return {}
    return config if isinstance(config, dict) else {}


def _last_validation(path: Path, step: int) -> tuple[int, dict[str, float]]:
    """Step and values of the last validation at or before ``step``."""
    found: dict[int, dict[str, float]] = {}
    try:
        with path.open(newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                if row["name"].startswith("val/") and int(row["step"]) <= step:
                    found.setdefault(int(row["step"]), {})[row["name"]] = float(row["value"])
    except (OSError, KeyError, TypeError, ValueError, AttributeError):
        return 0, {}
    last = max(found, default=0)
    return last, found.get(last, {})


def _without_folders(value: Any, name: str = "") -> Any:
    """The options with the last part of each path: a card is for others, whose folders are other ones."""
    if isinstance(value, dict):
        return {key: _without_folders(inner, str(key)) for key, inner in value.items()}
    if isinstance(value, list):
        return [_without_folders(inner, name) for inner in value]
    return _shown_path(value) if name == "path" and isinstance(value, str) else value


def _shown_path(path: Any) -> str:
    return Path(str(path)).name
