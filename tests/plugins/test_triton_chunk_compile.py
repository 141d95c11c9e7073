"""Top-1 Chunk's Triton kernels compile for GPUs that are not here, and fit them."""

import pytest
import torch

pytest.importorskip("triton")

from seqarch_top1.triton_chunk_attention import chunk_attention
from seqarch_top1.triton_decode import triton_decode
from tests.plugins.triton_compile import SHARED, TARGETS, recorded

KERNELS = [
    "own_forward",
    "selected_forward",
    "own_queries_backward",
    "selected_queries_backward",
    "selected_keys_backward",
    "own_keys_backward",
]
SPILLED = {
    ("own_forward", "sm_80", 128, torch.bfloat16): 16,
    ("own_forward", "sm_80", 128, torch.float16): 16,
    ("own_forward", "sm_100", 128, torch.float16): 16,
    ("own_forward", "sm_100", 128, torch.float32): 8,
    ("selected_queries_backward", "sm_80", 64, torch.float32): 24,
    ("own_keys_backward", "sm_80", 64, torch.float32): 8,
    ("attend_token", "sm_100", 128, torch.bfloat16): 8,
}
"""Bytes a thread that may spill: a few words, where ptxas stops at 64 or 128 registers to fit more blocks, and some of
float32's, which is multiplied without tensor cores."""


def launches(monkeypatch, target, D, C, dtype, T=4096, H=8, G=4):
    monkeypatch.setattr(torch.version, "hip", "6.2" if target.startswith("gfx") else None)
    with torch.device("meta"):
        q, k, v = (torch.empty(1, T, h, D, dtype=dtype, requires_grad=True) for h in (H, G, G))
        index = torch.empty(1, H, T, dtype=torch.int32)
        P = torch.empty(1, H, T, requires_grad=True)
        begin = torch.empty(T // C + 1, dtype=torch.int32)
        with recorded() as found:
            o = chunk_attention(q, k, v, index, P, begin=begin, scale=0.1, chunk_size=C, n0=0)
            torch.autograd.grad(o, (q, k, v, P), torch.empty_like(o))
    assert [str(launch) for launch in found] == KERNELS
    return found


def check(found, target, D, dtype):
    for launch in found:
        resources = launch.resources(target)
        assert resources.shared <= SHARED[target], f"{launch} {target}: {resources}"
        assert resources.spilled <= SPILLED.get((str(launch), target, D, dtype), 0), f"{launch} {target}: {resources}"


def test_attention_compiles_for_sm_90(monkeypatch):
    check(launches(monkeypatch, "sm_90", 64, 128, torch.bfloat16), "sm_90", 64, torch.bfloat16)


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("D", "C", "dtype"),
    [
        (64, 128, torch.bfloat16),
        (128, 128, torch.bfloat16),
        (64, 128, torch.float32),
        (128, 128, torch.float32),
        (80, 16, torch.float16),
        (128, 256, torch.float16),
    ],
)
def test_attention_compiles(monkeypatch, target, D, C, dtype):
    check(launches(monkeypatch, target, D, C, dtype), target, D, dtype)


@pytest.mark.parametrize("target", [pytest.param(t, marks=[] if t == "sm_90" else pytest.mark.slow) for t in TARGETS])
def test_decoding_compiles(target):
    S, C, D = 5000, 128, 128
    with torch.device("meta"):
        q = torch.empty(2, 1, 8, D, dtype=torch.bfloat16)
        k, v = (torch.empty(2, 4, 8192, D, dtype=torch.bfloat16)[:, :, :S].transpose(1, 2) for _ in range(2))
        means = torch.empty(2, 4, 64, D)
        with recorded() as found:
            for by in (means, None):
                triton_decode(q, k, v, by, scale=0.1, chunk_size=C)
    assert [str(launch) for launch in found] == ["mean_logits", "attend_token", "exact_logits", "attend_token"]
    check(found[:3], target, D, torch.bfloat16)
