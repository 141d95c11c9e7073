"""Top-1 Chunk's Triton kernels against dense float64: values and gradients, in the interpreter and on a GPU."""

import pytest
import torch

from seqarch_top1.decode import decode
from tests.interpreter import interpreted
from tests.plugins import triton_chunk_cases as cases
from tests.plugins.triton_chunk_cases import ATTENTION, LONG, Case

TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 1.5e-2}
"""Relative error; the interpreter cuts float32 to bfloat16 instead of rounding."""


def assert_close(case, dtype, results, expected):
    for name, value in expected.items():
        error, size = (results[name].double().cpu() - value).norm(), value.norm()
        assert error <= TOLERANCE[dtype] * size, f"{case} {dtype} {name}: relative error {error / size:.1e}"


def check_interpreted(case, dtype):
    arguments, do = cases.inputs(case, dtype)
    expected = cases.dense(case, arguments, do)
    (o,), gradients = interpreted("seqarch_top1.triton_chunk_attention:chunk_attention", arguments, [do])
    assert o.dtype == dtype
    assert_close(case, dtype, {"o": o, **gradients}, expected)


def test_attention():
    """One test, so that one process serves all cases."""
    for case in ATTENTION:
        check_interpreted(case, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_attention_half_precision(dtype):
    check_interpreted(Case(53, H=4, G=2, D=32), dtype)
    check_interpreted(Case(70, C=32, D=80), dtype)


@pytest.mark.slow
@pytest.mark.parametrize("case", LONG, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_attention_at_length(case, dtype):
    check_interpreted(case, dtype)


def token(S, H, G, D, C, exact, dtype):
    """Arguments of ``triton_decode``, as views of a cache with room for more, and float64's answer."""
    generator = torch.Generator().manual_seed(S)
    q = torch.randn(2, 1, H, D, generator=generator).to(dtype)
    k, v = torch.randn(2, 2, G, S + 7, D, generator=generator).to(dtype)[:, :, :, :S].transpose(2, 3)
    n = S // C
    means = torch.randn(2, G, n + 2, D, generator=generator)
    means[:, :, :n] = k[:, : n * C].float().unflatten(1, (n, C)).mean(2).transpose(1, 2)
    arguments = {"q": q, "k": k, "v": v, "means": None if exact else means, "scale": D**-0.5, "chunk_size": C}
    wide = {n: t.double() if isinstance(t, torch.Tensor) else t for n, t in arguments.items()}
    return arguments, decode(**wide, local=True, element=False)


TOKENS = [(1, 2, 1, 16, 16), (16, 2, 1, 16, 16), (17, 4, 2, 16, 16), (100, 4, 2, 80, 16), (200, 2, 2, 64, 64)]


@pytest.mark.parametrize("exact", [False, True])
def test_decoding(exact):
    for shape in [*TOKENS, (1300, 1, 1, 16, 16)] if not exact else TOKENS:  # two blocks of mean keys
        for dtype in (torch.float32, torch.bfloat16):
            arguments, expected = token(*shape, exact, dtype)
            (o,), _ = interpreted("seqarch_top1.triton_decode:triton_decode", arguments)
            assert o.dtype == torch.float32
            assert (o - expected).norm() <= 2e-6 * expected.norm(), (shape, dtype)


def test_decoding_takes_the_first_of_equal_chunks():
    """All chunks alike but for their values."""
    arguments, _ = token(65, 2, 1, 16, 16, exact=True, dtype=torch.float32)
    k, v = arguments["k"].contiguous(), arguments["v"].contiguous()
    k[:, 16:64] = k[:, :16].repeat(1, 3, 1, 1)
    wide = {n: t.double() if isinstance(t, torch.Tensor) else t for n, t in {**arguments, "k": k, "v": v}.items()}
    first = [torch.cat((wide[n][:, :16], wide[n][:, 64:]), 1) for n in ("k", "v")]
    expected = decode(**{**wide, "k": first[0], "v": first[1]}, local=True, element=False)
    (o,), _ = interpreted("seqarch_top1.triton_decode:triton_decode", {**arguments, "k": k, "v": v})
    assert (o - expected).norm() <= 2e-6 * expected.norm()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("shape", [*TOKENS, (100_000, 8, 2, 128, 128)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_decoding_on_a_gpu(shape, exact, dtype):
    from seqarch_top1.triton_decode import triton_decode

    arguments, expected = token(*shape, exact, dtype)
    o = triton_decode(**{n: t.cuda() if isinstance(t, torch.Tensor) else t for n, t in arguments.items()})
    assert (o.cpu() - expected).norm() <= 1e-5 * expected.norm()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("case", [*ATTENTION, *LONG, Case(5000, H=8, G=2, C=128, D=128)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_attention_on_a_gpu(case, dtype):
    from seqarch_top1.triton_chunk_attention import chunk_attention

    arguments, do = cases.inputs(case, dtype)
    expected = cases.dense(case, arguments, do)
    results = []
    for _ in range(2):
        moved = {n: t.detach().cuda() if isinstance(t, torch.Tensor) else t for n, t in arguments.items()}
        leaves = {n: moved[n].requires_grad_() for n in ("q", "k", "v", "P")}
        o = chunk_attention(**moved)
        gradients = torch.autograd.grad(o, list(leaves.values()), do.cuda())
        results.append({"o": o, **dict(zip(leaves, gradients, strict=True))})
    assert_close(case, dtype, results[0], expected)
    assert all(torch.equal(results[0][n], results[1][n]) for n in expected)  # deterministic
