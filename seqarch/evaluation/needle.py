"""A needle in a haystack: is a number that was mentioned once, anywhere in a long text, still known at its end?

The text is RULER's ``niah_single_1`` (Hsieh et al. 2024, arXiv 2404.06654): five sentences repeated, one that gives a
word its magic number, and the question for it. It is put together from tokens, with the model's own tokenizer, so that
a context has exactly the length that was asked for.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from itertools import cycle
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from seqarch.evaluation.generation import PREFILL
from seqarch.evaluation.trained import Trained
from seqarch.model import SequenceModel
from seqarch.options import at_least

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_INTRODUCTION = (
    "A special magic number is hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the number afterwards.\n"
)
_HAYSTACK = (
    "The grass is green.",
    " The sky is blue.",
    " The sun is yellow.",
    " Here we go.",
    " There and back again.\n",
)
_NEEDLE = "One of the special magic numbers for {key} is: {value}.\n"
_QUESTION = (
    "What is the special magic number for {key} mentioned in the provided text? "
    "The special magic number for {key} mentioned in the provided text is"
)
_KEYS = [
    f"{first}-{second}"
    for first in ("amber", "brave", "calm", "dusty", "early", "fresh", "gentle", "hidden", "light", "quiet", "round")
    for second in ("anchor", "basket", "candle", "engine", "forest", "garden", "island", "lantern", "mirror", "window")
]


class Sample(NamedTuple):
    """One question.

    Attributes:
        prompt: Token ids up to the answer.
        answer: Token ids of the number.
        value: The number.
        start: Where in the prompt the needle begins.
    """

    prompt: list[int]
    answer: list[int]
    value: str
    start: int


def make_sample(tokenizer: Tokenizer, eos_id: int, length: int, depth: float, seed: str) -> Sample:
    """A haystack with one needle.

    Args:
        tokenizer: The model's.
        eos_id: Begins the prompt.
        length: Tokens of the prompt, exactly.
        depth: Where in the haystack the needle is, from 0 (its beginning) to 1 (its end), moved to the nearest end of a
            sentence.
        seed: Decides word and number, whatever else is drawn.

    Raises:
        ValueError: If the needle and the question alone are longer.
    """
    if not 0 <= depth <= 1:
        raise ValueError(f"depth must be between 0 and 1, got {depth}")
    rng = random.Random(seed)
    key, value = rng.choice(_KEYS), str(rng.randrange(1_000_000, 10_000_000))

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False).ids

    before = [eos_id, *encode(_INTRODUCTION)]
    needle = encode(_NEEDLE.format(key=key, value=value))
    after = encode("\n" + _QUESTION.format(key=key))
    room = length - len(before) - len(needle) - len(after)
    if room < 0:
        raise ValueError(f"lengths: {length} is too short, needle and question take {length - room} tokens")
    hay: list[int] = []
    ends = [0]
    for sentence in cycle([encode(sentence) for sentence in _HAYSTACK]):
        if len(hay) + len(sentence) > room:
            hay += sentence[: room - len(hay)]
            break
        hay += sentence
        ends.append(len(hay))
    place = min(ends, key=lambda end: abs(end - depth * room))
    prompt = [*before, *hay[:place], *needle, *hay[place:], *after]
    return Sample(prompt, encode(" " + value), value, len(before) + place)


@torch.inference_mode()
def ask(model: SequenceModel, samples: Sequence[Sample], chunk: int = PREFILL) -> tuple[list[bool], list[float]]:
    """Read the prompts in chunks and score the answers.

    Memory is that of the mixers' state and of one chunk's activations; only the state of a mixer whose state grows
    depends on the length.

    Args:
        model: The model; its device is used.
        samples: With prompts of one length.
        chunk: Tokens a call.

    Returns:
        For each sample whether the number is what the model would have written (its greedy continuation begins with
        it), and the nats that the number costs. A guess among all numbers of seven digits costs ln 9,000,000 = 16.0.
    """
    device = model.embedding.weight.device
    prompts = torch.tensor([sample.prompt for sample in samples], device=device)
    longest = max(len(sample.answer) for sample in samples)
    state = model.init_state(len(samples), prompts.shape[1] + longest - 1, device=device)
    logits = torch.empty(0)  # replaced below: no prompt is empty
    for piece in prompts.split(chunk, dim=1):
        logits, state = model(piece, state=state, last_only=True)
    if longest > 1:  # right padding: shorter answers do not see it
        answers = [[*s.answer, *[0] * (longest - len(s.answer))][:-1] for s in samples]
        more, _ = model(torch.tensor(answers, device=device), state=state)
        logits = torch.cat([logits, more], dim=1)
    log_p = logits.float().log_softmax(dim=-1)
    found, nats = [], []
    for row, sample in zip(log_p, samples, strict=True):
        labels = torch.tensor(sample.answer, device=device)
        row = row[: len(labels)]
        found.append(bool((row.argmax(dim=-1) == labels).all()))
        nats.append(-float(row.gather(1, labels[:, None]).sum()))
    return found, nats


def needle_test(
    trained: Trained,
    lengths: Sequence[int],
    depths: int = 5,
    samples: int = 8,
    *,
    batch_size: int = 1,
    chunk: int = PREFILL,
    seed: int = 0,
    report: Callable[[int, float, float], None] = lambda length, accuracy, nats: None,
) -> dict[str, Any]:
    """Accuracy and cost of the answer by length of the context and depth of the needle.

    Args:
        trained: Model and tokenizer.
        lengths: Tokens of the context.
        depths: How many places of the needle, evenly from the beginning to the end.
        samples: Questions for each length and place.
        batch_size: Questions at once.
        chunk: Tokens a call.
        seed: Each question depends on it, its length, depth and number, not on what else is asked.
        report: Called after each length with the means over its depths.

    Returns:
        What to write as JSON: ``accuracy`` and ``nats`` are tables with a row for each depth, a column for each length.
    """
    at_least(1, depths=depths, samples=samples, batch_size=batch_size, chunk=chunk)
    make_sample(trained.tokenizer, trained.eos_id, min(lengths), 0, "")  # refuses what is too short before hours pass
    places = [i / (depths - 1) if depths > 1 else 0.5 for i in range(depths)]
    accuracy, nats = ([[math.nan] * len(lengths) for _ in places] for _ in range(2))
    for column, length in enumerate(lengths):
        for row, depth in enumerate(places):
            asked = [
                make_sample(trained.tokenizer, trained.eos_id, length, depth, f"{seed}/{length}/{depth:.4f}/{i}")
                for i in range(samples)
            ]
            answers = [
                answer
                for start in range(0, samples, batch_size)
                for answer in zip(*ask(trained.model, asked[start : start + batch_size], chunk), strict=True)
            ]
            accuracy[row][column] = sum(found for found, _ in answers) / samples
            nats[row][column] = sum(cost for _, cost in answers) / samples
        report(length, *(sum(table[row][column] for row in range(depths)) / depths for table in (accuracy, nats)))
    return {
        "model": trained.describe(),
        "lengths": list(lengths),
        "depths": places,
        "samples": samples,
        "seed": seed,
        "accuracy": accuracy,
        "nats": nats,
    }
