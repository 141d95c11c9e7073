"""Which checks there are, when each applies, and how they are run."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from seqarch.mixer import Tags
from seqarch.testing import (
    accounting,
    causality,
    compilation,
    numerics,
    packing,
    parameters,
    refusals,
    robustness,
    state,
)
from seqarch.testing.compare import ContractError, InapplicableError
from seqarch.testing.report import Report, Row
from seqarch.testing.subject import MixerFactory, Subject


def _always(tags: Tags) -> str | None:
    return None


def _packing(tags: Tags) -> str | None:
    return None if tags.packs_documents else "packs_documents is False"


def _denials(tags: Tags) -> str | None:
    every = {torch.float64, torch.float32, torch.bfloat16} <= set(tags.dtypes)
    return "the tags deny nothing" if tags.packs_documents and every else None


def _overflow(tags: Tags) -> str | None:
    return "constant_state: a state has room for any length" if tags.constant_state else None


def _derivative(tags: Tags) -> str | None:
    if tags.straight_through:
        return "straight_through: the gradient is not the derivative"
    return None if torch.float64 in tags.dtypes else "dtypes has no float64"


def _straight_through(tags: Tags) -> str | None:
    return None if tags.straight_through else "straight_through is False: check_gradcheck compares the gradient"


def _precision(tags: Tags) -> str | None:
    return None if torch.float64 in tags.dtypes else "dtypes has no float64 to compare with"


def _constant(tags: Tags) -> str | None:
    return None if tags.constant_state else "constant_state is False"


def _recurrent(tags: Tags) -> str | None:
    return None if tags.recurrent else "recurrent is False"


@dataclass(frozen=True)
class Check:
    """One check.

    Attributes:
        function: Raises ``ContractError`` with the broken clause and its numbers.
        ruled_out: Why tags rule the check out, or None if it applies.
        slow: Takes many seconds, so that it runs only when asked for.
    """

    function: Callable[[Subject], None]
    ruled_out: Callable[[Tags], str | None] = _always
    slow: bool = False

    @property
    def name(self) -> str:
        """The function's name."""
        return self.function.__name__


CHECKS: tuple[Check, ...] = (
    Check(robustness.check_lengths),
    Check(causality.check_causality),
    Check(causality.check_causality_gradients),
    Check(state.check_state_split),
    Check(state.check_step_by_step),
    Check(state.check_state_split_gradients),
    Check(state.check_state_batch_first),
    Check(state.check_state_dtype),
    Check(state.check_state_save),
    Check(packing.check_packed_documents, _packing),
    Check(packing.check_packed_gradients, _packing),
    Check(refusals.check_refuses_what_tags_deny, _denials),
    Check(refusals.check_refuses_bad_arguments),
    Check(refusals.check_refuses_overflow, _overflow),
    Check(robustness.check_right_padding),
    Check(robustness.check_batch),
    Check(robustness.check_non_contiguous),
    Check(robustness.check_nothing_mutated),
    Check(robustness.check_determinism),
    Check(numerics.check_gradcheck, _derivative),
    Check(numerics.check_straight_through, _straight_through),
    Check(numerics.check_reduced_precision, _precision),
    Check(parameters.check_meta_initialisation),
    Check(parameters.check_constructor_initialises),
    Check(parameters.check_state_dict),
    Check(parameters.check_copies),
    Check(parameters.check_parameter_gradients),
    Check(accounting.check_state_bytes),
    Check(accounting.check_constant_state, _constant),
    Check(accounting.check_recurrent, _recurrent),
    Check(accounting.check_flops),
    Check(compilation.check_compile, slow=True),
)


def known_checks(names: Mapping[str, str]) -> None:
    """Raise ``ValueError`` if ``expected_failures`` names a check that does not exist."""
    known = [check.name for check in CHECKS]
    for name in names:
        if name not in known:
            raise ValueError(f"expected_failures names '{name}', which is no check; there are {', '.join(known)}")


def run_check(check: Check, subject: Subject) -> None:
    """Run one check; the caller's random state is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(subject.seed)
        check.function(subject)


def _row(check: Check, subject: Subject, expected: str | None) -> Row:
    start = time.perf_counter()
    try:
        run_check(check, subject)
    except InapplicableError as e:
        return Row(check.name, "skipped", time.perf_counter() - start, str(e))
    except Exception as e:  # the boundary to third-party code: whatever it raises is a finding
        seconds = time.perf_counter() - start
        if expected is not None:
            return Row(check.name, "expected failure", seconds, expected)
        return Row(check.name, "failed", seconds, _describe(e))
    seconds = time.perf_counter() - start
    if expected is not None:
        return Row(check.name, "unexpected pass", seconds, f"expected to fail: {expected}")
    return Row(check.name, "passed", seconds)


def _describe(error: Exception) -> str:
    if isinstance(error, ContractError):
        return str(error)
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({frame.filename}:{frame.lineno})"


def check_mixer(
    factory: MixerFactory,
    *,
    expected_failures: Mapping[str, str] | None = None,
    d_model: int = 32,
    seed: int = 0,
    slow: bool = False,
) -> Report:
    """Check a mixer against the contract of ``seqarch.mixer``, on the CPU.

    Args:
        factory: Called as ``factory(d_model)`` and with ``layer_idx=…`` or ``backend=…`` where a check needs them: a
            class, or a ``functools.partial`` that fixes options. Fix ``layer_idx`` and ``n_layers`` to check a later
            layer; where it shares a context, the layers before it are built and called first.
        expected_failures: Names of checks that may fail, each with the reason. One that passes is reported.
        d_model: Width of the instances.
        seed: Seed of parameters and inputs. The caller's random state is left as it was.
        slow: Run ``check_compile`` too.

    Returns:
        The report; it never raises for what the mixer does.

    Raises:
        ValueError: If ``expected_failures`` names a check that does not exist.
    """
    expected_failures = expected_failures or {}
    known_checks(expected_failures)
    start = time.perf_counter()
    try:
        subject = Subject(factory, d_model=d_model, seed=seed)
    except Exception as e:  # the same boundary
        return Report(repr(factory), (Row("construction", "failed", time.perf_counter() - start, _describe(e)),))
    rows = []
    for check in CHECKS:
        reason = check.ruled_out(subject.tags)
        if reason is None and check.slow and not slow:
            reason = "slow"
        if reason is not None:
            rows.append(Row(check.name, "skipped", 0.0, reason))
        else:
            rows.append(_row(check, subject, expected_failures.get(check.name)))
    return Report(subject.name, tuple(rows))
