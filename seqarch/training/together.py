"""What all processes of a job do together, or none does."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

Result = TypeVar("Result")


def ranks() -> tuple[int, int]:
    """This process's rank, and how many there are; (0, 1) where there is no process group."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def together(action: Callable[[], Result]) -> list[Result]:
    """Do something on every process, and learn of every other's result; an error on one is an error on all.

    Without it, the others would wait for one that has given up.

    Returns:
        The results by rank.

    Raises:
        Exception: Where ``action`` raised it.
        OSError, ValueError: Elsewhere, of the same kind, naming the rank.
    """
    rank, world_size = ranks()
    result, error = None, None
    try:
        result = action()
    except Exception as raised:  # whatever it is, the others must know
        error = raised
    if world_size == 1:
        found = [(result, None)]
    else:
        found = [(None, None)] * world_size
        kind = None if error is None else OSError if isinstance(error, OSError) else ValueError
        dist.all_gather_object(found, (result, kind and (kind, f"rank {rank}: {error}")))
    if error is not None:
        raise error
    for _, failure in found:
        if failure is not None:
            raise failure[0](failure[1])
    return [value for value, _ in found]  # pyright: ignore[reportReturnType]
