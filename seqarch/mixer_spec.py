"""A mixer and its options in one word of a command line: ``Top1Chunk(n_heads=4, selection='approx')``."""

from __future__ import annotations

import ast
import inspect
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import torch

from seqarch.discovery import find
from seqarch.mixer import TokenMixer


@dataclass(frozen=True)
class MixerSpec:
    """A mixer with options.

    Attributes:
        label: The text that it came from, as a table shows it.
        mixer: The class.
        options: Keyword arguments of the class beside ``d_model``, ``layer_idx`` and ``n_layers``.
    """

    label: str
    mixer: type[TokenMixer]
    options: dict[str, Any]

    def build(self, d_model: int, *, layer_idx: int = 0, n_layers: int = 1) -> TokenMixer:
        """One layer; the call is the one that ``SequenceModel`` makes of its ``mixer``."""
        return self.mixer(d_model, layer_idx=layer_idx, n_layers=n_layers, **self.options)


def parse_mixer(text: str, d_model: int | None = None, **given: Any) -> MixerSpec:
    """Read ``Name`` or ``Name(option=value, ...)``, values as Python literals; a bare word is a string.

    Args:
        text: What the user wrote; Name is the class or the entry point of any installed mixer.
        d_model: Try the options in a layer of this width (on the meta device, which costs nothing).
        given: Options for a mixer that has them and whose text does not set them (``backend``, say).

    Raises:
        ValueError: If the text cannot be read, or names a mixer or an option that there is not, or if the mixer refuses
            the values; with the text, and the nearest name.
    """
    name, values = _read(text)
    mixer = find(name)
    known = [p for p in inspect.signature(mixer).parameters if p not in ("d_model", "layer_idx", "n_layers")]
    for option in values:
        if option not in known:
            near = get_close_matches(option, known, n=1)
            hint = f"did you mean '{near[0]}'? " if near else ""
            raise ValueError(f"{text}: {mixer.__name__} has no option '{option}': {hint}It has {', '.join(known)}")
    options = {**{k: v for k, v in given.items() if k in known}, **values}
    spec = MixerSpec(text, mixer, options)
    if d_model is not None:
        try:
            with torch.device("meta"):
                spec.build(d_model)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{text}: {error}") from error
    return spec


def _read(text: str) -> tuple[str, dict[str, Any]]:
    wrong = f"cannot read the mixer '{text}': write Name or 'Name(option=value, ...)', in quotes for the shell's sake"
    if "(" not in text:
        return text.strip(), {}
    try:
        call = ast.parse(text.strip(), mode="eval").body
    except SyntaxError as error:
        raise ValueError(wrong) from error
    if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name)) or call.args:
        raise ValueError(wrong)
    values = {}
    for keyword in call.keywords:
        if keyword.arg is None:
            raise ValueError(wrong)
        values[keyword.arg] = _value(keyword.value, wrong)
    return call.func.id, values


def _value(node: ast.expr, wrong: str) -> Any:
    if isinstance(node, ast.Name):
        return {"true": True, "false": False, "null": None}.get(node.id, node.id)
    try:
        return ast.literal_eval(node)
    except ValueError as error:
        raise ValueError(wrong) from error
