"""The checks as items of a pytest suite."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from seqarch.testing.compare import InapplicableError
from seqarch.testing.kit import CHECKS, Check, known_checks, run_check
from seqarch.testing.subject import MixerFactory, Subject

if TYPE_CHECKING:
    import pytest


def parametrize_with_mixer_checks(
    mixers: Sequence[MixerFactory | tuple[str, MixerFactory]],
    *,
    expected_failures: Mapping[str, Mapping[str, str]] | None = None,
    d_model: int = 32,
    seed: int = 0,
    marks: Sequence[pytest.MarkDecorator] = (),
) -> pytest.MarkDecorator:
    """A decorator that makes one test of every mixer and every check that the mixer's tags call for.

    ::

        @parametrize_with_mixer_checks([("window", partial(Attention, n_heads=2, window=8)), Top1Element])
        def test_contract(mixer_check):
            mixer_check()

    Args:
        mixers: Factories, as for ``check_mixer``, or pairs of an id and a factory.
        expected_failures: By id: names of checks that must fail, with the reason (a strict xfail).
        d_model: Width of the instances.
        seed: Seed of parameters and inputs.
        marks: Marks of every test. The check that compiles is marked ``slow`` besides.

    Raises:
        ValueError: If two mixers have one id, or ``expected_failures`` names an unknown mixer or check.
    """
    import pytest

    named = dict([m if isinstance(m, tuple) else (_name(m), m) for m in mixers])
    if len(named) < len(mixers):
        raise ValueError(f"two mixers have the same id, give pairs (id, factory): {', '.join(named)}")
    expected_failures = expected_failures or {}
    for mixer_id, checks in expected_failures.items():
        if mixer_id not in named:
            raise ValueError(f"expected_failures names the mixer '{mixer_id}'; there are {', '.join(named)}")
        known_checks(checks)
    parameters = []
    for mixer_id, factory in named.items():
        for check in _applicable(factory, d_model, seed):
            extra = [pytest.mark.slow] if check.slow else []
            reason = expected_failures.get(mixer_id, {}).get(check.name)
            if reason is not None:
                extra.append(pytest.mark.xfail(reason=reason, strict=True))
            run: Callable[[], None] = partial(_run, check, factory, d_model, seed)
            parameters.append(pytest.param(run, id=f"{mixer_id}-{check.name}", marks=[*marks, *extra]))
    return pytest.mark.parametrize("mixer_check", parameters)


def _name(factory: Any) -> str:
    return getattr(factory, "__name__", None) or getattr(getattr(factory, "func", None), "__name__", repr(factory))


def _applicable(factory: MixerFactory, d_model: int, seed: int) -> list[Check]:
    """Without tags, because the mixer cannot be built, all of them: each test then says why it fails."""
    try:
        tags = Subject(factory, d_model=d_model, seed=seed).tags
    except Exception:  # third-party code must not break the collection of the other tests
        return list(CHECKS)
    return [check for check in CHECKS if check.ruled_out(tags) is None]


def _run(check: Check, factory: MixerFactory, d_model: int, seed: int) -> None:
    import pytest

    try:
        run_check(check, Subject(factory, d_model=d_model, seed=seed))
    except InapplicableError as e:
        pytest.skip(str(e))
