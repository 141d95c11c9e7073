"""Exported models in transformers: ``import seqarch.hf``, then ``AutoModelForCausalLM.from_pretrained(folder)``.

Needs the extra ``hf``. Nothing else of seqarch imports it.
"""

from transformers import AutoConfig, AutoModelForCausalLM

from seqarch.hf.cache import StateCache
from seqarch.hf.configuration import SeqArchConfig
from seqarch.hf.modeling import SeqArchForCausalLM

__all__ = ["SeqArchConfig", "SeqArchForCausalLM", "StateCache"]

AutoConfig.register(SeqArchConfig.model_type, SeqArchConfig)
AutoModelForCausalLM.register(SeqArchConfig, SeqArchForCausalLM)
