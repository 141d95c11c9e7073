"""RWKV's mixers against the contract."""

from functools import partial

import pytest

from seqarch.testing import parametrize_with_mixer_checks
from seqarch_rwkv import RWKV5, RWKV6, RWKV7

SMALL = {"head_dim": 16, "decay_rank": 4, "a_rank": 4, "v_rank": 4, "gate_rank": 4}

CONFIGURATIONS = [
    ("rwkv5", partial(RWKV5, n_heads=2)),
    ("rwkv6", partial(RWKV6, n_heads=2, mix_rank=4, decay_rank=8)),
    (
        "rwkv6-widths",
        partial(RWKV6, expand_k=0.25, expand_v=1.5, mix_rank=4, decay_rank=8, layer_idx=2, n_layers=3),
    ),
    ("rwkv7-first", partial(RWKV7, **SMALL)),
    ("rwkv7-later", partial(RWKV7, layer_idx=2, n_layers=4, **SMALL)),
]


# torch.compile's own
@pytest.mark.filterwarnings("ignore:.*_prims_common.check. is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:.*Function'> should not be instantiated:DeprecationWarning")
@parametrize_with_mixer_checks(CONFIGURATIONS)
def test_conformance(mixer_check):
    mixer_check()
