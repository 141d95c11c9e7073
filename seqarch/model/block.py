"""One layer of the backbone."""

from __future__ import annotations

from torch import Tensor, nn

from seqarch.mixer import State, TokenMixer
from seqarch.model.channel import ChannelMixer
from seqarch.ops.norm import RMSNorm


class Block(nn.Module):
    """Pre-norm residual block: x + mixer(norm(x)), then x + channel_mixer(norm(x)) where there is one.

    Args:
        mixer: Moves information between positions.
        channel_mixer: Works on each position; None for architectures whose mixer does both.
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
    ) -> tuple[Tensor, State | None]:
        """Map x ``[B, T, D]`` and the mixer's state; ``context`` reaches mixers whose tags ask for it."""
        shared = {"context": context} if self.mixer.tags.shares_context else {}
        y, state = self.mixer(self.mixer_norm(x), cu_seqlens=cu_seqlens, state=state, **shared)
        x = x + y
        if self.channel_mixer is not None and self.channel_norm is not None:
            x = x + self.channel_mixer(self.channel_norm(x))
        return x, state
