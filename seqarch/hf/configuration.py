"""The configuration of an exported model."""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig


class SeqArchConfig(PretrainedConfig):
    """The options of a ``SequenceModel`` as plain data, as a checkpoint holds them.

    Args:
        vocab_size: V.
        d_model: D.
        n_layers: Blocks.
        mixer: ``{"class_path": ..., "init_args": {...}}``, or a list of such, cycled over the blocks.
        channel_mixer: The same of the channel mixer, or None.
        tie_embeddings: The head shares the embedding's weight.
        norm_eps: ε of the RMS norms.
        requires: By class path, the distribution that a class of the options came from.
        max_position_embeddings: Tokens of a training sequence. Nothing in the model is limited by it; programs that
            evaluate models cut their inputs to it.
    """

    model_type = "seqarch"
    attribute_map = {"hidden_size": "d_model", "num_hidden_layers": "n_layers"}

    def __init__(
        self,
        vocab_size: int = 32768,
        d_model: int = 768,
        n_layers: int = 12,
        mixer: dict[str, Any] | list[dict[str, Any]] | None = None,
        channel_mixer: dict[str, Any] | None = None,
        tie_embeddings: bool = True,
        norm_eps: float = 1e-5,
        requires: dict[str, str] | None = None,
        max_position_embeddings: int = 2048,
        **kwargs: Any,
    ) -> None:
        self.vocab_size, self.d_model, self.n_layers = vocab_size, d_model, n_layers
        self.mixer, self.channel_mixer = mixer, channel_mixer
        self.tie_embeddings, self.norm_eps = tie_embeddings, norm_eps
        self.requires = requires or {}
        self.max_position_embeddings = max_position_embeddings
        super().__init__(**{**kwargs, "tie_word_embeddings": tie_embeddings})
