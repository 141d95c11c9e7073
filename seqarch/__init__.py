"""seqarch: pre-train language models with pluggable token mixers."""

from seqarch.mixer import Backend, Tags, TokenMixer, keep_float32, no_weight_decay

__version__ = "0.1.0"
__all__ = ["Backend", "Tags", "TokenMixer", "__version__", "keep_float32", "no_weight_decay"]
