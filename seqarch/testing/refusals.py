"""What a mixer cannot do it refuses with a ``ValueError``; it never ignores it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from seqarch.testing.compare import ContractError, InapplicableError
from seqarch.testing.subject import Subject


def _expect_refusal(call: Callable[[], object], what: str) -> None:
    try:
        with torch.no_grad():
            call()
    except ValueError:
        return
    except Exception as e:
        raise ContractError(
            f"refusal: {what} must raise ValueError with the reason, it raised {type(e).__name__}: {e}"
        ) from e
    raise ContractError(f"refusal: {what} must raise ValueError, it was accepted")


def check_refuses_what_tags_deny(subject: Subject) -> None:
    """``cu_seqlens`` where ``packs_documents`` is False, and parameter dtypes that ``dtypes`` does not list."""
    denied = [d for d in (torch.float64, torch.float32, torch.bfloat16) if d not in subject.tags.dtypes]
    if subject.tags.packs_documents and not denied:
        raise InapplicableError("the tags deny nothing")
    if not subject.tags.packs_documents:
        stack, x = subject.build(), subject.noise(1, 4)
        cu_seqlens = torch.tensor([0, 1, 4], dtype=torch.int32)
        _expect_refusal(lambda: stack(x, cu_seqlens=cu_seqlens), "cu_seqlens, which packs_documents=False denies,")
    for dtype in denied:
        stack, x = subject.build(dtype), subject.noise(1, 4, dtype=dtype)
        _expect_refusal(lambda stack=stack, x=x: stack(x), f"{dtype}, which the tag dtypes denies,")


def check_refuses_bad_arguments(subject: Subject) -> None:
    """Shapes, boundaries and backends that make no sense."""
    stack = subject.build()
    one, two = subject.noise(1, 4), subject.noise(2, 4)
    _expect_refusal(lambda: stack(one[0]), "x of two dimensions")
    _expect_refusal(lambda: stack(one[..., :-1]), f"x of width {subject.d_model - 1} for d_model {subject.d_model}")
    _expect_refusal(lambda: subject.fresh(backend="no such backend"), "an unknown backend")
    if not subject.tags.packs_documents:
        return

    def packed(x: torch.Tensor, bounds: list[int], dtype: torch.dtype = torch.int32) -> object:
        return stack(x, cu_seqlens=torch.tensor(bounds, dtype=dtype))

    good = torch.tensor([0, 4], dtype=torch.int32)
    state = stack.init_state(1, 4, one.dtype)
    _expect_refusal(lambda: packed(two, [0, 4]), "cu_seqlens with a batch of 2")
    _expect_refusal(lambda: stack(one, cu_seqlens=good, state=state), "cu_seqlens together with a state")
    _expect_refusal(lambda: packed(one, [0, 4], torch.int64), "cu_seqlens of int64")
    _expect_refusal(lambda: packed(one, [0, 3]), "cu_seqlens that end before T")
    _expect_refusal(lambda: packed(one, [1, 4]), "cu_seqlens that do not start at 0")
    _expect_refusal(lambda: packed(one, [0, 3, 2, 4]), "cu_seqlens that fall")


def check_refuses_overflow(subject: Subject) -> None:
    """More tokens than a state has room for, at once or one by one."""
    stack = subject.build()
    x = subject.noise(1, 6)
    for lengths in ([5], [3, 2], [1, 1, 1, 1, 1]):

        def fill(lengths: list[int] = lengths) -> None:
            state = stack.init_state(1, 4, x.dtype)
            for T in lengths:
                _, state = stack(x[:, :T], state=state)

        _expect_refusal(fill, f"pieces of {lengths} for a state with max_len = 4")
