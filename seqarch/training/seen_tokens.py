"""Which tokens of the vocabulary a model has been trained to predict so far."""

from __future__ import annotations

import torch
from lightning.pytorch.strategies import Strategy
from torch import Tensor


class SeenTokens:
    """A mark for each token that has been a label in training. Nothing here waits for the device.

    Args:
        vocab_size: Number of token ids V.
        device: Where the labels are.
        state: Marks to begin with, from `state`.
    """

    def __init__(self, vocab_size: int, device: torch.device, state: Tensor | None = None) -> None:
        self._seen = torch.zeros(vocab_size + 1, dtype=torch.bool, device=device)  # the last takes ignored labels
        if state is not None:
            self._seen[:-1] = state.to(device)

    def add(self, labels: Tensor) -> None:
        """Mark labels of any shape; negative ones are ignored."""
        self._seen[self._places(labels)] = True

    def unseen(self, labels: Tensor) -> Tensor:
        """Whether each label has never been marked, a bool tensor of the labels' shape; false where ignored."""
        return ~self._seen[self._places(labels)] & (labels >= 0)

    def _places(self, labels: Tensor) -> Tensor:
        return torch.where(labels >= 0, labels, len(self._seen) - 1)

    def unite(self, strategy: Strategy) -> None:
        """Mark what any rank has marked."""
        self._seen = strategy.reduce(self._seen.int(), reduce_op="max").bool()

    def state(self) -> Tensor:
        """The marks, ``[V]``."""
        return self._seen[:-1].cpu()
