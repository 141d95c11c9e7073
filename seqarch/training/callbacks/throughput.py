"""How fast training is: tokens per second, model-FLOPs utilisation, peak memory."""

from __future__ import annotations

import resource
import sys
import time
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback

from seqarch.training.loops import at_end_of_step, logging_due
from seqarch.training.metrics import record
from seqarch.training.module import SequenceModule

PEAK_FLOPS: dict[str, dict[str, float]] = {
    "H200": {"16": 989.4e12, "tf32": 494.7e12, "32": 66.9e12},
    "H100 PCIe": {"16": 756e12, "tf32": 378e12, "32": 51.2e12},
    "H100 NVL": {"16": 835e12, "tf32": 417.5e12, "32": 60e12},
    "H100": {"16": 989.4e12, "tf32": 494.7e12, "32": 66.9e12},
    "A100": {"16": 312e12, "tf32": 156e12, "32": 19.5e12},
    "L40S": {"16": 362e12, "tf32": 183e12, "32": 91.6e12},
    "V100": {"32": 15.7e12},
    "T4": {"32": 8.1e12},
}
"""Dense peaks by a part of the device's name and the arithmetic, from NVIDIA's data sheets; the first match counts."""


def peak_flops(device_name: str, precision: str, tf32: bool) -> float | None:
    """The device's peak in FLOP/s for Lightning's name of a precision, or None where it is not known."""
    arithmetic = "16" if "16" in precision else "tf32" if tf32 else "32"
    for part, peaks in PEAK_FLOPS.items():
        if part in device_name:
            return peaks.get(arithmetic)
    return None


class Throughput(Callback):
    """Records ``train/tokens_per_s``, ``train/mfu`` and ``train/peak_memory_bytes`` every ``log_every_n_steps``.

    Time for validation and checkpoints is not counted. The FLOPs of a step are three times those of the forward pass
    (the backward pass is two), each sequence taken as one document; recomputation is not counted (Chowdhery et al.
    2022, arXiv 2204.02311, appendix B). MFU is left out where the device's peak is not known.

    Args:
        peak_flops: FLOP/s of one device; by default from a table of GPUs by name and precision.
    """

    def __init__(self, peak_flops: float | None = None) -> None:
        if peak_flops is not None and peak_flops <= 0:
            raise ValueError(f"peak_flops must be above 0, got {peak_flops}")
        self.peak_flops = peak_flops
        self._seconds = 0.0
        self._steps = 0
        self._since: float | None = None  # None while the clock stands

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start the clock."""
        self._seconds, self._steps = 0.0, 0
        self._peak = self.peak_flops or _known_peak(trainer, pl_module.device)
        if pl_module.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(pl_module.device)
        self._since = time.perf_counter()

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Stop the clock."""
        self._stop()

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Stop the clock."""
        self._stop()

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Start the clock again where it was stopped."""
        if self._since is None:
            self._since = time.perf_counter()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Measure at the end of a step. The step has waited for the device to read the loss."""
        if not at_end_of_step(trainer):
            return
        assert isinstance(pl_module, SequenceModule)
        self._steps += 1
        running = 0.0 if self._since is None else time.perf_counter() - self._since
        steps_per_s = self._steps / (self._seconds + running)
        data: Any = pl_module.data
        values = {"train/tokens_per_s": steps_per_s * data.tokens_per_step}
        pl_module.log("train/tokens_per_s", values["train/tokens_per_s"], prog_bar=True, logger=False)
        if not logging_due(trainer, trainer.global_step):
            return
        if self._peak is not None:
            flops = 3 * pl_module.model.flops(data.seq_len) * data.batch_size
            values["train/mfu"] = flops * steps_per_s / (self._peak * trainer.world_size)
        values["train/peak_memory_bytes"] = peak_memory(pl_module.device)
        record(trainer, trainer.global_step, pl_module.tokens, values)
        self._seconds, self._steps, self._since = 0.0, 0, time.perf_counter()

    def _stop(self) -> None:
        if self._since is not None:
            self._seconds += time.perf_counter() - self._since
            self._since = None


def peak_memory(device: torch.device) -> int:
    """Most bytes in use so far: allocated by torch on a GPU; resident of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _known_peak(trainer: L.Trainer, device: torch.device) -> float | None:
    if device.type != "cuda":
        return None
    tf32 = torch.get_float32_matmul_precision() != "highest"
    return peak_flops(torch.cuda.get_device_name(device), str(trainer.precision), tf32)
