"""Each backend of a mixer against its torch backend in float64, on a device: values and gradients, also packed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from seqarch.testing.compare import relative_rms, token_error
from seqarch.testing.subject import MixerFactory, Stack, Subject, gradients

_TENSOR_CORES = 5e-3  # float32 kernels round their factors to TF32 there, 10 bits of fraction
_BOUNDARIES = (0, 70, 71, 200)


@dataclass(frozen=True)
class Comparison:
    """What came of one backend.

    Attributes:
        mixer: Class of the mixer.
        backend: Name of the backend.
        dtype: Of parameters and inputs, or None where the backend did not run.
        output: Relative root-mean-square error of the output against float64; of the median token where the tags say
            discontinuous.
        gradient: Largest relative root-mean-square error of the gradients of x and of every parameter; None where the
            tags say discontinuous.
        allowed: What the output's may reach; the gradients' may reach ten times that, since those of decays are sums
            over all tokens that largely cancel.
        reason: Why it did not run, or what it raised.
    """

    mixer: str
    backend: str
    dtype: torch.dtype | None = None
    output: float = float("nan")
    gradient: float | None = None
    allowed: float = 0.0
    reason: str = ""

    @property
    def wrong(self) -> bool:
        """It ran, or should have, and does not agree."""
        if self.dtype is None:
            return False
        return bool(self.reason) or not (self.output <= self.allowed and (self.gradient or 0.0) <= 10 * self.allowed)


def compare_backends(factory: MixerFactory, device: torch.device | str, *, d_model: int = 256) -> list[Comparison]:
    """Compare every backend of a mixer on a device.

    Args:
        factory: As for ``check_mixer``; it must take ``backend=…``.
        device: A CPU or a CUDA device.
        d_model: Width of the instances.

    Returns:
        One entry for each backend; those that cannot serve the device say why.
    """
    device = torch.device(device)
    try:
        mixer = factory(d_model)
    except Exception as error:  # third-party code: one mixer's fault must not hide what is known of the others
        name = getattr(factory, "__name__", repr(factory))
        return [Comparison(name, "auto", reason=f"it cannot be built with its defaults: {_first_line(error)}")]
    return [_compare(factory, backend.name, device, d_model) for backend in mixer.backends]


def _compare(factory: MixerFactory, backend: str, device: torch.device, d_model: int) -> Comparison:
    subject = Subject(partial(factory, backend=backend), d_model=d_model)
    mixer, tags = subject.fresh(), subject.tags
    refusals = {d: mixer.refuses(backend, device.type, d) for d in (torch.float32, torch.bfloat16) if d in tags.dtypes}
    dtype = next((d for d, reason in refusals.items() if reason is None), None)
    if dtype is None:
        return Comparison(
            subject.name, backend, reason=next(reversed(refusals.values()), "no float32, no bfloat16") or ""
        )
    allowed = tags.tolerances[dtype]
    if device.type != "cpu":
        allowed = max(allowed, _TENSOR_CORES)
    outputs, grads = [0.0], [0.0]
    try:
        stack = subject.build(dtype)
        exact = Subject(partial(factory, backend="torch"), d_model=d_model).build(torch.float64)
        exact.load_state_dict(stack.state_dict())
        for packed in (False, True) if tags.packs_documents else (False,):
            (y, found), (expected, reference) = (
                _run(s.to(device), subject, device, d, packed) for s, d in ((stack, dtype), (exact, torch.float64))
            )
            outputs.append((token_error if tags.discontinuous else relative_rms)(y, expected))
            grads.append(_gradient_error(found, reference))
    except Exception as error:  # a kernel may fail in any way, which is what is being asked
        return Comparison(subject.name, backend, dtype, reason=_first_line(error))
    gradient = None if tags.discontinuous else max(grads)
    return Comparison(subject.name, backend, dtype, max(outputs), gradient, allowed)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _run(
    stack: Stack, subject: Subject, device: torch.device, dtype: torch.dtype, packed: bool
) -> tuple[Tensor, dict[str, Tensor]]:
    B, T = (1, _BOUNDARIES[-1]) if packed else (2, _BOUNDARIES[-1])
    cu_seqlens = torch.tensor(_BOUNDARIES, dtype=torch.int32, device=device) if packed else None
    # Rounded to bfloat16 so that every dtype sees the same numbers.
    x, dy = (subject.noise(B, T, dtype=torch.bfloat16, seed=s).to(device, dtype) for s in (2, 4))
    y = stack(x.requires_grad_(), cu_seqlens=cu_seqlens)[0]
    return y, gradients(stack, y, dy, x)


def _gradient_error(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """Each on its own scale, or on 10⁻³ of the largest of all where it is nearly zero."""
    scales = {name: float(g.double().square().mean().sqrt()) for name, g in expected.items()}
    floor = 1e-3 * max(scales.values())
    errors = [
        float((actual[n].double() - g.double()).square().mean().sqrt()) / max(scales[n], floor)
        for n, g in expected.items()
    ]
    return float("inf") if any(e != e for e in errors) else max(errors)
