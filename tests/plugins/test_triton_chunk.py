"""Top-1 Chunk's Triton kernels against dense float64: values and gradients, in the interpreter and on a GPU."""

import pytest
import torch

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
