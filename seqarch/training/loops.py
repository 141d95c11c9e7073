"""Lightning's loops, counted in optimiser steps: how long to train, when to validate, and where a resumed run stands.

Lightning counts micro batches; how many make a step depends on the number of ranks, which may change on resume.
"""

from __future__ import annotations

import math
from typing import Any

import lightning as L

from seqarch.training.schedule import Length


def set_length(trainer: L.Trainer, max_tokens: int | None, tokens_per_step: int) -> Length:
    """Have the trainer stop after ``max_tokens``, or after ``trainer.max_steps`` if that comes first.

    Returns:
        The length of the whole training, which schedules refer to: that of ``max_tokens`` where it is given.

    Raises:
        ValueError: If neither is given.
    """
    max_steps = trainer.max_steps
    if max_tokens is None:
        if max_steps < 1:
            raise ValueError("the length of training is not known: set model.max_tokens or trainer.max_steps")
        return Length(max_steps, tokens_per_step)
    steps = math.ceil(max_tokens / tokens_per_step)
    trainer.fit_loop.epoch_loop.max_steps = steps if max_steps < 0 else min(steps, max_steps)
    return Length(steps, tokens_per_step)


def set_validation(trainer: L.Trainer, every_n_steps: int | None) -> None:
    """Have the trainer validate at ends of steps only: every ``every_n_steps``, or as ``val_check_interval`` says.

    Raises:
        ValueError: If ``val_check_interval`` would validate in the middle of an accumulation.
    """
    accumulate = trainer.accumulate_grad_batches
    if every_n_steps is not None:
        trainer.val_check_interval = every_n_steps * accumulate
        trainer.check_val_every_n_epoch = None
    elif isinstance(trainer.val_check_interval, int) and trainer.val_check_interval % accumulate:
        raise ValueError(
            f"trainer.val_check_interval ({trainer.val_check_interval}) counts micro batches and must be a multiple of "
            f"the {accumulate} of a step: use model.val_every_n_steps, which counts steps"
        )


def validation_follows(trainer: L.Trainer) -> bool:
    """Whether the trainer validates after the batch that has just ended."""
    fit_loop = trainer.fit_loop
    fetcher = fit_loop._data_fetcher
    return fetcher is not None and fit_loop.epoch_loop._should_check_val_fx(fetcher)


def at_end_of_step(trainer: L.Trainer) -> bool:
    """Whether the batch that has just ended completed an optimiser step."""
    return not trainer.fit_loop._should_accumulate()


def logging_due(trainer: L.Trainer, step: int) -> bool:
    """Whether step number ``step`` is recorded: every ``log_every_n_steps``, and the last."""
    every: int = trainer.log_every_n_steps  # pyright: ignore[reportAttributeAccessIssue]  (set by Lightning's connector)
    return every > 0 and (step % every == 0 or step == trainer.max_steps)


def recount(loops: dict[str, Any], global_step: int, accumulate: int) -> None:
    """Make the micro batches that a checkpoint's loops have counted those of ``global_step`` steps of ``accumulate``.

    The checkpoint may come from another number of ranks or another size of micro batch.

    Args:
        loops: The checkpoint's ``loops``; changed in place.
        global_step: Steps taken.
        accumulate: Micro batches of a step now.
    """
    progress = loops["fit_loop"]["epoch_loop.batch_progress"]
    shift = global_step * accumulate - progress["total"]["ready"]
    for counters in (progress["total"], progress["current"]):
        for name in counters:
            counters[name] += shift
