"""Float32 parameters among those that FSDP2 gathers in bfloat16.

``fully_shard`` has one policy for all parameters of a module. Here those that must stay float32 are taken out of it,
in the group that they share with the others: one all-gather for both (FSDP sends unlike types as bytes) and one
reduce-scatter, in float32. torch has no public way: this builds on two members of its ``FSDPParam``.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam


class _Wide(FSDPParam):
    """Gathered as it is sharded, in float32."""

    def init_dtype_attrs(self, mp_policy: MixedPrecisionPolicy) -> None:
        super().init_dtype_attrs(mp_policy)
        self.param_dtype = None


class _Narrow(FSDPParam):
    """Gathered in bfloat16; its gradient is widened before the reduction, which asks for one type in a group."""

    @property
    def unsharded_grad_data(self) -> Tensor:
        return super().unsharded_grad_data.to(torch.float32)


def keep_wide(module: nn.Module, names: Collection[str]) -> None:
    """Have parameters of a module, to which ``fully_shard`` has just been applied, gathered in float32.

    Args:
        module: Sharded with a policy that gathers in bfloat16 and reduces in float32.
        names: The parameters' names in it.
    """
    assert isinstance(module, FSDPModule)
    state: Any = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]  # older releases of torch have one
    owners = {(id(module.get_submodule(name.rpartition(".")[0])), name.rpartition(".")[2]) for name in names}
    found = 0
    for group in groups:
        for parameter in group.fsdp_params:
            info = parameter._module_info
            wide = (id(info.module), info.param_name) in owners
            parameter.__class__ = _Wide if wide else _Narrow
            found += wide
    assert found == len(owners), f"{found} of {sorted(names)} were found among the sharded parameters"
