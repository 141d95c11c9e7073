"""FSDP2 over all processes."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.strategies import ModelParallelStrategy


class FSDP2Strategy(ModelParallelStrategy):
    """Shards parameters, gradients and moments over all processes of all nodes (``fully_shard``), on GPUs or on a CPU.

    Lightning's ``data_parallel_size: auto`` means the number of nodes, and leaves the rest to tensor parallelism; here
    every process is data-parallel. Checkpoints are gathered into one file.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(tensor_parallel_size=1, save_distributed_checkpoint=False, **kwargs)

    def setup_environment(self) -> None:
        """Settle the mesh when the number of processes is known."""
        self._data_parallel_size = self.num_nodes * self.num_processes
        super().setup_environment()
