"""Initial values, the meta device, copies, and gradients of every parameter."""

from __future__ import annotations

import copy
import math
import pickle
from itertools import chain

import torch
from torch import Tensor

from seqarch.mixer import TokenMixer
from seqarch.testing.compare import ContractError, expect_identical
from seqarch.testing.subject import Stack, Subject, gradients, run

_SEED = 20_011


def _tensors(mixer: TokenMixer) -> dict[str, Tensor]:
    return {name: t.detach() for name, t in chain(mixer.named_parameters(), mixer.named_buffers())}


def _reset(mixer: TokenMixer) -> dict[str, Tensor]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SEED)
        mixer.reset_parameters()
    return _tensors(mixer)


def _poison(mixer: TokenMixer, reference: dict[str, Tensor]) -> None:
    """Fill every tensor with values that no initialisation gives; a boolean with the opposite of the right one."""
    for name, t in _tensors(mixer).items():
        if t.dtype == torch.bool:
            t.copy_(~reference[name])
        else:
            t.fill_(float("nan") if t.is_floating_point() or t.is_complex() else torch.iinfo(t.dtype).max)


def check_meta_initialisation(subject: Subject) -> None:
    """Built on the meta device, ``to_empty`` and ``reset_parameters`` give every parameter and buffer its value.

    The same seed gives the same values as ``reset_parameters`` of a mixer that was built with storage; and the mixer
    works, so that no tensor of it is left on the meta device.
    """
    normal = subject.fresh()
    expected = _reset(normal)
    with torch.device("meta"):
        mixer = subject.fresh()
    where_from = {name: t.device.type for name, t in _tensors(mixer).items() if t.device.type != "meta"}
    if where_from:
        raise ContractError(f"meta device: under torch.device('meta') these have storage: {where_from}")
    mixer.to_empty(device="cpu")
    _poison(mixer, expected)
    actual = _reset(mixer)
    if actual.keys() != expected.keys():
        raise ContractError(f"meta device: tensors {sorted(actual)} instead of {sorted(expected)}")
    for name, t in actual.items():
        untouched = t.isnan() if t.is_floating_point() or t.is_complex() else t != expected[name]
        if untouched.any():
            raise ContractError(
                f"meta device: reset_parameters leaves {int(untouched.sum())} of {t.numel()} values of {name} untouched"
            )
        clause = f"meta device: reset_parameters must give {name} the value that its seed gives elsewhere"
        expect_identical(t, expected[name], clause, f"seed {_SEED}")
    if subject.tags.shares_context and subject.layer_idx > 0:
        return
    x = subject.noise(1, 4, dtype=next((p.dtype for p in normal.parameters()), torch.float32))
    clause = "meta device: a mixer built there must work as one built elsewhere"
    try:
        y = run(Stack([mixer]), x)
    except Exception as e:
        raise ContractError(f"{clause}: {type(e).__name__}: {e}") from e
    expect_identical(y, run(Stack([normal]), x), clause, "T = 4")


def check_constructor_initialises(subject: Subject) -> None:
    """``__init__`` leaves values of the distribution that ``reset_parameters`` gives.

    Two-sample Kolmogorov-Smirnov test at a level of 10⁻⁶, for each tensor.
    """
    built = {name: t.clone() for name, t in _tensors(subject.fresh()).items()}
    for name, expected in _reset(subject.fresh()).items():
        a, b = (t.flatten().double().sort().values for t in (built[name], expected))
        at = torch.cat((a, b))
        # How far the two empirical distribution functions are apart, at most.
        gap = (torch.searchsorted(a, at, right=True) / len(a) - torch.searchsorted(b, at, right=True) / len(b)).abs()
        limit = math.sqrt(-math.log(1e-6 / 2) / 2) * math.sqrt(2 / max(len(a), 1))
        if gap.numel() and gap.max().item() > limit:
            raise ContractError(
                f"initial values: {name} after __init__ (mean {a.mean():.3g}, σ {a.std(correction=0):.3g}) is not "
                f"distributed as after reset_parameters (mean {b.mean():.3g}, σ {b.std(correction=0):.3g})"
            )


def check_state_dict(subject: Subject) -> None:
    """A strict ``state_dict`` holds all that another instance needs to give the same outputs."""
    stack, other = subject.build(), subject.build(seed=7)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SEED)
        other.mixer.reset_parameters()
    other.load_state_dict(stack.state_dict(), strict=True)
    x = subject.noise(2, subject.T)
    clause = "state_dict: an instance that loaded it must give the same outputs"
    expect_identical(run(other, x), run(stack, x), clause, f"T = {subject.T}")


def check_copies(subject: Subject) -> None:
    """A pickled and a deep-copied mixer give the same outputs."""
    stack, x = subject.build(), subject.noise(2, subject.T)
    y = run(stack, x)
    for how, duplicate in (
        ("pickle", lambda: pickle.loads(pickle.dumps(stack))),
        ("deepcopy", lambda: copy.deepcopy(stack)),
    ):
        try:
            other = duplicate()
        except Exception as e:
            raise ContractError(f"copies: {how} of the mixer fails: {type(e).__name__}: {e}") from e
        clause = f"copies: the mixer after {how} must give the same outputs"
        expect_identical(run(other, x), y, clause, f"T = {subject.T}")


def check_parameter_gradients(subject: Subject) -> None:
    """Every parameter that requires a gradient gets one that is not zero."""
    stack = subject.build()
    x = subject.noise(2, subject.T).requires_grad_()
    found = gradients(stack, stack(x)[0], subject.noise(2, subject.T, seed=4), x)
    prefix = f"layers.{len(stack.layers) - 1}."
    dead = [n.removeprefix(prefix) for n, g in found.items() if n.startswith(prefix) and not g.any()]
    if dead:
        raise ContractError(f"gradient: at T = {subject.T} these parameters get none: {', '.join(dead)}")
