"""Every configuration of Based against the contract."""

from functools import partial

from seqarch.testing import parametrize_with_mixer_checks
from seqarch_linear import Based

CONFIGURATIONS = [
    ("default", partial(Based, n_heads=2, feature_dim=4)),
    ("odd-features", partial(Based, n_heads=3, head_dim=5, feature_dim=3)),
]


@parametrize_with_mixer_checks(CONFIGURATIONS)
def test_conformance(mixer_check):
    mixer_check()
