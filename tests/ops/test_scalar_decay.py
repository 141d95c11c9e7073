"""Chunked scalar-decay attention against the recurrence in float64, values and every gradient."""

from itertools import pairwise

import pytest
import torch

from seqarch.ops.scalar_decay import scalar_decay_attention


def recurrence(q, k, v, g, gain=None, skip=None, scale=1.0, state=None):
    B, T, H, V = v.shape
    q, k = (t.repeat_interleave(H // t.shape[2], 2) for t in (q, k))
    S = torch.zeros(B, H, q.shape[3], V, dtype=v.dtype) if state is None else state
    o = []
    for t in range(T):
        if g is not None:
            S = g[:, t].exp()[..., None, None] * S
        written = v[:, t] if gain is None else gain[:, t, :, None] * v[:, t]
        S = S + k[:, t, :, :, None] * written[:, :, None]
        read = scale * (q[:, t, :, :, None] * S).sum(2)
        o.append(read if skip is None else read + skip[:, None] * v[:, t])
    return torch.stack(o, 1), S


def inputs(B, T, G, H, K=5, V=6, *, decay="mild", state=False, seed=0):
    r = torch.Generator().manual_seed(seed)

    def noise(*shape):
        return torch.randn(*shape, generator=r, dtype=torch.float64)

    g = -torch.rand(B, T, H, generator=r, dtype=torch.float64)
    if decay == "none":
        g = None
    elif decay == "strong":  # -50 and 0 among weak ones
        g = g * 0.01
        g[:, ::7], g[:, 1::3] = -50, 0
    elif decay == "very strong":
        g = g * 1e-3
        g[:, 3::16] = -1e4
    q, k, v = noise(B, T, G, K), noise(B, T, G, K), noise(B, T, H, V)
    return {"q": q, "k": k, "v": v, "g": g, "initial_state": noise(B, H, K, V) if state else None}


def run(function, tensors, dtype, weights=None, **options):
    leaves = {n: None if t is None else t.to(dtype).requires_grad_() for n, t in tensors.items()}
    state = leaves.pop("initial_state")
    name = "state" if function is recurrence else "initial_state"
    outputs = function(**leaves, **{name: state}, **options)
    every = [t for t in (*leaves.values(), state) if t is not None]
    r = torch.Generator().manual_seed(1)
    weights = [torch.randn(o.shape, generator=r, dtype=torch.float64).to(dtype) for o in outputs]
    return [*outputs, *torch.autograd.grad(outputs, every, weights)]


def compare(tensors, dtype, tolerance, **options):
    chunk = {"chunk_size": options.pop("chunk_size")} if "chunk_size" in options else {}
    ours = run(scalar_decay_attention, tensors, dtype, **options, **chunk)
    theirs = run(recurrence, tensors, torch.float64, **options)
    for a, b in zip(ours, theirs, strict=True):
        assert (a.double() - b).norm() <= tolerance * b.norm()


@pytest.mark.parametrize("T", [1, 2, 15, 16, 17, 48, 50])
@pytest.mark.parametrize("state", [False, True])
def test_lengths_around_the_chunk(T, state):
    compare(inputs(2, T, 2, 4, state=state), torch.float64, 1e-12, scale=0.3, chunk_size=16)


@pytest.mark.parametrize(("G", "H"), [(1, 4), (2, 4), (4, 4)])
@pytest.mark.parametrize("decay", ["mild", "none", "strong", "very strong"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-11), (torch.float32, 3e-6)])
def test_groups_and_decays(G, H, decay, dtype, tolerance):
    compare(inputs(2, 70, G, H, decay=decay, state=True), dtype, tolerance, chunk_size=32)


@pytest.mark.parametrize("decay", ["strong", "none"])
@pytest.mark.parametrize("only", ["gain", "skip", "both"])
@pytest.mark.parametrize(("G", "T"), [(1, 1), (1, 40), (2, 40)])
def test_gain_and_skip(G, T, only, decay):
    tensors = inputs(2, T, G, 4, decay=decay, state=True)
    r = torch.Generator().manual_seed(2)
    if only != "skip":
        tensors["gain"] = torch.randn(2, T, 4, generator=r, dtype=torch.float64)
        tensors["gain"][:, ::5] = 0
    if only != "gain":
        tensors["skip"] = torch.randn(4, generator=r, dtype=torch.float64)
    compare(tensors, torch.float64, 1e-11, scale=0.3, chunk_size=16)


@pytest.mark.parametrize("g", [-50.0, -200.0, 0.0])
def test_one_decay_for_all(g):
    tensors = inputs(1, 40, 1, 2, state=True)
    tensors["g"] = torch.full_like(tensors["g"], g)
    for t in run(scalar_decay_attention, tensors, torch.float32, chunk_size=16):
        assert t.isfinite().all()
    compare({**tensors, "g": tensors["g"].clamp(min=-50)}, torch.float32, 2e-6, chunk_size=16)


def test_no_digit_is_lost_behind_a_strong_decay():
    # e^{-1e4} wipes the state; what follows within the chunk must be as exact as without it.
    tensors = inputs(1, 64, 1, 1)
    tensors["g"] = torch.full_like(tensors["g"], -1e-3)
    tensors["g"][:, 1] = -1e4
    ours, _ = scalar_decay_attention(*(t.float() for t in list(tensors.values())[:4]))
    theirs, _ = recurrence(*list(tensors.values())[:4])
    error = (ours - theirs)[:, 2:].abs().max() / theirs.abs().max()
    assert error < 1e-6


@pytest.mark.parametrize("decay", ["mild", "none"])
def test_long_sequences_in_float32(decay):
    tensors = inputs(1, 4096, 1, 2, decay=decay)
    if decay == "mild":
        tensors["g"] = tensors["g"] * 0.01
    compare(tensors, torch.float32, 5e-6)


@pytest.mark.parametrize("decay", ["mild", "none"])
def test_packed_documents_are_separate_ones(decay):
    tensors = inputs(1, 75, 2, 4, decay=decay)
    bounds = [0, 1, 17, 17, 33, 75]
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32)
    leaves = [None if t is None else t.requires_grad_() for t in list(tensors.values())[:4]]
    o, state = scalar_decay_attention(*leaves, cu_seqlens=cu_seqlens, chunk_size=16)
    assert state is None
    parts = [recurrence(*(None if t is None else t[:, a:b] for t in leaves))[0] for a, b in pairwise(bounds) if a < b]
    separate = torch.cat(parts, 1)
    torch.testing.assert_close(o, separate)
    weight = torch.randn(o.shape, generator=torch.Generator().manual_seed(1), dtype=o.dtype)
    used = [t for t in leaves if t is not None]
    for a, b in zip(torch.autograd.grad(o, used, weight), torch.autograd.grad(separate, used, weight), strict=True):
        torch.testing.assert_close(a, b)


def test_two_calls_are_one():
    tensors = inputs(2, 50, 1, 4)
    args = list(tensors.values())[:4]
    whole, end = scalar_decay_attention(*args, chunk_size=16)
    first, state = scalar_decay_attention(*(t[:, :21] for t in args), chunk_size=16)
    second, last = scalar_decay_attention(*(t[:, 21:] for t in args), initial_state=state, chunk_size=16)
    torch.testing.assert_close(torch.cat((first, second), 1), whole)
    torch.testing.assert_close(last, end)


def test_only_the_output_has_a_gradient_or_only_the_state():
    tensors = inputs(1, 20, 1, 2, state=True)
    for pick in (0, 1):
        grads = []
        for function, name in ((scalar_decay_attention, "initial_state"), (recurrence, "state")):
            leaves = {n: t.clone().requires_grad_() for n, t in tensors.items()}
            every = list(leaves.values())
            outputs = function(*every[:4], **{name: every[4]})
            grads.append(torch.autograd.grad(outputs[pick].square().sum(), every, allow_unused=True))
        for a, b in zip(*grads, strict=True):
            torch.testing.assert_close(a, torch.zeros_like(a) if b is None else b)


def test_half_precision_keeps_its_dtype_and_a_wide_state():
    tensors = inputs(1, 20, 1, 2)
    args = [t.bfloat16() for t in list(tensors.values())[:4]]
    o, state = scalar_decay_attention(*args)
    assert (o.dtype, state.dtype) == (torch.bfloat16, torch.float32)
    want, _ = recurrence(*(t.double() for t in args))
    assert (o.double() - want).norm() < 4e-3 * want.norm()


def test_no_final_state_unless_asked_for():
    args = list(inputs(1, 20, 1, 2).values())[:4]
    o, state = scalar_decay_attention(*args, output_final_state=False)
    assert state is None
    torch.testing.assert_close(o, scalar_decay_attention(*args)[0])


@pytest.mark.filterwarnings("ignore:.*Function'> should not be instantiated:DeprecationWarning")  # torch's own
def test_compiles_to_the_same():
    args = [t.float().requires_grad_() for t in list(inputs(1, 20, 1, 2).values())[:4]]

    def function(*args):
        return scalar_decay_attention(*args, chunk_size=16)[0]

    o = torch.compile(function, backend="aot_eager", fullgraph=True)(*args)
    want = function(*args)
    torch.testing.assert_close(o, want)
    for a, b in zip(
        torch.autograd.grad(o.square().sum(), args), torch.autograd.grad(want.square().sum(), args), strict=True
    ):
        torch.testing.assert_close(a, b)


@pytest.mark.filterwarnings("ignore:Triton is not supported on current platform")
def test_agrees_with_flas_naive_functions():
    naive = pytest.importorskip("fla.ops.simple_gla.naive")
    tensors = inputs(2, 96, 4, 4, K=16, V=8, state=True)
    q, k, v, g, state = (t.float() for t in tensors.values())
    ours = scalar_decay_attention(q, k, v, g, scale=0.25, initial_state=state)
    for function in (naive.naive_chunk_simple_gla, naive.naive_recurrent_simple_gla):
        theirs = function(q, k, v, g, scale=0.25, initial_state=state, output_final_state=True)
        for a, b in zip(ours, theirs, strict=True):
            assert (a - b).norm() < 1e-5 * b.norm()
    start, _ = scalar_decay_attention(q, k, v, g, scale=0.25)
    want, _ = naive.naive_parallel_simple_gla(q, k, v, g, scale=0.25)
    assert (start - want).norm() < 1e-5 * want.norm()


def test_memory_is_linear_and_scores_are_never_kept():
    saved = []
    args = [t.float().requires_grad_() for t in list(inputs(1, 512, 1, 8, K=16, V=16).values())[:4]]
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        scalar_decay_attention(*args)
    state = 512 // 64 * 16 * 8 * 16
    assert sum(t.numel() for t in saved) == sum(t.numel() for t in args) + state


def test_errors():
    q, k, v, g, state = inputs(1, 8, 3, 4, state=True).values()
    with pytest.raises(ValueError, match=r"groups of q and k \(3\) must divide the heads of v \(4\)"):
        scalar_decay_attention(q, k, v, g)
    cu_seqlens = torch.tensor([0, 8], dtype=torch.int32)
    with pytest.raises(ValueError, match="cu_seqlens and initial_state"):
        scalar_decay_attention(q[:, :, :2], k[:, :, :2], v, g, initial_state=state, cu_seqlens=cu_seqlens)
