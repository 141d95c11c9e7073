"""FSDP2 over all processes: fully sharded, or sharded within a node and replicated across nodes."""

from __future__ import annotations

import os
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal

import torch
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from seqarch.model.init import marked
from seqarch.options import at_least
from seqarch.training.checkpoint import check_resumable, or_offer, read_checkpoint
from seqarch.training.sharded import is_sharded, load_sharded, load_whole, write_sharded
from seqarch.training.wide_parameters import keep_wide


class FSDP2Strategy(ModelParallelStrategy):
    """Shards parameters, gradients and moments (``fully_shard``), on GPUs or, with gloo, on a CPU.

    Every process is data-parallel. With trainer.precision bf16-mixed, parameters are gathered and used in bfloat16,
    without autocast; what is sharded (the master weights), the reduction of gradients and the optimiser stay float32,
    as do parameters that a mixer marks with ``keep_float32``.

    A checkpoint is a folder of shards (``seqarch.training.sharded``); any number of processes goes on from it, and from
    a checkpoint of one file.

    Args:
        replicate: How many copies of the model there are, each sharded over the processes of consecutive ranks; auto
            is one for each node, so that parameters are gathered within nodes only. 1 shards over all processes, which
            needs the least memory.
        param_dtype: In what the parameters are gathered and used; auto follows trainer.precision.
        reshard_after_forward: Free a block's gathered parameters after its forward pass, and gather them again for
            its backward pass; false needs less communication and more memory.
        prefetch: Blocks whose parameters are asked for ahead of the one that computes, in both passes; 0 leaves it to
            FSDP, which looks one block ahead in the backward pass.
        timeout_s: Seconds after which a process that waits for another gives up.
        process_group_backend: By default nccl on GPUs and gloo on a CPU.
    """

    def __init__(
        self,
        replicate: int | Literal["auto"] = "auto",
        param_dtype: Literal["auto", "float32", "bfloat16"] = "auto",
        reshard_after_forward: bool = True,
        prefetch: int = 0,
        timeout_s: float = 1800.0,
        process_group_backend: str | None = None,
    ) -> None:
        if replicate != "auto":
            at_least(1, replicate=replicate)
        at_least(0, prefetch=prefetch)
        if timeout_s <= 0:
            raise ValueError(f"timeout_s must be above 0, got {timeout_s}")
        super().__init__(
            tensor_parallel_size=1,
            save_distributed_checkpoint=True,
            process_group_backend=process_group_backend,
            timeout=timedelta(seconds=timeout_s),
        )
        self.replicate: int | Literal["auto"] = replicate
        self.param_dtype = param_dtype
        self.reshard_after_forward = reshard_after_forward
        self.prefetch = prefetch
        self.timeout_s = timeout_s
        self._shard_mesh: DeviceMesh | None = None

    def setup_environment(self) -> None:
        """Settle the mesh and the precision when the number of processes is known.

        Raises:
            ValueError: If ``replicate`` does not divide it, or ``param_dtype`` does not go with trainer.precision.
        """
        # Lightning's `auto` means the number of nodes, and leaves the rest to tensor parallelism.
        world_size = self._data_parallel_size = self.num_nodes * self.num_processes
        copies = self.num_nodes if self.replicate == "auto" else self.replicate
        if world_size % copies:
            raise ValueError(f"strategy: replicate {copies} does not divide the {world_size} processes")
        self._settle_precision()
        super().setup_environment()
        if copies == 1:
            self._shard_mesh = self.device_mesh["data_parallel"]
        else:
            shape = (copies, world_size // copies)
            self._shard_mesh = init_device_mesh(self.root_device.type, shape, mesh_dim_names=("replicate", "shard"))
            for group in self._shard_mesh.get_all_groups():  # torch gives them half an hour, whatever the job's own
                distributed_c10d._set_pg_timeout(timedelta(seconds=self.timeout_s), group)

    @property
    def gathers_bfloat16(self) -> bool:
        """Whether parameters are gathered and used in bfloat16."""
        precision = str(self.precision_plugin.precision)
        return self.param_dtype == "bfloat16" or (self.param_dtype == "auto" and precision == "bf16-mixed")

    def _settle_precision(self) -> None:
        plugin = self.precision_plugin
        if not self.gathers_bfloat16:
            return
        if not isinstance(plugin, MixedPrecision):
            raise ValueError(
                f"strategy: param_dtype bfloat16 does not go with trainer.precision {plugin.precision}: set that to "
                "bf16-mixed"
            )
        self.precision_plugin = _BFloat16Parameters("bf16-mixed", plugin.device)

    def shard(self, module: nn.Module) -> None:
        """Shard what of a module's parameters is not sharded yet, in place."""
        if not self.gathers_bfloat16:
            policy, kept = MixedPrecisionPolicy(), set()
        else:
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            kept = marked(module, "_keep_float32")
        reshard = None if self.reshard_after_forward else False  # None: all but the outermost
        fully_shard(module, mesh=self._shard_mesh, reshard_after_forward=reshard, mp_policy=policy)
        if kept:
            keep_wide(module, kept)

    def prefetch_blocks(self, blocks: Sequence[nn.Module]) -> None:
        """Have each block, in the order of the forward pass, ask for those that follow it."""
        if not self.prefetch:
            return
        sharded: list[FSDPModule] = [block for block in blocks if isinstance(block, FSDPModule)]
        for i, block in enumerate(sharded):
            block.set_modules_to_forward_prefetch(sharded[i + 1 : i + 1 + self.prefetch])
            block.set_modules_to_backward_prefetch(sharded[max(i - self.prefetch, 0) : i][::-1])

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | os.PathLike, storage_options: Any | None = None
    ) -> None:
        """Write shards, by all processes."""
        write_sharded(self.broadcast(filepath), checkpoint)

    def load_checkpoint(self, checkpoint_path: str | os.PathLike, weights_only: bool | None = None) -> dict[str, Any]:
        """Read shards, or a checkpoint of one file, into the model and the optimiser.

        Raises:
            ValueError: On every process, if it is damaged, with the newest older one that is whole.
        """
        path = self.broadcast(checkpoint_path)
        assert self.model is not None
        if not is_sharded(path):
            return load_whole(lambda: self._read_whole(path), self.model, self.optimizers)
        with or_offer(path):
            return load_sharded(path, self.model, self.optimizers)

    def _read_whole(self, path: str | os.PathLike) -> dict[str, Any]:
        checkpoint = read_checkpoint(path)
        if self.optimizers:
            check_resumable(path, checkpoint)
        return checkpoint


class _BFloat16Parameters(MixedPrecision):
    """Lightning's bf16-mixed without autocast: the sharded modules cast their parameters and inputs themselves."""

    @contextmanager
    def forward_context(self) -> Generator[None, None, None]:
        yield
