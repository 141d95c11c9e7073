"""One layer of the backbone."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from seqarch.mixer import State, TokenMixer
from seqarch.model.channel import ChannelMixer
from seqarch.ops.norm import RMSNorm


class Block(nn.Module):
    """Pre-norm residual block: x + mixer(norm(x)), then x + channel_mixer(norm(x)) where there is one.

    Args:
        mixer: Moves information between positions.
        channel_mixer: Works on the channels; None for architectures whose mixer does both.
        norm_eps: ε of the RMS norms.
    """

    def __init__(self, mixer: TokenMixer, channel_mixer: ChannelMixer | None, norm_eps: float) -> None:
        super().__init__()
        self.mixer_norm = RMSNorm(mixer.d_model, norm_eps)
        self.mixer = mixer
        self.channel_norm = None if channel_mixer is None else RMSNorm(mixer.d_model, norm_eps)
        self.channel_mixer = channel_mixer

    def forward(
        self,
        x: Tensor,
        context: dict[str, Tensor],
        cu_seqlens: Tensor | None = None,
        state: State | None = None,
    ) -> tuple[Tensor, dict[str, Tensor], State | None]:
        """Map x ``[B, T, D]`` and the layer's state; ``context`` reaches mixers whose tags ask for it.

        The context after the layer is returned, and the one given stays as it is: a block may be recomputed, and
        FSDP hands it copies of its arguments.
        """
        context = dict(context)
        of_mixer, of_channels = (None, None) if state is None else _parted(state)
        shared = {"context": context} if self.mixer.tags.shares_context else {}
        y, of_mixer = self.mixer(self.mixer_norm(x), cu_seqlens=cu_seqlens, state=of_mixer, **shared)
        x = x + y
        if self.channel_mixer is not None and self.channel_norm is not None:
            y, of_channels = self.channel_mixer(self.channel_norm(x), cu_seqlens=cu_seqlens, state=of_channels)
            x = x + y
        return x, context, None if state is None else _joined(of_mixer, of_channels)

    def init_state(
        self, batch_size: int, max_len: int, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> State:
        """The mixer's empty state, and the channel mixer's under names that begin with ``channel_mixer.``."""
        of_channels = None
        if self.channel_mixer is not None:
            of_channels = self.channel_mixer.init_state(batch_size, max_len, device=device, dtype=dtype)
        return _joined(self.mixer.init_state(batch_size, max_len, device=device, dtype=dtype), of_channels)


_PREFIX = "channel_mixer."


def _joined(of_mixer: State | None, of_channels: State | None) -> State:
    return {**(of_mixer or {}), **{_PREFIX + name: t for name, t in (of_channels or {}).items()}}


def _parted(state: State) -> tuple[State, State]:
    of_channels = {name.removeprefix(_PREFIX): t for name, t in state.items() if name.startswith(_PREFIX)}
    return {name: t for name, t in state.items() if not name.startswith(_PREFIX)}, of_channels
