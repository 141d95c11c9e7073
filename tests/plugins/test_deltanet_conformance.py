"""Every configuration of DeltaNet and Gated DeltaNet against the contract."""

from functools import partial

from seqarch.testing import parametrize_with_mixer_checks
from seqarch_deltanet import DeltaNet, GatedDeltaNet

CONFIGURATIONS = [
    ("deltanet", partial(DeltaNet, n_heads=2)),
    ("deltanet-gate-no-conv", partial(DeltaNet, n_heads=2, gate=True, conv=False, head_dim=6, expand_v=1.5)),
    ("gated", partial(GatedDeltaNet, n_heads=2)),
    ("gated-grouped", partial(GatedDeltaNet, n_heads=1, n_v_heads=2, head_dim=8, conv_kernel=3)),
    ("gated-no-gate-no-conv", partial(GatedDeltaNet, n_heads=2, head_dim=8, gate=False, conv=False)),
]


@parametrize_with_mixer_checks(CONFIGURATIONS)
def test_conformance(mixer_check):
    mixer_check()
