"""Mamba-2 and its ablations."""

from seqarch_mamba.mamba2 import Mamba2

__all__ = ["Mamba2"]
