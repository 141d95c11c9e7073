"""Top-1 Chunk on its Triton kernels as a whole: selection and attention, against the formula in float64."""

from itertools import pairwise

import pytest
import torch

from tests.interpreter import interpreted
from tests.plugins import top1_reference

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
