"""GPU backends of the linear-time mixers against the torch backend in float64 on the same device.

Values and gradients, also of packed documents, of a sequence in two calls, and of a prefill with single steps after it.
"""

from functools import partial

import pytest
import torch

from seqarch.mixer import TORCH
from seqarch.ops.convolution import ShortConvolution
from seqarch.testing.backends import compare_backends
from seqarch.testing.compare import relative_rms
from seqarch.testing.subject import Subject, gradients
from seqarch_deltanet import DeltaNet, GatedDeltaNet
from seqarch_mamba import Mamba1, Mamba2
from seqarch_rwkv import RWKV5, RWKV6, RWKV7

D_MODEL, T = 256, 150
TENSOR_CORES = 5e-3  # float32 kernels round their factors to TF32

CONFIGURATIONS = {
    "mamba1": Mamba1,
    "mamba1-shared": partial(Mamba1, decay="shared"),
    "mamba1-none": partial(Mamba1, decay="none"),
    "mamba2": Mamba2,
    "mamba2-shared": partial(Mamba2, decay="shared"),
    "mamba2-none": partial(Mamba2, decay="none"),
    "mamba2-groups": partial(Mamba2, n_groups=2, head_dim=32, chunk_size=128),
    "rwkv5": RWKV5,
    "rwkv6": RWKV6,
    "rwkv7-first": RWKV7,
    "rwkv7-later": partial(RWKV7, layer_idx=1, n_layers=2),
    "deltanet": DeltaNet,
    "deltanet-gate": partial(DeltaNet, gate=True, conv=False),
    "gated": GatedDeltaNet,
    "gated-grouped": partial(GatedDeltaNet, n_heads=2, n_v_heads=4, head_dim=64),
}


@pytest.fixture
def device():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return torch.device("cuda")


def on_every_backend(test):
    """One test for each configuration and GPU backend."""
    cases = [
        pytest.param(factory, backend.name, id=f"{name}-{backend.name}")
        for name, factory in CONFIGURATIONS.items()
        for backend in getattr(factory, "func", factory).backends
        if backend != TORCH
    ]
    return pytest.mark.gpu(pytest.mark.parametrize(("factory", "backend"), cases)(test))


def subject_of(factory, backend, device, dtype):
    """Skips where the backend cannot be used, with its reason."""
    subject = Subject(partial(factory, backend=backend), d_model=D_MODEL)
    if reason := subject.fresh().refuses(backend, device.type, dtype):
        pytest.skip(reason)
    return subject


def compare_alone_and_packed(factory, backend, device):
    (found,) = (c for c in compare_backends(factory, device, d_model=D_MODEL) if c.backend == backend)
    if found.dtype is None:
        pytest.skip(found.reason)
    assert not found.wrong, found


def in_pieces(stack, x, lengths):
    """The output of successive calls, the state passed along."""
    state = [{n: t.to(x.device) for n, t in s.items()} for s in stack.init_state(len(x), x.shape[1], x.dtype)]
    out = []
    for piece in x.split(lengths, dim=1):
        y, state = stack(piece, state=state)
        out.append(y)
    return torch.cat(out, dim=1)


def compare_in_pieces(factory, backend, device, dtype, lengths, with_gradients):
    subject = subject_of(factory, backend, device, dtype)
    fast, exact = subject.build(dtype), Subject(partial(factory, backend="torch"), d_model=D_MODEL).build(torch.float64)
    exact.load_state_dict(fast.state_dict())
    x, dy = (subject.noise(2, sum(lengths), dtype=torch.bfloat16, seed=s).to(device) for s in (2, 4))
    results = []
    for stack, wide, pieces in ((fast, dtype, lengths), (exact, torch.float64, [sum(lengths)])):
        leaf = x.to(wide).requires_grad_()
        stack.to(device)
        with torch.set_grad_enabled(with_gradients):
            y = in_pieces(stack, leaf, pieces)
        results.append([y, *(gradients(stack, y, dy.to(wide), leaf).values() if with_gradients else ())])
    allowed = max(subject.tags.tolerances[dtype], TENSOR_CORES if device.type == "cuda" else 0.0)
    (y, *found), (expected, *wanted) = results
    assert relative_rms(y, expected) < allowed
    # As compare_backends: those of decays are sums over all tokens that largely cancel.
    largest = max((float(g.norm()) for g in wanted), default=0.0)
    for a, b in zip(found, wanted, strict=True):
        assert (a.double() - b).norm() < 10 * allowed * max(float(b.norm()), 1e-3 * largest)


@on_every_backend
def test_whole_and_packed_sequences(factory, backend, device):
    compare_alone_and_packed(factory, backend, device)


@on_every_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_calls(factory, backend, device, dtype):
    compare_in_pieces(factory, backend, device, dtype, [70, T - 70], with_gradients=True)


@on_every_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decoding(factory, backend, device, dtype):
    compare_in_pieces(factory, backend, device, dtype, [T - 9, *[1] * 9], with_gradients=False)


@pytest.mark.parametrize("name", ["mamba1", "mamba2-groups", "rwkv6", "rwkv7-later", "gated-grouped"])
def test_the_comparisons_themselves_run(name):
    """The torch backend against itself on a CPU."""
    factory, cpu = CONFIGURATIONS[name], torch.device("cpu")
    compare_alone_and_packed(factory, "torch", cpu)
    compare_in_pieces(factory, "torch", cpu, torch.float32, [5, 1, 9], with_gradients=True)
    compare_in_pieces(factory, "torch", cpu, torch.bfloat16, [12, 1, 1], with_gradients=False)


class _SeenError(Exception):
    """Ends a forward at its first convolution."""


@pytest.mark.parametrize(
    ("mixer", "gpu"),
    [(Mamba1, "mamba_ssm"), (Mamba2, "mamba_ssm"), (Mamba2, "fla"), (DeltaNet, "fla"), (GatedDeltaNet, "fla")],
)
def test_convolutions_follow_the_backend(monkeypatch, mixer, gpu):
    """The torch backend is torch's alone; with another, causal-conv1d may convolve."""
    seen = []

    def forward(self, x, *, fused, **options):
        seen.append(fused)
        raise _SeenError

    monkeypatch.setattr(ShortConvolution, "forward", forward)
    for backend in ("torch", gpu):
        layer = mixer(64)
        monkeypatch.setattr(layer, "choose_backend", lambda x, backend=backend: backend)
        with pytest.raises(_SeenError):
            layer(torch.zeros(1, 5, 64))
    assert seen == [False, True]
