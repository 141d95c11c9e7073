"""RWKV's mixers against the contract."""

from functools import partial

from seqarch.testing import parametrize_with_mixer_checks
from seqarch_rwkv import RWKV5, RWKV6


@parametrize_with_mixer_checks(
    [
        ("rwkv5", partial(RWKV5, n_heads=2)),
        ("rwkv6", partial(RWKV6, n_heads=2, mix_rank=4, decay_rank=8)),
        (
            "rwkv6-widths",
            partial(RWKV6, expand_k=0.25, expand_v=1.5, mix_rank=4, decay_rank=8, layer_idx=2, n_layers=3),
        ),
    ],
)
def test_conformance(mixer_check):
    mixer_check()
