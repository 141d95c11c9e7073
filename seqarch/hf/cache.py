"""The mixers' states in the place of transformers' cache of keys and values."""

from __future__ import annotations

from torch import Tensor

from seqarch.mixer import State


class StateCache:
    """What a model carries from one call of ``forward`` to the next, which updates it in place.

    Args:
        states: The layers' states, as ``SequenceModel.init_state`` gives them.
    """

    is_compileable = False

    def __init__(self, states: list[State]) -> None:
        self.states = states
        self.n_tokens = 0

    def update(self, states: list[State], n_tokens: int) -> None:
        """Take the states after ``n_tokens`` more."""
        self.states = states
        self.n_tokens += n_tokens

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens seen so far."""
        return self.n_tokens

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Give sequence i the states of sequence ``beam_idx[i]``: beam search."""
        self.states = [
            {name: t.index_select(0, beam_idx.to(t.device)) for name, t in state.items()} for state in self.states
        ]
