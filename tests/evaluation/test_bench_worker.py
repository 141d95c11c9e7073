"""What ``seqarch bench`` times, and processes that time it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from seqarch.evaluation import bench_steps
from seqarch.evaluation.bench_steps import Decoding, Product, Setup, Training, build_model
from seqarch.evaluation.bench_worker import START_LIMIT, Failure, Job, Ready, Sample, Worker, failure
from seqarch.mixer_spec import MixerSpec, parse_mixer
from tests.evaluation.bench_mixers import Exits, Hangs, Killed, Raises, Terminated

SETUP = Setup(d_model=32, n_layers=2, vocab_size=64, tokens=256, decode_tokens=3, decode_batch=2)
MIXERS = ["Attention(n_heads=2)", "Top1Chunk(n_heads=2, chunk_size=16)", "Mamba2(head_dim=16)", "RWKV7(head_dim=16)"]


@pytest.mark.parametrize("text", MIXERS)
def test_decoding_goes_on_from_a_state_of_that_length(text, monkeypatch):
    """Every decoded token's logits are those of the whole sequence in one pass, after a prompt read in three calls."""
    monkeypatch.setattr(bench_steps, "PREFILL", 16)
    work = Decoding(parse_mixer(text), 40, SETUP, room=5)
    assert work.prompt.shape == (2, 40)
    ids, logits = work.prompt, [work.logits]
    for _ in range(5):
        ids = torch.cat([ids, work.next_ids], dim=1)
        work.step()
        logits.append(work.logits)
    with torch.no_grad():
        whole, _ = build_model(parse_mixer(text), SETUP)(ids)
    torch.testing.assert_close(torch.cat(logits, dim=1), whole[:, 39:], rtol=1e-4, atol=1e-5)


def test_a_training_step_is_counted_by_hand():
    """Attention and SwiGLU of width 32 (inner width 128), vocabulary 64, 256 tokens as 2 × 100."""
    work = Training(parse_mixer("Attention(n_heads=2)"), 100, SETUP)
    attention = 4 * 2 * 100 * 32 * 32 + 4 * 32 * 100 * 101 // 2
    swiglu = 3 * 2 * 100 * 32 * 128
    head = 2 * 100 * 32 * 64
    assert (work.batch, work.tokens) == (2, 200)
    assert work.flops == 3 * 2 * (2 * (attention + swiglu) + head)
    assert work.input_ids.shape == work.labels.shape == (2, 100)
    assert torch.equal(work.input_ids[:, 1:], work.labels[:, :-1])
    assert work.parameters == sum(p.numel() for p in work.model.parameters())
    assert work.backend == "torch"


def test_a_sequence_longer_than_the_step_is_taken_whole():
    work = Training(parse_mixer("Mamba2(head_dim=16)"), 300, SETUP)
    assert (work.batch, work.tokens) == (1, 300)


def test_a_step_gives_every_parameter_a_gradient_and_leaves_none():
    work = Training(parse_mixer("Attention(n_heads=2)"), 16, SETUP)
    seen = set()
    for name, p in work.model.named_parameters():
        p.register_post_accumulate_grad_hook(lambda p, name=name: seen.add((name, bool(p.grad.abs().sum() > 0))))
    work.step()
    assert seen == {(name, True) for name, _ in work.model.named_parameters()}
    assert all(p.grad is None for p in work.model.parameters())


def test_bfloat16_is_that_of_parameters_activations_and_state():
    setup = replace(SETUP, dtype="bfloat16")
    work = Decoding(parse_mixer("Attention(n_heads=2)"), 8, setup, room=1)
    wide = Decoding(parse_mixer("Attention(n_heads=2)"), 8, SETUP, room=1)
    assert work.logits.dtype == torch.bfloat16
    keys_and_values = 2 * 2 * 2 * 9 * 32  # layers, k and v, batch, room, width
    assert wide.state_bytes is not None
    assert work.state_bytes is not None
    assert wide.state_bytes - work.state_bytes == 2 * keys_and_values
    assert Training(parse_mixer("Attention(n_heads=2)"), 8, setup).model(work.prompt)[0].dtype == torch.bfloat16


def test_the_product_is_counted():
    work = Product(SETUP, size=8)
    work.step()
    assert work.flops == 2 * 8**3


def measure(spec, phase="training", length=96, time_limit=START_LIMIT, **changes):
    worker = Worker(Job(spec, phase, length, replace(SETUP, **changes), repetitions=2))
    try:
        answer = worker.ready(time_limit)
        if isinstance(answer, Failure):
            return answer, worker
        return (answer, *(worker.measure(time_limit) for _ in range(2))), worker
    finally:
        worker.stop()


@pytest.mark.parametrize("phase", ["training", "decoding"])
def test_a_worker_measures(phase):
    (ready, *samples), _ = measure(parse_mixer("Attention(n_heads=2)"), phase)
    work = Training if phase == "training" else Decoding
    here = work(parse_mixer("Attention(n_heads=2)"), 96, SETUP, *([] if phase == "training" else [8]))
    assert ready == Ready(here.batch, here.tokens, here.flops, here.parameters, "torch", here.state_bytes)
    for sample in samples:
        assert isinstance(sample, Sample)
        assert sample.seconds > 0
        assert sample.steps >= 1 if phase == "training" else sample.steps == 3


def test_peak_memory_is_that_of_the_measurement():
    """Between the bytes that a step must hold and a small multiple: nothing of Python, torch or other measurements."""
    setup = {"d_model": 256, "n_layers": 4, "vocab_size": 4096}
    (ready, *samples), _ = measure(parse_mixer("Mamba2"), length=256, **setup)
    weights_and_gradients = 2 * 4 * ready.parameters
    assert weights_and_gradients < samples[-1].peak_memory < 8 * weights_and_gradients


def test_memory_beyond_the_limit_is_a_failure():
    found, _ = measure(parse_mixer("Attention(n_heads=2)"), length=4096, memory_limit=4 << 20, threads=1)
    answer = found if isinstance(found, Failure) else found[1]
    assert isinstance(answer, Failure)
    assert answer.status == "out of memory"


@pytest.mark.parametrize(
    ("mixer", "status", "reason"),
    [
        (Raises, "error", "KeyError: 'no such\\nthing'"),
        (Killed, "out of memory", "killed (SIGKILL), as the system does with a process that takes too much"),
        (Terminated, "error", "the process died: SIGTERM"),
        (Exits, "error", "the process died: exit status 3"),
    ],
)
def test_a_mixer_that_ends_its_process_is_a_failure(mixer, status, reason):
    (ready, answer, after), _ = measure(MixerSpec("bad", mixer, {}))
    assert isinstance(ready, Ready)
    assert answer == Failure(status, reason)
    assert isinstance(after, Failure)  # there is nobody to ask again


def test_a_mixer_that_fails_while_its_state_is_filled():
    answer, _ = measure(MixerSpec("bad", Raises, {}), "decoding")
    assert answer == Failure("error", "KeyError: 'no such\\nthing'")


def test_a_mixer_that_never_returns_is_ended():
    answer, worker = measure(MixerSpec("bad", Hangs, {}), "decoding", time_limit=0.05)
    assert answer == Failure("time limit", "> 0.05 s")
    assert not worker._process.is_alive()


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"),
        RuntimeError("not enough memory: you tried to allocate 8 bytes"),
        RuntimeError("std::bad_alloc"),
        RuntimeError("CUDA error: out of memory"),
    ],
)
def test_wants_of_memory_are_told_from_errors(error):
    assert failure(error).status == "out of memory"
    assert failure(ValueError(str(error))).status == "error"
