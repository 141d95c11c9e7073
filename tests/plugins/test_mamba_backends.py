"""The GPU adapters without a GPU: fla's kernel in Triton's interpreter, mamba-ssm's by stand-ins.

These have the signatures of mamba-ssm 2.3.2 and assert what its code checks.
"""

import sys
from types import ModuleType

import pytest
import torch

from seqarch.mixer import Backend
from seqarch.ops.scalar_decay import scalar_decay_attention
from seqarch.ops.selective_scan import selective_scan
from seqarch_mamba import Mamba1, Mamba2
from seqarch_mamba.backends import mamba_scan, mamba_ssd
from tests.interpreter import interpreted
from tests.ops.test_scalar_decay import inputs

CU = torch.tensor([0, 5, 6, 20], dtype=torch.int32)


@pytest.mark.parametrize(
    ("decay", "groups", "case"),
    [("mild", 1, "state"), ("mild", 2, "packed"), ("none", 1, "state"), ("none", 2, "packed")],
)
def test_fla_adapter(decay, groups, case):
    tensors = inputs(1, 20, groups, 2, K=16, V=16, decay=decay, state=case == "state")
    tensors = {n: None if t is None else t.float().requires_grad_() for n, t in tensors.items()}
    options = {"output_final_state": case == "state", "cu_seqlens": CU if case == "packed" else None}
    want = scalar_decay_attention(**tensors, **options)
    r = torch.Generator().manual_seed(1)
    weights = [None if o is None else torch.randn(o.shape, generator=r) for o in want]
    got, grads = interpreted("seqarch_mamba.backends:fla_simple_gla", {**tensors, **options}, weights)
    for a, b in zip(got, want, strict=True):
        assert (a is None) == (b is None)
        if b is not None:
            assert (a - b).norm() < 1e-5 * b.norm()
    leaves = {n: t for n, t in tensors.items() if t is not None}
    used = [(o, w) for o, w in zip(want, weights, strict=True) if o is not None]
    ours = torch.autograd.grad([o for o, _ in used], list(leaves.values()), [w for _, w in used])
    for name, b in zip(leaves, ours, strict=True):
        assert (grads[name] - b).norm() < 1e-4 * b.norm(), name


def documented_scan(u, delta, A, B, C, D=None, z=None, delta_bias=None, delta_softplus=False, return_last_state=False):
    """``selective_scan_fn``: u, delta ``[B, D, L]``, A ``[D, N]``, B, C ``[B, N, L]``."""
    assert D is z is delta_bias is None
    assert not delta_softplus
    assert not return_last_state
    assert u.dtype == delta.dtype == B.dtype == C.dtype
    assert A.dtype == torch.float32
    assert u.shape == delta.shape
    assert all(t.stride(-1) == 1 for t in (u, delta))
    h, ys = 0.0, []
    for t in range(u.shape[2]):
        h = (delta[:, :, t, None] * A).exp() * h + (delta[:, :, t] * u[:, :, t])[..., None] * B[:, None, :, t]
        ys.append((h * C[:, None, :, t]).sum(-1))
    return torch.stack(ys, 2)


def documented_ssd(
    x,
    dt,
    A,
    B,
    C,
    chunk_size,
    D=None,
    z=None,
    dt_bias=None,
    initial_states=None,
    seq_idx=None,
    cu_seqlens=None,
    dt_softplus=False,
    dt_limit=(0.0, float("inf")),
    return_final_states=False,
    return_varlen_states=False,
    state_dtype=None,
):
    """``mamba_chunk_scan_combined``: x ``[B, L, H, P]``, B, C ``[B, L, G, N]``, states ``[B, H, P, N]``."""
    assert D is z is dt_bias is cu_seqlens is state_dtype is None
    assert not dt_softplus
    assert not return_varlen_states
    assert dt_limit == (0.0, float("inf"))
    assert dt.shape == x.shape[:3]
    assert A.shape == x.shape[2:3]
    assert seq_idx is None or (seq_idx.shape == x.shape[:2] and seq_idx.dtype == torch.int32)
    assert initial_states is None or initial_states.shape == (len(x), *x.shape[2:], B.shape[3])
    S = torch.zeros(*x.shape[::2], x.shape[3], B.shape[3]) if initial_states is None else initial_states
    B, C = (t.repeat_interleave(x.shape[2] // t.shape[2], 2) for t in (B, C))
    ys = []
    for t in range(x.shape[1]):
        if seq_idx is not None and t and seq_idx[0, t] != seq_idx[0, t - 1]:
            S = torch.zeros_like(S)
        write = (dt[:, t, :, None] * x[:, t])[..., None] * B[:, t, :, None]
        S = (dt[:, t] * A).exp()[..., None, None] * S + write
        ys.append((S * C[:, t, :, None]).sum(-1))
    y = torch.stack(ys, 1)
    return (y, S) if return_final_states else y


@pytest.fixture
def mamba_ssm(monkeypatch):
    names = ("mamba_ssm", "mamba_ssm.ops", "mamba_ssm.ops.triton")
    kernels = {
        "mamba_ssm.ops.selective_scan_interface": {"selective_scan_fn": documented_scan},
        "mamba_ssm.ops.triton.ssd_combined": {"mamba_chunk_scan_combined": documented_ssd},
    }
    for name in (*names, *kernels):
        module = ModuleType(name)
        vars(module).update(kernels.get(name, {}))
        monkeypatch.setitem(sys.modules, name, module)


def noise(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_what_the_kernels_do_not_take_is_refused(monkeypatch):
    monkeypatch.setattr(Backend, "unavailable", lambda self, device_type: None)
    for cls in (Mamba1, Mamba2):
        mixer = cls(64)
        for backend in ("mamba_ssm", "fla")[: len(mixer.backends) - 1]:
            assert "not torch.float64" in mixer.refuses(backend, "cuda", torch.float64)
            assert mixer.refuses(backend, "cuda", torch.bfloat16) is None
        assert mixer.refuses("torch", "cuda", torch.float64) is None
    assert "state_dim up to 256, not 257" in Mamba1(16, state_dim=257).refuses("mamba_ssm", "cuda", torch.float32)


@pytest.mark.usefixtures("mamba_ssm")
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("decay", "by_delta"), [(True, True), (True, False), (False, True)])
def test_scan_adapter(packed, decay, by_delta):
    x, delta, b, c = noise(1, 20, 6), noise(1, 20, 6, seed=1).abs(), noise(1, 20, 3, seed=2), noise(1, 20, 3, seed=3)
    A = -noise(6, 3, seed=4).abs() if decay else None
    options = {"decay_by_delta": by_delta, "cu_seqlens": CU if packed else None}
    torch.testing.assert_close(
        mamba_scan(x, delta, A, b, c, **options), selective_scan(x, delta, A, b, c, **options)[0]
    )


@pytest.mark.usefixtures("mamba_ssm")
@pytest.mark.parametrize("case", ["plain", "packed", "state"])
def test_ssd_adapter(case):
    x, dt, A = noise(1, 20, 4, 6), noise(1, 20, 4, seed=1).abs(), -noise(4, seed=2).abs()
    b, c = noise(1, 20, 2, 3, seed=3), noise(1, 20, 2, 3, seed=4)
    start = noise(1, 4, 6, 3, seed=5) if case == "state" else None
    cu = CU if case == "packed" else None
    y, end = mamba_ssd(x, dt, A, b, c, chunk_size=16, initial_state=start, cu_seqlens=cu)
    v = x * dt[..., None]
    want, state = scalar_decay_attention(
        c, b, v, dt * A, initial_state=None if start is None else start.mT, cu_seqlens=cu
    )
    torch.testing.assert_close(y, want)
    assert (end is None) == (start is None)
    if end is not None:
        torch.testing.assert_close(end, state.mT)


@pytest.mark.usefixtures("mamba_ssm")
@pytest.mark.parametrize("decay", ["data", "shared", "none"])
@pytest.mark.parametrize("case", ["plain", "packed", "state"])
@pytest.mark.parametrize("cls", [Mamba1, Mamba2])
def test_mixers_through_mamba_ssm(monkeypatch, cls, decay, case):
    torch.manual_seed(0)
    mixer = cls(32, decay=decay, state_dim=4, **({"head_dim": 16} if cls is Mamba2 else {}))
    x = noise(1, 20, 32)
    cu = CU if case == "packed" else None
    results = []
    for backend in ("torch", "mamba_ssm"):
        monkeypatch.setattr(mixer, "choose_backend", lambda x, backend=backend: backend)
        state = mixer.init_state(1, 20) if case == "state" else None
        results.append(mixer(x, cu_seqlens=cu, state=state))
    torch.testing.assert_close(results[1][0], results[0][0])
    if case == "state":
        torch.testing.assert_close(results[1][1], results[0][1])
