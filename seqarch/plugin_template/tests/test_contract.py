"""Does MyMixer keep the contract? One test for each check that its tags call for."""

from functools import partial

from my_mixer import MyMixer
from seqarch.testing import parametrize_with_mixer_checks


@parametrize_with_mixer_checks([MyMixer, ("one head", partial(MyMixer, n_heads=1))])
def test_contract(mixer_check):
    """Runs one check; it raises with the clause that is broken and by how much."""
    mixer_check()
