"""Influences: against autograd, closed forms, and what must be refused."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from seqarch.evaluation.probe_jacobian import Layer, influence
from seqarch.mixer import Tags
from seqarch_attention import Attention
from seqarch_deltanet import GatedDeltaNet
from seqarch_mamba import Mamba2
from seqarch_top1 import Top1Chunk, Top1Element
from tests.evaluation.probed_mixers import constant, explicit, inputs

DIRECTIONS = inputs(1, 3, 8, seed=5)[0]


def layer(factory, T, D=8, N=1, seed=3):
    torch.manual_seed(seed)
    return Layer(factory(D).double().requires_grad_(False), inputs(N, T, D), {})


@pytest.mark.parametrize(
    "factory",
    [
        partial(Attention, n_heads=2),
        partial(Attention, n_heads=2, window=5),
        partial(Mamba2, head_dim=8, state_dim=4, chunk_size=8),
        partial(GatedDeltaNet, n_heads=1, head_dim=8),
    ],
    ids=["attention", "window", "mamba2", "gated_deltanet"],
)
def test_influences_are_the_jacobian_of_a_smooth_mixer(factory):
    probed = layer(factory, 19)
    J = torch.autograd.functional.jacobian(lambda x: probed.mixer(x)[0][0], probed.inputs[:1])[:, :, 0]
    expected = torch.einsum("iajb,kb->kija", J, DIRECTIONS).square().sum(-1).mean(0).sqrt()
    found = influence(probed, DIRECTIONS, batch_size=7)
    torch.testing.assert_close(found.G[0], expected, rtol=1e-6, atol=1e-8)
    assert ((found.G[0] == 0) == (expected <= found.floor)).all()
    assert found.floor < 1e-8
    assert not found.jumped.any()


def test_influences_of_explicit_weights():
    W = inputs(1, 16, 16, seed=1)[0].tril()
    W[12, 3] = 0.0
    found = influence(explicit(constant(W)), DIRECTIONS[:, :6])
    scale = DIRECTIONS[:, :6].square().sum(-1).mean().sqrt()
    torch.testing.assert_close(found.G, (W.abs() * scale).expand(2, -1, -1), rtol=1e-8, atol=1e-12)
    assert found.G[0, 12, 3] == 0.0


@pytest.mark.parametrize("decay", ["shared", "data"])
def test_mamba2_sees_the_product_of_its_decays(decay):
    """On equal tokens, all that a late input's distance changes is how often its write has decayed."""
    probed = layer(
        partial(Mamba2, expand=1, head_dim=8, state_dim=4, conv=False, norm=False, decay=decay, chunk_size=16), 48
    )
    mixer, x = probed.mixer, inputs(1, 1, 8, seed=4).expand(1, 48, 8)
    with torch.no_grad():
        mixer.dt_bias.fill_(0.3)
        mixer.A_log.fill_(-0.2)
    dt = F.softplus(F.linear(x[0, 0], mixer.in_proj.weight)[-1] + mixer.dt_bias if decay == "data" else mixer.dt_bias)
    log_decay = float(-mixer.A_log.exp() * dt)
    assert -3.0 < log_decay < -0.1
    row = influence(Layer(mixer, x.contiguous(), {}), DIRECTIONS[:1]).G[0, 47]
    near = row[47 - 12 : 47].flip(0)  # distances 1 … 12
    expected = log_decay * torch.arange(1.0, 12.0, dtype=torch.float64)
    torch.testing.assert_close((near[1:] / near[0]).log(), expected, rtol=1e-4, atol=1e-4)


def test_top1_element_is_moved_by_what_it_selects():
    probed = layer(partial(Top1Element, n_heads=1, position="none"), 40)
    found = influence(probed, DIRECTIONS)
    q, k = (x @ getattr(probed.mixer, name).weight.T for name in ("q_proj", "k_proj") for x in [probed.inputs[0]])
    best = (q @ k.T).masked_fill(torch.ones(40, 40, dtype=torch.bool).triu(1), -torch.inf).argmax(dim=1)
    sound = ~found.jumped[0]
    assert sound.sum() > 30
    assert torch.equal((found.G[0] > 0)[sound], F.one_hot(best, 40).bool()[sound])
    assert len(best.unique()) > 5


def test_top1_chunk_is_moved_by_its_own_and_one_other_chunk():
    found = influence(layer(partial(Top1Chunk, n_heads=1, chunk_size=4), 24), DIRECTIONS)
    chunks = (found.G[0] > 0).unflatten(1, (6, 4)).any(-1)
    assert chunks[4:].sum(-1).eq(2).all()
    assert all(chunks[i, i // 4] for i in range(24))


def test_a_jump_is_noticed_and_only_where_it_is():
    """y_i = Σ_j sign(first channel of x_j) x_j, with one token on the jump."""

    def weights(x):
        return x[:, None, :, 0].sign().expand(-1, x.shape[1], -1).tril()

    probed = explicit(weights, tags=Tags(discontinuous=True))
    probed.inputs[1, 5, 0] = 0.0
    found = influence(probed, DIRECTIONS[:, :6])
    assert not found.jumped[0].any()
    assert found.jumped[1].tolist() == [i >= 5 for i in range(16)]


def test_the_context_of_the_sequence_is_what_the_mixer_finds():
    class Scaled(type(explicit(constant(torch.ones(16, 16).double())).mixer)):
        def forward(self, x, *, cu_seqlens=None, state=None, context=None):
            assert context["scale"].shape == (len(x), 16, 1)
            y = super().forward(x)[0] * context["scale"]
            context["scale"] = None
            return y, None

    W = torch.rand(16, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64).tril()
    mixer = Scaled(6, constant(W), Tags(shares_context=True))
    scale = torch.tensor([1.0, 3.0], dtype=torch.float64)[:, None, None].expand(2, 16, 1)
    found = influence(Layer(mixer, inputs(2, 16, 6), {"scale": scale}), DIRECTIONS[:, :6])
    torch.testing.assert_close(found.G[1], 3 * found.G[0])


def test_what_cannot_be_measured_is_refused():
    W = torch.eye(16).double()
    W[2, 9] = 2.0
    with pytest.raises(ValueError, match="Explicit is not causal: input 9 moves output 2"):
        influence(explicit(constant(W)), DIRECTIONS[:, :6])
    with pytest.raises(ValueError, match="Explicit: its outputs do not depend on its inputs"):
        influence(explicit(constant(torch.zeros(16, 16).double())), DIRECTIONS[:, :6])
    with pytest.raises(ValueError, match="Explicit: its outputs are not finite"):
        influence(explicit(constant(torch.full((16, 16), torch.nan).double())), DIRECTIONS[:, :6])
