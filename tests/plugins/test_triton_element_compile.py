"""Top-1 Element's Triton kernels compile for GPUs that are not here, and fit them."""

import pytest
import torch

pytest.importorskip("triton")

from seqarch_top1.triton_element import triton_element
from seqarch_top1.triton_element_decode import triton_element_token
from tests.plugins.triton_compile import SHARED, TARGETS, recorded

FORWARD, *BACKWARD = [
    "element_forward",
    "element_queries_backward",
    "element_keys_backward",
    "element_values_backward",
]
WIDE = [(128, torch.bfloat16), (128, torch.float16), (80, torch.float16)]
SPILLED = {
    ("element_keys_backward", "sm_80", 64, torch.float32): 16,
    ("element_forward", "sm_90", 64, torch.float32): 8,
    ("element_forward", "sm_100", 64, torch.float32): 8,
    **{("element_keys_backward", "sm_80", D, dtype): 40 for D, dtype in WIDE},
    **{("element_keys_backward", "sm_100", D, dtype): 56 for D, dtype in WIDE},
}
"""Bytes a thread that may spill, most of them for packed documents only."""
SM_90 = [pytest.param(t, marks=[] if t == "sm_90" else pytest.mark.slow) for t in TARGETS]
SHAPES = [(64, torch.bfloat16), *WIDE, (64, torch.float32), (128, torch.float32)]


def launches(monkeypatch, target, D, dtype, packed=False, gradient=True, T=4096, H=8, G=4):
    monkeypatch.setattr(torch.version, "hip", "6.2" if target.startswith("gfx") else None)
    with torch.device("meta"):
        q, k, v = (torch.empty(1, T, h, D, dtype=dtype, requires_grad=gradient) for h in (H, G, G))
        cu_seqlens = torch.empty(5, dtype=torch.int32) if packed else None
        with recorded() as found:
            o = triton_element(q, k, v, scale=0.1, cu_seqlens=cu_seqlens)
            if gradient:
                torch.autograd.grad(o, (q, k, v), torch.empty_like(o))
    assert [str(launch) for launch in found] == [FORWARD, *(BACKWARD if gradient else [])]
    return found


def check(found, target, D, dtype):
    for launch in found:
        resources = launch.resources(target)
        assert resources.shared <= SHARED[target], f"{launch} {target}: {resources}"
        assert resources.spilled <= SPILLED.get((str(launch), target, D, dtype), 0), f"{launch} {target}: {resources}"


def test_compiles_for_sm_90(monkeypatch):
    check(launches(monkeypatch, "sm_90", 64, torch.bfloat16), "sm_90", 64, torch.bfloat16)


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("D", "dtype"), SHAPES)
@pytest.mark.parametrize("packed", [False, True], ids=["whole", "packed"])
def test_compiles(monkeypatch, target, D, dtype, packed):
    check(launches(monkeypatch, target, D, dtype, packed), target, D, dtype)


@pytest.mark.parametrize("target", SM_90)
def test_compiles_without_gradient(monkeypatch, target):
    check(launches(monkeypatch, target, 128, torch.bfloat16, gradient=False), target, 128, torch.bfloat16)


@pytest.mark.parametrize("target", SM_90)
def test_decoding_compiles(target):
    with torch.device("meta"):
        q = torch.empty(2, 1, 8, 128, dtype=torch.bfloat16)
        k, v = (torch.empty(2, 4, 8192, 128, dtype=torch.bfloat16)[:, :, :5000].transpose(1, 2) for _ in range(2))
        with recorded() as found:
            triton_element_token(q, k, v)
    assert [str(launch) for launch in found] == ["best_of_spans", "fetch_best"]
    check(found, target, 128, torch.bfloat16)
