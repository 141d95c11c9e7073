"""The backbone: plain modules, no Lightning."""

from seqarch.model.backbone import Loss, SequenceModel
from seqarch.model.channel import SwiGLU

__all__ = ["Loss", "SequenceModel", "SwiGLU"]
