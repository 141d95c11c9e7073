"""What RWKV's mixers share: token shift, a state per head, and the choice of a backend.

Shape legend: B batch, T tokens, D model width, H heads, K and V sizes of a head's keys and values.
"""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor, nn

from seqarch.mixer import TORCH, Backend, State, TokenMixer
from seqarch.ops.convolution import token_shift

Context = dict[str, Tensor]


class RWKVMixer(TokenMixer):
    """A recurrence over a state ``[K, V]`` a head, whose inputs see the token before as well.

    Args:
        d_model: D.
        layer_idx: Which layer of the backbone this is.
        n_layers: How many layers the backbone has.
        n_heads: H.
        key_dim: H · K.
        value_dim: H · V.
        backend: auto, fla or torch.
    """

    backends = (Backend("fla", ("fla",), device="cuda"), TORCH)

    def __init__(
        self, d_model: int, *, layer_idx: int, n_layers: int, n_heads: int, key_dim: int, value_dim: int, backend: str
    ) -> None:
        super().__init__(d_model, layer_idx=layer_idx, n_layers=n_layers, backend=backend)
        self.n_heads, self.key_dim, self.value_dim = n_heads, key_dim, value_dim

    @abstractmethod
    def mix(
        self,
        x: Tensor,
        delta: Tensor,
        *,
        fla: bool,
        initial_state: Tensor | None,
        cu_seqlens: Tensor | None,
        context: Context,
    ) -> tuple[Tensor, Tensor]:
        """The output and the state after x ``[B, T, D]``; ``delta`` is the token before minus x."""

    def forward(
        self,
        x: Tensor,
        *,
        cu_seqlens: Tensor | None = None,
        state: State | None = None,
        context: Context | None = None,
    ) -> tuple[Tensor, State | None]:
        """See ``TokenMixer.forward``; ``context`` where the tags say so."""
        self.check_input(x, cu_seqlens, state)
        # One token is served by torch on every device: there is nothing to chunk.
        fla = self.choose_backend(x) == "fla" and x.shape[1] > 1
        shifted, last = token_shift(x, cu_seqlens=cu_seqlens, state=None if state is None else state["shift"])
        y, s = self.mix(
            x,
            shifted - x,
            fla=fla,
            initial_state=None if state is None else state["s"],
            cu_seqlens=cu_seqlens,
            context={} if context is None else context,
        )
        if state is None or last is None:
            return y, None
        return y, {"shift": last, "s": s.to(state["s"].dtype)}

    def heads(self, x: Tensor) -> Tensor:
        """``[B, T, H · K]`` to ``[B, T, H, K]``."""
        return x.unflatten(-1, (self.n_heads, -1))

    def init_state(
        self,
        batch_size: int,
        max_len: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> State:
        """``s`` ``[B, H, K, V]``, at least float32, and ``shift`` ``[B, D]``, the last input."""
        weight = next(m.weight for m in self.modules() if isinstance(m, nn.Linear))
        device, dtype = device or weight.device, dtype or weight.dtype
        shape = (batch_size, self.n_heads, self.key_dim // self.n_heads, self.value_dim // self.n_heads)
        return {
            "s": torch.zeros(shape, device=device, dtype=torch.promote_types(dtype, torch.float32)),
            "shift": torch.zeros(batch_size, self.d_model, device=device, dtype=dtype),
        }

    def refuses(self, backend: str, device_type: str, dtype: torch.dtype) -> str | None:
        """fla's kernels have no float64."""
        if backend == "fla" and dtype == torch.float64:
            return "fla's kernels work in float32, float16 and bfloat16, not torch.float64"
        return super().refuses(backend, device_type, dtype)

    def _projection_flops(self, T: int) -> int:
        return 2 * T * sum(m.in_features * m.out_features for m in self.modules() if isinstance(m, nn.Linear))

    def _state_entries(self) -> int:
        return self.key_dim * self.value_dim // self.n_heads


def whole_width(option: str, d_model: int, factor: float) -> int:
    """d_model times an expansion.

    Raises:
        ValueError: If the product is no whole number above 0.
    """
    width = round(d_model * factor)
    if width < 1 or abs(width - d_model * factor) > 1e-6:
        raise ValueError(f"{option} ({factor}) times d_model ({d_model}) must be a whole number above 0")
    return width
