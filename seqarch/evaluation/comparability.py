"""Which runs can be compared with each other, and in which unit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from seqarch.evaluation.bootstrap import MIN_DOCUMENTS
from seqarch.evaluation.runs import Run, RunError, read_run


def read_runs(paths: Sequence[Path]) -> tuple[list[Run], dict[Path, str]]:
    """Read run folders: those that can be, and for the others the reason why not."""
    runs, refused = [], {}
    for path in dict.fromkeys(paths):
        try:
            runs.append(read_run(path))
        except RunError as error:
            refused[path] = str(error)
    return runs, refused


def select(runs: Sequence[Run], *, keep_all: bool) -> tuple[list[Run], dict[Path, str], list[str]]:
    """Keep runs that can be compared.

    What most runs have in common decides: the test documents and the number of training tokens.

    Args:
        runs: All of them.
        keep_all: Keep unfinished runs, and those of other lengths.

    Returns:
        The runs kept; why each other was refused; and notes on what the kept ones do not share.
    """
    kept: list[Run] = []
    refused: dict[Path, str] = {}
    notes: list[str] = []
    tests = Counter(_test_set(run) for run in runs)
    budgets = Counter(run.planned_tokens for run in runs)
    usual_test = tests.most_common(1)[0][0] if tests else ()
    budget = budgets.most_common(1)[0][0] if budgets else 0
    for run in runs:
        if reason := _unusable(run):
            refused[run.path] = reason
        elif _test_set(run) != usual_test:
            refused[run.path] = f"its test documents are others than those of most runs ({_test_difference(run, runs)})"
        elif twin := next((other for other in kept if _twins(run, other)), None):
            refused[run.path] = f"it is the same run as {twin.path}: all its losses are equal"
        else:
            lengths = _length(run, budget)
            if lengths and not keep_all:
                refused[run.path] = f"{lengths[0]}; --keep_all compares it nevertheless"
                continue
            notes += [f"{run.path}: {reason}" for reason in lengths]
            kept.append(run)
    return kept, refused, notes


def _unusable(run: Run) -> str:
    if len(run.tokens) < 2:
        return "it has only one validation, and a curve needs two: lower model.val_every_n_steps"
    if not run.setting:
        return "none of its test domains was trained on: its pre-training loss is not known"
    if all(len(d.ids) < MIN_DOCUMENTS for d in run.documents if d.in_domain):
        return f"its training domains have fewer than {MIN_DOCUMENTS} test documents: raise data.max_val_tokens"
    return ""


def _test_set(run: Run) -> tuple:
    """What identifies the test data, whatever the tokenizer: which documents, and their lengths in bytes."""
    return tuple((d.name, d.ids.tobytes(), d.bytes.tobytes()) for d in sorted(run.documents, key=lambda d: d.name))


def _test_difference(run: Run, runs: Sequence[Run]) -> str:
    usual = Counter(_test_set(r) for r in runs).most_common(1)[0][0]
    other = next(r for r in runs if _test_set(r) == usual)
    if set(run.domains) != set(other.domains):
        return f"domains {', '.join(sorted(run.domains))} instead of {', '.join(sorted(other.domains))}"
    theirs = {d.name: d for d in other.documents}
    for d in run.documents:
        if not np.array_equal(d.ids, theirs[d.name].ids):
            return f"{len(d.ids)} of {d.name} instead of {len(theirs[d.name].ids)}: max_val_tokens or the corpus differ"
    return "their texts are of other lengths: another corpus"


def _twins(run: Run, other: Run) -> bool:
    same = all(getattr(run, name) == getattr(other, name) for name in ("mixer", "options", "setting", "tokenizer"))
    return same and np.array_equal(run.nats, other.nats)


def _length(run: Run, budget: int) -> list[str]:
    reasons = []
    if not run.finished:
        reasons.append(f"it is not finished: {run.tokens[-1]:,} of {run.planned_tokens:,} tokens")
    if run.planned_tokens != budget:
        reasons.append(f"it trains on {run.planned_tokens:,} tokens, most runs on {budget:,}")
    return reasons


def common_unit(runs: Sequence[Run]) -> tuple[str, str]:
    """``token`` or ``byte``, and why it is bytes.

    Raises:
        ValueError: If tokenizers differ and the tokens stand for no text.
    """
    if len({run.tokenizer for run in runs}) == 1:
        return "token", ""
    if any(not d.bytes.sum() for run in runs for d in run.documents):
        raise ValueError("the runs have different tokenizers, and there are test domains without text: no unit fits")
    if without := [str(run.path) for run in runs if not run.tokenizer]:
        return "byte", f"{', '.join(without)}: without a tokenizer.json; so losses are in bits per byte"
    return "byte", "the runs have different tokenizers: losses are in bits per byte"
