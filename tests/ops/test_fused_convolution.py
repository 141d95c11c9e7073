"""causal-conv1d's kernel, by a stand-in with its signature that checks what the CUDA code checks, against torch."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from seqarch.ops import convolution, fused_convolution
from seqarch.ops.convolution import ShortConvolution

calls = []


def causal_conv1d_fn(
    x,
    weight,
    bias=None,
    seq_idx=None,
    initial_states=None,
    return_final_states=False,
    final_states_out=None,
    activation=None,
):
    """As causal-conv1d 1.6.1 documents it; x ``[B, C, T]``, weight ``[C, K]``, initial_states ``[B, C, K-1]``."""
    B, C, T = x.shape
    K = weight.shape[1]
    assert x.stride(1) == 1
    assert C % 8 == x.stride(0) % 8 == x.stride(2) % 8 == 0
    assert bias is None or bias.dtype == weight.dtype
    assert activation == "silu"
    assert not return_final_states
    assert final_states_out is None
    before = x.new_zeros(B, C, K - 1)
    if initial_states is not None:
        assert seq_idx is None
        assert initial_states.dtype == x.dtype
        assert initial_states.stride(1) == 1
        before = initial_states
    padded = torch.cat((before, x), 2)
    same = torch.ones(B, T, K, dtype=torch.bool)
    if seq_idx is not None:
        assert seq_idx.dtype == torch.int32
        assert seq_idx.shape == (B, T)
        assert seq_idx.is_contiguous()
        # The kernel reads to the end of its last chunk of 64 tokens.
        assert seq_idx.untyped_storage().nbytes() // 4 >= -(-T // 64) * 64
        ids = F.pad(seq_idx, (K - 1, 0), value=-1)
        same = ids.unfold(1, K, 1) == seq_idx[:, :, None]
    windows = padded.unfold(2, K, 1) * same[:, None]
    z = (windows * weight[:, None]).sum(-1)
    calls.append(x)
    return F.silu(z if bias is None else z + bias[:, None]).to(x.dtype)


@pytest.fixture(autouse=True)
def kernel(monkeypatch):
    module = ModuleType("causal_conv1d")
    module.causal_conv1d_fn = causal_conv1d_fn
    monkeypatch.setitem(sys.modules, "causal_conv1d", module)
    monkeypatch.setattr(convolution, "has_kernel", lambda x, kernel_size: True)
    calls.clear()


@pytest.mark.parametrize("case", ["plain", "packed", "state"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kernel_size", [2, 4])
@pytest.mark.parametrize("strides", ["contiguous", "part", "odd"])
def test_agrees_with_torch(case, bias, kernel_size, strides):
    torch.manual_seed(0)
    conv = ShortConvolution(16, kernel_size, bias=bias)
    width = {"contiguous": 16, "part": 32, "odd": 37}[strides]
    B = 1 if case == "packed" else 2
    x = torch.randn(B, 70, width)[..., :16].requires_grad_()
    options = {}
    if case == "packed":
        options["cu_seqlens"] = torch.tensor([0, 1, 9, 9, 70], dtype=torch.int32)
    elif case == "state":
        options["state"] = torch.randn(B, kernel_size - 1, 16, requires_grad=True)
    leaves = [x, *conv.parameters(), *([options["state"]] if case == "state" else [])]
    dy = torch.randn(B, 70, 16)
    results = []
    for fused in (True, False):
        y, state = conv(x, fused=fused, **options)
        results.append([y, *torch.autograd.grad(y, leaves, dy), *([] if state is None else [state])])
    assert len(calls) == 1
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def test_a_state_of_another_dtype_is_read_as_x():
    conv = ShortConvolution(8).bfloat16()
    x = torch.randn(1, 5, 8).bfloat16()
    y, state = conv(x, state=torch.randn(1, 3, 8), fused=True)
    assert (y.dtype, state.dtype, len(calls)) == (torch.bfloat16, torch.float32, 1)


def test_one_token_and_compilers_stay_with_torch():
    conv = ShortConvolution(8)
    conv(torch.randn(1, 1, 8), state=conv.init_state(1), fused=True)
    compiled = torch.compile(lambda x: conv(x, fused=True)[0], backend="eager", fullgraph=True)
    x = torch.randn(1, 5, 8)
    torch.testing.assert_close(compiled(x), conv(x)[0])
    assert not calls


def test_what_the_kernel_can_serve(monkeypatch):
    def served(kernel_size=4, dtype=torch.bfloat16, channels=64, is_cuda=True):
        x = SimpleNamespace(is_cuda=is_cuda, dtype=dtype, shape=(1, 5, channels))
        return fused_convolution.has_kernel(x, kernel_size)

    monkeypatch.setattr(fused_convolution, "_installed", lambda: True)
    assert served()
    assert served(dtype=torch.float32, kernel_size=2)
    assert not served(dtype=torch.float64)
    assert not served(kernel_size=5)
    assert not served(channels=60)
    assert not served(is_cuda=False)
    monkeypatch.setattr(fused_convolution, "_installed", lambda: False)
    assert not served()
