"""Activations as planned against what the allocator hands out in a real forward and backward pass."""

from functools import partial

import pytest
import torch

from seqarch.discovery import find
from seqarch.model import SequenceModel, SwiGLU
from seqarch.planning import activations
from seqarch.planning.activations import ActivationModel, Precision
from tests.planning.measured import allocated, zero_gradients

MIXERS = {
    "Attention": {"n_heads": 2},
    "Top1Element": {"n_heads": 2},
    "Top1Chunk": {"n_heads": 2, "chunk_size": 32},
    "Mamba1": {},
    "Mamba2": {},
    "RWKV5": {},
    "RWKV6": {},
    "RWKV7": {},
    "DeltaNet": {"n_heads": 2},
    "GatedDeltaNet": {"n_heads": 2},
    "Based": {"n_heads": 2},
}
B, T = 3, 128
T_MAMBA1 = 512  # its scan has buffers of a fixed size within one operator


def build(*mixers, checkpointing=False, channel_mixer=SwiGLU, n_layers=3):
    factories = [partial(find(name), backend="torch", **MIXERS[name]) for name in mixers]
    with torch.device("meta"):
        return SequenceModel(256, 128, n_layers, factories, channel_mixer, activation_checkpointing=checkpointing)


def measure(model, T, autocast=None):
    model.materialise("cpu", 0)
    ids = torch.randint(0, 256, (B, T), generator=torch.Generator().manual_seed(0))
    zero_gradients(model)

    def forward():
        with torch.autocast("cpu", dtype=autocast or torch.bfloat16, enabled=autocast is not None):
            return model(ids, labels=ids).objective

    forward().backward()  # what is made once and kept is made here
    return allocated(forward)[0], allocated(lambda: forward().backward())[1]


def check(model, T=T, autocast=None):
    planned = ActivationModel(model, T, Precision(autocast=autocast))(B, model.activation_checkpointing)
    held, peak = measure(model, T, autocast)
    assert planned.held == pytest.approx(held, rel=0.05)
    assert planned.total == pytest.approx(peak, rel=0.15)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("mixer", MIXERS)
def test_every_mixer(mixer, checkpointing):
    check(build(mixer, checkpointing=checkpointing), T_MAMBA1 if mixer == "Mamba1" else T)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_hybrids_count_each_kind_of_block(checkpointing):
    check(build("Attention", "RWKV7", "Mamba2", checkpointing=checkpointing, n_layers=5))


def test_autocast_holds_the_copies_of_the_weights_too():
    check(build("Attention"), autocast=torch.bfloat16)


def test_blocks_without_a_channel_mixer():
    check(build("Mamba1", channel_mixer=None), T_MAMBA1)


@pytest.mark.parametrize("mixer", ["Attention", "Top1Chunk", "Based"])
def test_long_sequences_and_large_batches_are_extrapolated(mixer, monkeypatch):
    model = build(mixer, n_layers=1)
    with monkeypatch.context() as patch:
        patch.setattr(activations, "_USUAL", 1 << 20)
        patch.setattr(activations, "_LONGEST", 4096)
        run = ActivationModel(model, 4096, Precision())(B, False)
    extrapolated = ActivationModel(model, 4096, Precision())(B, False)
    assert extrapolated.held == pytest.approx(run.held, rel=0.03)
    assert extrapolated.total == pytest.approx(run.total, rel=0.05)


@pytest.mark.parametrize("mixer", ["Attention", "RWKV5", "DeltaNet"])
def test_the_bend_where_activations_outgrow_the_weights_is_no_parabola(mixer):
    with torch.device("meta"):
        model = SequenceModel(256, 1024, 1, partial(find(mixer), backend="torch", n_heads=8), SwiGLU)
    shorter, longer = (ActivationModel(model, T, Precision(torch.bfloat16))(1, True).working for T in (51_200, 102_400))
    assert 1.95 < longer / shorter < 2.05


def test_a_loop_is_extrapolated_by_a_parabola_only_where_it_is_one():
    model = ActivationModel(build("Attention", n_layers=1), 20_000, Precision())

    def run(T):  # held is quadratic, the peak has a bend at 700
        return activations._Run([activations._Part(T, 0, T * T + 3 * T, max(7e5, 1000 * T))], operators=T)

    (part,) = model._at_length(run)
    assert part == pytest.approx((20_000, 0, 20_000**2 + 3 * 20_000, 1000 * 20_000))


def test_bfloat16_takes_half_but_for_what_stays_float32():
    model = build("Attention")
    wide, narrow = (ActivationModel(model, T, Precision(dtype))(B, False) for dtype in (torch.float32, torch.bfloat16))
    assert 0.5 * wide.held < narrow.held < 0.6 * wide.held


def test_planning_leaves_the_model_on_the_meta_device():
    model = build("Top1Chunk", "Attention")
    ActivationModel(model, 64, Precision())
    assert all(p.is_meta for p in model.parameters())
