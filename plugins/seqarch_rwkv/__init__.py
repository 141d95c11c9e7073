"""RWKV-5, RWKV-6 and RWKV-7, and RWKV's channel mix."""

from seqarch_rwkv.channel_mix import RWKVChannelMix
from seqarch_rwkv.rwkv7 import RWKV7
from seqarch_rwkv.vector_decay_mixers import RWKV5, RWKV6

__all__ = ["RWKV5", "RWKV6", "RWKV7", "RWKVChannelMix"]
