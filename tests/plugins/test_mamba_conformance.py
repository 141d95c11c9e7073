"""Every configuration of Mamba-1 and Mamba-2 against the contract."""

from functools import partial

import pytest

from seqarch.testing import parametrize_with_mixer_checks
from seqarch_mamba import Mamba1, Mamba2

MAMBA1 = partial(Mamba1, state_dim=4)
MAMBA2 = partial(Mamba2, head_dim=8, state_dim=4, chunk_size=16)

CONFIGURATIONS = [
    ("mamba1", MAMBA1),
    ("mamba1-shared", partial(MAMBA1, decay="shared")),
    ("mamba1-none", partial(MAMBA1, decay="none")),
    ("mamba1-no-conv", partial(MAMBA1, conv=False, dt_rank=3)),
    ("mamba2", MAMBA2),
    ("mamba2-groups", partial(MAMBA2, n_groups=2, conv_kernel=2)),
    ("mamba2-shared", partial(MAMBA2, decay="shared")),
    ("mamba2-none", partial(MAMBA2, decay="none")),
    ("mamba2-no-conv-no-norm", partial(MAMBA2, conv=False, norm=False)),
]
OPTIONS = {"d_model": 16}


# torch.compile's own
@pytest.mark.filterwarnings("ignore:.*_prims_common.check. is deprecated:FutureWarning")
@parametrize_with_mixer_checks(CONFIGURATIONS, **OPTIONS)
def test_conformance(mixer_check):
    mixer_check()
