"""DeltaNet and Gated DeltaNet as flash-linear-attention's classes."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from seqarch.export.formats import NativeFormat, same_in_all_layers, swiglu_width
from seqarch.model import SequenceModel, SwiGLU
from seqarch_deltanet.mixers import DeltaNet, GatedDeltaNet

_NAMES = (
    ("embedding.", "model.embeddings."),
    ("norm.", "model.norm."),
    ("head.", "lm_head."),
    ("blocks.{i}.mixer_norm.", "model.layers.{i}.attn_norm."),
    ("blocks.{i}.mixer.", "model.layers.{i}.attn."),
    ("blocks.{i}.channel_norm.", "model.layers.{i}.mlp_norm."),
    ("blocks.{i}.channel_mixer.", "model.layers.{i}.mlp."),
)
_EPS = 1e-5  # of the mixers' own norm; fla has one ε for all


class FlaGatedDeltaNet(NativeFormat):
    """fla's ``GatedDeltaNetForCausalLM``: Gated DeltaNet and SwiGLU, RMS norms before each."""

    name, model_type, library = "fla-gated_deltanet", "gated_deltanet", "flash-linear-attention"
    architecture = "GatedDeltaNetForCausalLM"
    mixer = GatedDeltaNet
    names = _NAMES
    fixed = {
        "hidden_act": "swish",
        "allow_neg_eigval": False,
        "attn": None,
        "attnres_block_size": None,
        "output_gate_activation": "swish",
    }

    def to_config(self, model: SequenceModel) -> dict[str, Any]:
        """Heads, convolution, gate and inner width."""
        shared = _shared(self, model)
        sizes = same_in_all_layers(self, model, ("n_v_heads", "head_dim"))
        return {**shared, "num_v_heads": sizes["n_v_heads"], "head_dim": sizes["head_dim"]}

    def to_options(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Of Gated DeltaNet."""
        mixer = partial(
            GatedDeltaNet,
            n_heads=config["num_heads"],
            n_v_heads=config.get("num_v_heads"),
            head_dim=config["head_dim"],
            expand_v=config.get("expand_v", 2.0),
            conv=config.get("use_short_conv", True),
            conv_kernel=config.get("conv_size", 4),
            gate=config.get("use_gate", True),
        )
        return _options(self, config, mixer)


class FlaDeltaNet(NativeFormat):
    """fla's ``DeltaNetForCausalLM``: DeltaNet and SwiGLU, RMS norms before each."""

    name, model_type, library = "fla-delta_net", "delta_net", "flash-linear-attention"
    architecture = "DeltaNetForCausalLM"
    mixer = DeltaNet
    names = _NAMES
    fixed = {
        "hidden_act": "swish",
        "allow_neg_eigval": False,
        "attn": None,
        "attnres_block_size": None,
        "use_beta": True,
        "use_output_norm": True,
        "qk_norm": "l2",
        "qk_activation": "silu",
    }

    def to_config(self, model: SequenceModel) -> dict[str, Any]:
        """As of Gated DeltaNet; sizes of heads are shares of the width there."""
        shared = _shared(self, model)
        sizes = same_in_all_layers(self, model, ("n_heads", "head_dim", "v_dim"))
        widths = {k: sizes["n_heads"] * sizes[k] / model.d_model for k in ("head_dim", "v_dim")}
        return {**shared, "expand_k": widths["head_dim"], "expand_v": widths["v_dim"]}

    def to_options(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Of DeltaNet."""
        expand_k, expand_v = config.get("expand_k", 1.0), config.get("expand_v", 1.0)
        mixer = partial(
            DeltaNet,
            n_heads=config["num_heads"],
            head_dim=int(config["hidden_size"] * expand_k) // config["num_heads"],
            expand_v=expand_v / expand_k,
            conv=config.get("use_short_conv", True),
            conv_kernel=config.get("conv_size", 4),
            gate=config.get("use_gate", False),
        )
        return _options(self, config, mixer)


def _shared(fmt: NativeFormat, model: SequenceModel) -> dict[str, Any]:
    if model.norm.eps != _EPS:
        raise fmt.cannot(f"norm_eps is {model.norm.eps:g}, and {fmt.architecture} has one for all norms: {_EPS:g} here")
    kernels, gates = set(), set()
    for mixer in model.mixers:
        assert isinstance(mixer, (DeltaNet, GatedDeltaNet))
        kernels.add(None if mixer.q_conv1d is None else mixer.q_conv1d.weight.shape[-1])
        gates.add(mixer.g_proj is not None)
    if len(kernels) > 1 or len(gates) > 1:
        raise fmt.cannot("conv, conv_kernel or gate differ from layer to layer")
    kernel = kernels.pop()
    sizes = same_in_all_layers(fmt, model, ("n_heads", "head_dim", "v_dim"))
    return {
        "num_heads": sizes["n_heads"],
        "expand_v": sizes["v_dim"] / sizes["head_dim"],
        "use_short_conv": kernel is not None,
        **({} if kernel is None else {"conv_size": kernel}),
        "use_gate": gates.pop(),
        "intermediate_size": swiglu_width(fmt, model),
        "norm_eps": _EPS,
    }


def _options(fmt: NativeFormat, config: Mapping[str, Any], mixer: Any) -> dict[str, Any]:
    if config.get("norm_eps", 1e-6) != _EPS:
        raise fmt.cannot_import(f"norm_eps is {config.get('norm_eps', 1e-6):g}, and the mixer's own norm has {_EPS:g}")
    return {
        "mixer": mixer,
        "channel_mixer": partial(SwiGLU, d_ff=config["intermediate_size"]),
        "tie_embeddings": config.get("tie_word_embeddings", False),
        "norm_eps": _EPS,
    }
