"""The options of a model as plain data, the form that checkpoints and exported models hold, turned into factories."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

from seqarch.class_paths import find_class
from seqarch.mixer import TokenMixer
from seqarch.model.backbone import SequenceModel
from seqarch.model.channel import ChannelMixer

T = TypeVar("T")

ARCHITECTURE = ("vocab_size", "d_model", "n_layers", "mixer", "channel_mixer", "tie_embeddings", "norm_eps")
"""The options of a model that decide what its weights mean."""


def factory(value: Any, base: type[T], option: str) -> Callable[..., T]:
    """What builds the class that ``{"class_path": ..., "init_args": {...}}`` describes; anything callable stays itself.

    Args:
        value: Plain data, or a callable.
        base: What the class must be a subclass of.
        option: What the error calls it.

    Raises:
        ValueError: If the class is not known here (see ``find_class``), or this is no such description.
    """
    if callable(value):
        return value  # pyright: ignore[reportReturnType]
    known = {"class_path", "init_args"}
    if not (isinstance(value, Mapping) and isinstance(value.get("class_path"), str) and value.keys() <= known):
        raise ValueError(f"{option} must be a class_path with init_args, got {value!r}")
    try:
        cls = find_class(value["class_path"], base)
    except ValueError as error:
        raise ValueError(f"{option} needs {error}") from error
    return partial(cls, **(value.get("init_args") or {}))


def model_options(plain: Mapping[str, Any]) -> dict[str, Any]:
    """The mapping with its ``mixer`` (one, or several in a list) and ``channel_mixer`` (or None) as factories."""
    mixer, channel_mixer = plain["mixer"], plain["channel_mixer"]
    if isinstance(mixer, (list, tuple)):
        mixers: Any = [factory(one, TokenMixer, "mixer") for one in mixer]
    else:
        mixers = factory(mixer, TokenMixer, "mixer")
    channel = None if channel_mixer is None else factory(channel_mixer, ChannelMixer, "channel_mixer")
    return {**plain, "mixer": mixers, "channel_mixer": channel}


def build_model(plain: Mapping[str, Any], **others: Any) -> SequenceModel:
    """The model, on the current device, that the options named in ``ARCHITECTURE`` describe; ``others`` are its own."""
    architecture = {name: plain[name] for name in ARCHITECTURE}
    return SequenceModel(**model_options(architecture), **others)
