"""Top-1 Element and Top-1 Chunk on their Triton kernels, against the torch backend: in the interpreter and on a GPU."""

from functools import partial
from itertools import pairwise

import pytest
import torch

from seqarch_top1 import Top1Chunk, Top1Element
from tests.interpreter import interpreted

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
MIXERS = {
    "element": Top1Element,
    "exact": partial(Top1Chunk, selection="exact"),
    "approx": partial(Top1Chunk, selection="approx"),
}
SMALL_CHUNKS = {"element": {}, "exact": {"chunk_size": 16}, "approx": {"chunk_size": 16}}
BOUNDS = [0, 1, 16, 33, 45]


def assert_close(results, expected, tolerance=2e-6):
    for ours, theirs in zip(results, expected, strict=True):
        assert (ours - theirs).norm() <= tolerance * theirs.norm()


def run(backend: str, name: str, x: torch.Tensor, cu_seqlens: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """A mixer, always the same, on ``backend`` wherever it is: in one pass, packed, in parts and token by token."""
    torch.manual_seed(0)
    mixer = MIXERS[name](32, n_heads=4, n_kv_heads=2, head_dim=16, **SMALL_CHUNKS[name])
    mixer.choose_backend = lambda _: backend
    whole, _ = mixer(x)
    packed, _ = mixer(x, cu_seqlens=cu_seqlens)
    parts, state = [], mixer.init_state(1, x.shape[1])
    T = x.shape[1]
    for a, b in pairwise((0, 20, T - 2, T - 1, T)):
        with torch.no_grad():
            y, state = mixer(x[:, a:b], state=state)
        parts.append(y)
    last, _ = mixer(x[:, -1:], state={**state, "pos": state["pos"] - 1})  # a single token with a gradient
    return whole, packed, torch.cat(parts, 1), last


@pytest.mark.parametrize("name", MIXERS)
def test_in_the_interpreter(name):
    """Training, packed documents, prefill in parts and decoding; the gradient of all that has one."""
    x = torch.randn(1, 45, 32, generator=torch.Generator().manual_seed(0)).requires_grad_()
    kwargs = {"name": name, "x": x, "cu_seqlens": torch.tensor(BOUNDS, dtype=torch.int32)}
    dy = [torch.randn(1, T, 32, generator=torch.Generator().manual_seed(T)) for T in (45, 45, 45, 1)]
    dy[2] = None
    ours, gradients = interpreted("tests.plugins.test_triton_mixers:run", {"backend": "triton", **kwargs}, dy)
    theirs = run("torch", **kwargs)
    assert_close(ours, theirs)
    (dx,) = torch.autograd.grad([y for y in theirs if y.requires_grad], x, [g for g in dy if g is not None])
    assert_close([gradients["x"]], [dx])


@pytest.mark.parametrize(
    ("name", "options", "dtype", "reason"),
    [
        ("exact", {"chunk_size": 100}, torch.float32, "power of two from 16 to 256, not 100"),
        ("exact", {"chunk_size": 8}, torch.float32, "power of two from 16 to 256, not 8"),
        ("exact", {"chunk_size": 512}, torch.float32, "power of two from 16 to 256, not 512"),
        ("exact", {"local": False}, torch.float32, "needs local: true"),
        ("exact", {"select": "element"}, torch.float32, "needs select: chunk"),
        ("exact", {"head_dim": 256}, torch.float32, "head_dim up to 128, not 256"),
        ("exact", {}, torch.float64, "not torch.float64"),
        ("element", {"head_dim": 256}, torch.float32, "head_dim up to 128, not 256"),
        ("element", {}, torch.float64, "not torch.float64"),
    ],
)
def test_refuses(name, options, dtype, reason):
    pytest.importorskip("triton")
    mixer = MIXERS[name](64, n_heads=2, **options)
    refusal = mixer.refuses("triton", "cuda", dtype)
    assert refusal is not None
    assert refusal.endswith(reason)
    with pytest.raises(ValueError, match="backend='triton' cannot be used: needs a cuda device"):
        MIXERS[name](64, n_heads=2, backend="triton", **options)(torch.zeros(1, 5, 64))


@pytest.mark.parametrize("name", MIXERS)
def test_auto_takes_triton_where_it_can(name):
    pytest.importorskip("triton")
    mixer = MIXERS[name](64, n_heads=2)

    def chosen(device_type, dtype):
        return next(b.name for b in mixer.backends if mixer.refuses(b.name, device_type, dtype) is None)

    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        assert chosen("cuda", dtype) == "triton"
        assert chosen("cpu", dtype) == "torch"
    assert chosen("cuda", torch.float64) == "torch"
    assert mixer.choose_backend(torch.zeros(1, 5, 64)) == "torch"


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("name", MIXERS)
@pytest.mark.parametrize("bounds", [[0, 3000], [0, 1, 128, 384, 513, 3000]], ids=["whole", "packed"])
def test_on_a_gpu(name, bounds):
    """float32, so that both backends select alike nearly everywhere; values, and gradients of everything."""
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32, device="cuda") if len(bounds) > 2 else None
    torch.manual_seed(0)
    x = torch.randn(1, bounds[-1], 256, device="cuda")
    results = []
    for backend in ("triton", "torch"):
        torch.manual_seed(0)
        mixer = MIXERS[name](256, n_heads=8, n_kv_heads=2, backend=backend).cuda()
        inputs = x.clone().requires_grad_()
        y, _ = mixer(inputs, cu_seqlens=cu_seqlens)
        y.square().sum().backward()
        results.append([y, inputs.grad, *(p.grad for p in mixer.parameters())])
    assert_close(*results, tolerance=1e-2)
