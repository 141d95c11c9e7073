"""Retention against the paper's two other forms, written out, against fla's, and each option against what it says."""

import math

import pytest
import torch

from seqarch_retention import Retention

B, T, D = 2, 150, 32  # two whole chunks and a part of a third


def inputs(mixer, x):
    """q, k ``[B, H, T, K]`` with their positions, as complex rotations, and v ``[B, H, T, V]``."""
    q, k, v = (
        p(x).unflatten(-1, (mixer.n_heads, -1)).transpose(1, 2) for p in (mixer.q_proj, mixer.k_proj, mixer.v_proj)
    )
    K = mixer.head_dim
    angle = torch.arange(T, dtype=torch.float64)[:, None] * mixer.rope_base ** (
        -torch.arange(0, K, 2, dtype=torch.float64) / K
    )
    turn = torch.polar(torch.ones_like(angle), angle)

    def rotated(t):
        z = torch.complex(t[..., : K // 2], t[..., K // 2 :]) * turn
        return torch.cat((z.real, z.imag), dim=-1)

    return rotated(q), rotated(k), v


def output(mixer, x, o):
    """What follows the retention o ``[B, H, T, V]``."""
    o = o.transpose(1, 2)
    o = o / (o.square().mean(-1, keepdim=True) + 1e-5).sqrt() * mixer.norm.weight
    gate = mixer.g_proj(x).unflatten(-1, (mixer.n_heads, -1))
    return mixer.o_proj((o * gate * gate.sigmoid()).flatten(2))


def recurrent(q, k, v, gamma):
    """The paper's equation 6."""
    S, outputs = 0.0, []
    for t in range(T):
        S = gamma[:, None, None] * S + k[:, :, t, :, None] * v[:, :, t, None, :]
        outputs.append((q[:, :, t, None, :] @ S).squeeze(2) / math.sqrt(q.shape[-1]))
    return torch.stack(outputs, dim=2)


def parallel(q, k, v, gamma):
    """The paper's equation 5: (QKᵀ ⊙ D) V."""
    distance = torch.arange(T)[:, None] - torch.arange(T)
    decay = torch.where(distance >= 0, gamma[:, None, None] ** distance.clamp(min=0), 0.0)
    return (q @ k.transpose(2, 3) / math.sqrt(q.shape[-1]) * decay) @ v


@pytest.fixture
def x():
    return torch.randn(B, T, D, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("form", [recurrent, parallel])
@pytest.mark.parametrize("options", [{}, {"n_heads": 2, "head_dim": 6, "expand_v": 1, "rope_base": 100.0}])
def test_chunks_are_the_paper_s_recurrence_and_its_parallel_form(form, options, x):
    torch.manual_seed(1)
    mixer = Retention(D, **options).double()
    gamma = torch.tensor([1 - 2.0 ** (-5 - h) for h in range(mixer.n_heads)], dtype=torch.float64)
    x.requires_grad_()
    leaves = [x, *mixer.parameters()]
    y, expected = mixer(x)[0], output(mixer, x, form(*inputs(mixer, x), gamma))
    torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-12)
    dy = torch.randn_like(y)
    for actual, wanted in zip(*(torch.autograd.grad(o, leaves, dy) for o in (y, expected)), strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-8, atol=1e-10)


def test_it_is_flash_linear_attention_s(x):
    naive = pytest.importorskip("fla.ops.retention.naive")
    torch.manual_seed(1)
    mixer = Retention(D).double()
    o = naive.naive_retention(*inputs(mixer, x))  # float32 inside
    torch.testing.assert_close(mixer(x)[0], output(mixer, x, o), rtol=1e-4, atol=1e-5)


def test_it_has_the_paper_s_eight_squares_of_parameters():
    sizes = {name: p.numel() for name, p in Retention(64).named_parameters()}
    assert sum(n for name, n in sizes.items() if "proj" in name) == 8 * 64**2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_heads": 0}, "n_heads must be at least 1"),
        ({"n_heads": 5}, r"n_heads \(5\) must divide d_model \(32\)"),
        ({"head_dim": 7}, r"head_dim \(7\) must be even"),
        ({"expand_v": 0}, "expand_v must be at least 1"),
        ({"backend": "fla"}, "backend must be one of auto, torch"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        Retention(D, **options)
