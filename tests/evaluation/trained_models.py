"""Small models with a tokenizer of their own, as evaluation gets them from a checkpoint."""

from __future__ import annotations

import random
import re
from functools import partial
from pathlib import Path

import torch

from seqarch.data.tokenizer import find_eos, train_bpe, vocabulary_size
from seqarch.evaluation.trained import Trained
from seqarch.model import SequenceModel, SwiGLU

WORDS = re.findall(r"\w+", "the of and a grey horse ran over old hills while seven birds watched from trees")


def text(n: int, seed: int) -> str:
    """n random words."""
    return " ".join(random.Random(seed).choices(WORDS, k=n))


def tokenizer():
    """A byte-level BPE of 300 ids."""
    return train_bpe((text(50, seed) for seed in range(20)), 300)


def trained(mixer, **options) -> Trained:
    """A random model, far from uniform, so that likelihoods and greedy choices are clear."""
    vocabulary = tokenizer()
    with torch.device("meta"):
        model = SequenceModel(
            vocabulary_size(vocabulary), 32, 2, mixer, partial(SwiGLU, d_ff=48), tie_embeddings=False, **options
        )
    model.materialise("cpu", 0)
    with torch.no_grad():
        model.embedding.weight.mul_(30)
        assert model.head is not None
        model.head.weight.mul_(15)
    return Trained(model.eval(), vocabulary, find_eos(vocabulary)[1], Path("runs/random/checkpoints/last.ckpt"), 7, 70)


def write_run(run_dir: Path) -> Path:
    """A run folder with a checkpoint of one step and a tokenizer."""
    from tests.training.synthetic import SyntheticData, tiny, trainer

    trainer(run_dir, max_steps=1, enable_progress_bar=False, limit_val_batches=0).fit(
        tiny(vocab_size=300), SyntheticData()
    )
    (run_dir / "tokenizer.json").write_text(tokenizer().to_str())
    return run_dir
