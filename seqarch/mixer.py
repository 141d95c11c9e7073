"""The contract of a token mixer: what a layer that moves information between positions must offer.

Shape legend: B batch, T tokens, D model width.
"""

from __future__ import annotations

import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import ClassVar

import torch
from torch import Tensor, nn

from seqarch.options import at_least

State = dict[str, Tensor]
"""What a mixer carries from one call to the next: a flat dict of tensors, each with the batch first."""


@dataclass(frozen=True)
class Backend:
    """One implementation of a mixer's computation.

    Attributes:
        name: What the option ``backend`` says.
        packages: Import names of the packages it needs.
        extra: The extra of the distribution that installs them.
        device: The device type it needs, or None for any.
        distribution: What has that extra.
    """

    name: str
    packages: tuple[str, ...] = ()
    extra: str = "cuda"
    device: str | None = None
    distribution: str = "seqarch"

    def unavailable(self, device_type: str) -> str | None:
        """Why this backend cannot serve a device of this type here, or None if it can."""
        for package in self.packages:
            if importlib.util.find_spec(package) is None:
                return f"package {package} is not installed: pip install '{self.distribution}[{self.extra}]'"
        if self.device is not None and self.device != device_type:
            return f"needs a {self.device} device, not {device_type}"
        return None


TORCH = Backend("torch")


@dataclass(frozen=True)
class Tags:
    """What a mixer is and can do. The conformance kit and the trainer read it; they never ask for names.

    Attributes:
        recurrent: Decoding a token costs the same at any position.
        constant_state: The state's size does not grow with ``max_len``.
        packs_documents: ``cu_seqlens`` is supported.
        straight_through: The gradient is, by design, not the derivative of the forward function.
        discontinuous: A tiny change of the input can change the output by a jump (a hard selection), so
            reduced precision agrees for most tokens, not for all.
        bitwise_prefix: Outputs up to t are bit-identical under any change after t. Otherwise equal within rounding.
        shares_context: ``forward`` takes ``context``, a dict that lives for one pass through the backbone, in which a
            layer leaves tensors for later layers.
        fullgraph: ``torch.compile(fullgraph=True)`` works on the ``torch`` backend, without ``cu_seqlens`` and state.
        chunk_size: The length at which the computation changes form, if any; tests look closely around it.
        dtypes: Parameter dtypes that are supported.
        tolerances: Relative error allowed against float64, by dtype.
    """

    recurrent: bool = False
    constant_state: bool = False
    packs_documents: bool = True
    straight_through: bool = False
    discontinuous: bool = False
    bitwise_prefix: bool = True
    shares_context: bool = False
    fullgraph: bool = True
    chunk_size: int | None = None
    dtypes: tuple[torch.dtype, ...] = (torch.float64, torch.float32, torch.bfloat16)
    tolerances: Mapping[torch.dtype, float] = field(
        default_factory=lambda: {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
    )


class TokenMixer(nn.Module, ABC):
    """Base class of all token mixers.

    A subclass adds its options as keyword arguments, each typed and with a default. ``reset_parameters`` gives every
    parameter and buffer its initial value, which makes it possible to build a mixer on the meta device; ``__init__``
    ends by calling it, so that a mixer built elsewhere is ready for use.

    Args:
        d_model: Width D of the model.
        layer_idx: Which layer of the backbone this is, from 0.
        n_layers: How many layers the backbone has.
        backend: ``auto``, or the name of one of ``backends``.
    """

    backends: ClassVar[tuple[Backend, ...]] = (TORCH,)
    """From the fastest to the plainest; ``auto`` takes the first that can serve the device."""

    tags: Tags = Tags()
    """Set on the instance in ``__init__`` where it depends on options."""

    formats: ClassVar[Mapping[str, str]] = {}
    """Formats of other libraries that models of this mixer can be exported to: by name, ``module:class`` of its
    ``seqarch.export.formats.NativeFormat``, imported when it is asked for."""

    def __init__(self, d_model: int, *, layer_idx: int = 0, n_layers: int = 1, backend: str = "auto") -> None:
        super().__init__()
        at_least(1, d_model=d_model)
        names = ["auto", *(b.name for b in self.backends)]
        if backend not in names:
            raise ValueError(f"backend must be one of {', '.join(names)} for {type(self).__name__}, got '{backend}'")
        self.d_model = d_model
        self.layer_idx = layer_idx
        self.n_layers = n_layers
        self.backend = backend

    @abstractmethod
    def forward(
        self, x: Tensor, *, cu_seqlens: Tensor | None = None, state: State | None = None
    ) -> tuple[Tensor, State | None]:
        """Mix ``x`` causally.

        Args:
            x: ``[B, T, D]``.
            cu_seqlens: int32 ``[n+1]``, from 0 to T: boundaries of packed documents (B = 1). Nothing crosses one.
            state: From ``init_state`` or an earlier call. It may be overwritten: use the returned one.

        Returns:
            The output ``[B, T, D]`` and the new state, which is None where no state was given.

        Raises:
            ValueError: For what the tags deny, ``cu_seqlens`` with B > 1 or with a state, or more tokens than the
                state has room for.
        """

    @abstractmethod
    def init_state(
        self,
        batch_size: int,
        max_len: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> State:
        """The empty state for ``batch_size`` sequences of at most ``max_len`` tokens; every tensor has batch first."""

    @abstractmethod
    def reset_parameters(self) -> None:
        """Give every parameter and buffer of this mixer its initial value."""

    @abstractmethod
    def flops(self, T: int) -> int:
        """Operations (a multiply-add is two) of the forward pass of one sequence of T tokens, projections included.

        Counts what the mathematics asks for (the causal half of attention, say), not what a backend wastes.
        """

    def state_bytes(self, T: int, dtype: torch.dtype = torch.float32) -> int:
        """Bytes of the state of one sequence with room for T tokens, for parameters of ``dtype``."""
        state = self.init_state(1, T, device="meta", dtype=dtype)
        return sum(t.numel() * t.element_size() for t in state.values())

    def refuses(self, backend: str, device_type: str, dtype: torch.dtype) -> str | None:
        """Why this instance cannot use ``backend`` there, or None. Override to add reasons that depend on options."""
        for candidate in self.backends:
            if candidate.name == backend:
                return candidate.unavailable(device_type)
        return f"{type(self).__name__} has no backend '{backend}'"

    def choose_backend(self, x: Tensor) -> str:
        """The backend that will serve ``x``.

        Raises:
            ValueError: If the option ``backend`` asks for one that cannot, with the reason.
        """
        if self.backend != "auto":
            reason = self.refuses(self.backend, x.device.type, x.dtype)
            if reason is not None:
                raise ValueError(f"{type(self).__name__}: backend='{self.backend}' cannot be used: {reason}")
            return self.backend
        for candidate in self.backends:
            if self.refuses(candidate.name, x.device.type, x.dtype) is None:
                return candidate.name
        raise ValueError(f"{type(self).__name__}: no backend can serve {x.device.type} tensors of {x.dtype}")

    def check_input(self, x: Tensor, cu_seqlens: Tensor | None, state: State | None) -> None:
        """Raise ``ValueError`` for arguments that break the contract. Every ``forward`` calls it first."""
        if x.ndim != 3 or x.shape[-1] != self.d_model:
            raise ValueError(f"x must be [B, T, {self.d_model}], got {list(x.shape)}")
        if cu_seqlens is None:
            return
        name = type(self).__name__
        if not self.tags.packs_documents:
            raise ValueError(
                f"{name} cannot keep packed documents apart: do not pass cu_seqlens (document_mask: false)"
            )
        if x.shape[0] != 1:
            raise ValueError(f"cu_seqlens needs a batch of 1, got x of {list(x.shape)}")
        if state is not None:
            raise ValueError("cu_seqlens and state cannot be given together: run each document with a state of its own")
        if cu_seqlens.ndim != 1 or cu_seqlens.dtype != torch.int32 or len(cu_seqlens) < 2:
            raise ValueError(f"cu_seqlens must be int32 [n+1], got {cu_seqlens.dtype} {list(cu_seqlens.shape)}")
        if cu_seqlens.device.type == "cpu" and not torch.compiler.is_compiling():
            bounds = cu_seqlens.tolist()
            if bounds[0] != 0 or bounds[-1] != x.shape[1] or any(b < a for a, b in pairwise(bounds)):
                raise ValueError(f"cu_seqlens must rise from 0 to T = {x.shape[1]}, got {bounds}")


def no_weight_decay(parameter: nn.Parameter) -> nn.Parameter:
    """Mark a parameter that the optimiser must not decay (decays, biases, gains); returns it."""
    parameter._no_weight_decay = True  # pyright: ignore[reportAttributeAccessIssue]
    return parameter


def keep_float32(parameter: nn.Parameter) -> nn.Parameter:
    """Mark a parameter that stays float32 when the model's parameters are cast to a lower precision; returns it."""
    parameter._keep_float32 = True  # pyright: ignore[reportAttributeAccessIssue]
    return parameter
