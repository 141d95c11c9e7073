"""What the Lightning data modules have in common: a prepared corpus in, batches of tokens out."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

import torch
from torch.utils.data import DataLoader

from seqarch.data.corpus import Beginnings, Corpus
from seqarch.data.eval_batches import EvalBatches, choose_documents, count_bytes, loader
from seqarch.data.mixture import SampleOrder, check_weights
from seqarch.data.steps import StepDataModule, TrainLoader
from seqarch.data.train_batches import TrainBatches
from seqarch.options import at_least

_SMALL = 1_000_000_000  # tokens that are read through in seconds


class TokenDataModule(StepDataModule):
    """Training batches mixed from domains, and one validation loader for each test domain.

    The order of training samples is a pure function of ``seed`` and the sample's number: the same for any number of
    ranks, workers and accumulation steps. A resumed run sees exactly the batches that an uninterrupted one would have
    seen. The stream of batches is endless: training ends by ``max_steps``.

    Use a subclass, which says which domains are in-domain. ``setup`` makes the attributes ``vocab_size``, ``eos_id``,
    ``tokenizer_path``, ``tokenizer_hash``, ``val_domains`` (in the order of the loaders), ``train_tokens`` and
    ``tokens_per_epoch`` (both by domain).

    Args:
        path: Folder of a prepared corpus, or ``builtin``.
        seq_len: Tokens of a sequence.
        batch_size: Sequences of an optimiser step, over all ranks.
        micro_batch_size: Sequences of a rank in one forward pass; the rest of batch_size is accumulated.
        train_domains: Domains to train on; by default all of the corpus.
        test_domains: Domains to validate on; by default all of the test split.
        weights: Share of each training domain; by default in proportion to its tokens.
        document_mask: Keep packed documents apart (cu_seqlens); the mixer must support it.
        seed: Another seed is another order of the training data.
        num_workers: Loader processes of each rank; 0 loads in the training process.
        val_batch_size: Windows of a validation batch; micro_batch_size by default.
        max_val_tokens: About how many tokens of each test domain to use: a fixed choice of documents.
        max_val_document_tokens: Test on the first so many tokens of each document: more documents for the same work,
            and documents are what a comparison of runs is sure by.
        verify: Check every shard's checksum before use, which reads the corpus once; by default where it is small
            (up to a billion tokens).
    """

    def __init__(
        self,
        path: str | os.PathLike,
        seq_len: int,
        batch_size: int,
        micro_batch_size: int,
        *,
        train_domains: list[str] | None = None,
        test_domains: list[str] | None = None,
        weights: dict[str, float] | None = None,
        document_mask: bool = False,
        seed: int = 0,
        num_workers: int = 0,
        val_batch_size: int | None = None,
        max_val_tokens: int | None = None,
        max_val_document_tokens: int | None = None,
        verify: bool | None = None,
    ) -> None:
        super().__init__(seq_len, batch_size, micro_batch_size, num_workers=num_workers)
        if type(self) is TokenDataModule:
            raise TypeError("TokenDataModule is abstract: use LimitedDomainDataModule or MixedDomainDataModule")
        at_least(
            1,
            val_batch_size=val_batch_size,
            max_val_tokens=max_val_tokens,
            max_val_document_tokens=max_val_document_tokens,
        )
        for option, domains in (("train_domains", train_domains), ("test_domains", test_domains)):
            if domains is not None and not domains:
                raise ValueError(f"{option} is empty: name at least one domain, or leave it out for all")
            if domains is not None and len(set(domains)) < len(domains):
                raise ValueError(f"{option} names a domain twice: {', '.join(domains)}")
        if weights is not None:
            check_weights(weights, train_domains or list(weights))
        self.path = path
        self.train_domains = train_domains
        self.test_domains = test_domains
        self.weights = weights
        self.document_mask = document_mask
        self.seed = seed
        self.val_batch_size = micro_batch_size if val_batch_size is None else val_batch_size
        self.max_val_tokens = max_val_tokens
        self.max_val_document_tokens = max_val_document_tokens
        self.verify = verify
        self.prepare_data_per_node = True
        self._corpus: Corpus | None = None

    @property
    def corpus(self) -> Corpus:
        """The opened corpus; there after ``setup``."""
        if self._corpus is None:
            raise RuntimeError("call setup() first")
        return self._corpus

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return self.corpus.tokenizer.vocab_size

    @property
    def eos_id(self) -> int:
        """Id of the end-of-text token."""
        return self.corpus.tokenizer.eos_id

    @property
    def tokenizer_path(self) -> Path:
        """The corpus's ``tokenizer.json``."""
        return self.corpus.tokenizer_path

    @property
    def tokenizer_hash(self) -> str:
        """SHA-256 of ``tokenizer.json``, as hexadecimal."""
        return self.corpus.tokenizer.hash

    def in_domain(self, name: str) -> bool:
        """Whether a test domain is one that is trained on. There after ``setup``."""
        return name in self.order.domains

    def _root(self) -> Path:
        if str(self.path) == "builtin":
            from seqarch.data.builtin import builtin_corpus

            return builtin_corpus()
        return Path(self.path)

    def prepare_data(self) -> None:
        """Build the built-in corpus if it is asked for, and check the shards (one process of each node)."""
        corpus = Corpus(self._root())
        tokens = sum(stream.n_tokens for streams in corpus.splits.values() for stream in streams.values())
        if self.verify or (self.verify is None and tokens <= _SMALL):
            corpus.verify()

    def setup(self, stage: Literal["fit", "validate", "test", "predict"] | str = "fit") -> None:
        """Open the corpus and fix the order of the training data.

        Raises:
            ValueError: If the corpus lacks a domain or has too few tokens for one window, or if ``batch_size`` cannot
                be dealt to the ranks.
        """
        if self._corpus is None:
            self._corpus = Corpus(self._root())
            self._set_domains(self._corpus)
        if stage == "fit":
            self._set_accumulation()

    def _set_domains(self, corpus: Corpus) -> None:
        names = self.train_domains or corpus.domains("train")
        streams = {d: corpus.stream("train", d, "train_domains") for d in names}
        if not streams:
            raise ValueError(
                f"path: {corpus.root} has no train split; prepare one with `seqarch data prepare --split train`"
            )
        for domain, stream in streams.items():
            if stream.n_windows(self.seq_len) == 0:
                raise ValueError(
                    f"domain {domain} of {corpus.root} has {stream.n_tokens} tokens, fewer than one window of "
                    f"{self.seq_len + 1}: lower seq_len, prepare more text, or leave the domain out of train_domains"
                )
        self.train_tokens = {d: s.n_tokens for d, s in streams.items()}
        windows = {d: s.n_windows(self.seq_len) for d, s in streams.items()}
        weights = self.weights or {d: float(n) for d, n in self.train_tokens.items()}
        self.order = SampleOrder(windows, weights, self.seed)
        self.tokens_per_epoch = {d: windows[d] * self.seq_len for d in self.order.domains}
        self._train_streams = streams
        self.val_domains = self.test_domains or corpus.domains("test")
        self._test_streams = {d: corpus.stream("test", d, "test_domains") for d in self.val_domains}

    def train_dataloader(self) -> DataLoader:
        """This rank's micro batches, from the optimiser step at which the trainer stands."""
        rank, world_size = self._rank()
        batches = TrainBatches(
            self.order,
            self._train_streams,
            seq_len=self.seq_len,
            batch_size=self.batch_size,
            micro_batch_size=self.micro_batch_size,
            rank=rank,
            world_size=world_size,
            document_mask=self.document_mask,
        )
        return TrainLoader(
            batches, self._current_step, num_workers=self.num_workers, pin_memory=torch.cuda.is_available()
        )

    def val_dataloader(self) -> list[DataLoader]:
        """One loader for each of ``val_domains``, in that order; see `EvalBatches` for what a batch is."""
        rank, world_size = self._rank()
        loaders = []
        for whole in self._test_streams.values():
            cut = self.max_val_document_tokens
            stream = whole if cut is None else Beginnings(whole, cut)
            documents = choose_documents(stream, self.max_val_tokens)
            batches = EvalBatches(
                stream,
                documents,
                count_bytes(stream, documents, self.tokenizer_path, self.eos_id),
                seq_len=self.seq_len,
                batch_size=self.val_batch_size,
                eos_id=self.eos_id,
                rank=rank,
                world_size=world_size,
            )
            loaders.append(loader(batches, self.num_workers, torch.cuda.is_available()))
        return loaders

    def state_dict(self) -> dict[str, Any]:
        """What decides the order of the training data."""
        return {
            "tokenizer_hash": self.tokenizer_hash,
            "order": {
                "seed": self.seed,
                "seq_len": self.seq_len,
                "batch_size": self.batch_size,
                "domains": list(self.order.domains),
                "windows": list(self.order.windows),
                "counts": list(self.order.counts),
            },
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Compare with the run that wrote the checkpoint.

        Raises:
            ValueError: If its tokenizer was another one.
        """
        if state_dict["tokenizer_hash"] != self.tokenizer_hash:
            raise ValueError(
                f"the checkpoint was trained with another tokenizer (hash {state_dict['tokenizer_hash'][:12]}…) than "
                f"that of {self.corpus.root} ({self.tokenizer_hash[:12]}…): use the corpus it was trained on"
            )
        self._warn_of_changes(state_dict["order"], self.state_dict()["order"])
