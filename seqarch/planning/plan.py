"""What a recipe needs on a cluster. Memory is counted; time follows from a stated utilisation and from bandwidths."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from seqarch.model.backbone import SequenceModel
from seqarch.planning.activations import ActivationModel, Precision
from seqarch.planning.hardware import Cluster
from seqarch.planning.sharding import Kept, Sharding, Traffic, buffers, kept, traffic


@dataclass(frozen=True)
class Recipe:
    """What a plan is made from.

    Attributes:
        model: On the meta device.
        seq_len: Tokens of a sequence.
        batch_size: Sequences of a step, over all processes.
        micro_batch_size: Sequences of a process in one forward pass.
        max_tokens: Length of training.
        precision: In which the model computes.
        master: Type of the parameters that are kept.
        sharded: FSDP2 is used.
        replicas: Copies of the model; None is one for each node.
        reshard: Gathered parameters are freed after the forward pass.
        prefetch: Blocks gathered ahead.
        keep_checkpoints: Regular checkpoints that are kept.
    """

    model: SequenceModel
    seq_len: int
    batch_size: int
    micro_batch_size: int
    max_tokens: int
    precision: Precision
    master: torch.dtype = torch.float32
    sharded: bool = True
    replicas: int | None = None
    reshard: bool = True
    prefetch: int = 0
    keep_checkpoints: int = 3

    @property
    def tokens_per_step(self) -> int:
        """Over all processes."""
        return self.batch_size * self.seq_len

    def sharding(self, cluster: Cluster) -> Sharding:
        """On so many GPUs.

        Raises:
            ValueError: If the number of copies does not divide that of GPUs.
        """
        if not self.sharded:
            return Sharding(1, cluster.gpus, False)
        replicas = cluster.nodes if self.replicas is None else self.replicas
        if cluster.gpus % replicas:
            raise ValueError(f"strategy: replicate {replicas} does not divide the {cluster.gpus} GPUs")
        shards = cluster.gpus // replicas
        return Sharding(shards, replicas, True, self.precision.dtype, self.reshard, self.prefetch)


@dataclass(frozen=True)
class Memory:
    """Bytes on the GPU that has the most.

    Attributes:
        weights: Float32 parameters.
        gradients: Float32 gradients.
        optimizer: AdamW's moments.
        buffers: Gathered parameters, and gradients on their way.
        activations: Held between forward and backward.
        working: On top of these while a block or the head computes.
    """

    weights: int
    gradients: int
    optimizer: int
    buffers: int
    activations: int
    working: int

    @property
    def total(self) -> int:
        """All together."""
        return self.weights + self.gradients + self.optimizer + self.buffers + self.activations + self.working


@dataclass(frozen=True)
class Setting:
    """One way to run a recipe, and what it takes.

    Attributes:
        micro_batch_size: Sequences of a process in one forward pass.
        checkpointing: Activation checkpointing.
        replicas: Copies of the model.
        memory: Of one GPU.
        fits: Within what a GPU may use.
        accumulation: Micro batches of a step.
        traffic: Bytes of one GPU in a step.
        compute_s: Seconds of a step at the stated utilisation.
        communication_s: Seconds that the traffic of a step takes by itself.
    """

    micro_batch_size: int
    checkpointing: bool
    replicas: int
    memory: Memory
    fits: bool
    accumulation: int
    traffic: Traffic
    compute_s: float
    communication_s: float

    @property
    def step_s(self) -> float:
        """Seconds of a step, if traffic runs beside the computation."""
        return max(self.compute_s, self.communication_s)

    @property
    def bound(self) -> str:
        """Which part decides the speed."""
        if not self.fits:
            return "memory: it does not fit"
        return "computation" if self.compute_s >= self.communication_s else "communication"


class Planner:
    """Plans one recipe on one cluster.

    Args:
        recipe: What is trained.
        cluster: Where.

    Raises:
        ValueError: If the batch cannot be dealt to so many GPUs.
    """

    def __init__(self, recipe: Recipe, cluster: Cluster) -> None:
        if recipe.batch_size % cluster.gpus:
            raise ValueError(
                f"data.batch_size {recipe.batch_size} is not a multiple of {cluster.gpus} GPUs: set it to one, or plan "
                "for another number with --gpus"
            )
        self.recipe, self.cluster = recipe, cluster
        self.activations = ActivationModel(recipe.model, recipe.seq_len, recipe.precision)
        self.flops_per_step = 3 * recipe.model.flops(recipe.seq_len) * recipe.batch_size
        low = recipe.precision.autocast is not None or recipe.precision.dtype.itemsize == 2
        self._flops_per_s = cluster.gpus * cluster.peak("16" if low else "32") * cluster.mfu

    @property
    def micro_batch_sizes(self) -> list[int]:
        """Those that divide a process's part of the batch, from the smallest."""
        share = self.recipe.batch_size // self.cluster.gpus
        return [n for n in range(1, share + 1) if share % n == 0]

    def as_written(self) -> Setting:
        """The recipe as it stands; with a smaller micro batch where its own does not divide a process's part."""
        size = max(n for n in self.micro_batch_sizes if n <= self.recipe.micro_batch_size)
        return self.setting(self.recipe, size, self.recipe.model.activation_checkpointing)

    def setting(self, recipe: Recipe, micro_batch_size: int, checkpointing: bool) -> Setting:
        """What one way of running it takes."""
        cluster, sharding = self.cluster, recipe.sharding(self.cluster)
        accumulation = recipe.batch_size // (micro_batch_size * cluster.gpus)
        stay: Kept = kept(recipe.model, sharding.shards, recipe.master)
        act = self.activations(micro_batch_size, checkpointing)
        memory = Memory(
            stay.weights, stay.gradients, stay.optimizer, buffers(recipe.model, sharding), act.held, act.working
        )
        sent = traffic(recipe.model, sharding, accumulation)
        within, across = cluster.bandwidth(sharding.shards), cluster.bandwidth(cluster.gpus)
        return Setting(
            micro_batch_size=micro_batch_size,
            checkpointing=checkpointing,
            replicas=sharding.replicas,
            memory=memory,
            fits=memory.total <= cluster.usable,
            accumulation=accumulation,
            traffic=sent,
            compute_s=self.flops_per_step / self._flops_per_s,
            communication_s=(sent.gather + sent.scatter) / within + sent.replicate / across,
        )

    def that_fit(self) -> list[Setting]:
        """For each choice of checkpointing and copies, the largest micro batch that fits; the fastest first.

        What checkpointing computes again is taken to cost a third of the step.
        """
        found = []
        for recipe in self._copies():
            for checkpointing in (False, True):
                settings = (self.setting(recipe, n, checkpointing) for n in reversed(self.micro_batch_sizes))
                found += [s for s in [next((s for s in settings if s.fits), None)] if s is not None]
        return sorted(found, key=lambda s: max(s.compute_s * (4 / 3 if s.checkpointing else 1), s.communication_s))

    def _copies(self) -> Iterator[Recipe]:
        if not self.recipe.sharded:
            yield self.recipe
            return
        given = self.recipe.sharding(self.cluster).replicas
        for replicas in sorted({given, 1, self.cluster.nodes}, reverse=True):
            if self.cluster.gpus % replicas == 0:
                yield replace(self.recipe, replicas=replicas)

    @property
    def checkpoint_bytes(self) -> int:
        """Of one checkpoint: parameters and moments, whole."""
        whole = kept(self.recipe.model, 1, self.recipe.master)
        return whole.weights + whole.optimizer

    @property
    def disk_bytes(self) -> int:
        """For checkpoints: the regular ones, the best, and one that is being written."""
        return (self.recipe.keep_checkpoints + 2) * self.checkpoint_bytes

    @property
    def data_bytes(self) -> int:
        """Of token shards that hold each token of the training once."""
        return self.recipe.max_tokens * (2 if self.recipe.model.vocab_size <= 1 << 16 else 4)

    @property
    def state_bytes(self) -> int:
        """Of the state of one sequence of ``seq_len`` tokens while decoding, over all layers, in bfloat16."""
        state = self.recipe.model.init_state(1, self.recipe.seq_len, device="meta", dtype=torch.bfloat16)
        return sum(t.numel() * t.element_size() for layer in state for t in layer.values())
