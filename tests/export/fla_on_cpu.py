"""fla's DeltaNet models on a CPU, where its kernels raise: the models' own code, with torch in the kernels' place.

The recurrences are fla's own naive ones.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def compute_with_torch(model: nn.Module, monkeypatch: Any) -> None:
    """Have an fla model of DeltaNet or Gated DeltaNet compute with torch instead of Triton."""
    for module in model.modules():
        name = type(module).__name__
        if name == "ShortConvolution":
            module.forward = partial(_convolution, module)
        elif name == "FusedRMSNormGated":
            module.forward = partial(_gated_norm, module)
        elif name == "RMSNorm":
            module.forward = partial(_norm, module)
        elif name == "GatedMLP":
            module.forward = partial(_swiglu, module)
        elif name == "GatedDeltaNet":
            module._use_fused_qkv_conv = lambda **_: False
    for function in ("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"):
        monkeypatch.setattr(f"fla.layers.gated_deltanet.{function}", _gated_delta_rule)
    for function in ("chunk_delta_rule", "fused_recurrent_delta_rule"):
        monkeypatch.setattr(f"fla.layers.delta_net.{function}", _delta_rule)


def _convolution(module: Any, x: Tensor, **_: Any) -> tuple[Tensor, None]:
    kernel = module.weight.shape[-1]
    y = F.conv1d(F.pad(x.mT, (kernel - 1, 0)), module.weight, module.bias, groups=module.weight.shape[0]).mT
    assert module.activation in ("silu", "swish")
    return F.silu(y), None


def _gated_norm(module: Any, x: Tensor, g: Tensor, *_: Any) -> Tensor:
    assert module.activation in ("silu", "swish")
    return F.rms_norm(x, x.shape[-1:], module.weight, module.eps) * F.silu(g)


def _norm(module: Any, x: Tensor, residual: Tensor | None = None, prenorm: bool = False) -> Any:
    x = x if residual is None else x + residual
    y = F.rms_norm(x, x.shape[-1:], module.weight, module.eps)
    return (y, x) if prenorm else y


def _swiglu(module: Any, x: Tensor, **_: Any) -> Tensor:
    return module.down_proj(F.silu(module.gate_proj(x)) * module.up_proj(x))


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def _gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, A_log: Tensor, dt_bias: Tensor, **options: Any
) -> tuple[Tensor, None]:
    from fla.ops.gated_delta_rule.naive import naive_recurrent_gated_delta_rule

    assert options["use_qk_l2norm_in_kernel"]
    assert options["use_gate_in_kernel"]
    assert options["use_beta_sigmoid_in_kernel"]
    assert not options["allow_neg_eigval"]
    group = v.shape[2] // q.shape[2]
    q, k = (_unit(t).repeat_interleave(group, dim=2) for t in (q, k))
    o, _ = naive_recurrent_gated_delta_rule(q, k, v, beta.sigmoid(), -A_log.exp() * F.softplus(g + dt_bias))
    return o, None


def _delta_rule(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, **options: Any) -> tuple[Tensor, None]:
    from fla.ops.delta_rule.naive import delta_rule_recurrence

    assert options["use_qk_l2norm_in_kernel"]
    o, _ = delta_rule_recurrence(*(t.transpose(1, 2) for t in (_unit(q), _unit(k), v, beta)))
    return o.transpose(1, 2), None
