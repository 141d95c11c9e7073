"""Mamba-1 and Mamba-2 as transformers' classes."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from seqarch.export.formats import NativeFormat, check_plain, only_channel_mixer, same_in_all_layers
from seqarch.model import SequenceModel
from seqarch.ops.convolution import ShortConvolution
from seqarch_mamba.mamba1 import Mamba1
from seqarch_mamba.mamba2 import Mamba2

_NAMES = (
    ("embedding.", "backbone.embeddings."),
    ("norm.", "backbone.norm_f."),
    ("head.", "lm_head."),
    ("blocks.{i}.mixer_norm.", "backbone.layers.{i}.norm."),
    ("blocks.{i}.mixer.", "backbone.layers.{i}.mixer."),
)
_FIXED = {"hidden_act": "silu", "use_bias": False, "use_conv_bias": True}


class Mamba(NativeFormat):
    """``MambaForCausalLM``: blocks of an RMS norm and Mamba-1, without a channel mixer."""

    name = model_type = "mamba"
    architecture = "MambaForCausalLM"
    mixer = Mamba1
    names = _NAMES
    fixed = _FIXED

    def to_config(self, model: SequenceModel) -> dict[str, Any]:
        """States, rank and kernel."""
        shared = _shared(self, model)
        sizes = same_in_all_layers(self, model, ("state_dim", "dt_rank"))
        return {**shared, "state_size": sizes["state_dim"], "time_step_rank": sizes["dt_rank"]}

    def to_options(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Of Mamba-1."""
        mixer = partial(
            Mamba1,
            expand=config.get("expand", 2),
            state_dim=config.get("state_size", 16),
            dt_rank=config.get("time_step_rank", "auto"),
            conv_kernel=config.get("conv_kernel", 4),
        )
        return _options(config, mixer, tied=True)


class MambaTwo(NativeFormat):
    """``Mamba2ForCausalLM``: blocks of an RMS norm and Mamba-2, without a channel mixer."""

    name = model_type = "mamba2"
    architecture = "Mamba2ForCausalLM"
    mixer = Mamba2
    names = _NAMES
    fixed = _FIXED

    def to_config(self, model: SequenceModel) -> dict[str, Any]:
        """Heads, states, groups and kernel."""
        shared = _shared(self, model)
        for mixer in model.mixers:
            assert isinstance(mixer, Mamba2)
            if mixer.norm is None:
                raise self.cannot("norm is false, and Mamba2ForCausalLM has the gated norm always")
            if mixer.norm.eps != model.norm.eps:
                raise self.cannot(
                    f"norm_eps is {model.norm.eps:g}, and Mamba2ForCausalLM has one for all norms, which is "
                    f"{mixer.norm.eps:g} in the mixer"
                )
        sizes = same_in_all_layers(self, model, ("n_heads", "head_dim", "state_dim", "n_groups", "chunk_size"))
        return {
            **shared,
            "num_heads": sizes["n_heads"],
            "head_dim": sizes["head_dim"],
            "state_size": sizes["state_dim"],
            "n_groups": sizes["n_groups"],
            "chunk_size": sizes["chunk_size"],
        }

    def to_options(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Refuses a limit of the step size, and another ε than the mixer's."""
        low, high = config.get("time_step_limit", (0.0, float("inf")))
        if float(low) > 0 or float(high) < float("inf"):
            raise self.cannot_import(f"time_step_limit is {[low, high]}, and Mamba2 has none")
        if config.get("layer_norm_epsilon", 1e-5) != 1e-5:
            raise self.cannot_import(f"layer_norm_epsilon is {config['layer_norm_epsilon']:g}, and Mamba2 has 1e-05")
        mixer = partial(
            Mamba2,
            expand=config.get("expand", 2),
            head_dim=config["head_dim"],
            state_dim=config.get("state_size", 128),
            n_groups=config.get("n_groups", 8),
            conv_kernel=config.get("conv_kernel", 4),
            chunk_size=config.get("chunk_size", 256),
        )
        return _options(config, mixer, tied=False)


def _shared(fmt: NativeFormat, model: SequenceModel) -> dict[str, Any]:
    only_channel_mixer(fmt, model, None)
    check_plain(fmt, model, {"decay": "data"})
    inner = same_in_all_layers(fmt, model, ("d_inner",))["d_inner"]
    kernels = set()
    for mixer in model.mixers:
        conv = mixer.conv1d
        if not isinstance(conv, ShortConvolution):
            raise fmt.cannot(f"conv is false, and {fmt.architecture} has the short convolution always")
        kernels.add(conv.weight.shape[-1])
    if len(kernels) > 1:
        raise fmt.cannot(f"conv_kernel differs from layer to layer: {sorted(kernels)}")
    return {
        "expand": inner // model.d_model,
        "intermediate_size": inner,
        "conv_kernel": kernels.pop(),
        "layer_norm_epsilon": model.norm.eps,
        "residual_in_fp32": True,
    }


def _options(config: Mapping[str, Any], mixer: Any, *, tied: bool) -> dict[str, Any]:
    return {
        "mixer": mixer,
        "channel_mixer": None,
        "tie_embeddings": config.get("tie_word_embeddings", tied),
        "norm_eps": config.get("layer_norm_epsilon", 1e-5),
    }
