"""The model: a ``SequenceModel`` under the interface of transformers.

Shape legend: B batch, T tokens, V vocabulary.
"""

from __future__ import annotations

import re
from typing import Any

from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.generation.utils import ALL_CACHE_NAMES
from transformers.modeling_outputs import CausalLMOutputWithPast

from seqarch.class_paths import find_class
from seqarch.hf.cache import StateCache
from seqarch.hf.configuration import SeqArchConfig
from seqarch.model import SequenceModel
from seqarch.model.init import marked
from seqarch.model.options import ARCHITECTURE, build_model

_CACHE = ALL_CACHE_NAMES[0]
"""What this release of transformers calls a cache: ``past_key_values``, or ``cache``."""


class SeqArchForCausalLM(PreTrainedModel, GenerationMixin):
    """A causal language model with any token mixer that is installed.

    Args:
        config: The model's options. Classes that they name are looked up among the installed plugins; nothing is
            imported for them.

    Raises:
        ValueError: If a class is not known here, with the distribution to install.
    """

    config_class = SeqArchConfig  # pyright: ignore[reportAssignmentType]
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _is_stateful = True  # a state cannot go back, as assisted decoding would have it
    _no_split_modules = ["Block"]

    def __init__(self, config: SeqArchConfig) -> None:
        super().__init__(config)
        self.model = _build(config)
        wide = (rf"^model\.{re.escape(name)}$" for name in marked(self.model, "_keep_float32"))
        self._keep_in_fp32_modules_strict = set(wide)
        self.post_init()

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """As in transformers, from safetensors only.

        Raises:
            ValueError: If another format is asked for, or a plugin is not installed.
        """
        if not kwargs.setdefault("use_safetensors", True):
            raise ValueError("use_safetensors=False would unpickle a file, which can run code: leave it out")
        return super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)

    @property
    def gradient_checkpointing(self) -> bool:
        """Whether only each block's input is kept for backward; transformers sets it."""
        return self.model.activation_checkpointing

    @gradient_checkpointing.setter
    def gradient_checkpointing(self, value: bool) -> None:
        self.model.activation_checkpointing = value

    def get_input_embeddings(self) -> nn.Module:
        """The embedding."""
        return self.model.embedding

    def get_output_embeddings(self) -> nn.Module | None:
        """The head, or None where it shares the embedding's weight."""
        return self.model.head

    def new_cache(self, batch_size: int, max_len: int) -> StateCache:
        """An empty cache for sequences of at most ``max_len`` tokens."""
        return StateCache(self.model.init_state(batch_size, max_len))

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        cache: StateCache | None = None,
        past_key_values: StateCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Logits, and the loss where labels are given.

        Args:
            input_ids: int64 ``[B, T]``.
            attention_mask: ``[B, T]``, zeros where there is padding: on the right, where nothing that counts sees it.
            cache: From ``new_cache``; updated in place.
            past_key_values: An older name of ``cache``.
            labels: int64 ``[B, T]``, the same tokens as ``input_ids`` (they are shifted here), -100 where ignored.
            use_cache: Ignored but for True without a cache, which is an error.
            logits_to_keep: Logits of the last so many positions only; 0 for all.
            **kwargs: ``num_items_in_batch`` divides the loss; the rest is not for this model.

        Returns:
            ``loss`` (mean over the labels that count), ``logits`` ``[B, T, V]`` and the cache.

        Raises:
            ValueError: For padding on the left, or any together with a cache: a mixer's state would take it in.
        """
        cache = past_key_values if cache is None else cache
        if use_cache and cache is None:
            raise ValueError("use_cache needs a cache to write to: give one from model.new_cache(batch_size, max_len)")
        _check_padding(attention_mask, cached=cache is not None)
        states = None if cache is None else cache.states
        last = logits_to_keep == 1 and labels is None
        logits, states = self.model(input_ids, state=states, last_only=last)
        if cache is not None:
            cache.update(states, input_ids.shape[1])
        loss = None
        if labels is not None:
            items = {k: v for k, v in kwargs.items() if k == "num_items_in_batch"}
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **items)
        if logits_to_keep:
            logits = logits[:, -logits_to_keep:]
        kept: dict[str, Any] = {_CACHE: cache}
        return CausalLMOutputWithPast(loss=loss, logits=logits, **kept)  # pyright: ignore[reportArgumentType]

    def _prepare_cache_for_generation(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        generation_config: Any,
        model_kwargs: dict[str, Any],
        generation_mode: Any,
        batch_size: int,
        max_cache_length: int,
    ) -> None:
        if model_kwargs.get(_CACHE) is None and generation_config.use_cache:
            copies = max(generation_config.num_beams or 1, generation_config.num_return_sequences or 1)
            model_kwargs[_CACHE] = self.new_cache(batch_size * copies, max_cache_length + 1)

    def prepare_inputs_for_generation(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        input_ids: Tensor,
        cache: StateCache | None = None,
        past_key_values: StateCache | None = None,
        attention_mask: Tensor | None = None,
        logits_to_keep: int = 1,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """The tokens that the cache has not seen."""
        cache = past_key_values if cache is None else cache
        if cache is not None and (seen := cache.get_seq_length()) < input_ids.shape[1]:
            input_ids = input_ids[:, seen:]
        return {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            _CACHE: cache,
            "logits_to_keep": logits_to_keep,
        }

    def _init_weights(self, module: nn.Module) -> None:
        """Initial values of a module that no file had any for."""
        reset = getattr(module, "reset_parameters", None)
        parameters = list(module.parameters())
        loaded = [getattr(p, "_is_hf_initialized", False) for p in parameters]
        if any(loaded) and not all(loaded) and any(True for _ in module.parameters(recurse=False)):
            raise ValueError(f"the file has some weights of a {type(module).__name__}, but not all of them")
        if reset is not None and not any(loaded):
            reset()


def _build(config: SeqArchConfig) -> SequenceModel:
    options = {name: getattr(config, name) for name in ARCHITECTURE}
    try:
        return build_model(options)
    except ValueError as error:
        missing = [d for path, d in config.requires.items() if path in str(error) and not _known(path)]
        if not missing:
            raise
        names = ", ".join(sorted({d.split()[0] for d in missing}))
        raise ValueError(
            f"{error}. The model was trained with {', '.join(sorted(set(missing)))}: install {names}"
        ) from (error)


def _known(path: str) -> bool:
    try:
        find_class(path, nn.Module)
    except ValueError:
        return False
    return True


def _check_padding(attention_mask: Tensor | None, *, cached: bool) -> None:
    if attention_mask is None or bool(attention_mask.all()):
        return
    if cached:
        raise ValueError(
            "prompts of unequal length cannot be generated from together: padding would go into the mixers' states. "
            "Give prompts of one length, or one at a time"
        )
    if bool((attention_mask[:, 1:] > attention_mask[:, :-1]).any()):
        raise ValueError(
            "pad on the right (tokenizer.padding_side = 'right'): padding before a text changes its logits"
        )
