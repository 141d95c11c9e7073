"""Sums of the loss over a validation, by domain and by test document, over all batches and ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from lightning.pytorch.strategies import Strategy
from torch import Tensor

from seqarch.model.loss import IGNORE_INDEX
from seqarch.training.documents import DomainDocuments
from seqarch.training.seen_tokens import SeenTokens
from seqarch.training.validation import DomainLoss


class ValidationSums:
    """Sums on the device; nothing is read from it before the end.

    Args:
        names: The domains.
        in_domain: Whether each is trained on.
        device: Where the sums are made.
        seen: Which labels occurred in training; None if that is not known.
        accuracy: Whether labels that are the most probable token are counted.
    """

    def __init__(
        self,
        names: Sequence[str],
        in_domain: Sequence[bool],
        device: torch.device,
        seen: SeenTokens | None,
        accuracy: bool,
    ) -> None:
        self._domains = list(zip(names, in_domain, strict=True))
        self._seen = seen
        self._accuracy = accuracy
        # nats, labels, bytes, hits, nats of unseen labels
        self._sums = torch.zeros(len(names), 5, dtype=torch.float64, device=device)
        # by domain, for each window: document, nats, labels, bytes
        self._windows = [[torch.empty(0, 4, dtype=torch.float64, device=device)] for _ in names]

    def add(self, domain: int, batch: Mapping[str, Tensor], nll: Tensor, hits: Tensor | None) -> None:
        """Add a batch: ``nll`` ``[B, T]`` in nats, 0 where a label is ignored, and the number of hits."""
        labels, n_bytes = batch["labels"], batch["bytes"]
        none = nll.new_zeros(())
        unseen = none if self._seen is None else (nll * self._seen.unseen(labels)).sum(dtype=torch.float64)
        nats, tokens = nll.sum(dim=1, dtype=torch.float64), (labels != IGNORE_INDEX).sum(dim=1)
        sums = [nats.sum(), tokens.sum(), n_bytes.sum(), none if hits is None else hits, unseen]
        self._sums[domain] += torch.stack([s.double() for s in sums])
        if "document" in batch:
            columns = (batch["document"], nats, tokens, n_bytes)
            self._windows[domain].append(torch.stack([c.double() for c in columns], dim=1))

    def by_domain(self, strategy: Strategy) -> list[DomainLoss]:
        """The sums by domain over all ranks, the same on each."""
        sums = strategy.reduce(self._sums.clone(), reduce_op="sum").tolist()
        return [
            DomainLoss(
                name,
                inside,
                nats,
                int(tokens),
                n_bytes,
                int(hits) if self._accuracy else None,
                None if self._seen is None else unseen,
            )
            for (name, inside), (nats, tokens, n_bytes, hits, unseen) in zip(self._domains, sums, strict=True)
        ]

    def by_document(self, strategy: Strategy) -> list[DomainDocuments]:
        """The sums by document over all ranks, the same on each; empty if batches do not name their documents."""
        windows = [torch.cat(rows) for rows in self._windows]
        last = torch.stack([torch.cat([w[:, 0], w.new_tensor([-1.0])]).max() for w in windows])
        last = strategy.reduce(last, reduce_op="max")
        found = []
        for (name, inside), rows, n in zip(self._domains, windows, last.long().tolist(), strict=True):
            sums = rows.new_zeros(n + 2, 3)  # the first row takes what belongs to no document
            sums.index_add_(0, rows[:, 0].long() + 1, rows[:, 1:])
            sums = strategy.reduce(sums, reduce_op="sum")[1:].cpu().numpy()
            ids = sums[:, 1].nonzero()[0]
            nats, tokens, n_bytes = sums[ids].T
            found.append(DomainDocuments(name, inside, ids, tokens.astype("i8"), n_bytes.round(6), nats))
        return found if all(len(d.ids) for d in found) else []
