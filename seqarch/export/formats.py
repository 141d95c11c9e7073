"""Formats of other libraries: what a mixer's package says about one, and finding it.

A mixer lists them in ``TokenMixer.formats``. A format is a rule for names, since the tensors are the same on both
sides, and two functions for options.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from typing import Any, ClassVar

from torch import Tensor

from seqarch.discovery import plugins
from seqarch.mixer import TokenMixer
from seqarch.model import SequenceModel
from seqarch.model.channel import ChannelMixer, SwiGLU

HF = "hf"
"""The format that takes every model: ``seqarch.hf``."""


class NativeFormat(ABC):
    """A model class of another library that computes what a ``SequenceModel`` does with one kind of mixer."""

    name: ClassVar[str]
    """What ``--format`` says."""

    model_type: ClassVar[str]
    """The entry of config.json by which the library knows it."""

    architecture: ClassVar[str]
    """The library's class."""

    library: ClassVar[str] = "transformers"
    """What it is installed as."""

    mixer: ClassVar[type[TokenMixer]]

    names: ClassVar[tuple[tuple[str, str], ...]]
    """Pairs of our and their beginnings of a parameter's name, in which ``{i}`` is the layer."""

    fixed: ClassVar[Mapping[str, Any]]
    """Entries of config.json that have one value in every model that can be exchanged."""

    @abstractmethod
    def to_config(self, model: SequenceModel) -> dict[str, Any]:
        """Entries of config.json beside ``fixed``, ``vocab_size`` and the like.

        Raises:
            ValueError: For an option that the library's class does not have.
        """

    @abstractmethod
    def to_options(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Options of a ``SequenceModel``, its mixers as partials.

        Raises:
            ValueError: For an entry that our classes cannot follow.
        """

    def config(self, model: SequenceModel) -> dict[str, Any]:
        """All that config.json says about the model itself.

        Raises:
            ValueError: If the model cannot be expressed, with the option that stands in the way.
        """
        self.check_mixers(model)
        return {
            "model_type": self.model_type,
            "architectures": [self.architecture],
            **self.fixed,
            "vocab_size": model.vocab_size,
            "hidden_size": model.d_model,
            "num_hidden_layers": model.n_layers,
            "tie_word_embeddings": model.head is None,
            **self.to_config(model),
        }

    def options(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The opposite.

        Raises:
            ValueError: If our classes cannot express it, with the entry that stands in the way.
        """
        for name, value in self.fixed.items():
            if config.get(name, value) != value:
                raise self.cannot_import(f"{name} is {config[name]!r}, and only {value!r} has an equivalent")
        try:
            shared = {
                "vocab_size": config["vocab_size"],
                "d_model": config["hidden_size"],
                "n_layers": config["num_hidden_layers"],
            }
            return {**shared, **self.to_options(config)}
        except KeyError as error:
            raise self.cannot_import(f"config.json has no entry {error}") from error

    def check_mixers(self, model: SequenceModel) -> None:
        """See that every layer has the format's mixer.

        Raises:
            ValueError: If not.
        """
        for i, mixer in enumerate(model.mixers):
            if type(mixer) is not self.mixer:
                raise self.cannot(
                    f"mixer: layer {i} has {type(mixer).__name__}, and every layer must have {self.mixer.__name__}"
                )

    def cannot(self, reason: str) -> ValueError:
        """The error of a model that cannot be written in this format."""
        return ValueError(f"--format {self.name} cannot express this model: {reason} (--format {HF} takes every model)")

    def cannot_import(self, reason: str) -> ValueError:
        """The error of a model that cannot be read from this format."""
        return ValueError(f"a model of type {self.model_type} cannot be imported: {reason}")

    def to_theirs(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Our weights under their names."""
        return self._renamed(weights, self.names)

    def to_ours(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Their weights under our names."""
        return self._renamed(weights, [(b, a) for a, b in self.names])

    def _renamed(self, weights: Mapping[str, Tensor], names: Iterable[tuple[str, str]]) -> dict[str, Tensor]:
        rules: list[tuple[re.Pattern[str], str]] = []
        for a, b in names:
            pattern = re.escape(a).replace(re.escape("{i}"), r"(?P<i>\d+)")
            rules.append((re.compile(pattern), b))
        out = {}
        for name, tensor in weights.items():
            for pattern, b in rules:
                if match := pattern.match(name):
                    out[b.format(**match.groupdict()) + name[match.end() :]] = tensor
                    break
            else:
                raise ValueError(f"{name} is no weight that a model of {self.model_type} and {self.name} share")
        return out


class NoFormat(NativeFormat):
    """A model class of the same architecture's name that does not compute the same: asking for it is an error."""

    reason: ClassVar[str]
    names = ()
    fixed = {}

    def to_config(self, model: SequenceModel) -> dict[str, Any]:
        """Raises the reason."""
        raise self.cannot(self.reason)

    def to_options(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Raises the reason."""
        raise self.cannot_import(self.reason)


def same_in_all_layers(fmt: NativeFormat, model: SequenceModel, mixer_options: Iterable[str]) -> dict[str, Any]:
    """Attributes of the mixers that every layer must have alike.

    Raises:
        ValueError: If one differs from layer to layer.
    """
    out = {}
    for option in mixer_options:
        values = [getattr(mixer, option) for mixer in model.mixers]
        if any(value != values[0] for value in values):
            raise fmt.cannot(f"{option} differs from layer to layer: {values}")
        out[option] = values[0]
    return out


def only_channel_mixer(fmt: NativeFormat, model: SequenceModel, wanted: type[ChannelMixer] | None) -> Any:
    """The first layer's channel mixer, where all layers must have this kind; None for none.

    Raises:
        ValueError: If they have another.
    """
    mixers = model.channel_mixers
    if wanted is None:
        if mixers:
            raise fmt.cannot(f"channel_mixer is {type(mixers[0]).__name__}, and {fmt.architecture} has none (null)")
        return None
    if len(mixers) < model.n_layers:
        raise fmt.cannot(f"channel_mixer is null, and {fmt.architecture} has a {wanted.__name__}")
    for mixer in mixers:
        if type(mixer) is not wanted:
            raise fmt.cannot(f"channel_mixer is {type(mixer).__name__}, and {fmt.architecture} has a {wanted.__name__}")
    return mixers[0]


def swiglu_width(fmt: NativeFormat, model: SequenceModel) -> int:
    """Inner width of the SwiGLU that all layers have.

    Raises:
        ValueError: If they have another channel mixer.
    """
    return only_channel_mixer(fmt, model, SwiGLU).d_ff


def check_plain(fmt: NativeFormat, model: SequenceModel, expected: Mapping[str, Any]) -> None:
    """See that attributes of the mixers have the only values that the library's class knows.

    Raises:
        ValueError: If one has not.
    """
    for option, found in same_in_all_layers(fmt, model, expected).items():
        if found != expected[option]:
            raise fmt.cannot(f"{option} is {found!r}, and {fmt.architecture} has only {expected[option]!r}")


def formats() -> dict[str, Callable[[], NativeFormat]]:
    """Every native format that an installed mixer lists, by name; called, each is loaded."""
    found: dict[str, Callable[[], NativeFormat]] = {}
    for plugin in plugins():
        for name, place in (plugin.mixer.formats if plugin.mixer is not None else {}).items():
            found.setdefault(name, lambda place=place: _load(place))
    return dict(sorted(found.items()))


def find_format(name: str) -> NativeFormat:
    """The native format of this name.

    Raises:
        ValueError: If no installed mixer lists it.
    """
    known = formats()
    if name not in known:
        usable = [n for n, load in known.items() if not isinstance(load(), NoFormat)]
        raise ValueError(f"--format must be one of {', '.join([HF, *usable])}, got '{name}'")
    return known[name]()


def format_of_type(model_type: str) -> NativeFormat:
    """The native format whose config.json has this ``model_type``.

    Raises:
        ValueError: If no installed mixer lists one.
    """
    loaded = [load() for load in formats().values()]
    for fmt in loaded:
        if fmt.model_type == model_type:
            return fmt
    types = ", ".join(["seqarch", *(fmt.model_type for fmt in loaded if not isinstance(fmt, NoFormat))])
    raise ValueError(f"config.json says model_type '{model_type}'; what can be imported: {types}")


def _load(place: str) -> NativeFormat:
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)()
