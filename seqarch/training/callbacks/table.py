"""The table by domain that is printed after each validation."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from statistics import fmean

import lightning as L
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.callbacks.progress import ProgressBar
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from seqarch.training.module import SequenceModule
from seqarch.training.validation import DomainLoss


def domain_table(losses: Sequence[DomainLoss], title: str) -> Table:
    """Loss, bits per byte, perplexity and tokens of each domain, those in training first, each group with its mean.

    A column of accuracies is added where they were counted.
    """
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    table.add_column("domain", overflow="fold")
    table.add_column("trained on")
    counted = any(d.accuracy is not None for d in losses)
    for name in ("loss", "bpb", "perplexity", "tokens", *(["accuracy"] if counted else [])):
        table.add_column(name, justify="right", no_wrap=True)
    for inside, mean in ((True, "mean in domain"), (False, "mean out of domain")):
        group = [d for d in losses if d.in_domain is inside]
        for d in group:
            numbers = (f"{d.loss:.4f}", f"{d.bpb:.4f}", f"{d.perplexity:.2f}", f"{d.tokens:,}")
            accuracy = [] if d.accuracy is None else [f"{d.accuracy:.4f}"]
            table.add_row(d.name, "yes" if inside else "no", *numbers, *accuracy)
        if group:
            table.add_row(mean, "", f"{fmean(d.loss for d in group):.4f}", style="bold", end_section=True)
    return table


class DomainTable(Callback):
    """Prints the table by domain after each validation, also the one at the end of training."""

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Print it, above the progress bar where there is one."""
        if trainer.sanity_checking or not trainer.is_global_zero:
            return
        assert isinstance(pl_module, SequenceModule)
        title = "Validation"
        if trainer.state.fn == "fit":
            title += f" at step {trainer.global_step} of {trainer.max_steps}, {pl_module.tokens:,} tokens"
        width = None if sys.stdout.isatty() else 100  # a log file has no width
        console = Console(file=sys.stdout, width=width)
        with console.capture() as captured:
            console.print(domain_table(pl_module.domain_losses, title))
        bar = trainer.progress_bar_callback
        write = bar.print if isinstance(bar, ProgressBar) else print
        write(captured.get().rstrip("\n"))
