"""What a function holds: the sizes of the tensors that its operators return."""

from collections.abc import Callable, Sequence

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class _Record(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, tuple | list) else [out]:
            if isinstance(t, Tensor):
                self.sizes.append(t.numel())
        return out


def largest(function: Callable[..., Tensor], inputs: Sequence[Tensor]) -> int:
    """Elements of the largest tensor that any operator returns, forward and backward."""
    with _Record() as record:
        function(*inputs).sum().backward()
    return max(record.sizes)
