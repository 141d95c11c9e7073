"""Sampling: against whole-prefix forward passes, and the distributions by hand."""

from functools import partial

import pytest
import torch

from seqarch.evaluation.generation import generate, next_token_distribution
from seqarch.model import SequenceModel, SwiGLU
from seqarch_attention import Attention


@pytest.fixture(scope="module")
def model():
    with torch.device("meta"):
        model = SequenceModel(61, 32, 2, partial(Attention, n_heads=2), SwiGLU)
    model.materialise("cpu", 0)
    with torch.no_grad():
        model.embedding.weight.mul_(30)  # far from uniform, so that greedy choices are clear
    return model


PROMPT = [3, 1, 4, 1, 5]


def test_greedy_equals_the_whole_prefix_each_time(model):
    tokens = list(PROMPT)
    with torch.no_grad():
        for _ in range(20):
            logits, _ = model(torch.tensor([tokens]))
            tokens.append(int(logits[0, -1].argmax()))
    assert list(generate(model, PROMPT, 20, temperature=0)) == tokens[5:]


def test_a_long_prompt_is_read_in_parts(model, monkeypatch):
    whole = list(generate(model, PROMPT, 5, temperature=0))
    monkeypatch.setattr("seqarch.evaluation.generation.PREFILL", 2)
    assert list(generate(model, PROMPT, 5, temperature=0)) == whole


def test_the_seed_decides(model):
    draws = [tuple(generate(model, PROMPT, 30, temperature=5.0, seed=seed)) for seed in (0, 0, 1)]
    assert draws[0] == draws[1] != draws[2]


def test_stops_before_the_end_of_document(model):
    tokens = list(generate(model, PROMPT, 20, temperature=0))
    assert list(generate(model, PROMPT, 20, temperature=0, eos_id=tokens[3])) == tokens[: tokens.index(tokens[3])]


def test_draws_follow_the_distribution(model):
    with torch.no_grad():
        logits, _ = model(torch.tensor([PROMPT]))
    expected = next_token_distribution(logits[0, -1], temperature=20.0)
    counts = torch.zeros(61)
    for seed in range(2000):
        counts[next(generate(model, PROMPT, 1, temperature=20.0, seed=seed))] += 1
    # Total variation of 2000 draws over 61 tokens has mean near 0.07.
    assert 0.5 * (counts / 2000 - expected).abs().sum() < 0.11


LOGITS = torch.tensor([0.1, 0.4, 0.2, 0.3]).log()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [0.1, 0.4, 0.2, 0.3]),
        ({"temperature": 0.5}, [0.01 / 0.3, 0.16 / 0.3, 0.04 / 0.3, 0.09 / 0.3]),
        ({"temperature": 0}, [0, 1, 0, 0]),
        ({"top_k": 2}, [0, 4 / 7, 0, 3 / 7]),
        ({"top_k": 9}, [0.1, 0.4, 0.2, 0.3]),
        ({"top_p": 0.5}, [0, 4 / 7, 0, 3 / 7]),
        ({"top_p": 0.39}, [0, 1, 0, 0]),
        ({"top_p": 1.0}, [0.1, 0.4, 0.2, 0.3]),
        ({"top_k": 3, "top_p": 0.75}, [0, 4 / 7, 0, 3 / 7]),  # of 4/9, 3/9, 2/9 the first two hold 7/9
    ],
)
def test_distributions(options, expected):
    torch.testing.assert_close(next_token_distribution(LOGITS, **options), torch.tensor(expected, dtype=torch.float32))


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ([], {}, "prompt is empty"),
        ([61], {}, "outside the model's vocabulary of 61"),
        ([1], {"max_new_tokens": 0}, "max_new_tokens must be at least 1"),
        ([1], {"temperature": -1}, "temperature must be at least 0, got -1"),
        ([1], {"top_k": 0}, "top_k must be at least 1"),
        ([1], {"top_p": 0}, "top_p must be above 0"),
    ],
)
def test_bad_options_are_named(model, prompt, options, message):
    with pytest.raises(ValueError, match=message):
        generate(model, prompt, **{"max_new_tokens": 1, **options})
