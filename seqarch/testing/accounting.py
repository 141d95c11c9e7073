"""What a mixer says of its cost agrees with what is allocated and counted.

Two counters: operations of matrix products, convolutions and fused attention (``torch.utils.flop_counter``), and, for
everything else, elements: the larger of what a call of an operator reads and writes, views excepted. The second is no
count of operations, but it bounds what elementwise recurrences can ask for and grows where work grows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode, flop_registry, sdpa_flop_count

from seqarch.mixer import TokenMixer
from seqarch.testing.compare import ContractError
from seqarch.testing.subject import Subject

_OVERCLAIM = 1.05
_SHARE = 0.3  # the causal half, and of that what padding to blocks leaves at these lengths


def _sdpa_cpu(q: Sequence[int], k: Sequence[int], v: Sequence[int], *_args: object, **_kwargs: object) -> int:
    return sdpa_flop_count(q, k, v)


def _product(_added: object, a: Sequence[int], b: Sequence[int], **_kwargs: object) -> int:
    return 2 * math.prod(a) * b[-1]


# PyTorch's registry has the fused attention of GPUs only, and no product that adds in place.
_MORE_OPERATORS: dict[Any, Any] = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _sdpa_cpu,
    torch.ops.aten.addmm_: _product,
    torch.ops.aten.baddbmm_: _product,
}


class _Elements(TorchDispatchMode):
    """Counts elements of the operators whose operations the FLOP counter does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        packet = func.overloadpacket
        if packet not in flop_registry and packet not in _MORE_OPERATORS and not func.is_view:
            read = sum(t.numel() for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor))
            written = sum(t.numel() for t in tree_leaves(out) if isinstance(t, Tensor))
            self.total += max(read, written)
        return out


def _count(call: Callable[[], object]) -> tuple[int, int]:
    """Operations that the FLOP counter sees, and elements of the other operators."""
    with (
        torch.no_grad(),
        _Elements() as elements,
        FlopCounterMode(display=False, custom_mapping=_MORE_OPERATORS) as flops,
    ):
        call()
    return flops.get_total_flops(), elements.total


def check_flops(subject: Subject) -> None:
    """``flops(T)`` agrees with the operations counted in a forward pass of one sequence.

    At T = 256 or more, where the masked half dominates padding. The claim may be below the count, down to 30%: masked
    and padded work is counted and not claimed. It may not be above what the FLOP counter sees plus the elements that
    other operators touch (an elementwise recurrence is invisible to the counter), and not below the projections, which
    every backend must do and the counter always sees.
    """
    stack, T = subject.build(), max(256, 2 * subject.C)
    x = subject.noise(1, T)
    claim = sum(m.flops(T) for m in stack.layers if isinstance(m, TokenMixer))
    if not isinstance(claim, int):
        raise ContractError(f"flops: flops({T}) is a {type(claim).__name__}, not an int")
    visible, elements = _count(lambda: stack(x))
    used = [0]

    def projection(module: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> None:
        used[0] += 2 * out.numel() * args[0].shape[-1]

    handles = [m.register_forward_hook(projection) for m in stack.modules() if isinstance(m, nn.Linear)]
    with torch.no_grad():
        stack(x)
    for handle in handles:
        handle.remove()
    counts = f"{visible:,} counted, {elements:,} elements touched by other operators, {used[0]:,} in linear layers"
    if claim > _OVERCLAIM * (visible + elements):
        raise ContractError(f"flops: flops({T}) claims {claim:,}, more than is done: {counts}")
    if claim < max(_SHARE * visible, used[0] / _OVERCLAIM):
        raise ContractError(f"flops: flops({T}) claims only {claim:,}: {counts}")


def _bytes(state: Mapping[str, Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in state.values())


def check_state_bytes(subject: Subject) -> None:
    """``state_bytes`` is what ``init_state`` allocates, and what the state of a full sequence still takes."""
    for dtype in subject.tags.dtypes:
        stack = subject.build(dtype)
        for T in (8, subject.T):
            claim = stack.mixer.state_bytes(T, dtype)
            state = stack.init_state(1, T, dtype)
            allocated = _bytes(state[-1])
            with torch.no_grad():
                for piece in subject.noise(1, T, dtype=dtype).split([T - 2, 1, 1], dim=1):
                    _, state = stack(piece, state=state)
            after = _bytes(state[-1])
            if not claim == allocated == after:
                raise ContractError(
                    f"state_bytes: for T = {T} and {dtype} it claims {claim}, init_state allocates {allocated}, the "
                    f"state after T tokens has {after}"
                )


def check_constant_state(subject: Subject) -> None:
    """A state that is tagged constant does not grow with ``max_len``."""
    mixer = subject.build().mixer
    sizes = {T: mixer.state_bytes(T) for T in (8, 1024, 65536)}
    if len(set(sizes.values())) > 1:
        raise ContractError(f"constant_state: the tag says that the state does not grow, its bytes by length: {sizes}")


def check_recurrent(subject: Subject) -> None:
    """A mixer that is tagged recurrent decodes a token at the same cost at any position (past three chunks)."""
    stack = subject.build()
    cost = {}
    for position in (3 * subject.C, 6 * subject.C):
        x = subject.noise(1, position + 1)
        state = stack.init_state(1, position + 1, x.dtype)
        with torch.no_grad():
            _, state = stack(x[:, :position], state=state)
        cost[position] = _count(lambda x=x, state=state: stack(x[:, -1:], state=state))
    (early, late) = cost.values()
    if any(b > 1.01 * a for a, b in zip(early, late, strict=True)):
        raise ContractError(
            "recurrent: the tag says that a step costs the same at any position; (operations, elements) by position: "
            f"{cost}"
        )
