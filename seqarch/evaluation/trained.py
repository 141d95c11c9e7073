"""A trained model with what belongs to it: its tokenizer and the folder of its run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import yaml

from seqarch.data.builtin import builtin_corpus
from seqarch.data.corpus import Corpus
from seqarch.data.tokenizer import find_eos, load_tokenizer
from seqarch.discovery import plugins
from seqarch.model import SequenceModel
from seqarch.training.checkpoint import read_checkpoint
from seqarch.training.rebuild import load_module
from seqarch.training.runs import RESULTS, checkpoint_of, tokenizer_of

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@dataclass(frozen=True)
class Trained:
    """A model from a checkpoint, ready for use.

    Attributes:
        model: In evaluation mode, on its device.
        tokenizer: Encodes plain text.
        eos_id: The end of a document; a text starts after one, as in training.
        checkpoint: The checkpoint's file.
        step: Optimiser steps it was trained for.
        tokens: Tokens it was trained on.
    """

    model: SequenceModel
    tokenizer: Tokenizer
    eos_id: int
    checkpoint: Path
    step: int
    tokens: int

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return self.model.embedding.weight.device

    @property
    def results(self) -> Path:
        """The folder for results, inside the run's folder."""
        return tokenizer_of(self.checkpoint).parent / RESULTS

    def results_file(self, kind: str, out: str | None) -> Path:
        """Where results of a kind go: the file ``out``, by default one in the run's folder, named after the step."""
        return self.results / f"{kind}-step{self.step}.json" if out is None else Path(out)

    def corpus(self, data: str | None = None) -> Corpus:
        """The prepared corpus ``data`` (a folder, or builtin), by default the one that the run was trained on.

        Raises:
            ValueError: If the run's ``config.yaml`` does not name one, or it cannot be read.
        """
        if data is None:
            config = self.results.parent / "config.yaml"
            try:
                data = str(yaml.safe_load(config.read_text(encoding="utf-8"))["data"]["init_args"]["path"])
            except (OSError, KeyError, TypeError) as error:
                raise ValueError(
                    f"data: {config} does not say on which corpus it was trained; name one with --data"
                ) from error
        return Corpus(builtin_corpus() if data == "builtin" else Path(data))

    def describe(self) -> dict[str, Any]:
        """What a file of results says about the model."""
        return {"checkpoint": self.checkpoint.name, "step": self.step, "tokens": self.tokens}


def load_trained(ckpt: str | Path, tokenizer: str | Path | None = None, device: str | None = None) -> Trained:
    """Read a checkpoint and its tokenizer.

    Args:
        ckpt: Checkpoint file, or run folder (its last checkpoint).
        tokenizer: A tokenizer.json; by default the run folder's.
        device: By default a GPU if there is one.

    Raises:
        ValueError: If one of them is missing or cannot be read, or if they do not fit.
    """
    plugins()
    path = checkpoint_of(ckpt)
    file = Path(tokenizer) if tokenizer is not None else tokenizer_of(path)
    if not file.is_file():
        raise ValueError(f"{file}: there is no such tokenizer; name one with --tokenizer")
    vocabulary = load_tokenizer(file)
    checkpoint = read_checkpoint(path, options_only=True)
    step, tokens = checkpoint["global_step"], int(checkpoint["seqarch"]["tokens"])
    module = load_module(path, map_location=device or ("cuda" if torch.cuda.is_available() else "cpu"))
    return Trained(module.model, vocabulary, find_eos(vocabulary)[1], path, step, tokens)
