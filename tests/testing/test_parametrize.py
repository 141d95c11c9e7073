from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from seqarch.testing import CHECKS, parametrize_with_mixer_checks
from tests.testing.broken_mixers import CannotBeBuilt, HalfTheBytes
from tests.testing.toy_mixers import ToyAttention, ToySelection


@parametrize_with_mixer_checks(
    [("one head", partial(ToyAttention, n_heads=1)), ToySelection, ("bytes", HalfTheBytes)],
    expected_failures={"bytes": {"check_state_bytes": "claims those of half the precision"}},
    d_model=8,
)
def test_contract(mixer_check: Callable[[], None]) -> None:
    mixer_check()


def _items(*args: Any, **kwargs: Any) -> dict[str, set[str]]:
    """Marks by id of the tests that the decorator makes."""
    mark = parametrize_with_mixer_checks(*args, **kwargs).mark
    assert mark.args[0] == "mixer_check"
    return {str(p.id): {m.name for m in p.marks} for p in mark.args[1]}


def test_ids_and_marks() -> None:
    reason = {"ToySelection": {"check_batch": "why not"}}
    items = _items([ToyAttention, ToySelection], expected_failures=reason, marks=[pytest.mark.gpu])
    assert items["ToyAttention-check_causality"] == {"gpu"}
    assert items["ToyAttention-check_compile"] == {"gpu", "slow"}
    assert items["ToySelection-check_batch"] == {"gpu", "xfail"}
    assert items["ToyAttention-check_batch"] == {"gpu"}


def test_tags_choose_the_checks() -> None:
    items = _items([ToyAttention, ToySelection])
    assert "ToyAttention-check_packed_documents" in items
    assert "ToySelection-check_packed_documents" not in items
    assert "ToySelection-check_refuses_what_tags_deny" in items
    assert "ToyAttention-check_gradcheck" in items
    assert "ToySelection-check_gradcheck" not in items
    assert "ToyAttention-check_constant_state" not in items


def test_mixer_that_cannot_be_built_fails_in_every_test_and_not_in_collection() -> None:
    items = parametrize_with_mixer_checks([CannotBeBuilt]).mark.args[1]
    assert len(items) == len(CHECKS)
    for item in items:
        with pytest.raises(KeyError, match="an option"):
            item.values[0]()


def test_mistakes_are_errors() -> None:
    with pytest.raises(ValueError, match="two mixers have the same id, give pairs"):
        parametrize_with_mixer_checks([ToyAttention, partial(ToyAttention, n_heads=1)])
    with pytest.raises(ValueError, match="names the mixer 'other'; there are ToyAttention"):
        parametrize_with_mixer_checks([ToyAttention], expected_failures={"other": {}})
    with pytest.raises(ValueError, match="names 'check_nothing', which is no check"):
        parametrize_with_mixer_checks([ToyAttention], expected_failures={"ToyAttention": {"check_nothing": "?"}})


def test_outcomes_in_a_suite(tmp_path: Path) -> None:
    (tmp_path / "test_mixers.py").write_text(
        """
from seqarch.testing import parametrize_with_mixer_checks
from tests.testing.broken_mixers import HalfTheBytes
from tests.testing.toy_mixers import ToySelection

class Detached(ToySelection):
    def extend(self, k, v, state):
        return super().extend(k.detach(), v.detach(), state)

@parametrize_with_mixer_checks(
    [HalfTheBytes, Detached],
    expected_failures={"HalfTheBytes": {"check_state_bytes": "halved"}, "Detached": {"check_batch": "it passes"}},
    d_model=8,
)
def test_contract(mixer_check):
    mixer_check()
"""
    )
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    slow: slow\n")
    options = ["-rA", "-p", "no:cacheprovider", "-k", "state_bytes or batch or split_gradients"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "--rootdir", str(tmp_path), str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        check=False,
    )
    for outcome in (
        r"XFAIL .*\[HalfTheBytes-check_state_bytes\] - halved",
        r"PASSED .*\[HalfTheBytes-check_batch\]",
        r"FAILED .*\[Detached-check_batch\]",
        r"\[XPASS\(strict\)\] it passes",
        r"SKIPPED .*: the returned state carries no gradient",
        r"1 failed, 5 passed, 1 skipped, \d+ deselected, 1 xfailed",
    ):
        assert re.search(outcome, done.stdout), done.stdout + done.stderr


def test_kit_needs_no_pytest() -> None:
    code = "import sys; sys.modules['pytest'] = None; import seqarch.testing as t; print(len(t.CHECKS))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[2], check=True
    )
    assert int(done.stdout) == len(CHECKS)
