"""Every configuration of attention against the contract."""

from functools import partial

from seqarch.testing import parametrize_with_mixer_checks
from seqarch_attention import Attention

ATTENTION = partial(Attention, n_heads=4)

CONFIGURATIONS = [
    ("rope", ATTENTION),
    ("window", partial(ATTENTION, window=6)),
    ("window-of-one", partial(ATTENTION, window=1)),
    ("grouped", partial(ATTENTION, n_kv_heads=2, qk_norm=True, temperature=0.5)),
    ("alibi", partial(ATTENTION, position="alibi")),
    ("alibi-window", partial(ATTENTION, position="alibi", window=7)),
    ("absolute", partial(ATTENTION, position="absolute")),
    ("random-keys", partial(ATTENTION, relation="random_keys", max_len=512)),
    ("random-scores", partial(ATTENTION, relation="random_scores", max_len=512)),
]
OPTIONS = {
    "expected_failures": {
        "window-of-one": {"check_parameter_gradients": "a softmax over one key depends on neither query nor key"}
    }
}


@parametrize_with_mixer_checks(CONFIGURATIONS, **OPTIONS)
def test_conformance(mixer_check):
    mixer_check()
