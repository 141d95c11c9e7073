"""The language model: embedding, L blocks, final norm, head.

Shape legend: B batch, T tokens, D model width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from seqarch.mixer import State, TokenMixer
from seqarch.model.block import Block
from seqarch.model.channel import ChannelMixer
from seqarch.model.init import marked, materialise
from seqarch.model.loss import IGNORE_INDEX, linear_cross_entropy, token_nll
from seqarch.ops.norm import RMSNorm
from seqarch.options import at_least

MixerFactory = Callable[..., TokenMixer]
ChannelMixerFactory = Callable[..., ChannelMixer]


class Loss(NamedTuple):
    """Losses of one batch.

    Attributes:
        objective: Scalar to minimise: the sum of nll (and z-loss) over the number of positions, ignored ones included,
            so that the gradient does not depend on how a batch is split.
        nll: Scalar, mean negative log-likelihood in nats per label that counts; no gradient.
    """

    objective: Tensor
    nll: Tensor


class Embedding(nn.Embedding):
    """Embedding, or head, whose weight ``[V, D]`` starts normal with σ = std, by default 0.02 (Radford et al. 2019)."""

    def __init__(self, vocab_size: int, d_model: int, std: float = 0.02) -> None:
        self.std = std
        super().__init__(vocab_size, d_model)

    def reset_parameters(self) -> None:
        """Draw the weight."""
        nn.init.normal_(self.weight, std=self.std)


class SequenceModel(nn.Module):
    """A causal language model whose token mixer is pluggable.

    Build it under ``torch.device("meta")`` and call ``materialise``: the parameters have no initial values before that.

    Args:
        vocab_size: V.
        d_model: D.
        n_layers: Number of blocks.
        mixer: Called as ``mixer(d_model, layer_idx=i, n_layers=n)``; several are cycled over the layers.
        channel_mixer: Called as ``channel_mixer(d_model, n_layers=n)``; None for blocks without one.
        tie_embeddings: The head shares the embedding's weight.
        embedding_std: σ of the embedding's initial values; a head of its own starts with 0.02.
        norm_eps: ε of the RMS norms.
        activation_checkpointing: Keep only each block's input for backward and recompute the rest.
    """

    def __init__(
        self,
        vocab_size: int,
        d_model: int,
        n_layers: int,
        mixer: MixerFactory | Sequence[MixerFactory],
        channel_mixer: ChannelMixerFactory | None,
        *,
        tie_embeddings: bool = True,
        embedding_std: float = 0.02,
        norm_eps: float = 1e-5,
        activation_checkpointing: bool = False,
    ) -> None:
        super().__init__()
        at_least(1, vocab_size=vocab_size, d_model=d_model, n_layers=n_layers)
        if embedding_std <= 0:
            raise ValueError(f"embedding_std must be above 0, got {embedding_std}")
        mixers = [mixer] if callable(mixer) else list(mixer)
        if not mixers:
            raise ValueError("mixer is an empty list: name at least one")
        self.vocab_size, self.d_model, self.n_layers = vocab_size, d_model, n_layers
        self.activation_checkpointing = activation_checkpointing
        self.embedding = Embedding(vocab_size, d_model, embedding_std)
        blocks = [
            Block(
                mixers[i % len(mixers)](d_model, layer_idx=i, n_layers=n_layers),
                None if channel_mixer is None else channel_mixer(d_model, n_layers=n_layers),
                norm_eps,
            )
            for i in range(n_layers)
        ]
        self.blocks = nn.ModuleList(blocks)
        self.norm = RMSNorm(d_model, norm_eps)
        self.head = None if tie_embeddings else Embedding(vocab_size, d_model)
        self.no_weight_decay = marked(self, "_no_weight_decay")

    def materialise(
        self, device: torch.device | str, seed: int, shard: Callable[[nn.Module], object] | None = None
    ) -> None:
        """Give a model built on the meta device storage and initial values, a pure function of ``seed``.

        Args:
            device: Where the parameters go.
            seed: Two models of one configuration and one seed are equal, sharded or not.
            shard: Called with each block once it has values, and with the whole model at the end (``fully_shard``).
        """
        for i, block in enumerate(self.blocks):
            materialise(block, device, seed, i)
            if shard is not None:
                shard(block)
        for i, module in enumerate((self.embedding, self.norm, self.head)):
            if module is not None:
                materialise(module, device, seed, self.n_layers + i)
        if shard is not None:
            shard(self)

    @property
    def mixers(self) -> list[TokenMixer]:
        """The token mixers, from the first layer to the last."""
        return [block.mixer for block in self.blocks if isinstance(block, Block)]

    @property
    def channel_mixers(self) -> list[ChannelMixer]:
        """The channel mixers of the layers that have one."""
        return [b.channel_mixer for b in self.blocks if isinstance(b, Block) and b.channel_mixer is not None]

    def compile_blocks(self) -> None:
        """Compile each block in place: one graph serves all of a kind, and the names of parameters stay as they are."""
        for block in self.blocks:
            block.compile()

    def _hidden(
        self, input_ids: Tensor, cu_seqlens: Tensor | None, state: list[State] | None
    ) -> tuple[Tensor, list[State] | None]:
        x = self.embedding(input_ids)
        context: dict[str, Tensor] = {}
        new_state: list[State] = []
        for i, block in enumerate(self.blocks):
            if self.activation_checkpointing and state is None and torch.is_grad_enabled():
                x, context, s = checkpoint(block, x, context, cu_seqlens, None, use_reentrant=False)  # pyright: ignore
            else:
                x, context, s = block(x, context, cu_seqlens, None if state is None else state[i])
            if s is not None:
                new_state.append(s)
        return self.norm(x), new_state if state is not None else None

    @property
    def _head_weight(self) -> Tensor:
        return self.embedding.weight if self.head is None else self.head.weight

    def forward(
        self,
        input_ids: Tensor,
        *,
        labels: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        state: list[State] | None = None,
        per_token: bool = False,
        last_only: bool = False,
        z_loss: float = 0.0,
    ) -> Loss | Tensor | tuple[Tensor, list[State] | None]:
        """Logits and state, or losses.

        Args:
            input_ids: int64 ``[B, T]``.
            labels: int64 ``[B, T]``, -100 where ignored: asks for losses.
            cu_seqlens: int32 ``[n+1]``, boundaries of packed documents (B = 1).
            state: From ``init_state`` or an earlier call; may be overwritten.
            per_token: With labels: negative log-likelihood of each, without gradient.
            last_only: Without labels: logits of the last position only, ``[B, 1, V]``.
            z_loss: With labels: weight of the squared log-normaliser in the objective.

        Returns:
            Without labels: logits ``[B, T, V]`` and the new state (None if none was given). With labels: ``Loss``, or
            with ``per_token`` nats ``[B, T]``, 0 where ignored.
        """
        h, state = self._hidden(input_ids, cu_seqlens, state)
        if labels is None:
            if last_only:
                h = h[:, -1:]
            return F.linear(h, self._head_weight), state
        h, y = h.flatten(0, 1), labels.flatten()
        if per_token:
            return token_nll(h, self._head_weight, y).view(labels.shape)
        total, nll = linear_cross_entropy(h, self._head_weight, y, z_loss=z_loss)
        return Loss(total / y.numel(), nll / (y != IGNORE_INDEX).sum().clamp(min=1))

    def init_state(
        self, batch_size: int, max_len: int, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> list[State]:
        """The empty state of every layer, for ``batch_size`` sequences of at most ``max_len`` tokens."""
        return [b.init_state(batch_size, max_len, device=device, dtype=dtype) for b in self.blocks]  # pyright: ignore

    def flops(self, T: int) -> int:
        """Operations of the forward pass for one sequence of T tokens: mixers, channel mixers and head."""
        head = 2 * T * self.d_model * self.vocab_size
        return head + sum(m.flops(T) for m in [*self.mixers, *self.channel_mixers])
