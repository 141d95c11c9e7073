"""Small models with a tokenizer of their own, as evaluation gets them from a checkpoint."""

from __future__ import annotations

import random
import re
from functools import partial
from pathlib import Path

import torch

from seqarch.data.tokenizer import find_eos, load_tokenizer, tokenizer_from_text, train_bpe, vocabulary_size
from seqarch.evaluation.trained import Trained
from seqarch.model import SequenceModel, SwiGLU

WORDS = re.findall(r"\w+", "the of and a grey horse ran over old hills while seven birds watched from trees")


def text(n: int, seed: int) -> str:
    """n random words."""
    return " ".join(random.Random(seed).choices(WORDS, k=n))


def tokenizer():
    """A byte-level BPE of 300 ids."""
    return train_bpe((text(50, seed) for seed in range(20)), 300)


def trained(mixer, *, tokenizer_path: Path | None = None) -> Trained:
    """A random model, far from uniform, so that likelihoods and greedy choices are clear."""
    vocabulary = tokenizer() if tokenizer_path is None else load_tokenizer(tokenizer_path)
    with torch.device("meta"):
        model = SequenceModel(vocabulary_size(vocabulary), 32, 2, mixer, partial(SwiGLU, d_ff=48), tie_embeddings=False)
    model.materialise("cpu", 0)
    with torch.no_grad():
        model.embedding.weight.mul_(30)
        assert model.head is not None
        model.head.weight.mul_(15)
    return Trained(model.eval(), vocabulary, find_eos(vocabulary)[1], Path("runs/random/checkpoints/last.ckpt"), 7, 70)


def write_run(run_dir: Path, tokenizer_path: Path | None = None) -> Path:
    """A run folder with a checkpoint of one step and a tokenizer."""
    text = tokenizer().to_str() if tokenizer_path is None else tokenizer_path.read_text()
    from tests.training.synthetic import SyntheticData, tiny, trainer

    trainer(run_dir, max_steps=1, enable_progress_bar=False, limit_val_batches=0).fit(
        tiny(vocab_size=vocabulary_size(tokenizer_from_text(text, ""))), SyntheticData()
    )
    (run_dir / "tokenizer.json").write_text(text)
    return run_dir
