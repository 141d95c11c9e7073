"""Top-1 Element's Triton kernels against dense float64: values and gradients, in the interpreter and on a GPU."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch

from tests.interpreter import interpreted
from tests.plugins import top1_reference as reference

TRITON = "seqarch_top1.triton_element:triton_element"
TOKEN = "seqarch_top1.triton_element_decode:triton_element_token"
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 1.5e-2}
"""Relative error of gradients; the interpreter cuts float32 to bfloat16 instead of rounding."""
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@dataclass(frozen=True)
class Case:
    """T queries, the last of S keys (default T), of documents between ``bounds`` (default one).

    ``scale`` is in units of 1/√D; a large one makes softmax nearly one-hot.
    """

    T: int
    S: int | None = None
    B: int = 1
    H: int = 2
    G: int = 1
    D: int = 16
    bounds: tuple[int, ...] | None = None
    scale: float = 1.0

    def __str__(self) -> str:
        return "-".join(f"{n}{v}" for n, v in vars(self).items() if v != getattr(Case, n, None))


SHORT = [
    Case(1),
    Case(5, B=2),
    Case(32, H=1),
    Case(70, B=2, H=2),
    Case(45, H=6, G=2, scale=30.0),
    Case(40, G=2, D=80),
    Case(35, H=1, D=64),
    Case(33, H=1, D=128),
    Case(45, H=1, D=7),
    Case(1, S=33),
    Case(21, S=90, B=2, H=1),
    Case(101, H=1, bounds=(0, 1, 1, 16, 32, 49, 64, 101)),
    Case(140, H=1, bounds=(0, 70, 140)),
]
HALF = [Case(77, B=2, H=4, G=2), Case(64, D=32, scale=30.0), Case(60, S=90, H=1, D=80)]
LONG = [
    Case(300, D=128, H=4, G=2),
    Case(300, D=64, H=3, G=3, B=2),
    Case(250, S=430, H=4, D=64),
    Case(400, D=64, H=4, G=2, bounds=(0, 63, 127, 192, 193, 400)),
    Case(600, H=1, D=32, scale=100.0),
]


def inputs(case: Case, dtype: torch.dtype) -> tuple[dict[str, Any], torch.Tensor]:
    """Arguments of ``triton_element``, and the gradient of the output."""
    generator = torch.Generator().manual_seed(case.T)
    S = case.S or case.T
    shapes = {"q": (case.T, case.H), "k": (S, case.G), "v": (S, case.G), "do": (case.T, case.H)}
    x = {
        n: torch.randn(case.B, *shape, case.D, generator=generator).to(dtype).requires_grad_(n != "do")
        for n, shape in shapes.items()
    }
    do = x.pop("do")
    cu_seqlens = None if case.bounds is None else torch.tensor(case.bounds, dtype=torch.int32)
    return {**x, "scale": case.scale * case.D**-0.5, "cu_seqlens": cu_seqlens}, do


def dense(case: Case, arguments: dict[str, Any], do: torch.Tensor) -> dict[str, torch.Tensor]:
    """The output and all gradients in float64, each document alone, every score written out."""
    leaves = {n: arguments[n].detach().double().requires_grad_() for n in ("q", "k", "v")}
    S = case.S or case.T
    q = torch.cat((leaves["q"].new_zeros(case.B, S - case.T, case.H, case.D), leaves["q"]), 1)
    parts = [
        reference.element(*(x[:, a:b] for x in (q, leaves["k"], leaves["v"])), arguments["scale"])
        for a, b in pairwise(case.bounds or (0, S))
        if a < b
    ]
    o = torch.cat(parts, 1)[:, S - case.T :]
    gradients = torch.autograd.grad(o, list(leaves.values()), do.double())
    return {"o": o.detach(), **dict(zip(leaves, gradients, strict=True))}


def assert_close(case, dtype, results, expected):
    """Values are exact: those of the chosen keys. Rounding of float32's scores, and so of softmax, grows with them."""
    torch.testing.assert_close(results["o"].double().cpu(), expected["o"], atol=0, rtol=0, msg=f"{case} {dtype}: o")
    tolerance = max(TOLERANCE[dtype], 2e-7 * case.scale)
    for name in ("q", "k", "v"):
        error, size = (results[name].double().cpu() - expected[name]).norm(), expected[name].norm()
        # With one key to see, the gradients of q and k are 0.
        assert error <= tolerance * max(size, 1e-2), f"{case} {dtype} {name}: relative error {error / size:.1e}"


def check_interpreted(case, dtype):
    arguments, do = inputs(case, dtype)
    (o,), gradients = interpreted(TRITON, arguments, [do])
    assert o.dtype == dtype
    assert all(gradients[n].dtype == dtype for n in ("q", "k", "v"))
    assert_close(case, dtype, {"o": o, **gradients}, dense(case, arguments, do))


def test_float32():
    """One test, so that one process serves all cases."""
    for case in SHORT:
        check_interpreted(case, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype):
    for case in HALF:
        check_interpreted(case, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("case", [*SHORT, *LONG], ids=str)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_everything(case, dtype):
    check_interpreted(case, dtype)


def test_without_gradient():
    """Another variant of the kernel, which sums no weights."""
    for case in (Case(77, B=2, H=4, G=2), Case(101, bounds=(0, 1, 1, 16, 32, 49, 64, 101))):
        arguments, do = inputs(case, torch.float32)
        expected = dense(case, arguments, do)["o"]
        (o,), _ = interpreted(
            TRITON, {n: t.detach() if isinstance(t, torch.Tensor) else t for n, t in arguments.items()}
        )
        assert torch.equal(o.double(), expected)


def test_rows_need_not_be_contiguous():
    """Heads before tokens, as in a cache, and values whose last dimension is not the innermost."""
    case = Case(40, S=60, H=4, G=2)
    arguments, do = inputs(case, torch.float32)
    expected = dense(case, arguments, do)
    moved = dict(arguments)
    for name in ("q", "k"):
        moved[name] = arguments[name].detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    moved["v"] = arguments["v"].detach().mT.contiguous().mT.requires_grad_()
    (o,), gradients = interpreted(TRITON, moved, [do.transpose(1, 2).contiguous().transpose(1, 2)])
    assert_close(case, torch.float32, {"o": o, **gradients}, expected)


def periodic(dtype):
    """Keys that repeat with period 5, whose products with q are exact, and what each query then chooses."""
    generator = torch.Generator().manual_seed(0)
    k = torch.randint(-3, 4, (1, 5, 1, 16), generator=generator).to(dtype).repeat(1, 30, 1, 1)
    q = torch.randint(-3, 4, (1, 150, 2, 16), generator=generator).to(dtype)
    q[:, ::3] = 0  # equal scores throughout
    v = torch.randn(1, 150, 1, 16, generator=generator).to(dtype)
    scores = torch.einsum("bthd,bjgd->bhtj", q.long(), k.long())[0].tolist()
    chosen = [[max(range(t + 1), key=lambda j: (s[j], -j)) for t, s in enumerate(head)] for head in scores]
    return q, k, v, torch.tensor(chosen)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_smallest_index_wins_a_tie(dtype):
    """Within a block of keys and across blocks; also what its value gets of the gradient."""
    q, k, v, chosen = periodic(dtype)
    do = torch.randint(-4, 5, q.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    (o,), gradients = interpreted(TRITON, {"q": q, "k": k, "v": v.requires_grad_(), "scale": 0.5}, [do])
    assert torch.equal(o[0].transpose(0, 1), v.detach()[0, :, 0][chosen])
    dv = torch.zeros(150, 16).index_add_(0, chosen.flatten(), do[0].transpose(0, 1).reshape(-1, 16).float())
    assert torch.equal(gradients["v"][0, :, 0].float(), dv)


def token(S, H, G, D, dtype):
    """Arguments of ``triton_element_token``, as views of a cache with room for more, and float64's answer."""
    generator = torch.Generator().manual_seed(S)
    q = torch.randn(2, 1, H, D, generator=generator).to(dtype)
    k, v = torch.randn(2, 2, G, S + 7, D, generator=generator).to(dtype)[:, :, :, :S].transpose(2, 3)
    padded = torch.cat((q.new_zeros(2, S - 1, H, D), q), 1)
    return {"q": q, "k": k, "v": v}, reference.element(*(t.double() for t in (padded, k, v)), 1.0)[:, -1:]


TOKENS = [(1, 2, 1, 16), (33, 4, 2, 80), (256, 1, 1, 64), (300, 2, 1, 128)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decoding(dtype):
    for shape in TOKENS:
        arguments, expected = token(*shape, dtype)
        (o,), _ = interpreted(TOKEN, arguments)
        assert o.dtype == dtype
        assert torch.equal(o.double(), expected), shape


@pytest.mark.parametrize(
    ("S", "D", "places"),
    [
        (130 * 256 + 3, 16, ((255, 256, 129 * 256), (128 * 256, 128 * 256 + 1), (130 * 256 + 2,))),
        (200, 128, ((40, 41, 100), (31, 32), (0, 199))),
    ],
)
def test_decoding_takes_the_first_of_equals(S, D, places):
    """Within blocks of a span and across them, across spans and blocks of spans; a head for each of ``places``."""
    k = torch.zeros(1, S, 1, D)
    for head, best in enumerate(places):
        k[:, list(best), :, head] = 1
    q = torch.eye(3, D)[None, None]
    v = torch.arange(S).float()[None, :, None, None].expand(-1, -1, -1, D).contiguous()
    (o,), _ = interpreted(TOKEN, {"q": q, "k": k, "v": v})
    assert o[0, 0, :, 0].tolist() == [best[0] for best in places]


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("case", [*SHORT, *LONG, Case(5000, H=8, G=2, D=128)], ids=str)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_on_a_gpu(case, dtype):
    """A choice between two nearly equal keys may differ, which changes a row of values."""
    from seqarch_top1.triton_element import triton_element

    arguments, do = inputs(case, dtype)
    expected = dense(case, arguments, do)
    results = []
    for _ in range(2):
        moved = {n: t.detach().cuda() if isinstance(t, torch.Tensor) else t for n, t in arguments.items()}
        leaves = [moved[n].requires_grad_() for n in ("q", "k", "v")]
        o = triton_element(**moved)
        results.append([o, *torch.autograd.grad(o, leaves, do.cuda())])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))  # deterministic
    o, *gradients = (t.cpu().double() for t in results[0])
    wrong = (o != expected["o"]).any(-1)
    assert wrong.float().mean() <= 1e-3
    tolerance = max(TOLERANCE[dtype], 1e-5, 1e-6 * case.scale)
    for name, found in zip(("q", "k", "v"), gradients, strict=True):
        allowed = tolerance + (0.0 if name == "k" else 2 * float(wrong.float().mean().sqrt()))
        assert (found - expected[name]).norm() <= allowed * max(expected[name].norm(), 1e-2), name


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_ties_on_a_gpu(dtype):
    from seqarch_top1.triton_element import triton_element
    from seqarch_top1.triton_element_decode import triton_element_token

    q, k, v, chosen = periodic(dtype)
    o = triton_element(q.cuda(), k.cuda(), v.cuda(), scale=0.5)
    assert torch.equal(o.cpu()[0].transpose(0, 1), v[0, :, 0][chosen])
    last = triton_element_token(q[:, -1:].cuda(), k.cuda(), v.cuda())
    assert torch.equal(last.cpu()[0, 0], v[0, :, 0][chosen[:, -1]])


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("shape", [*TOKENS, (100_000, 8, 2, 128)], ids=str)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_decoding_on_a_gpu(shape, dtype):
    from seqarch_top1.triton_element_decode import triton_element_token

    arguments, expected = token(*shape, dtype)
    o = triton_element_token(**{n: t.cuda() for n, t in arguments.items()})
    assert torch.equal(o.cpu().double(), expected)
