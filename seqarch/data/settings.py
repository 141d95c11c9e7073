"""The two settings of a study: pre-training on a limited domain, and on a mixture of all."""

from __future__ import annotations

import os
from typing import Any

from seqarch.data.datamodule import TokenDataModule


class LimitedDomainDataModule(TokenDataModule):
    """Train on some domains and test on all: those trained on are in-domain, the others out of domain.

    Args:
        path: Folder of a prepared corpus, or ``builtin`` for the text of this Python installation.
        seq_len: Tokens of a sequence.
        batch_size: Sequences of an optimiser step, over all ranks.
        micro_batch_size: Sequences of a rank in one forward pass; the rest of batch_size is accumulated.
        train_domains: Domains to train on.
        kwargs: The other options of ``TokenDataModule``.
    """

    def __init__(
        self,
        path: str | os.PathLike,
        seq_len: int,
        batch_size: int,
        micro_batch_size: int,
        train_domains: list[str],
        **kwargs: Any,
    ) -> None:
        super().__init__(path, seq_len, batch_size, micro_batch_size, train_domains=train_domains, **kwargs)


class MixedDomainDataModule(TokenDataModule):
    """Train on all domains of the corpus, by weight; every test domain is in-domain.

    Args:
        path: Folder of a prepared corpus, or ``builtin`` for the text of this Python installation.
        seq_len: Tokens of a sequence.
        batch_size: Sequences of an optimiser step, over all ranks.
        micro_batch_size: Sequences of a rank in one forward pass; the rest of batch_size is accumulated.
        kwargs: The other options of ``TokenDataModule``, but for train_domains.
    """

    def __init__(
        self, path: str | os.PathLike, seq_len: int, batch_size: int, micro_batch_size: int, **kwargs: Any
    ) -> None:
        super().__init__(path, seq_len, batch_size, micro_batch_size, train_domains=None, **kwargs)

    def in_domain(self, name: str) -> bool:
        """Always true: a mixture of all domains has no other."""
        return True
