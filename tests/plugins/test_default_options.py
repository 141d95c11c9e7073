"""Each first-party mixer keeps the contract with its options as they are, at the width that ``seqarch check`` takes."""

import pytest

from seqarch.discovery import find
from seqarch.testing import check_mixer

MIXERS = (
    "Attention",
    "Based",
    "DeltaNet",
    "GatedDeltaNet",
    "Mamba1",
    "Mamba2",
    "RWKV5",
    "RWKV6",
    "RWKV7",
    "Top1Chunk",
    "Top1Element",
)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", MIXERS)
def test_conformance(name: str, seed: int) -> None:
    report = check_mixer(find(name), d_model=64, seed=seed)
    assert report.ok, str(report)
