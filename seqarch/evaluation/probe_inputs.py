"""What is probed: a fresh mixer on random inputs, or the mixers of a trained model on the hidden states of text.

Shape legend: N sequences, T tokens, D model width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from seqarch.data.corpus import Corpus
from seqarch.data.tokenizer import load_tokenizer
from seqarch.evaluation.position import long_documents
from seqarch.evaluation.probe_jacobian import Layer
from seqarch.evaluation.trained import Trained
from seqarch.mixer import TokenMixer
from seqarch.mixer_spec import MixerSpec


def fresh_layer(spec: MixerSpec, d_model: int, sequences: int, length: int, seed: int = 0) -> Layer:
    """A mixer as its constructor leaves it, but without dead matrices, on random inputs.

    A weight matrix that is initialised with zeros (an output projection, say, so that a block starts as the identity)
    lets nothing through, and never stays so in training: such matrices are drawn with σ = 1/√fan_in.

    Args:
        spec: The mixer, which becomes layer 0 of 1.
        d_model: D.
        sequences: N.
        length: T.
        seed: Of parameters and inputs, which are normal with root mean square 1 in each token, as after a norm.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        mixer = spec.build(d_model)
    dtype = working_dtype([mixer])
    mixer.to(dtype).eval().requires_grad_(False)
    for p in mixer.parameters():
        if p.ndim == 2 and not p.any():
            p.copy_(torch.randn(p.shape, generator=generator) * p.shape[1] ** -0.5)
    x = torch.randn(sequences, length, d_model, generator=generator, dtype=torch.float64)
    return Layer(mixer, (x / x.square().mean(dim=-1, keepdim=True).sqrt()).to(dtype), {})


def working_dtype(mixers: Sequence[TokenMixer]) -> torch.dtype:
    """float64 if all the mixers support it, else float32, whose differences are much coarser."""
    wide = all(torch.float64 in mixer.tags.dtypes for mixer in mixers)
    return torch.float64 if wide else torch.float32


@torch.no_grad()
def trained_layers(trained: Trained, tokens: Tensor) -> list[Layer]:
    """Every mixer of a model, with the normalised hidden states that the tokens give it.

    Args:
        trained: The model, on the CPU; its parameters are cast to ``working_dtype``.
        tokens: int64 ``[N, T]``.
    """
    model = trained.model.requires_grad_(False)
    model.to(working_dtype(model.mixers))
    layers: list[Layer] = []

    def catch(mixer: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Any]) -> None:
        assert isinstance(mixer, TokenMixer)
        layers.append(Layer(mixer, args[0].clone(), dict(kwargs.get("context", {}))))

    hooks = [mixer.register_forward_pre_hook(catch, with_kwargs=True) for mixer in model.mixers]
    try:
        model(tokens, last_only=True)
    finally:
        for hook in hooks:
            hook.remove()
    return layers


def text_tokens(
    trained: Trained, corpus: Corpus, sequences: int, length: int, domains: Sequence[str] | None = None
) -> Tensor:
    """Beginnings of test documents, each after the end-of-document token as in training; domains take turns.

    Returns:
        int64 ``[N, T]``.

    Raises:
        ValueError: If the corpus has another tokenizer, or too few documents that are long enough.
    """
    if load_tokenizer(corpus.tokenizer_path).to_str() != trained.tokenizer.to_str():
        raise ValueError(f"data: {corpus.root} has another tokenizer than the model was trained with")
    streams = [corpus.stream("test", domain, "domains") for domain in domains or corpus.domains("test")]
    chosen = [long_documents(stream, length - 1, sequences) for stream in streams]
    turns = [
        (s, ids[turn]) for turn in range(sequences) for s, ids in zip(streams, chosen, strict=True) if turn < len(ids)
    ]
    if len(turns) < sequences:
        raise ValueError(
            f"length: only {len(turns)} test documents of {corpus.root} have {length - 1} tokens, and {sequences} are "
            "needed: give a smaller --length, or fewer --sequences"
        )
    rows = [torch.from_numpy(stream.document(i)[: length - 1]) for stream, i in turns[:sequences]]
    return torch.stack([torch.cat([torch.tensor([trained.eos_id]), row]) for row in rows])


def random_tokens(trained: Trained, sequences: int, length: int, seed: int = 0) -> Tensor:
    """Tokens drawn evenly from the vocabulary, ``[N, T]``."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(trained.model.vocab_size, (sequences, length), generator=generator)
