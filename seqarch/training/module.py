"""The LightningModule: a ``SequenceModel``, its optimiser and schedule, and what to do with each batch.

Shape legend: B batch, T tokens, V vocabulary.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import Self

from seqarch.mixer import TokenMixer
from seqarch.model import Loss, SequenceModel, SwiGLU
from seqarch.model.channel import ChannelMixer
from seqarch.model.init import marked
from seqarch.model.loss import IGNORE_INDEX
from seqarch.options import at_least
from seqarch.training.documents import DomainDocuments
from seqarch.training.hyperparameters import differences, to_plain
from seqarch.training.known_warnings import ignore_known_warnings
from seqarch.training.loops import logging_due, recount, set_length, set_validation
from seqarch.training.metrics import record, resume_loggers
from seqarch.training.optimizer import AdamWConfig, build_adamw, configure_groups, gradient_norm
from seqarch.training.schedule import Cosine, Schedule
from seqarch.training.seen_tokens import SeenTokens
from seqarch.training.smoothing import SmoothedLoss
from seqarch.training.strategy import FSDP2Strategy
from seqarch.training.validation import DomainLoss, domain_metrics
from seqarch.training.validation_sums import ValidationSums

_ADAMW, _COSINE = AdamWConfig(), Cosine()


class TrainingDivergedError(RuntimeError):
    """Loss or gradient was not finite for too many steps in a row."""


class SequenceModule(L.LightningModule):
    """A language model and how it is trained.

    Args:
        vocab_size: Number of token ids V; may be larger than the tokenizer's.
        d_model: Width of the model.
        n_layers: Number of blocks.
        mixer: The token mixer of every block; a list is cycled over the blocks, which makes a hybrid.
        channel_mixer: The channel mixer of every block; null for none.
        tie_embeddings: The head shares the embedding's weight.
        embedding_std: Standard deviation of the embedding's initial values; a head of its own starts with 0.02.
        norm_eps: Epsilon of the RMS norms.
        optimizer: Settings of AdamW.
        schedule: How the learning rate changes over training.
        max_tokens: Length of training in tokens; by default trainer.max_steps decides. If both are given, the schedule
            is that of max_tokens, and training stops at whichever comes first.
        val_every_n_steps: Validate after so many optimiser steps; by default trainer.val_check_interval decides, which
            counts micro batches. Validation also comes at the end.
        z_loss: Weight of the squared log-normaliser in the objective.
        activation_checkpointing: Keep only each block's input for the backward pass and recompute the rest.
        compile: Compile each block with torch.compile.
        max_skipped_steps: Stop training after so many steps in a row whose loss or gradient is not finite.
    """

    def __init__(
        self,
        vocab_size: int,
        d_model: int,
        n_layers: int,
        # The list comes first: in the other order jsonargparse 4.53 cannot write a list of mixers back to YAML.
        mixer: list[Callable[[int], TokenMixer]] | Callable[[int], TokenMixer],
        channel_mixer: Callable[[int], ChannelMixer] | None = SwiGLU,
        tie_embeddings: bool = True,
        embedding_std: float = 0.02,
        norm_eps: float = 1e-5,
        optimizer: AdamWConfig = _ADAMW,
        schedule: Schedule = _COSINE,
        max_tokens: int | None = None,
        val_every_n_steps: int | None = None,
        z_loss: float = 0.0,
        activation_checkpointing: bool = False,
        compile: bool = False,
        max_skipped_steps: int = 10,
    ) -> None:
        options = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        super().__init__()
        at_least(1, max_tokens=max_tokens, val_every_n_steps=val_every_n_steps, max_skipped_steps=max_skipped_steps)
        at_least(0, z_loss=z_loss)
        self.save_hyperparameters(to_plain(options))
        self.optimizer_config = optimizer
        self.schedule = schedule
        self.max_tokens = max_tokens
        self.val_every_n_steps = val_every_n_steps
        self.z_loss = z_loss
        self.compile_blocks = compile
        self.max_skipped_steps = max_skipped_steps
        self.seed = torch.initial_seed() % 2**32
        """Of the initial values and of what is random in a step (dropout). A checkpoint brings its own."""
        self.skipped_steps = 0
        """Steps skipped so far because loss or gradient was not finite."""
        self.domain_losses: list[DomainLoss] = []
        """What the last validation found."""
        self.document_losses: list[DomainDocuments] = []
        """The same by document; empty if the batches do not say which documents they are of."""
        self.skipped_in_a_row = 0
        self._window: Tensor | None = None  # sums over the step being accumulated: objective, nats, labels
        self._smoothed_loss = SmoothedLoss()
        self._seen: SeenTokens | None = None
        self._seen_state: Tensor | None = None  # a checkpoint's
        self._val_sums: ValidationSums | None = None
        with torch.device("meta"):  # cheap, and a wrong configuration shows at once
            self.model = SequenceModel(
                vocab_size,
                d_model,
                n_layers,
                mixer,
                channel_mixer,
                tie_embeddings=tie_embeddings,
                embedding_std=embedding_std,
                norm_eps=norm_eps,
                activation_checkpointing=activation_checkpointing,
            )

    @classmethod
    def load_from_checkpoint(cls, checkpoint_path: str | os.PathLike, map_location: Any = "cpu") -> SequenceModule:  # pyright: ignore[reportIncompatibleMethodOverride]
        """``load_module``, in place of Lightning's own, which would import whatever a file names."""
        from seqarch.training.rebuild import load_module

        return load_module(checkpoint_path, map_location)

    @property
    def data(self) -> Any:
        """The trainer's data module."""
        data = getattr(self.trainer, "datamodule", None)
        if data is None:
            raise ValueError("SequenceModule needs a data module: pass datamodule=... to the trainer")
        return data

    @property
    def tokens(self) -> int:
        """Tokens that have been trained on."""
        return self.trainer.global_step * self.data.tokens_per_step

    def setup(self, stage: str) -> None:
        """Fit the trainer to the data module, which has been set up by now."""
        ignore_known_warnings()
        if self.data.vocab_size > self.model.vocab_size:
            raise ValueError(
                f"the tokenizer has {self.data.vocab_size} tokens, but model.vocab_size is {self.model.vocab_size}: "
                f"set it to {self.data.vocab_size} or more"
            )
        low_precision = str(self.trainer.precision) in ("bf16-true", "16-true")
        if low_precision and (kept := marked(self.model, "_keep_float32")):
            raise ValueError(
                f"trainer.precision {self.trainer.precision} would cast parameters that must stay float32, such as "
                f"{min(kept)}: use bf16-mixed"
            )
        if stage == "fit":
            self.length = set_length(self.trainer, self.max_tokens, self.data.tokens_per_step)
            self.schedule.factor(0, self.length)  # says at once what is wrong with it
            set_validation(self.trainer, self.val_every_n_steps)

    def configure_model(self) -> None:
        """Give the parameters storage and initial values, sharded where there is a mesh."""
        if not any(p.is_meta for p in self.model.parameters()):
            return
        trainer = self._trainer
        device = torch.device("cpu") if trainer is None else trainer.strategy.root_device
        shard = self._shard()
        self.model.materialise(device, self.seed, None if shard is None else shard.shard)
        if shard is not None:
            shard.prefetch_blocks(list(self.model.blocks))
        if self.compile_blocks:
            for block in self.model.blocks:
                block.compile()  # in place: the names of the parameters stay

    def cpu(self) -> Self:
        """Move to the CPU, unless there is nothing yet to move: Lightning calls it after any error."""
        return self if any(p.is_meta for p in self.model.parameters()) else super().cpu()

    def _shard(self) -> FSDP2Strategy | None:
        """The strategy that shards the parameters, if one does."""
        if self.device_mesh is None:
            return None
        strategy = self.trainer.strategy
        if not isinstance(strategy, FSDP2Strategy):
            raise ValueError(
                f"trainer.strategy {type(strategy).__name__} does not know how to shard the model: use "
                "seqarch.training.strategy.FSDP2Strategy"
            )
        return strategy

    def configure_optimizers(self) -> Optimizer:
        """AdamW with its groups. The learning rate is set before each step, from the schedule."""
        loss_scaling = str(self.trainer.precision) == "16-mixed"
        return build_adamw(self.optimizer_config, self.model, loss_scaling=loss_scaling)

    # --- training -----------------------------------------------------------------------------------------------------

    def on_train_start(self) -> None:
        """Go on with the record, with the options of this configuration."""
        resume_loggers(self.trainer)
        configure_groups(self.optimizer_config, self.trainer.optimizers[0])
        self._window = torch.zeros(3, dtype=torch.float64, device=self.device)
        known = self.trainer.global_step == 0 or self._seen_state is not None
        self._seen = SeenTokens(self.model.vocab_size, self.device, self._seen_state) if known else None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's."""
        return self.model(*args, **kwargs)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """The objective of one micro batch ``[B, T]``; Lightning divides it by the micro batches of a step."""
        with self._random(batch_idx % self.trainer.accumulate_grad_batches):
            loss = self.model(
                batch["input_ids"], labels=batch["labels"], cu_seqlens=batch.get("cu_seqlens"), z_loss=self.z_loss
            )
        assert isinstance(loss, Loss)
        labels = (batch["labels"] != IGNORE_INDEX).sum()
        if self._seen is not None:
            self._seen.add(batch["labels"])
        assert self._window is not None
        self._window += torch.stack([loss.objective.detach(), loss.nll * labels, labels])
        return loss.objective

    @contextmanager
    def _random(self, micro_step: int) -> Iterator[None]:
        """Make what is random a function of seed, step, micro batch and rank, so that resuming needs no state."""
        cuda = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices=cuda):
            place = (self.trainer.global_step * self.trainer.accumulate_grad_batches + micro_step) * 65_537
            torch.manual_seed((self.seed << 31) ^ (place + self.trainer.global_rank))
            yield

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Set the learning rate, drop gradients that are not finite, clip the others, and record the step."""
        assert self._window is not None
        parameters = [p for p in self.model.parameters() if p.grad is not None]
        norm = gradient_norm(parameters)
        window = self.trainer.strategy.reduce(self._window, reduce_op="sum")
        objective, nats, labels, grad_norm = torch.cat([window, norm.detach().to(window).reshape(1)]).tolist()
        self._window.zero_()
        lr = self.optimizer_config.lr * self.schedule.factor(self.trainer.global_step, self.length)
        for group in optimizer.param_groups:
            group["lr"] = lr
        loss = nats / labels if labels else 0.0
        skip = not (math.isfinite(objective) and math.isfinite(grad_norm))
        if skip:
            # Parameters without a gradient are passed over: neither they nor their moments change.
            for p in parameters:
                p.grad = None
        elif gradient_clip_algorithm == "value" and gradient_clip_val:
            nn.utils.clip_grad_value_(parameters, gradient_clip_val)
        elif gradient_clip_val:
            nn.utils.clip_grads_with_norm_(parameters, gradient_clip_val, norm)
        self.skipped_steps += skip
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if skip else 0
        if not skip:
            self._smoothed_loss.add(loss)
        self._record_step(loss, grad_norm, lr, skip)
        if self.skipped_in_a_row >= self.max_skipped_steps:
            raise TrainingDivergedError(
                f"loss or gradient was not finite in {self.skipped_in_a_row} steps in a row, up to step "
                f"{self.trainer.global_step + 1} (loss {loss}, gradient norm {grad_norm}, learning rate {lr:.3g}). "
                "Resume from an earlier checkpoint with a lower model.optimizer.lr, a longer warm-up or a lower "
                "trainer.gradient_clip_val; with 16-mixed precision use bf16-mixed"
            )

    def _record_step(self, loss: float, grad_norm: float, lr: float, skipped: bool) -> None:
        trainer = self.trainer
        step = trainer.global_step + 1  # Lightning counts it when it is done
        if step == trainer.max_steps:
            trainer.should_stop = True  # so that Lightning validates once more
        self.log("train/loss", loss, prog_bar=True, logger=False)
        if skipped or logging_due(trainer, step):
            values = {
                "train/loss": loss,
                "train/grad_norm": grad_norm,
                "train/lr": lr,
                "train/skipped_steps": self.skipped_steps,
            }
            record(trainer, step, step * self.data.tokens_per_step, values)

    # --- validation ---------------------------------------------------------------------------------------------------

    def on_validation_epoch_start(self) -> None:
        """Start the sums by domain and by document."""
        if self._seen is None and self._seen_state is not None:  # not after training, but from a checkpoint
            self._seen = SeenTokens(self.model.vocab_size, self.device, self._seen_state)
        if self._seen is not None:
            self._seen.unite(self.trainer.strategy)
        names = self.data.val_domains
        inside = [self.data.in_domain(name) for name in names]
        self._val_sums = ValidationSums(names, inside, self.device, self._seen, self._counts_hits)

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        """Add up one batch's nats, predictions and bytes, and hits where the data module asks for the accuracy."""
        input_ids, labels = batch["input_ids"], batch["labels"]
        # Windows come in many lengths: compiling for each would take longer than it saves.
        usual = input_ids.shape == (self.data.micro_batch_size, self.data.seq_len)
        with torch.compiler.set_stance("default" if usual else "force_eager"):
            nll = self.model(input_ids, labels=labels, cu_seqlens=batch.get("cu_seqlens"), per_token=True)
        hits = None
        if self._counts_hits:
            logits, _ = self.model(input_ids, cu_seqlens=batch.get("cu_seqlens"))
            hits = (logits.argmax(dim=-1) == labels).sum()
        assert self._val_sums is not None
        self._val_sums.add(dataloader_idx, batch, nll, hits)

    @property
    def _counts_hits(self) -> bool:
        return getattr(self.data, "accuracy", False)

    def on_validation_epoch_end(self) -> None:
        """Log the losses by domain, and gather those by document."""
        assert self._val_sums is not None
        self.domain_losses = self._val_sums.by_domain(self.trainer.strategy)
        self.document_losses = self._val_sums.by_document(self.trainer.strategy)
        if self.trainer.sanity_checking:
            return
        metrics = domain_metrics(self.domain_losses)
        self.log_dict(metrics, logger=False)
        if self.trainer.state.fn == "fit":
            if self._smoothed_loss.value is not None:
                metrics["train/smoothed_loss"] = self._smoothed_loss.value
            record(self.trainer, self.trainer.global_step, self.tokens, metrics)

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add what a resumed run must know."""
        if self._seen is not None:
            self._seen.unite(self.trainer.strategy)
        checkpoint["seqarch"] = {
            "seed": self.seed,
            "skipped_steps": self.skipped_steps,
            "skipped_in_a_row": self.skipped_in_a_row,
            "tokens": self.tokens,
            "smoothed_loss": self._smoothed_loss.state(),
            "seen_tokens": None if self._seen is None else self._seen.state(),
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Compare the architecture, and go on where the checkpoint stands.

        Raises:
            ValueError: If the checkpoint is of another architecture.
        """
        if lines := differences(checkpoint["hyper_parameters"], self.hparams):
            raise ValueError("the checkpoint is of another architecture than model:\n  " + "\n  ".join(lines))
        state = checkpoint["seqarch"]
        self.seed = state["seed"]
        self.skipped_steps = state["skipped_steps"]
        self.skipped_in_a_row = state["skipped_in_a_row"]
        if "smoothed_loss" in state:  # checkpoints of the first version have neither
            self._smoothed_loss.load(state["smoothed_loss"])
            self._seen_state = state["seen_tokens"]
        if self._trainer is not None and self._trainer.state.fn == "fit":
            recount(checkpoint["loops"], checkpoint["global_step"], self._trainer.accumulate_grad_batches)
