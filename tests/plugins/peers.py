"""Layers of flash-linear-attention and transformers that compute on a CPU, for the tests and benchmarks/agreement.py.

fla's layers raise there. Their ``*_output`` here is the layer's forward with its own modules around fla's naive
recurrence. A context of theirs that a layer needs is an argument.
"""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def mamba1_layer(
    d_model: int, *, expand: int = 2, state_dim: int = 16, dt_rank: int | None = None, conv_kernel: int = 4
) -> nn.Module:
    """transformers' Mamba-1."""
    from transformers import MambaConfig
    from transformers.models.mamba.modeling_mamba import MambaMixer

    config = MambaConfig(
        hidden_size=d_model,
        expand=expand,
        intermediate_size=expand * d_model,
        state_size=state_dim,
        time_step_rank="auto" if dt_rank is None else dt_rank,
        conv_kernel=conv_kernel,
        num_hidden_layers=1,
    )
    return MambaMixer(config, layer_idx=0)


def mamba2_layer(d_model: int, *, head_dim: int, state_dim: int, n_groups: int = 1, conv_kernel: int = 4) -> nn.Module:
    """transformers' Mamba-2."""
    from transformers import Mamba2Config
    from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

    config = Mamba2Config(
        hidden_size=d_model,
        num_heads=2 * d_model // head_dim,
        head_dim=head_dim,
        state_size=state_dim,
        n_groups=n_groups,
        conv_kernel=conv_kernel,
        chunk_size=32,
        num_hidden_layers=1,
        layer_norm_epsilon=1e-5,
    )
    return Mamba2Mixer(config, layer_idx=0)


def qwen3_next_layer(n_heads: int, n_v_heads: int, head_dim: int, v_dim: int, d_model: int = 32) -> nn.Module:
    """transformers' Gated DeltaNet."""
    from transformers import Qwen3NextConfig
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

    config = Qwen3NextConfig(
        hidden_size=d_model,
        linear_num_key_heads=n_heads,
        linear_num_value_heads=n_v_heads,
        linear_key_head_dim=head_dim,
        linear_value_head_dim=v_dim,
        rms_norm_eps=1e-5,
        num_hidden_layers=1,
    )
    return Qwen3NextGatedDeltaNet(config, layer_idx=0)


def from_qwen3_next(
    source: Mapping[str, Tensor], n_heads: int, n_v_heads: int, head_dim: int, v_dim: int
) -> dict[str, Tensor]:
    """The parameters of ``qwen3_next_layer`` under the names of our GatedDeltaNet."""
    group = n_v_heads // n_heads
    # For each key head: its q and k, then v and gate of its value heads.
    q, k, v, g = (
        source["in_proj_qkvz.weight"]
        .unflatten(0, (n_heads, -1))
        .split([head_dim, head_dim, group * v_dim, group * v_dim], dim=1)
    )
    b, a = source["in_proj_ba.weight"].unflatten(0, (n_heads, -1)).split([group, group], dim=1)
    widths = [n_heads * head_dim, n_heads * head_dim, n_v_heads * v_dim]
    ours = {f"{n}_proj.weight": w.flatten(0, 1) for n, w in zip("qkvgba", (q, k, v, g, b, a), strict=True)}
    convs = source["conv1d.weight"].split(widths)
    ours |= {f"{n}_conv1d.weight": w for n, w in zip("qkv", convs, strict=True)}
    ours |= {"A_log": source["A_log"], "dt_bias": source["dt_bias"]}
    return ours | {"o_norm.weight": source["norm.weight"], "o_proj.weight": source["out_proj.weight"]}


def rwkv6_layer(d_model: int, n_heads: int, *, mix_rank: int, decay_rank: int) -> nn.Module:
    """fla's RWKV-6."""
    from fla.layers import RWKV6Attention

    return RWKV6Attention(
        hidden_size=d_model, num_heads=n_heads, proj_low_rank_dim=mix_rank, gate_low_rank_dim=decay_rank
    )


def rwkv6_output(layer: nn.Module, x: Tensor) -> Tensor:
    """Of fla's RWKV-6 layer, x ``[B, T, D]``."""
    from fla.ops.rwkv6.recurrent_naive import naive_recurrent_rwkv6

    B, T, D = x.shape
    H = layer.num_heads
    delta = _shifted(x) - x
    low = torch.tanh(layer.x_proj[0](x, delta)).view(B, T, 5, -1)
    weight = layer.x_proj[2].weight.view(D, 5, -1)
    mixes = torch.einsum("btnr,dnr->nbtd", low, weight) + layer.x_bias[:, None, None]
    projections = (layer.r_proj, layer.w_proj, layer.k_proj, layer.v_proj, layer.g_proj)
    r, w, k, v, g = (projection(x, mix, delta) for projection, mix in zip(projections, mixes, strict=True))
    r, k, v, w = (t.unflatten(-1, (H, -1)).transpose(1, 2) for t in (r, k, v, -w.exp()))
    o, _ = naive_recurrent_rwkv6(r, k, v, w, layer.bonus, 1.0)
    o = o.transpose(1, 2).flatten(2)
    normed = F.group_norm(o.flatten(0, 1), H, layer.g_norm.weight, layer.g_norm.bias, 1e-5).view_as(o)
    return layer.o_proj(normed * F.silu(g))


def rwkv5_as_rwkv6(parameters: Mapping[str, Tensor], *, mix_rank: int, decay_rank: int) -> dict[str, Tensor]:
    """Parameters of RWKV-6 whose decays and mixes are the constants of our RWKV-5."""
    shared = {n: p for n, p in parameters.items() if not n.startswith("time_")}
    decay, like = parameters["time_decay"].flatten(), parameters["time_mix_r"]
    D = len(like)
    mixes = {name: 1.0 - parameters[f"time_mix_{name}"] for name in "rkvg"}
    return shared | {
        "x_proj.0.linear.weight": like.new_zeros(5 * mix_rank, D),
        "x_proj.0.mu": torch.zeros_like(like),
        "x_proj.2.weight": like.new_zeros(D, 5 * mix_rank),
        "x_bias": torch.stack([mixes.get(name, torch.zeros_like(like)) for name in "rwkvg"]),
        "w_proj.linear.lora.0.weight": like.new_zeros(decay_rank, D),
        "w_proj.linear.lora.2.weight": like.new_zeros(len(decay), decay_rank),
        "w_proj.linear.lora.2.bias": decay,
    }


def rwkv7_layer(
    d_model: int,
    n_heads: int,
    layer_idx: int,
    n_layers: int,
    *,
    decay_rank: int,
    a_rank: int,
    v_rank: int,
    gate_rank: int,
) -> nn.Module:
    """fla's RWKV-7."""
    from fla.layers import RWKV7Attention

    return RWKV7Attention(
        hidden_size=d_model,
        head_dim=d_model // n_heads,
        layer_idx=layer_idx,
        num_hidden_layers=n_layers,
        decay_low_rank_dim=decay_rank,
        a_low_rank_dim=a_rank,
        v_low_rank_dim=v_rank,
        gate_low_rank_dim=gate_rank,
    )


def rwkv7_output(layer: nn.Module, x: Tensor, v_first: Tensor | None = None) -> Tensor:
    """Of fla's RWKV-7 layer, x and the first layer's values ``[B, T, D]``, which later layers need."""
    from fla.ops.generalized_delta_rule.dplr.naive import dplr_recurrence

    D, H = x.shape[-1], layer.num_heads
    delta = _shifted(x) - x
    of_v = x + delta * layer.x_v
    r, k, v = layer.r_proj(x + delta * layer.x_r), layer.k_proj(x + delta * layer.x_k), layer.v_proj(of_v)
    w = -0.6065306597126334 * layer.w_lora(x + delta * layer.x_w).sigmoid()
    a = layer.a_lora(x + delta * layer.x_a).sigmoid()
    g = layer.g_lora(x + delta * layer.x_g)
    if v_first is not None:
        v = v + (v_first - v) * layer.v_lora(of_v).sigmoid()
    kk = F.normalize((k * layer.k_k).unflatten(-1, (H, -1)), dim=-1)
    k = k * (1 + (a - 1) * layer.k_a)
    r, k, v, w, a = (t.unflatten(-1, (H, -1)) for t in (r, k, v, w, a))
    o, _ = dplr_recurrence(*(t.transpose(1, 2) for t in (r * (D // H) ** 0.5, k, v, -kk, kk * a, w)))
    o = o.transpose(1, 2).flatten(2)
    eps = D // H * 1e-5
    normed = F.group_norm(o.flatten(0, 1), H, layer.g_norm.weight, layer.g_norm.bias, eps).view_as(o)
    normed = normed + ((r * k * layer.r_k).sum(-1, keepdim=True) * v).flatten(2)
    return layer.o_proj(normed * g)


def _shifted(x: Tensor) -> Tensor:
    return F.pad(x, (0, 0, 1, -1))
