"""Mamba-1, Mamba-2 and their ablations."""

from seqarch_mamba.mamba1 import Mamba1
from seqarch_mamba.mamba2 import Mamba2

__all__ = ["Mamba1", "Mamba2"]
