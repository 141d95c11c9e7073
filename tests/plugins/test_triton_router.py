"""The selection's Triton kernels: against the torch backend in float64 by the interpreter, and compiled for GPUs."""

from itertools import accumulate, pairwise

import pytest
import torch

from seqarch_top1.layout import plain
from seqarch_top1.router import route
from seqarch_top1.triton_layout import chunk_table
from tests.interpreter import interpreted
from tests.plugins.triton_compile import SHARED, TARGETS, recorded

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
# B, T, S, H, G, D, C, document boundaries
CASES = [
    (3, 50, 50, 6, 3, 16, 16, None),
    (2, 1, 33, 2, 1, 16, 16, None),
    (2, 21, 60, 2, 2, 80, 16, None),
    (1, 40, 40, 2, 1, 128, 32, None),
    (1, 5, 5, 2, 1, 16, 16, None),
    (1, 101, 101, 2, 1, 64, 16, (0, 1, 1, 16, 32, 49, 64, 101)),
    (1, 70, 70, 4, 2, 16, 16, None),
]
FULL, HALF = (128, torch.float32), (80, torch.float16)
SPILLED = {
    ("route_queries_backward", "sm_90", FULL): 8,
    ("route_queries_backward", "sm_100", FULL): 8,
    ("route_keys_backward", "sm_90", FULL): 56,
    ("route_keys_backward", "sm_100", FULL): 64,
    ("route_keys_backward", "sm_80", HALF): 8,
}
"""Bytes a thread that may spill: float32 at a head size of 128 is multiplied without tensor cores."""


def triton(q, k, T, S, C, bounds, exact, scale):
    """As the interpreter calls it: the table is made there."""
    from seqarch_top1.triton_router import triton_route

    cu_seqlens = None if bounds is None else torch.tensor(bounds, dtype=torch.int32)
    return triton_route(q, k, scale=scale, table=chunk_table(S, C, cu_seqlens, q.device), exact=exact)


def reference(q, k, C, bounds, exact, scale):
    """Index and probability ``[B, H, T]`` by the torch backend in float64, each document alone."""
    if bounds is not None:
        parts = [reference(q[:, a:b], k[:, a:b], C, None, exact, scale) for a, b in pairwise(bounds) if a < b]
        before = accumulate([0, *(-(-(b - a) // C) for a, b in pairwise(bounds) if a < b)])
        indices = [torch.where(index < 0, index, index + n) for (index, _), n in zip(parts, before, strict=False)]
        return torch.cat(indices, -1), torch.cat([P for _, P in parts], -1)
    B, T = q.shape[:2]
    S, G = k.shape[1:3]
    queries, keys = plain(T, C, S - T), plain(S, C)
    rows, x = queries.split(q * scale, G), keys.split(k, G)
    index, P = route(rows, x if exact else x.mean(2, keepdim=True), None, None, keys.n_chunks - queries.n_chunks)
    index, P = (queries.join(t[..., None], B, T)[..., 0].transpose(1, 2) for t in (index, P))
    return index, P


def check_interpreted(case, dtype, exact):
    """In the interpreter all products are float32's, so that half precision shows in the gradient's factors only."""
    tolerance = {torch.float32: 2e-6, torch.float16: 5e-3, torch.bfloat16: 4e-2}[dtype]
    B, T, S, H, G, D, C, bounds = case
    generator = torch.Generator().manual_seed(T)
    q, k = (torch.randn(B, n, h, D, generator=generator).to(dtype) for n, h in ((T, H), (S, G)))
    dP = torch.randn(B, H, T, generator=generator)
    options = {"C": C, "bounds": bounds, "exact": exact, "scale": D**-0.5}
    wide = [t.double().requires_grad_() for t in (q, k)]
    index, P = reference(*wide, **options)
    leaves = {"q": q.requires_grad_(), "k": k.requires_grad_()}
    (found, found_P), gradients = interpreted(
        "tests.plugins.test_triton_router:triton", {**leaves, "T": T, "S": S, **options}, [None, dP]
    )
    assert torch.equal(found.long(), index), (case, dtype)
    assert (found_P - P).norm() <= 2e-6 * P.norm(), (case, dtype)
    if not P.requires_grad or not bool((index >= 0).any()):
        return
    for name, want in zip(leaves, torch.autograd.grad(P, wide, dP.double()), strict=True):
        assert (gradients[name] - want).norm() <= tolerance * want.norm(), (case, dtype, name)


@pytest.mark.parametrize("exact", [True, False])
def test_selects_and_learns_as_the_torch_backend(exact):
    """One test, so that one process serves all cases."""
    for case in CASES:
        check_interpreted(case, torch.float32, exact)


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype, exact):
    for case in CASES[:3]:
        check_interpreted(case, dtype, exact)


@pytest.mark.slow
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("case", CASES[3:], ids=str)
def test_half_precision_at_more_shapes(case, dtype, exact):
    check_interpreted(case, dtype, exact)


def launches(monkeypatch, target, D, C, dtype, exact, T=4096, H=8, G=4):
    monkeypatch.setattr(torch.version, "hip", "6.2" if target.startswith("gfx") else None)
    from seqarch_top1.triton_router import triton_route

    with torch.device("meta"):
        q, k = (torch.empty(1, T, h, D, dtype=dtype, requires_grad=True) for h in (H, G))
        with recorded() as found:
            table = chunk_table(T, C, None, torch.device("meta"))
            _, P = triton_route(q, k, scale=0.1, table=table, exact=exact)
            torch.autograd.grad(P, (q, k), torch.empty_like(P))
    return found


@pytest.mark.parametrize("target", [pytest.param(t, marks=[] if t == "sm_90" else pytest.mark.slow) for t in TARGETS])
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize(
    ("D", "dtype"),
    [
        (64, torch.bfloat16),
        *(
            pytest.param(D, dtype, marks=pytest.mark.slow)
            for D, dtype in ((128, torch.bfloat16), (80, torch.float16), (64, torch.float32), (128, torch.float32))
        ),
    ],
)
def test_compiles(monkeypatch, target, exact, D, dtype):
    found = launches(monkeypatch, target, D, 128, dtype, exact)
    names = ["route_forward", "route_queries_backward", "route_keys_backward"]
    assert [str(launch) for launch in found] == (names if exact else ["mean_keys", *names])
    for launch in found:
        resources = launch.resources(target)
        spilled = SPILLED.get((str(launch), target, (D, dtype)), 0)
        assert resources.shared <= SHARED[target], f"{launch} {target}: {resources}"
        assert resources.spilled <= spilled, f"{launch} {target}: {resources}"


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("case", [*CASES, (1, 3000, 3000, 8, 2, 128, 128, None)], ids=str)
def test_on_a_gpu(case, exact):
    B, T, S, H, G, D, C, bounds = case
    generator = torch.Generator().manual_seed(T)
    q, k = (torch.randn(B, n, h, D, generator=generator) for n, h in ((T, H), (S, G)))
    options = {"C": C, "bounds": bounds, "exact": exact, "scale": D**-0.5}
    index, P = reference(q.double(), k.double(), **options)
    found, found_P = triton(q.cuda(), k.cuda(), T, S, **options)
    assert (found.cpu() != index).float().mean() <= 1e-3  # the nearest of ties
    assert (found_P.cpu() - P).norm() <= 1e-3 * P.norm()
