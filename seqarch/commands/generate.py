"""``seqarch generate``: continue a text."""

from __future__ import annotations

import sys
from pathlib import Path

from jsonargparse import auto_cli

from seqarch.commands.usage import Parser


def run(name: str, arguments: list[str]) -> None:
    """Parse the arguments and stream the text to standard output."""
    auto_cli(generate, args=arguments, as_positional=False, prog=f"seqarch {name}", parser_class=Parser)


def generate(
    ckpt: str,
    prompt: str,
    max_new_tokens: int = 200,
    temperature: float = 0.8,
    top_k: int | None = None,
    top_p: float | None = 0.95,
    seed: int = 0,
    tokenizer: str | None = None,
    device: str | None = None,
) -> None:
    """Continue a text with a trained model, streaming it as it is drawn.

    Args:
        ckpt: Checkpoint file, or run folder (its last checkpoint).
        prompt: The text to continue; - reads standard input.
        max_new_tokens: How many tokens to draw at the most; the text ends earlier at an end of document.
        temperature: Divides the logits; 0 always takes the most likely token.
        top_k: Draw from the k most likely tokens only.
        top_p: Draw from the smallest set of tokens that holds this probability.
        seed: The same seed gives the same text.
        tokenizer: A tokenizer.json; by default the run folder's.
        device: Where to compute; by default a GPU if there is one.
    """
    import torch
    from tokenizers.decoders import DecodeStream

    from seqarch.data.tokenizer import find_eos, load_tokenizer
    from seqarch.discovery import plugins
    from seqarch.evaluation.generation import generate as draw
    from seqarch.training.checkpoint import load_module
    from seqarch.training.runs import checkpoint_of, tokenizer_of

    plugins()
    path = checkpoint_of(ckpt)
    file = Path(tokenizer) if tokenizer is not None else tokenizer_of(path)
    if not file.is_file():
        raise ValueError(f"{file}: there is no such tokenizer; name one with --tokenizer")
    vocabulary = load_tokenizer(file)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    module = load_module(path, map_location=device)
    text = sys.stdin.read() if prompt == "-" else prompt
    _, eos_id = find_eos(vocabulary)
    # Documents follow an end-of-document token in training, so a text starts after one.
    ids = [eos_id, *vocabulary.encode(text, add_special_tokens=False).ids]
    stream = DecodeStream(skip_special_tokens=True)
    print(text, end="", flush=True)
    for token in draw(
        module.model, ids, max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p, eos_id=eos_id, seed=seed
    ):
        print(stream.step(vocabulary, token) or "", end="", flush=True)
    print()
