"""A seqarch checkpoint as a model of lm-evaluation-harness, registered there as ``seqarch``.

Run as a module, this file is lm-eval's own command line with that model in it:

    python -m seqarch.evaluation.lm_eval_model --model seqarch --model_args ckpt=runs/quickstart --tasks sciq
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from torch import Tensor
from tqdm import tqdm

from seqarch.evaluation.batch_generation import generate_batch
from seqarch.evaluation.generation import next_token_distribution
from seqarch.evaluation.trained import Trained, load_trained
from seqarch.options import at_least, one_of

Precision = Literal["32-true", "bf16-mixed"]


class SeqarchLM(TemplateLM):
    """Log-likelihoods and generation for lm-eval. Under ``torchrun`` every process takes its share of the documents.

    Rows of a batch are padded on the right: what follows a token changes nothing before it, in any mixer.

    Args:
        ckpt: Checkpoint file, run folder (its last checkpoint), or a model already loaded.
        tokenizer: A tokenizer.json; by default the run folder's.
        batch_size: Sequences a call.
        max_length: Tokens of context at the most; what is longer loses its beginning.
        add_bos_token: Begin each context with the end-of-document token, after which every text starts in training.
        precision: 32-true, or bf16-mixed as in training.
        device: Where to compute; by default a GPU if there is one.
        max_batch_size: Not supported; lm-eval passes it to every model.
    """

    def __init__(
        self,
        ckpt: str | Path | Trained,
        tokenizer: str | Path | None = None,
        batch_size: int | str = 8,
        max_length: int = 2048,
        add_bos_token: bool = True,
        precision: Precision = "32-true",
        device: str | None = None,
        max_batch_size: int | None = None,
    ) -> None:
        super().__init__()
        if not str(batch_size).isdecimal():
            raise ValueError(f"batch_size must be a number, got '{batch_size}': it is not found automatically")
        if max_batch_size is not None:
            raise ValueError("max_batch_size is not supported: set batch_size")
        at_least(1, batch_size=int(batch_size))
        at_least(2, max_length=max_length)
        one_of(("32-true", "bf16-mixed"), precision=precision)
        if device is not None and device.startswith("cuda") and not torch.cuda.is_available():
            device = None  # lm-eval's command line says cuda:0 where nobody named a device
        self._join_processes(device)
        if self.world_size > 1 and torch.cuda.is_available() and device != "cpu":
            device = f"cuda:{os.environ['LOCAL_RANK']}"
        self.trained = ckpt if isinstance(ckpt, Trained) else load_trained(ckpt, tokenizer, device)
        self.batch_size, self.max_length = int(batch_size), max_length
        self.add_bos_token, self.precision = add_bos_token, precision

    # --- processes ----------------------------------------------------------------------------------------------------

    def _join_processes(self, device: str | None) -> None:
        if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized():
            on_gpu = torch.cuda.is_available() and device != "cpu"
            dist.init_process_group("nccl" if on_gpu else "gloo")
        if dist.is_initialized():
            self._rank, self._world_size = dist.get_rank(), dist.get_world_size()

    def leave_processes(self) -> None:
        """End the work of several processes together."""
        if self.world_size > 1:
            dist.destroy_process_group()

    @property
    def device(self) -> torch.device:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Where the model is."""
        return self.trained.device

    def all_gather(self, tensor: Tensor) -> Tensor:
        """The scalars ``tensor`` of all processes, ``[world_size]``."""
        if self.world_size == 1:
            return tensor
        parts = [torch.zeros_like(tensor) for _ in range(self.world_size)]
        dist.all_gather(parts, tensor)
        return torch.stack(parts)

    def gather_object(self, obj: Any, dst: int = 0) -> list[Any]:
        """The objects of all processes, on ``dst``; an empty list elsewhere."""
        if self.world_size == 1:
            return [obj]
        gathered: list[Any] = [None] * self.world_size if self.rank == dst else []
        dist.gather_object(obj, gathered or None, dst=dst)
        return gathered

    def barrier(self) -> None:
        """Wait for all processes."""
        if self.world_size > 1:
            dist.barrier()

    # --- text and tokens ----------------------------------------------------------------------------------------------

    @property
    def eot_token_id(self) -> int:
        """The end-of-document token."""
        return self.trained.eos_id

    @property
    def tokenizer_name(self) -> str:
        """What lm-eval's cache of requests is keyed by."""
        return self.trained.checkpoint.name

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Token ids, after an end-of-document token where ``add_bos_token`` and ``add_special_tokens`` allow it."""
        first = [self.eot_token_id] if self.add_bos_token and add_special_tokens is not False else []
        return [*first, *self.trained.tokenizer.encode(string, add_special_tokens=False).ids]

    @property
    def settings(self) -> dict[str, Any]:
        """What the scores depend on beside the checkpoint and the task."""
        return {"max_length": self.max_length, "add_bos_token": self.add_bos_token, "precision": self.precision}

    def get_model_info(self) -> dict[str, Any]:
        """What lm-eval writes into its results."""
        n = sum(p.numel() for p in self.trained.model.parameters())
        return {"model_num_parameters": n, **self.trained.describe(), **self.settings}

    # --- log-likelihoods ----------------------------------------------------------------------------------------------

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.precision == "bf16-mixed")

    def _logits(self, rows: list[tuple[int, ...]]) -> Tensor:
        """Logits ``[B, T, V]`` of token rows, the shorter ones padded on the right."""
        longest = max(map(len, rows))
        padded = torch.tensor([[*row, *[self.eot_token_id] * (longest - len(row))] for row in rows], device=self.device)
        with torch.inference_mode(), self._autocast():
            return self.trained.model(padded)[0]

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        answers = self._scores([(context, continuation) for _, context, continuation in requests], disable_tqdm)
        for (text, _, _), answer in zip(requests, answers, strict=True):
            self.cache_hook.add_partial("loglikelihood", text, answer)
        return answers

    def _scores(self, pairs: list[tuple[list[int], list[int]]], disable_tqdm: bool) -> list[tuple[float, bool]]:
        """For each context and continuation: the latter's log-likelihood, and whether it is the greedy one.

        Pairs with the same tokens but the last (the choices A, B, C, D of a question) share a row.
        """
        sharing: dict[tuple[int, ...], list[int]] = {}
        for i, (context, continuation) in enumerate(pairs):
            if len(continuation) > self.max_length:
                raise ValueError(f"max_length ({self.max_length}) is below a continuation's {len(continuation)} tokens")
            sharing.setdefault(tuple((context + continuation)[-self.max_length - 1 : -1]), []).append(i)
        rows = sorted(sharing, key=lambda row: (-len(row), row))
        answers: dict[int, tuple[float, bool]] = {}
        with self._progress("log-likelihoods", len(rows), disable_tqdm) as bar:
            for start in range(0, len(rows), self.batch_size):
                batch = rows[start : start + self.batch_size]
                for row, logits in zip(batch, self._logits(batch), strict=True):
                    for i in sharing[row]:
                        continuation = pairs[i][1]
                        answers[i] = _score(logits[len(row) - len(continuation) : len(row)], continuation)
                bar.update(len(batch))
        return [answers[i] for i in range(len(pairs))]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of whole texts; a text longer than ``max_length`` goes through disjoint windows."""
        parts: list[tuple[list[int], list[int]]] = []
        owner: list[int] = []
        for i, request in enumerate(requests):
            windows = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0], add_special_tokens=False),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            parts += [make_disjoint_window(window) for window in windows]
            owner += [i] * (len(parts) - len(owner))
        totals = [0.0] * len(requests)
        for i, (log_likelihood, _) in zip(owner, self._scores(parts, disable_tqdm), strict=True):
            totals[i] += log_likelihood
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    # --- generation ---------------------------------------------------------------------------------------------------

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Continuations up to a stopping text, the end of the document, or ``max_gen_toks`` tokens."""
        pairs: list[tuple[str, dict[str, Any]]] = [cast("Any", request.args) for request in requests]
        alike: dict[str, list[int]] = {}
        for i, (_, options) in enumerate(pairs):
            alike.setdefault(json.dumps(options, sort_keys=True), []).append(i)
        texts: dict[int, str] = {}
        with self._progress("generation", len(pairs), disable_tqdm) as bar:
            for members in alike.values():
                until, limit, choose = _generation_options(pairs[members[0]][1])
                room = self.max_length - limit
                if room < 1:
                    raise ValueError(f"max_length ({self.max_length}) leaves no room before max_gen_toks ({limit})")
                prompts = {i: self.tok_encode(pairs[i][0])[-room:] or [self.eot_token_id] for i in members}
                for batch in _batches(prompts, self.batch_size, limit):
                    new = self._generate([prompts[i] for i in batch], limit, choose, until)
                    for i, text in zip(batch, new, strict=True):
                        texts[i] = text
                        self.cache_hook.add_partial("generate_until", pairs[i], text)
                    bar.update(len(batch))
        return [texts[i] for i in range(len(pairs))]

    def _generate(
        self, prompts: list[list[int]], limit: int, choose: Callable[[Tensor], Tensor], until: list[str]
    ) -> list[str]:
        def decode(tokens: list[int]) -> str:
            if tokens and tokens[-1] == self.eot_token_id:
                tokens = tokens[:-1]
            return self.trained.tokenizer.decode(tokens)

        def ends(tokens: list[int]) -> bool:
            return tokens[-1] == self.eot_token_id or any(stop in decode(tokens) for stop in until)

        with self._autocast():
            new = generate_batch(self.trained.model, prompts, limit, choose, ends)
        return [_before(decode(tokens), until) for tokens in new]

    def _progress(self, what: str, total: int, disable: bool) -> tqdm:
        return tqdm(total=total, desc=what, disable=disable or self.rank != 0 or None)


register_model("seqarch")(SeqarchLM)  # no decorator, which would hide the class's own methods from type checkers


def _score(logits: Tensor, continuation: list[int]) -> tuple[float, bool]:
    """From logits ``[n, V]`` at the positions before each of n tokens."""
    log_p = logits.float().log_softmax(dim=-1)
    labels = torch.tensor(continuation, dtype=torch.long, device=log_p.device)
    greedy = bool((log_p.argmax(dim=-1) == labels).all())
    return float(log_p.gather(1, labels[:, None]).sum()), greedy


def _generation_options(given: dict[str, Any]) -> tuple[list[str], int, Callable[[Tensor], Tensor]]:
    """Stopping texts, the greatest number of tokens, and how to choose one."""
    options: dict[str, Any] = dict(normalize_gen_kwargs(given))
    until, limit, sampled = (options.pop(name) for name in ("until", "max_gen_toks", "do_sample"))
    draw = {"temperature": 1.0, **{n: options.pop(n) for n in ("temperature", "top_k", "top_p") if n in options}}
    if options:
        raise ValueError(f"generation option {', '.join(options)} is not supported")

    def choose(logits: Tensor) -> Tensor:
        if not sampled:
            return logits.argmax(dim=-1)
        return torch.stack([torch.multinomial(next_token_distribution(row, **draw), 1)[0] for row in logits])

    return [stop for stop in until if stop], limit, choose


def _batches(prompts: dict[int, list[int]], size: int, spread: int) -> Iterable[list[int]]:
    """Keys of prompts of similar length, the longest first: within ``spread`` tokens, see `generate_batch`."""
    batch: list[int] = []
    for i in sorted(prompts, key=lambda i: (-len(prompts[i]), prompts[i])):
        if batch and (len(batch) == size or len(prompts[batch[0]]) - len(prompts[i]) > spread):
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch


def _before(text: str, until: list[str]) -> str:
    """The text up to the first of the stopping texts."""
    return text[: min((text.find(stop) for stop in until if stop in text), default=len(text))]


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
