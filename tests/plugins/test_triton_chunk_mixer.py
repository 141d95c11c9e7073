"""Top-1 Chunk on its Triton kernels as a whole: selection and attention, in the interpreter and on a GPU."""

from itertools import pairwise

import pytest
import torch

from seqarch_top1 import Top1Chunk
from tests.interpreter import interpreted
from tests.plugins import top1_reference
from tests.plugins.triton_chunk_cases import run_mixer

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
SELECTIONS = {"exact": True, "approx": False}
BOUNDS = [0, 1, 16, 32, 49, 70]


def arguments(T, H=4, G=2, D=16, B=1):
    generator = torch.Generator().manual_seed(T)
    return {
        n: torch.randn(B, T, h, D, generator=generator).requires_grad_() for n, h in (("q", H), ("k", G), ("v", G))
    }  # fmt: skip


def reference(arguments, do, selection, bounds, C=16):
    """Each document alone, in float64."""
    leaves = {n: t.detach().double().requires_grad_() for n, t in arguments.items()}
    o = torch.cat(
        [
            top1_reference.chunk(*(t[:, a:b] for t in leaves.values()), 0.25, C, selection)[0]
            for a, b in pairwise(bounds)
        ],
        dim=1,
    )
    return o, dict(zip(leaves, torch.autograd.grad(o, list(leaves.values()), do.double()), strict=True))


def assert_close(results, expected, tolerance=2e-6):
    for ours, theirs in zip(results, expected, strict=True):
        assert (ours - theirs).norm() <= tolerance * theirs.norm()


@pytest.mark.parametrize("selection", SELECTIONS)
@pytest.mark.parametrize("bounds", [[0, 70], BOUNDS], ids=["whole", "packed"])
def test_values_and_gradients(selection, bounds):
    kwargs = arguments(70)
    do = torch.randn(kwargs["q"].shape, generator=torch.Generator().manual_seed(1))
    o, gradients = reference(kwargs, do, selection, bounds)
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32) if len(bounds) > 2 else None
    options = {"scale": 0.25, "chunk_size": 16, "exact": SELECTIONS[selection], "cu_seqlens": cu_seqlens}
    (ours,), ours_gradients = interpreted("seqarch_top1.triton_chunk:triton_chunk", {**kwargs, **options}, [do])
    assert_close([ours], [o])
    assert_close([ours_gradients[n] for n in gradients], list(gradients.values()))


@pytest.mark.parametrize("selection", SELECTIONS)
def test_first_of_equal_chunks(selection):
    """Chunks 1 and 2 hold the same keys, which all queries like best, and different values."""
    kwargs = {n: t.detach() for n, t in arguments(64, H=1, G=1).items()}
    kwargs["q"][..., 0] = 4
    kwargs["k"][:, 16:32, :, 0] = 4
    kwargs["k"][:, 32:48] = kwargs["k"][:, 16:32]
    options = {"scale": 0.25, "chunk_size": 16, "exact": SELECTIONS[selection]}
    (o,), _ = interpreted("seqarch_top1.triton_chunk:triton_chunk", {**kwargs, **options})
    expected, chosen = top1_reference.chunk(*(t.double() for t in kwargs.values()), 0.25, 16, selection)
    assert (chosen[..., 48:] == 1).all()
    assert_close([o], [expected])


@pytest.mark.parametrize("selection", SELECTIONS)
def test_mixer(selection):
    """Training, packed documents, prefill in parts and decoding, against the torch backend."""
    kwargs = {
        "exact": SELECTIONS[selection],
        "x": torch.randn(1, 70, 32, generator=torch.Generator().manual_seed(0)),
        "cu_seqlens": torch.tensor(BOUNDS, dtype=torch.int32),
    }
    ours, _ = interpreted("tests.plugins.triton_chunk_cases:run_mixer", {"backend": "triton", **kwargs})
    assert_close(ours, run_mixer("torch", **kwargs))


@pytest.mark.parametrize(
    ("options", "dtype", "reason"),
    [
        ({"chunk_size": 100}, torch.float32, "power of two from 16 to 256, not 100"),
        ({"chunk_size": 8}, torch.float32, "power of two from 16 to 256, not 8"),
        ({"chunk_size": 512}, torch.float32, "power of two from 16 to 256, not 512"),
        ({"local": False}, torch.float32, "needs local: true"),
        ({"select": "element"}, torch.float32, "needs select: chunk"),
        ({"head_dim": 256}, torch.float32, "head_dim up to 128, not 256"),
        ({}, torch.float64, "not torch.float64"),
    ],
)
def test_refuses(options, dtype, reason):
    pytest.importorskip("triton")
    assert Top1Chunk(64, n_heads=2).refuses("triton", "cuda", torch.float32) is None
    refusal = Top1Chunk(64, n_heads=2, **options).refuses("triton", "cuda", dtype)
    assert refusal is not None
    assert refusal.endswith(reason)
    assert "needs a cuda device" in (Top1Chunk(64, n_heads=2).refuses("triton", "cpu", torch.float32) or "")


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("selection", SELECTIONS)
@pytest.mark.parametrize("bounds", [[0, 3000], [0, 1, 128, 384, 513, 3000]], ids=["whole", "packed"])
def test_mixer_on_a_gpu(selection, bounds):
    """float32, so that both backends select alike nearly everywhere; values, and gradients of everything."""
    torch.manual_seed(0)
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32, device="cuda") if len(bounds) > 2 else None
    x = torch.randn(1, bounds[-1], 256, device="cuda")
    results = []
    for backend in ("triton", "torch"):
        torch.manual_seed(0)
        mixer = Top1Chunk(256, n_heads=8, n_kv_heads=2, selection=selection, backend=backend).cuda()
        inputs = x.clone().requires_grad_()
        y, _ = mixer(inputs, cu_seqlens=cu_seqlens)
        y.square().sum().backward()
        results.append([y, inputs.grad, *(p.grad for p in mixer.parameters())])
    assert_close(*results, tolerance=1e-2)
