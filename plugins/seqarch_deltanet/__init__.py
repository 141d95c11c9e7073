"""DeltaNet and Gated DeltaNet: states that are corrected rather than added to."""

from seqarch_deltanet.mixers import DeltaNet, GatedDeltaNet

__all__ = ["DeltaNet", "GatedDeltaNet"]
