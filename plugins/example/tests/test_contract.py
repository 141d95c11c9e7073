"""Does Retention keep the contract? One test for each check that its tags call for."""

from functools import partial

from seqarch.testing import parametrize_with_mixer_checks
from seqarch_retention import Retention


@parametrize_with_mixer_checks([Retention, ("one head", partial(Retention, n_heads=1))])
def test_contract(mixer_check):
    """Runs one check; it raises with the clause that is broken and by how much."""
    mixer_check()
