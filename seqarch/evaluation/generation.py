"""Sampling from a model, one token at a time, with the mixers' state."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from seqarch.model import SequenceModel
from seqarch.options import at_least

PREFILL = 2048
"""Tokens of a prompt that one call reads: bounds the memory of its activations."""


def generate(
    model: SequenceModel,
    prompt: Sequence[int],
    max_new_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    eos_id: int | None = None,
    seed: int = 0,
) -> Iterator[int]:
    """Continue a prompt.

    Args:
        model: The model; its device is used.
        prompt: Token ids, at least one.
        max_new_tokens: How many tokens to draw at the most.
        temperature: Divides the logits; 0 takes the most likely token.
        top_k: Draw from the k most likely tokens only.
        top_p: Draw from the smallest set of tokens that holds this probability (nucleus sampling, arXiv 1904.09751).
        eos_id: Stop before this token.
        seed: Of the draw: the same seed gives the same text.

    Yields:
        Token ids as they are drawn.

    Raises:
        ValueError: For an empty prompt, ids outside the vocabulary, or options out of range.
    """
    if not prompt:
        raise ValueError("the prompt is empty: give at least one token")
    if min(prompt) < 0 or max(prompt) >= model.vocab_size:
        raise ValueError(f"the prompt has token ids outside the model's vocabulary of {model.vocab_size}")
    at_least(1, max_new_tokens=max_new_tokens, top_k=top_k)
    at_least(0, temperature=temperature)
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p must be above 0 and at most 1, got {top_p}")
    return _draw(model, prompt, max_new_tokens, temperature, top_k, top_p, eos_id, seed)


@torch.inference_mode()
def _draw(
    model: SequenceModel,
    prompt: Sequence[int],
    max_new_tokens: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    eos_id: int | None,
    seed: int,
) -> Iterator[int]:
    device = model.embedding.weight.device
    random = torch.Generator(device=device).manual_seed(seed)
    state = model.init_state(1, len(prompt) + max_new_tokens)
    tokens = torch.tensor([prompt], device=device)
    logits = tokens  # replaced below: the prompt is not empty
    for chunk in tokens.split(PREFILL, dim=1):
        logits, state = model(chunk, state=state, last_only=True)
    for i in range(max_new_tokens):
        probability = next_token_distribution(logits[0, -1], temperature=temperature, top_k=top_k, top_p=top_p)
        token = torch.multinomial(probability, 1, generator=random)
        if eos_id is not None and int(token) == eos_id:
            return
        yield int(token)
        if i + 1 < max_new_tokens:
            logits, state = model(token[None], state=state, last_only=True)


def next_token_distribution(
    logits: Tensor, *, temperature: float = 1.0, top_k: int | None = None, top_p: float | None = None
) -> Tensor:
    """Probabilities ``[V]`` (float32) to draw from: temperature first, then top-k, then top-p on what is left."""
    logits = logits.float()
    if temperature == 0:
        return torch.zeros_like(logits).scatter_(0, logits.argmax(dim=0, keepdim=True), 1.0)
    logits = logits / temperature
    if top_k is not None and top_k < len(logits):
        keep = logits.topk(top_k).indices
        logits = torch.full_like(logits, -torch.inf).scatter_(0, keep, logits[keep])
    probability = logits.softmax(dim=0)
    if top_p is not None:
        ordered, index = probability.sort(descending=True, stable=True)
        before = ordered.cumsum(dim=0) - ordered
        probability = torch.zeros_like(probability).scatter_(0, index, torch.where(before < top_p, ordered, 0.0))
        probability = probability / probability.sum()
    return probability
