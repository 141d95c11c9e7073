"""The needle: what is asked, how it is scored, and what it costs to read."""

import json
from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from seqarch.cli import main
from seqarch.evaluation.generation import generate
from seqarch.evaluation.needle import ask, make_sample, needle_test
from seqarch_attention import Attention
from seqarch_mamba import Mamba2
from tests.evaluation.trained_models import tokenizer, trained, write_run

ATTENTION = partial(Attention, n_heads=2)
MAMBA2 = partial(Mamba2, head_dim=16, state_dim=8, chunk_size=16)


@pytest.fixture(scope="module")
def vocabulary():
    return tokenizer()


@pytest.mark.parametrize("length", [400, 1001, 20_000])
@pytest.mark.parametrize("depth", [0, 0.3, 1])
def test_a_prompt_has_the_length_and_one_needle_at_its_depth(vocabulary, length, depth):
    sample = make_sample(vocabulary, 0, length, depth, "a")
    assert len(sample.prompt) == length
    assert sample.prompt[0] == 0
    text = vocabulary.decode(sample.prompt)
    assert text.count(sample.value) == 1
    assert vocabulary.decode(sample.answer) == " " + sample.value
    key = text.split("What is the special magic number for ")[1].split(" mentioned")[0]
    needle = f"One of the special magic numbers for {key} is: {sample.value}.\n"
    assert vocabulary.decode(sample.prompt[sample.start :]).startswith(needle)
    assert text.endswith(f"The special magic number for {key} mentioned in the provided text is")
    first, last = (make_sample(vocabulary, 0, length, d, "a").start for d in (0, 1))
    assert last - first > length - 400
    assert abs(sample.start - (first + depth * (last - first))) <= 20  # it moves to the nearest end of a sentence


def test_each_sample_has_a_seed_of_its_own(vocabulary):
    a, b, c = (make_sample(vocabulary, 0, 400, 0.5, seed) for seed in ("0/1", "0/1", "0/2"))
    assert a == b
    assert a.value != c.value


def test_too_short_a_length_is_refused(vocabulary):
    with pytest.raises(ValueError, match="lengths: 50 is too short, needle and question take"):
        make_sample(vocabulary, 0, 50, 0.5, "a")
    with pytest.raises(ValueError, match="depth must be between 0 and 1"):
        make_sample(vocabulary, 0, 400, 1.5, "a")


@pytest.mark.parametrize("mixer", [ATTENTION, MAMBA2], ids=["attention", "mamba2"])
def test_answers_are_scored_as_one_forward_pass_would(mixer):
    model = trained(mixer)
    samples = [make_sample(model.tokenizer, model.eos_id, 400, depth, f"{depth}") for depth in (0, 0.5, 1)]
    written = list(generate(model.model, samples[1].prompt, 5, temperature=0))
    samples.insert(1, samples[1]._replace(answer=written))  # shorter than a number, and right
    found, nats = ask(model.model, samples, chunk=96)
    assert found == [False, True, False, False]
    for cost, sample in zip(nats, samples, strict=True):
        whole = torch.tensor([[*sample.prompt, *sample.answer]])
        with torch.no_grad():
            log_p = model.model(whole[:, :-1])[0].log_softmax(-1)
        tokens = log_p[0].gather(1, whole[0, 1:, None])[-len(sample.answer) :]
        assert cost == pytest.approx(-tokens.sum().item(), abs=1e-3)


class Largest(TorchDispatchMode):
    """The most elements that a tensor of floats had."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        for t in tree_leaves(found):
            if isinstance(t, torch.Tensor) and t.is_floating_point():
                self.numel = max(self.numel, t.untyped_storage().nbytes() // t.element_size())
        return found


@pytest.mark.parametrize(("mixer", "grows"), [(MAMBA2, False), (ATTENTION, True)], ids=["mamba2", "attention"])
def test_memory_is_bounded_by_the_state(mixer, grows):
    model = trained(mixer)
    sizes = []
    for length in (512, 2048):
        with Largest() as largest:
            ask(model.model, [make_sample(model.tokenizer, model.eos_id, length, 0.5, "a")], chunk=128)
        sizes.append(largest.numel)
    # Attention's scores of one chunk: 2 heads × 128 queries × all keys. Nothing is a square of the length.
    assert sizes[1] <= (2 * 128 * 2100 if grows else sizes[0])


def test_the_table(monkeypatch):
    """With scores that say which question it was."""
    asked = []

    def ask_(model, samples, chunk):
        asked.append((len(samples), chunk))
        return [len(s.prompt) == 2000 and s.start < 500 for s in samples], [float(len(s.prompt)) for s in samples]

    monkeypatch.setattr("seqarch.evaluation.needle.ask", ask_)
    reports = []
    found = needle_test(
        trained(ATTENTION), [2000, 3000], 3, 4, batch_size=3, chunk=64, report=lambda *means: reports.append(means)
    )
    assert found["depths"] == [0, 0.5, 1]
    assert found["accuracy"] == [[1, 0], [0, 0], [0, 0]]
    assert found["nats"] == [[2000, 3000]] * 3
    assert reports == [(2000, pytest.approx(1 / 3), 2000), (3000, 0, 3000)]
    assert asked == [(3, 64), (1, 64)] * 6


def test_the_command(tmp_path, capsys):
    run = write_run(tmp_path / "run")
    main(["needle", str(run), "--lengths", "400", "500", "--depths", "2", "--samples", "2", "--device", "cpu"])
    found = json.loads((run / "results" / "needle-step1.json").read_text())
    assert found["lengths"] == [400, 500]
    # A random model's number costs about ln 300 a token.
    assert all(10 < cost < 60 for row in found["nats"] for cost in row)
    assert (run / "results" / "needle-step1.png").read_bytes().startswith(b"\x89PNG")
    assert "500 tokens: 0.0% found" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["needle", str(run), "--lengths", "20"])
    assert "lengths: 20 is too short" in capsys.readouterr().err
