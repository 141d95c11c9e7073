"""The checks of installed mixers as a test suite: ``pytest --pyargs seqarch.testing.contract --seqarch-mixer NAME``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from seqarch.mixer_spec import parse_mixer
from seqarch.testing.parametrize import parametrize_with_mixer_checks

_D_MODEL = 64  # as `seqarch check`


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test of every mixer and check."""
    texts = metafunc.config.getoption("seqarch_mixer")
    if not texts:
        raise pytest.UsageError("say which mixers to check: --seqarch-mixer NAME")
    try:
        specs = [parse_mixer(text, _D_MODEL) for text in texts]
    except ValueError as error:
        raise pytest.UsageError(str(error)) from error
    mark = parametrize_with_mixer_checks(
        [(spec.label, partial(spec.mixer, **spec.options)) for spec in specs], d_model=_D_MODEL
    )
    metafunc.parametrize(*mark.args)


def test_contract(mixer_check: Callable[[], None]) -> None:
    """One check, which raises with the clause that is broken."""
    mixer_check()
