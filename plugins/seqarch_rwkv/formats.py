"""Why RWKV-6 and RWKV-7 are not flash-linear-attention's models, though their two halves are its layers."""

from __future__ import annotations

from seqarch.export.formats import NoFormat
from seqarch_rwkv.rwkv7 import RWKV7
from seqarch_rwkv.vector_decay_mixers import RWKV6

_REASON = (
    "norms: seqarch's blocks have RMS norms, {} has layer norms, which also subtract the mean (and one more before the "
    "first layer)"
)


class FlaRWKV6(NoFormat):
    """fla's ``RWKV6ForCausalLM``."""

    name, model_type, library = "fla-rwkv6", "rwkv6", "flash-linear-attention"
    architecture = "RWKV6ForCausalLM"
    mixer = RWKV6
    reason = _REASON.format(architecture)


class FlaRWKV7(NoFormat):
    """fla's ``RWKV7ForCausalLM``."""

    name, model_type, library = "fla-rwkv7", "rwkv7", "flash-linear-attention"
    architecture = "RWKV7ForCausalLM"
    mixer = RWKV7
    reason = _REASON.format(architecture)
