"""The gated RMS norm against its formula, values and gradients."""

import pytest
import torch
import torch.nn.functional as F

from seqarch.ops.gated_norm import GatedRMSNorm, gated_rms_norm


def formula(x, z, w, eps, gate_first):
    u = x * F.silu(z) if gate_first else x
    y = u / (u.pow(2).mean(-1, keepdim=True) + eps).sqrt() * w
    return y if gate_first else y * F.silu(z)


@pytest.mark.parametrize("gate_first", [True, False])
@pytest.mark.parametrize("shape", [(7,), (5, 7), (2, 3, 4, 7)])
def test_values_and_gradients(gate_first, shape):
    g = torch.Generator().manual_seed(0)
    x, z, do = (torch.randn(shape, generator=g, dtype=torch.float64) for _ in range(3))
    w = torch.rand(7, generator=g, dtype=torch.float64)
    results = []
    for function in (gated_rms_norm, formula):
        leaves = [t.clone().requires_grad_() for t in (x, z, w)]
        y = function(*leaves, 1e-2, gate_first=gate_first)
        results.append([y, *torch.autograd.grad(y, leaves, do)])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("gate_first", [True, False])
def test_half_precision_is_wide_inside_and_inputs_stay(gate_first):
    g = torch.Generator().manual_seed(0)
    x, z = (torch.randn(6, 64, generator=g).bfloat16().requires_grad_() for _ in range(2))
    before = x.detach().clone(), z.detach().clone()
    norm = GatedRMSNorm(64, gate_first=gate_first)
    y = norm(x, z)
    assert y.dtype == torch.bfloat16
    want = formula(x.double(), z.double(), norm.weight.double(), norm.eps, gate_first)
    torch.testing.assert_close(y.double(), want, atol=0, rtol=2**-8)
    dx, dz, dw = torch.autograd.grad(y.float().square().sum(), (x, z, norm.weight))
    assert (dx.dtype, dz.dtype, dw.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)
    assert torch.equal(x, before[0])
    assert torch.equal(z, before[1])


def test_the_gain_is_not_decayed():
    assert GatedRMSNorm(8, gate_first=True).weight._no_weight_decay


@pytest.mark.parametrize("gate_first", [True, False])
def test_compiles_to_the_same(gate_first):
    g = torch.Generator().manual_seed(0)
    x, z = torch.randn(2, 5, 16, generator=g), torch.randn(2, 5, 16, generator=g)
    norm = GatedRMSNorm(16, gate_first=gate_first)
    compiled = torch.compile(norm, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, z), norm(x, z))
