"""Visibility and non-uniformity: known distributions."""

import math
from functools import partial

import pytest
import torch

from seqarch.evaluation.probe_jacobian import Influence, Layer, influence
from seqarch.evaluation.probe_properties import dropped_share, late_rows, non_uniformity, own_share, visibility
from seqarch_attention import Attention
from tests.evaluation.probed_mixers import inputs

T = 64


def of(G, jumped=None):
    G = G.double().tril()[None]
    return Influence(G, 1e-9, torch.zeros(1, len(G[0]), dtype=torch.bool) if jumped is None else jumped)


def test_even_weights():
    found = of(torch.ones(T, T))
    seen = visibility(found)
    rows = range(48, 64)
    assert list(late_rows(T)) == list(rows)
    # The smallest d with Σ_i min(d / i, 1) ≥ 0.95 · 16, by search.
    span = next(d for d in range(1, T) if sum(min(d / i, 1) for i in rows) >= 0.95 * 16)
    assert seen["span"] == span
    assert seen["span_share"] == pytest.approx(span / 55.5)
    assert seen["reach"] == 63
    assert seen["reach_share"] == 1.0
    assert seen["curve"][0] == pytest.approx(sum(1 / i for i in rows) / 16)
    assert seen["curve"][-1] == pytest.approx(1 / 63)
    uneven = non_uniformity(found)
    assert uneven["entropy"] == pytest.approx(1.0)
    assert uneven["top1"] == pytest.approx(sum(1 / i for i in rows) / 16)
    assert uneven["inputs"] == pytest.approx(math.exp(sum(math.log(i) for i in rows) / 16))
    assert own_share(found) == pytest.approx(sum(1 / (i + 1) for i in rows) / 16)


def test_a_single_input_at_a_distance():
    G = torch.zeros(T, T)
    G[range(20, T), range(T - 20)] = torch.rand(T - 20) + 0.1
    G.fill_diagonal_(5.0)
    found = of(G)
    seen, uneven = visibility(found), non_uniformity(found)
    assert (seen["span"], seen["reach"]) == (20, 20)
    assert [i + 1 for i, w in enumerate(seen["curve"]) if w > 0] == [20]
    assert uneven == {"entropy": 0.0, "inputs": 1.0, "top1": 1.0}


def test_geometric_weights():
    a = 0.7
    distance = torch.arange(T)[:, None] - torch.arange(T)
    found = of(a ** distance.clamp(min=0))
    assert visibility(found)["span"] == math.ceil(math.log(0.05) / math.log(a))  # the tail beyond d is a^d
    uneven = non_uniformity(found)
    assert uneven["top1"] == pytest.approx(1 - a, abs=1e-6)
    nats = -math.log(1 - a) - a * math.log(a) / (1 - a)  # of the geometric distribution
    assert uneven["inputs"] == pytest.approx(math.exp(nats), rel=1e-4)


def test_rows_with_a_jump_and_rows_alone_are_left_out():
    jumped = torch.zeros(1, T, dtype=torch.bool)
    jumped[0, 60:] = True
    G = torch.ones(T, T)
    G[60:] = 0.0
    G[60:, 1] = 9.0
    G[50, :50] = 0.0
    found = of(G, jumped)
    assert dropped_share(found) == 0.25
    assert visibility(found)["reach"] == 59
    assert non_uniformity(found)["top1"] < 0.03
    nothing = of(torch.eye(T))
    assert visibility(nothing)["reach"] == visibility(nothing)["span"] == 0
    assert non_uniformity(nothing) == {"entropy": None, "inputs": None, "top1": None}
    assert own_share(nothing) == 1.0


@pytest.mark.parametrize("window", [1, 2, 9, 32])
def test_a_window_is_what_windowed_attention_sees(window):
    torch.manual_seed(0)
    mixer = Attention(8, n_heads=2, window=window).double().requires_grad_(False)
    seen = visibility(influence(Layer(mixer, inputs(2, T, 8), {}), inputs(1, 1, 8, seed=5)[0]))
    assert seen["reach"] == window - 1
    assert 0.7 * (window - 1) <= seen["span"] <= window - 1


def test_top1_of_attention_falls_with_the_temperature():
    found = []
    for temperature in (2.0, 1.0, 0.25):
        torch.manual_seed(0)
        mixer = partial(Attention, n_heads=1, temperature=temperature)(8).double().requires_grad_(False)
        found.append(non_uniformity(influence(Layer(mixer, inputs(1, T, 8), {}), inputs(1, 1, 8, seed=5)[0])))
    assert found[0]["top1"] < found[1]["top1"] < found[2]["top1"]
    assert found[0]["entropy"] > found[1]["entropy"] > found[2]["entropy"]
