"""Transformer++: causal softmax attention and its ablations."""

from seqarch_attention.attention import Attention

__all__ = ["Attention"]
