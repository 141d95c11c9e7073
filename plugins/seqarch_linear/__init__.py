"""Based: linear attention with Taylor weights."""

from seqarch_linear.based import Based

__all__ = ["Based"]
