"""Keeps the losses by test document of each validation in the run folder."""

from __future__ import annotations

from pathlib import Path

import lightning as L
from lightning.pytorch.callbacks import Callback

from seqarch.training.documents import forget_documents, write_documents
from seqarch.training.module import SequenceModule


class DocumentLosses(Callback):
    """Writes them after each validation, before its checkpoint; a resumed run drops those after its checkpoint.

    Data whose validation batches name no documents leave nothing behind.

    Args:
        run_dir: Folder of the run.
    """

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Go on from the step of the checkpoint; 0 starts anew."""
        if trainer.is_global_zero:
            forget_documents(self.run_dir, trainer.global_step if trainer.global_step else -1)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write what the module has gathered from all ranks."""
        assert isinstance(pl_module, SequenceModule)
        if trainer.sanity_checking or trainer.state.fn != "fit" or not trainer.is_global_zero:
            return
        if pl_module.document_losses:
            write_documents(self.run_dir, trainer.global_step, pl_module.document_losses)
