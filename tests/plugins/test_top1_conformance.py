"""Configurations of Top-1 Element and Top-1 Chunk against the contract."""

from functools import partial

from seqarch.testing import parametrize_with_mixer_checks
from seqarch_top1 import Top1Chunk, Top1Element

CHUNK = partial(Top1Chunk, n_heads=4, chunk_size=8)

CONFIGURATIONS = [
    ("element", partial(Top1Element, n_heads=4)),
    ("element-grouped", partial(Top1Element, n_heads=4, n_kv_heads=2, qk_norm=True, position="none")),
    ("exact", CHUNK),
    ("approx", partial(CHUNK, selection="approx")),
    ("approx-grouped", partial(CHUNK, selection="approx", n_kv_heads=2, qk_norm=True, temperature=0.5)),
    ("exact-not-local", partial(CHUNK, local=False)),
    ("approx-not-local", partial(CHUNK, selection="approx", local=False, n_kv_heads=1)),
    ("exact-element", partial(CHUNK, select="element")),
    ("approx-element-not-local", partial(CHUNK, selection="approx", select="element", local=False)),
]


@parametrize_with_mixer_checks(CONFIGURATIONS)
def test_conformance(mixer_check):
    mixer_check()
