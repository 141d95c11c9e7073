"""Transformer++'s mixer: against transformers' Llama, and each ablation against what it says."""

import pytest
import torch

from seqarch.ops.attention import alibi_slopes
from seqarch_attention import Attention
from seqarch_attention.backends import flex_attention
from tests.ops.test_attention import dense

X = torch.randn(2, 13, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def build(**options):
    torch.manual_seed(0)
    return Attention(32, n_heads=4, **options).double()


@pytest.mark.parametrize("n_kv_heads", [4, 2])
def test_agrees_with_transformers_llama(n_kv_heads):
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding

    config = LlamaConfig(
        hidden_size=32, num_attention_heads=4, num_key_value_heads=n_kv_heads, attn_implementation="eager"
    )
    ours = build(n_kv_heads=n_kv_heads).float()
    theirs = LlamaAttention(config, layer_idx=0)
    theirs.load_state_dict(ours.state_dict())  # the parameter names are Llama's
    x = X.float()
    mask = torch.full((13, 13), -torch.inf).triu(1)[None, None]
    rotation = LlamaRotaryEmbedding(config)(x, torch.arange(13)[None])
    torch.testing.assert_close(ours(x)[0], theirs(x, rotation, mask)[0], atol=1e-5, rtol=1e-4)


def reference(mixer, x, q, k, slopes=None):
    v = mixer.v_proj(x).unflatten(-1, (-1, 8))
    return mixer.o_proj(dense(q, k, v, mixer.scale, mixer.window, slopes=slopes).flatten(2))


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("temperature", [1.0, 0.25])
@pytest.mark.parametrize("position", ["none", "alibi"])
def test_formula(window, temperature, position):
    mixer = build(window=window, temperature=temperature, position=position)
    assert mixer.scale == 1 / (temperature * 8**0.5)
    q, k = (p(X).unflatten(-1, (-1, 8)) for p in (mixer.q_proj, mixer.k_proj))
    slopes = alibi_slopes(4) if position == "alibi" else None
    torch.testing.assert_close(mixer(X)[0], reference(mixer, X, q, k, slopes), atol=1e-9, rtol=1e-7)


def test_random_keys_score_queries_against_trainable_constants():
    mixer = build(relation="random_keys", max_len=20, position="none")
    assert {n for n, _ in mixer.named_parameters()} == {
        "q_proj.weight", "v_proj.weight", "o_proj.weight", "random_keys",
    }  # fmt: skip
    q = mixer.q_proj(X).unflatten(-1, (-1, 8))
    k = mixer.random_keys[:13].expand(2, -1, -1, -1)
    torch.testing.assert_close(mixer(X)[0], reference(mixer, X, q, k))


def test_random_scores_ignore_the_content():
    mixer = build(relation="random_scores", max_len=20)
    a, b = mixer(X)[0], mixer(X.flip(2))[0]
    # One matrix of weights mixes every input: the map is linear in x.
    torch.testing.assert_close(mixer(X + 2 * X.flip(2))[0], a + 2 * b)


def test_every_ablation_changes_the_function():
    base = build()(X)[0]
    for options in (
        {"window": 4},
        {"position": "none"},
        {"position": "alibi"},
        {"position": "absolute"},
        {"temperature": 0.5},
        {"qk_norm": True},
        {"n_kv_heads": 2},
        {"relation": "random_keys"},
        {"relation": "random_scores"},
    ):
        assert (build(**options)(X)[0] - base).abs().max() > 1e-3, options


def test_the_cache_of_a_window_is_bounded_by_the_window():
    mixer = build(window=5)
    assert mixer.tags.constant_state
    assert mixer.state_bytes(10) == mixer.state_bytes(10_000) == 2 * 4 * 32 * 4 + 8
    assert build().state_bytes(10) == 2 * 10 * 32 * 4 + 8
    assert build(n_kv_heads=1).state_bytes(10) == 2 * 10 * 8 * 4 + 8


def test_flops_closed_form():
    assert build().flops(13) == 2 * 13 * 4 * 32 * 32 + 4 * 13 * 14 // 2 * 32
    pairs = sum(min(t + 1, 4) for t in range(13))
    assert build(window=4).flops(13) == 2 * 13 * 4 * 32 * 32 + 4 * pairs * 32


@pytest.mark.parametrize("slopes", [None, alibi_slopes(4)])
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("cu_seqlens", [None, torch.tensor([0, 60, 61, 200], dtype=torch.int32)])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_backend_masks_and_biases(slopes, window, cu_seqlens):
    g = torch.Generator().manual_seed(0)
    q = torch.randn(1, 200, 4, 16, generator=g)
    k, v = torch.randn(1, 200, 2, 16, generator=g), torch.randn(1, 200, 2, 16, generator=g)
    ours = flex_attention(q, k, v, scale=0.25, window=window, cu_seqlens=cu_seqlens, slopes=slopes)
    torch.testing.assert_close(ours, dense(q, k, v, 0.25, window, cu_seqlens, slopes), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_heads": 5}, r"n_heads \(5\) must divide d_model \(32\)"),
        ({"n_kv_heads": 3}, r"n_kv_heads \(3\) must divide n_heads \(4\)"),
        ({"window": 0}, "window must be at least 1"),
        ({"temperature": 0.0}, "temperature must be above 0"),
        ({"head_dim": 7}, "needs an even head_dim"),
        ({"position": "ropes"}, "position must be one of rope, alibi, absolute, none, got 'ropes'"),
        ({"relation": "kq"}, "relation must be one of"),
        ({"backend": "cuda"}, "backend must be one of auto, flash_attn, flex, torch"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        Attention(32, **{"n_heads": 4, **options})


def test_asking_for_a_backend_that_cannot_serve_names_the_extra():
    with pytest.raises(
        ValueError, match=r"flash-attn works in float16|package flash_attn is not installed.*seqarch\[cuda\]"
    ):
        build(backend="flash_attn")(X)


def test_too_many_tokens_name_max_len():
    mixer = build()
    with pytest.raises(ValueError, match="max_len = 12 tokens, not for 13"):
        mixer(X, state=mixer.init_state(2, 12))
    mixer = build(relation="random_keys", max_len=12)
    with pytest.raises(ValueError, match=r"max_len = 12 positions, the input has 13: raise max_len"):
        mixer(X)
