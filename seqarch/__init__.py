"""seqarch: pre-train language models with pluggable token mixers."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from seqarch.mixer import TORCH, Backend, State, Tags, TokenMixer, keep_float32, no_weight_decay

__version__ = "0.1.0"
__all__ = ["TORCH", "Backend", "State", "Tags", "TokenMixer", "__version__", "keep_float32", "no_weight_decay"]


def __getattr__(name: str) -> Any:
    """The contract, imported (and torch with it) when first asked for, so that the command's help comes at once."""
    if name in __all__:
        from seqarch import mixer

        return getattr(mixer, name)
    raise AttributeError(f"module 'seqarch' has no attribute '{name}'")
