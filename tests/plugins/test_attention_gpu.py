"""GPU backends of attention against the torch backend on the same device: values and gradients."""

import pytest
import torch

from seqarch_attention import Attention

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("backend", ["flash_attn", "flex"])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    "options", [{}, {"window": 64}, {"n_kv_heads": 2}, {"position": "alibi"}, {"position": "alibi", "window": 100}]
)
def test_backend_agrees_with_torch(backend, packed, options):
    dtype = torch.bfloat16
    torch.manual_seed(0)
    with torch.device("cuda"):
        fast = Attention(512, n_heads=8, backend=backend, **options).to(dtype)
        plain = Attention(512, n_heads=8, backend="torch", **options).double()
        x = torch.randn(1, 300, 512, dtype=dtype)
        cu_seqlens = torch.tensor([0, 17, 18, 170, 300], dtype=torch.int32) if packed else None
    if reason := fast.refuses(backend, "cuda", dtype):
        pytest.skip(reason)
    plain.load_state_dict({name: p.double() for name, p in fast.state_dict().items()})
    results = []
    for mixer, inputs in ((fast, x.clone().requires_grad_()), (plain, x.double().requires_grad_())):
        y, _ = mixer(inputs, cu_seqlens=cu_seqlens)
        y.square().sum().backward()
        results.append([y, inputs.grad, *(p.grad for p in mixer.parameters())])
    for ours, theirs in zip(*results, strict=True):
        error = (ours.double() - theirs).norm() / theirs.norm()
        assert error < 3e-2
