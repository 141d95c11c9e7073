"""``seqarch generate``: continue a text."""

from __future__ import annotations

import sys

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
    from tokenizers.decoders import DecodeStream

    from seqarch.evaluation.generation import generate as draw
    from seqarch.evaluation.trained import load_trained

    trained = load_trained(ckpt, tokenizer, device)
    vocabulary, eos_id = trained.tokenizer, trained.eos_id
    text = sys.stdin.read() if prompt == "-" else prompt
    # Documents follow an end-of-document token in training, so a text starts after one.
    ids = [eos_id, *vocabulary.encode(text, add_special_tokens=False).ids]
    stream = DecodeStream(skip_special_tokens=True)
    print(text, end="", flush=True)
    for token in draw(
        trained.model, ids, max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p, eos_id=eos_id, seed=seed
    ):
        print(stream.step(vocabulary, token) or "", end="", flush=True)
    print()
