"""Rotary positions against transformers' and against their defining property."""

import math

import torch

from seqarch.ops.rotary import positions, rotary, sinusoid


def test_agrees_with_transformers():
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    config = LlamaConfig(hidden_size=64, num_attention_heads=4, max_position_embeddings=4096)
    q = torch.randn(2, 9, 4, 16)
    position = torch.arange(1000, 1009)
    cos, sin = LlamaRotaryEmbedding(config)(q, position[None])
    expected, _ = apply_rotary_pos_emb(q.transpose(1, 2), q.transpose(1, 2), cos, sin)
    torch.testing.assert_close(rotary(q, position), expected.transpose(1, 2), atol=1e-4, rtol=1e-4)


def test_products_depend_on_the_distance_alone():
    q, k = torch.randn(1, 1, 1, 8, dtype=torch.float64), torch.randn(1, 1, 1, 8, dtype=torch.float64)

    def score(i, j):
        return (rotary(q, torch.tensor([i])) * rotary(k, torch.tensor([j]))).sum()

    torch.testing.assert_close(score(7, 3), score(100_007, 100_003))
    torch.testing.assert_close(score(5, 5), (q * k).sum())


def test_positions_restart_at_boundaries():
    assert positions(4, start=3).tolist() == [3, 4, 5, 6]
    cu_seqlens = torch.tensor([0, 2, 2, 5], dtype=torch.int32)
    assert positions(5, cu_seqlens=cu_seqlens).tolist() == [0, 1, 0, 1, 2]


def test_sinusoid_as_defined():
    row = sinusoid(torch.tensor([3]), 4, torch.float64)[0]
    expected = [math.sin(3), math.sin(3 / 100), math.cos(3), math.cos(3 / 100)]
    torch.testing.assert_close(row, torch.tensor(expected, dtype=torch.float64))
