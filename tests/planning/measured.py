"""What PyTorch's allocator hands out on a CPU."""

from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile


def allocated(call: Callable[[], object]) -> tuple[int, int]:
    """Bytes that a call's result holds, and the most that were in use on the way; by the profiler's memory events."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        result = call()
    events = prof.profiler.kineto_results.events()  # pyright: ignore[reportOptionalMemberAccess]
    now = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    del result
    return now, peak


def zero_gradients(model: torch.nn.Module) -> None:
    """Have gradients of their full size in place, so that a backward pass adds to them."""
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
