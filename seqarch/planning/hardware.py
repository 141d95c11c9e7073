"""GPUs and the links between them."""

from __future__ import annotations

from dataclasses import dataclass

from seqarch.options import at_least
from seqarch.training.callbacks.throughput import PEAK_FLOPS


@dataclass(frozen=True)
class GPU:
    """One kind of GPU.

    Attributes:
        memory: Bytes.
        link: Bytes per second to the other GPUs of its node, each way.
        peak: FLOP/s by arithmetic, as in ``PEAK_FLOPS``.
    """

    memory: float
    link: float
    peak: dict[str, float]


GPUS = {
    "H200": GPU(141e9, 450e9, PEAK_FLOPS["H200"]),
    "H100": GPU(80e9, 450e9, PEAK_FLOPS["H100"]),
    "H100-PCIe": GPU(80e9, 64e9, PEAK_FLOPS["H100 PCIe"]),
    "A100-80GB": GPU(80e9, 300e9, PEAK_FLOPS["A100"]),
    "A100-40GB": GPU(40e9, 300e9, PEAK_FLOPS["A100"]),
    "L40S": GPU(48e9, 32e9, PEAK_FLOPS["L40S"]),
}
"""From NVIDIA's data sheets: NVLink, or PCI Express where there is none (half of what both directions have)."""


@dataclass(frozen=True)
class Cluster:
    """What a run is planned for.

    Args:
        gpu: Kind of GPU.
        gpus: How many.
        gpus_per_node: How many of them share a node.
        network_gbps: Gigabit per second of the network between nodes, for each GPU, each way.
        memory_gb: Memory of a GPU in GB (10⁹ bytes); by default that of its kind.
        reserve: Share of the memory that is left to the driver, communication and fragmentation.
        mfu: Share of the peak at which the GPUs are taken to work.
    """

    gpu: str = "H100"
    gpus: int = 8
    gpus_per_node: int = 8
    network_gbps: float = 400.0
    memory_gb: float | None = None
    reserve: float = 0.1
    mfu: float = 0.4

    def __post_init__(self) -> None:
        if self.gpu not in GPUS:
            raise ValueError(
                f"gpu must be one of {', '.join(GPUS)}, got '{self.gpu}': take the nearest and set --memory_gb"
            )
        at_least(1, gpus=self.gpus, gpus_per_node=self.gpus_per_node)
        if self.gpus > self.gpus_per_node and self.gpus % self.gpus_per_node:
            raise ValueError(f"gpus {self.gpus} is not a multiple of gpus_per_node {self.gpus_per_node}")
        if self.network_gbps <= 0 or (self.memory_gb is not None and self.memory_gb <= 0):
            raise ValueError("network_gbps and memory_gb must be above 0")
        if not 0 <= self.reserve < 1:
            raise ValueError(f"reserve must be from 0 to below 1, got {self.reserve}")
        if not 0 < self.mfu <= 1:
            raise ValueError(f"mfu must be above 0 and at most 1, got {self.mfu}")

    @property
    def nodes(self) -> int:
        """How many nodes."""
        return -(-self.gpus // self.gpus_per_node)

    @property
    def usable(self) -> float:
        """Bytes of one GPU that the run may take."""
        total = GPUS[self.gpu].memory if self.memory_gb is None else self.memory_gb * 1e9
        return total * (1 - self.reserve)

    def peak(self, arithmetic: str) -> float:
        """FLOP/s of one GPU."""
        return GPUS[self.gpu].peak[arithmetic]

    def bandwidth(self, processes: int) -> float:
        """Bytes per second, each way, of one of so many processes of consecutive ranks that exchange data."""
        return GPUS[self.gpu].link if processes <= self.gpus_per_node else self.network_gbps * 1e9 / 8
