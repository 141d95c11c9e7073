"""Small trained models in run folders, as `seqarch export` finds them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from seqarch.model import SwiGLU
from seqarch.training.module import SequenceModule
from tests.evaluation.trained_models import tokenizer

V = 300


def write_model(
    run_dir: Path, mixer: Any, channel_mixer: Any = SwiGLU, *, step: int = 7, **options: Any
) -> SequenceModule:
    """Write a run folder with a checkpoint of random weights, far from uniform, and a tokenizer; returns the module."""
    module = SequenceModule(V, 32, 2, mixer, channel_mixer, **options)
    module.seed = 1
    module.configure_model()
    with torch.no_grad():
        for name, p in module.named_parameters():
            if p.ndim >= 2 or "norm" in name:  # where a fresh model has zeros or ones, an error would not show
                p.add_(0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(len(name))))
        module.model.embedding.weight.mul_(10)
    state = {"seed": 1, "skipped_steps": 0, "skipped_in_a_row": 0, "tokens": 1000 * step}
    (run_dir / "checkpoints").mkdir(parents=True)
    torch.save(
        {
            "state_dict": module.state_dict(),
            "hyper_parameters": dict(module.hparams),
            "global_step": step,
            "seqarch": state,
        },
        run_dir / "checkpoints" / "last.ckpt",
    )
    (run_dir / "tokenizer.json").write_text(tokenizer().to_str())
    return module.eval()


def tokens(length: int, batch: int = 2) -> torch.Tensor:
    """``[batch, length]``."""
    return torch.randint(0, V, (batch, length), generator=torch.Generator().manual_seed(3))
