"""Mixers with options on the command line."""

from __future__ import annotations

import pytest
import torch

from seqarch.mixer_spec import parse_mixer
from seqarch_attention import Attention
from seqarch_top1 import Top1Chunk


def test_a_name_alone_has_no_options() -> None:
    spec = parse_mixer("Attention")
    assert (spec.label, spec.mixer, spec.options) == ("Attention", Attention, {})
    assert parse_mixer("attention").mixer is Attention


def test_options_are_python_literals_and_bare_words_are_strings() -> None:
    spec = parse_mixer("Top1Chunk(n_heads=4, chunk_size=32, selection=approx)", 64)
    assert spec.mixer is Top1Chunk
    assert spec.options == {"n_heads": 4, "chunk_size": 32, "selection": "approx"}
    assert parse_mixer("Top1Chunk(selection='exact')").options == {"selection": "exact"}
    assert parse_mixer("Attention(n_heads=-1.5e3, window=null, qk_norm=true)").options == {
        "n_heads": -1500.0,
        "window": None,
        "qk_norm": True,
    }


def test_the_spec_builds_what_the_backbone_asks_for() -> None:
    layer = parse_mixer("Attention(n_heads=2)").build(32, layer_idx=3, n_layers=5)
    assert isinstance(layer, Attention)
    assert (layer.d_model, layer.layer_idx, layer.n_layers) == (32, 3, 5)
    assert layer(torch.zeros(1, 2, 32))[0].shape == (1, 2, 32)


def test_given_options_yield_to_the_text_and_to_mixers_without_them() -> None:
    assert parse_mixer("Top1Chunk(n_heads=2)", n_heads=4, chunk_size=16).options == {"n_heads": 2, "chunk_size": 16}
    assert parse_mixer("Attention", chunk_size=16).options == {}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("Attenton", "did you mean 'Attention'"),
        ("Attention(n_haeds=4)", "no option 'n_haeds': did you mean 'n_heads'"),
        ("Attention(n_heads=4", "cannot read the mixer"),
        ("Attention(4)", "cannot read the mixer"),
        ("Attention(**x)", "cannot read the mixer"),
        ("a.b(n_heads=4)", "cannot read the mixer"),
        ("Attention(n_heads=open('x'))", "cannot read the mixer"),
        ("Attention(n_heads=5)", r"Attention\(n_heads=5\): .*d_model"),
    ],
)
def test_what_cannot_be_read_is_named(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        parse_mixer(text, 64)
