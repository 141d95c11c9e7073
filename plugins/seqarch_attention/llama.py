"""Transformer++ as transformers' Llama."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

from seqarch.export.formats import NativeFormat, check_plain, same_in_all_layers, swiglu_width
from seqarch.model import SequenceModel, SwiGLU
from seqarch_attention.attention import Attention

_PLAIN = {"window": None, "position": "rope", "relation": "qk"}


class Llama(NativeFormat):
    """``LlamaForCausalLM``: rotary attention without a window, SwiGLU, RMS norms before each."""

    name = model_type = "llama"
    architecture = "LlamaForCausalLM"
    mixer = Attention
    names = (
        ("embedding.", "model.embed_tokens."),
        ("norm.", "model.norm."),
        ("head.", "lm_head."),
        ("blocks.{i}.mixer_norm.", "model.layers.{i}.input_layernorm."),
        ("blocks.{i}.mixer.", "model.layers.{i}.self_attn."),
        ("blocks.{i}.channel_norm.", "model.layers.{i}.post_attention_layernorm."),
        ("blocks.{i}.channel_mixer.", "model.layers.{i}.mlp."),
    )
    fixed = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False}

    def to_config(self, model: SequenceModel) -> dict[str, Any]:
        """Heads, rotary base, inner width and ε."""
        check_plain(self, model, _PLAIN)
        for mixer in model.mixers:
            assert isinstance(mixer, Attention)
            if mixer.q_norm is not None:
                raise self.cannot("qk_norm is true, and LlamaForCausalLM has no norms of queries and keys")
            temperature = mixer.head_dim**-0.5 / mixer.scale
            if not math.isclose(temperature, 1.0, rel_tol=1e-9):
                raise self.cannot(f"temperature is {temperature:g}, and LlamaForCausalLM has only 1")
        sizes = same_in_all_layers(self, model, ("n_heads", "n_kv_heads", "head_dim", "rope_base"))
        if model.d_model % sizes["n_heads"]:
            raise self.cannot(
                f"n_heads ({sizes['n_heads']}) does not divide d_model ({model.d_model}), as Llama's must"
            )
        theta = float(sizes["rope_base"])
        return {
            "num_attention_heads": sizes["n_heads"],
            "num_key_value_heads": sizes["n_kv_heads"],
            "head_dim": sizes["head_dim"],
            "rope_theta": theta,  # read by transformers 4; the next one by transformers 5
            "rope_parameters": {"rope_type": "default", "rope_theta": theta},
            "intermediate_size": swiglu_width(self, model),
            "rms_norm_eps": model.norm.eps,
        }

    def to_options(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Refuses rotary positions that are scaled."""
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind != "default":
            raise self.cannot_import(f"its rotary positions are of type '{kind}', and only 'default' has an equivalent")
        attention = partial(
            Attention,
            n_heads=config["num_attention_heads"],
            n_kv_heads=config.get("num_key_value_heads"),
            head_dim=config.get("head_dim"),
            rope_base=rope.get("rope_theta", config.get("rope_theta", 10000.0)),
        )
        return {
            "mixer": attention,
            "channel_mixer": partial(SwiGLU, d_ff=config["intermediate_size"]),
            "tie_embeddings": config.get("tie_word_embeddings", False),
            "norm_eps": config.get("rms_norm_eps", 1e-6),
        }
