"""Several prompts at once: each row is what it would be alone."""

from functools import partial

import pytest
import torch

from seqarch.evaluation.batch_generation import generate_batch
from seqarch.evaluation.generation import generate
from seqarch_attention import Attention
from seqarch_deltanet import GatedDeltaNet
from seqarch_mamba import Mamba2
from seqarch_rwkv import RWKV7
from seqarch_top1 import Top1Chunk
from tests.evaluation.trained_models import trained

MIXERS = {
    "attention": partial(Attention, n_heads=2),
    "hybrid": [partial(Mamba2, head_dim=16, state_dim=8), partial(Attention, n_heads=2, window=4)],
    "rwkv7": partial(RWKV7, head_dim=16),
    "gated_deltanet": partial(GatedDeltaNet, n_heads=2),
    "top1_chunk": partial(Top1Chunk, n_heads=2, chunk_size=4),
}
PROMPTS = [[5, 6, 7], [9, 8, 7, 6, 5, 4, 3, 2, 11, 30], [40, 41, 42, 43, 44, 45]]


def greedy(logits):
    return logits.argmax(dim=-1)


def never(tokens):
    return False


@pytest.mark.parametrize("mixer", MIXERS.values(), ids=MIXERS)
def test_rows_do_not_depend_on_their_company(mixer):
    model = trained(mixer).model
    alone = [list(generate(model, prompt, 12, temperature=0)) for prompt in PROMPTS]
    assert generate_batch(model, PROMPTS, 12, greedy, never) == alone
    assert len({tuple(a) for a in alone}) == 3


def test_a_row_ends_by_itself():
    model = trained(MIXERS["hybrid"]).model
    alone = [list(generate(model, prompt, 12, temperature=0)) for prompt in PROMPTS]
    last = alone[1][4]
    cut = [a[: a.index(last) + 1] if last in a else a for a in alone]
    assert generate_batch(model, PROMPTS, 12, greedy, lambda tokens: tokens[-1] == last) == cut


def test_a_long_prompt_is_read_in_parts(monkeypatch):
    model = trained(MIXERS["hybrid"]).model
    whole = generate_batch(model, PROMPTS[1:2], 6, greedy, never)
    monkeypatch.setattr("seqarch.evaluation.batch_generation.PREFILL", 3)
    assert generate_batch(model, PROMPTS[1:2], 6, greedy, never) == whole


def test_an_empty_prompt_is_refused():
    with pytest.raises(ValueError, match="a prompt is empty"):
        generate_batch(trained(MIXERS["attention"]).model, [[1], []], 2, greedy, never)


def test_choices_are_the_callers():
    model = trained(MIXERS["attention"]).model
    found = generate_batch(model, PROMPTS, 2, lambda logits: torch.arange(len(logits)), never)
    assert found == [[0, 0], [1, 1], [2, 2]]
