"""Top-1 Element against the dense formula, and its memory."""

from itertools import pairwise

import pytest
import torch

from seqarch_top1 import Top1Element
from seqarch_top1.element import top1_element
from tests.plugins import top1_reference as reference
from tests.plugins.top1_memory import largest


def heads(B, T, H, G, D=6, dtype=torch.float64, seed=0):
    g = torch.Generator().manual_seed(seed + T)
    return [torch.randn(B, T, h, D, generator=g, dtype=torch.float64).to(dtype).requires_grad_() for h in (H, G, G)]


def compare(actual, expected, qkv, tolerance):
    dy = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(expected)
    grads = [torch.autograd.grad(y, qkv, dy, retain_graph=True) for y in (actual, expected)]
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(*grads, atol=tolerance, rtol=tolerance)


@pytest.fixture(params=[None, 200], ids=["whole", "blocks"])
def blocks(request, monkeypatch):
    """Also with blocks so small that every loop turns many times."""
    if request.param is not None:
        monkeypatch.setattr("seqarch_top1.tiles.CPU_SCORES", request.param)
        monkeypatch.setattr("seqarch_top1.element._ROWS", 8)


@pytest.mark.parametrize(("H", "G"), [(2, 2), (4, 2), (3, 1)])
@pytest.mark.parametrize("T", [1, 2, 7, 40])
@pytest.mark.parametrize("scale", [0.4, 3.0])
@pytest.mark.usefixtures("blocks")
def test_values_and_gradients(T, H, G, scale):
    qkv = heads(2, T, H, G)
    compare(top1_element(*qkv, scale=scale), reference.element(*qkv, scale), qkv, 1e-10)


@pytest.mark.usefixtures("blocks")
def test_float32():
    qkv = heads(2, 50, 4, 2, dtype=torch.float32)
    compare(top1_element(*qkv, scale=0.4), reference.element(*qkv, 0.4), qkv, 2e-6)


@pytest.mark.usefixtures("blocks")
def test_documents_are_apart():
    qkv = heads(1, 40, 4, 2)
    bounds = [0, 3, 3, 4, 25, 40]
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32)
    parts = [reference.element(*(t[:, a:b] for t in qkv), 0.7) for a, b in pairwise(bounds) if b > a]
    compare(top1_element(*qkv, scale=0.7, cu_seqlens=cu_seqlens), torch.cat(parts, 1), qkv, 1e-10)


@pytest.mark.usefixtures("blocks")
def test_queries_may_be_the_last_of_more_keys():
    q, k, v = heads(2, 40, 4, 2)
    expected = reference.element(q, k, v, 0.7)[:, 29:]
    compare(top1_element(q[:, 29:], k, v, scale=0.7), expected, (q, k, v), 1e-10)


@pytest.mark.usefixtures("blocks")
def test_the_smallest_index_wins_a_tie():
    """Keys repeat with period 5, in a block and across blocks, and the scores are exact in float32."""
    g = torch.Generator().manual_seed(0)
    k = torch.randint(-3, 4, (1, 5, 1, 4), generator=g).float().repeat(1, 12, 1, 1)
    q = torch.randint(-3, 4, (1, 60, 1, 4), generator=g).float()
    v = torch.arange(60.0).view(1, 60, 1, 1).expand(-1, -1, -1, 4).contiguous()
    chosen = top1_element(q, k, v, scale=1.0)[0, :, 0, 0]
    scores = (q[0, :, 0] @ k[0, :, 0].T).tolist()
    assert chosen.tolist() == [max(range(t + 1), key=lambda j: (scores[t][j], -j)) for t in range(60)]
    assert chosen.max() < 5


def test_a_far_better_key_before_many_blocks(monkeypatch):
    """The running maximum may be hundreds above a later block's: its sum must neither overflow nor vanish."""
    monkeypatch.setattr("seqarch_top1.tiles.CPU_SCORES", 64)
    q, k, v = heads(1, 30, 1, 1)
    with torch.no_grad():
        k[:, 3] = 400 * q[:, 20]
        k[:, 27] = 900 * q[:, 29]
    compare(top1_element(q, k, v, scale=1.0), reference.element(q, k, v, 1.0), (q, k, v), 1e-9)


def test_memory_grows_as_the_length(monkeypatch):
    monkeypatch.setattr("seqarch_top1.tiles.CPU_SCORES", 1 << 12)
    sizes = [largest(lambda *qkv: top1_element(*qkv, scale=0.3), heads(1, T, 2, 2, D=16)) for T in (256, 1024)]
    assert sizes == [2 * 256 * 16, 2 * 1024 * 16]  # the heads themselves; a score matrix would be T · T


def test_the_mixer_is_its_formula():
    torch.manual_seed(0)
    mixer = Top1Element(24, n_heads=4, n_kv_heads=2, position="none", temperature=0.25).double()
    assert mixer.scale == 4 / 6**0.5
    x = torch.randn(2, 30, 24, dtype=torch.float64)
    q, k, v = (p(x).unflatten(-1, (-1, 6)) for p in (mixer.q_proj, mixer.k_proj, mixer.v_proj))
    torch.testing.assert_close(mixer(x)[0], mixer.o_proj(reference.element(q, k, v, mixer.scale).flatten(2)))
    rotated = Top1Element(24, n_heads=4, n_kv_heads=2, temperature=0.25).double()
    rotated.load_state_dict(mixer.state_dict())
    assert (rotated(x)[0] - mixer(x)[0]).abs().max() > 1e-3


def test_flops_closed_form():
    T = 37
    pairs = sum(t + 1 for t in range(T))
    assert Top1Element(32, n_heads=4).flops(T) == 2 * T * 4 * 32 * 32 + 2 * pairs * 32
    assert Top1Element(32, n_heads=4, n_kv_heads=1).flops(T) == 2 * T * (2 * 32 * 32 + 2 * 32 * 8) + 2 * pairs * 32
