"""Loss by position: how much does a model gain from a longer context?

Documents are followed from their beginning, so that a token's position is the length of its context. A domain's curve
averages over the same documents at every position, those that are at least as long as the curve: otherwise its slope
would show how long documents differ from short ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from seqarch.data.corpus import Corpus, TokenStream
from seqarch.data.permutation import KeyedPermutation, derive_key
from seqarch.data.tokenizer import load_tokenizer
from seqarch.evaluation.generation import PREFILL
from seqarch.evaluation.trained import Trained
from seqarch.model import SequenceModel
from seqarch.options import at_least


@torch.inference_mode()
def token_losses(model: SequenceModel, tokens: Tensor, chunk: int = PREFILL) -> Tensor:
    """Nats of each token after the first, given all before it.

    Args:
        model: The model; its device is used.
        tokens: int64 ``[B, T + 1]``.
        chunk: Tokens a call; memory is that of the mixers' state and of one chunk's logits.

    Returns:
        float32 ``[B, T]``, on the CPU.
    """
    tokens = tokens.to(model.embedding.weight.device)
    state = model.init_state(len(tokens), tokens.shape[1] - 1, device=tokens.device)
    losses = []
    for inputs, labels in zip(tokens[:, :-1].split(chunk, dim=1), tokens[:, 1:].split(chunk, dim=1), strict=True):
        logits, state = model(inputs, state=state)
        losses.append(F.cross_entropy(logits.float().mT, labels, reduction="none").cpu())
    return torch.cat(losses, dim=1)


def bin_edges(length: int, per_octave: int = 2) -> list[int]:
    """Edges of bins that grow by 2^(1/per_octave), from 0 to ``length``, each at least one token wide."""
    steps = math.ceil(per_octave * math.log2(length)) if length > 1 else 0
    return sorted({0, length, *(round(2 ** (i / per_octave)) for i in range(steps))})


def long_documents(stream: TokenStream, length: int, most: int) -> list[int]:
    """Documents of at least ``length`` tokens, at most so many; which ones depends on the domain's name and size."""
    permutation = KeyedPermutation(stream.n_documents, derive_key("documents by position", stream.name))
    chosen: list[int] = []
    for rank in range(stream.n_documents):
        document = int(permutation(torch.tensor([rank]).numpy())[0])
        if stream.document_length(document) >= length:
            chosen.append(document)
            if len(chosen) == most:
                break
    return sorted(chosen)


def loss_by_position(
    trained: Trained,
    corpus: Corpus,
    length: int,
    domains: Sequence[str] | None = None,
    documents: int = 64,
    *,
    batch_size: int = 4,
    chunk: int = PREFILL,
    report: Callable[[str, dict[str, Any]], None] = lambda domain, curve: None,
) -> dict[str, Any]:
    """Mean loss in bins of positions, for each test domain.

    Args:
        trained: The model.
        corpus: With its tokenizer.
        length: Positions to look at; documents that are shorter are left out.
        domains: Of the test split; by default all.
        documents: At most so many of each.
        batch_size: Documents at once.
        chunk: Tokens a call.
        report: Called with each domain's curve.

    Returns:
        What to write as JSON: ``starts`` and ``ends`` of the bins, and for each domain ``loss``, ``stderr`` (over
        documents; None for a single one) and ``documents``.

    Raises:
        ValueError: If no domain has a document that is long enough, or the tokenizer is another one.
    """
    at_least(1, length=length, documents=documents, batch_size=batch_size, chunk=chunk)
    if load_tokenizer(corpus.tokenizer_path).to_str() != trained.tokenizer.to_str():
        raise ValueError(f"data: {corpus.root} has another tokenizer than the model was trained with")
    edges = bin_edges(length)
    curves: dict[str, Any] = {}
    longest = 0
    for domain in domains or corpus.domains("test"):
        stream = corpus.stream("test", domain, "domains")
        chosen = long_documents(stream, length, documents)
        if not chosen:
            longest = max(longest, *(stream.document_length(i) for i in range(stream.n_documents)))
            continue
        tokens = torch.stack(
            [torch.cat([torch.tensor([trained.eos_id]), torch.from_numpy(stream.document(i)[:length])]) for i in chosen]
        )
        losses = torch.cat([token_losses(trained.model, part, chunk) for part in tokens.split(batch_size)]).double()
        bins = torch.stack([losses[:, a:b].mean(dim=1) for a, b in pairwise(edges)], dim=1)
        error = bins.std(dim=0) / math.sqrt(len(bins)) if len(bins) > 1 else None
        curves[domain] = {
            "documents": len(chosen),
            "loss": bins.mean(dim=0).tolist(),
            "stderr": None if error is None else error.tolist(),
        }
        report(domain, curves[domain])
    if not curves:
        raise ValueError(f"length: no test document of {corpus.root} has {length} tokens; the longest has {longest}")
    return {"model": trained.describe(), "starts": edges[:-1], "ends": edges[1:], "domains": curves}
