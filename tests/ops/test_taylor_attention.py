"""Taylor attention in chunks against the dense formula, in float64: values and gradients; and against fla."""

from itertools import pairwise

import pytest
import torch

from seqarch.ops.taylor_attention import n_features, taylor_attention
from tests.ops.test_delta_rule import assert_all_close

C = 128


def dense(q, k, v, scale=None):
    s = torch.einsum("bthf,bjhf->bhtj", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    w = (1 + s + s.square() / 2).tril()
    return torch.einsum("bhtj,bjhv->bthv", w / w.sum(-1, keepdim=True), v)


def inputs(T, B=2, H=3, F=4, V=5, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(B, T, H, F), (B, T, H, F), (B, T, H, V)]
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes]


def gradient(o, args, seed=9):
    do = torch.randn(o.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return torch.autograd.grad(o, args, do.to(o.dtype))


@pytest.mark.parametrize("F", [1, 3, 4, 16])
@pytest.mark.parametrize("T", [1, 2, 5, C - 1, C, C + 1, 2 * C + 40])
def test_agrees_with_the_dense_formula(T, F):
    args = inputs(T, F=F)
    ours, theirs = taylor_attention(*args)[0], dense(*args)
    assert_all_close([ours], [theirs], 1e-12)
    assert_all_close(gradient(ours, args), gradient(theirs, args), 1e-10)


@pytest.mark.parametrize("chunk_size", [16, 64])
def test_scale_and_chunk_size(chunk_size):
    args = inputs(150)
    assert_all_close([taylor_attention(*args, scale=0.9, chunk_size=chunk_size)[0]], [dense(*args, scale=0.9)], 1e-12)


@pytest.mark.parametrize("F", [3, 4])
def test_a_state_continues_the_sequence(F):
    args = inputs(200, F=F)
    state, out = None, []
    for a, b in pairwise([0, 1, 2, 70, 199, 200]):
        o, state = taylor_attention(*(x[:, a:b] for x in args), initial_state=state)
        out.append(o)
    ours, theirs = torch.cat(out, 1), dense(*args)
    assert_all_close([ours], [theirs], 1e-12)
    assert_all_close(gradient(ours, args), gradient(theirs, args), 1e-10)
    torch.testing.assert_close(state, taylor_attention(*args)[1])


def test_the_state_is_the_sum_it_is_said_to_be():
    _, k, v = args = inputs(40, F=4)
    state = taylor_attention(*args)[1]
    assert state.shape == (2, 3, n_features(4), 6)
    ones = torch.ones_like(k[..., :1])
    x, values = torch.cat((k, ones), -1), torch.cat((v, torch.ones_like(v[..., :1])), -1)
    features = torch.cat([x * x.roll(-d, -1) for d in range(3)], -1)
    torch.testing.assert_close(state, torch.einsum("bthp,bthv->bhpv", features, values))


def test_gradient_through_the_states():
    q, k, v = inputs(2 * C + 5)
    generator = torch.Generator().manual_seed(3)
    S = torch.randn(2, 3, n_features(4), 6, generator=generator, dtype=torch.float64)
    S[:, :, :, -1] = S[:, :, :, -1].abs()

    def final(q, k, v, S):
        return taylor_attention(q, k, v, initial_state=S, chunk_size=64)

    args = [x[:, : C // 2 + 9, :1].detach().requires_grad_() for x in (q, k, v)]
    first = S[:, :1].clone().requires_grad_()
    torch.autograd.gradcheck(final, (*args, first), fast_mode=True, check_undefined_grad=False)


def test_packed_documents_are_separate_ones():
    bounds = [0, 1, 1, 130, 258, 259, 300]
    args = inputs(bounds[-1], B=1)
    packed = taylor_attention(*args, cu_seqlens=torch.tensor(bounds, dtype=torch.int32))[0]
    separate = torch.cat([dense(*(x[:, a:b] for x in args)) for a, b in pairwise(bounds) if a < b], dim=1)
    assert_all_close([packed], [separate], 1e-12)
    assert_all_close(gradient(packed, args), gradient(separate, args), 1e-10)


def test_long_sequences_in_float32():
    args = inputs(5000, B=1, H=2, F=16, V=8, dtype=torch.float32)
    wide = [a.detach().double().requires_grad_() for a in args]
    ours, exact = taylor_attention(*args)[0], taylor_attention(*wide)[0]
    for a, e in zip((ours, *gradient(ours, args)), (exact, *gradient(exact, wide)), strict=True):
        assert (a - e).norm() / e.norm() < 1e-5


def test_what_backward_keeps_grows_with_the_sequence_only():
    def kept(T):
        args = inputs(T, B=1, H=1, F=16, V=32, dtype=torch.float32)
        total = 0

        def pack(t):
            nonlocal total
            total += t.numel()
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            taylor_attention(*args)
        return total

    # q, k, v, o, the normaliser, and a state a chunk: less than the features of the tokens (153 numbers) would take.
    assert kept(2048) == 2048 * (2 * 16 + 2 * 32 + 1) + 2048 // C * 153 * 33
    assert kept(4096) == 2 * kept(2048)


@pytest.mark.filterwarnings("ignore:Triton is not supported on current platform")
@pytest.mark.parametrize(("B", "T", "H", "F", "V"), [(1, 256, 2, 16, 8), (2, 512, 1, 8, 16), (1, 300, 3, 5, 4)])
def test_agrees_with_fla(B, T, H, F, V):
    naive = pytest.importorskip("fla.ops.based.naive")
    args = [x.detach() for x in inputs(T, B, H, F, V, dtype=torch.float32)]
    ours = taylor_attention(*args)[0]
    first = [x.transpose(1, 2) for x in args]
    functions = [naive.naive_parallel_based] + ([naive.naive_chunk_based] if T % 256 == 0 else [])
    for function in functions:  # it adds 1e-6 to a normaliser of at least 1/2
        assert_all_close([ours], [function(*first).transpose(1, 2)], 1e-5)
