"""``seqarch eval``: downstream tasks."""

from __future__ import annotations

import importlib.util
import logging
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

from seqarch.commands.usage import Parser
from seqarch.options import at_least


def run(name: str, arguments: list[str]) -> None:
    """Parse the arguments and evaluate."""
    parser = Parser(prog=f"seqarch {name}", description="Evaluate a checkpoint on tasks of lm-evaluation-harness.")
    parser.add_argument("ckpt", type=str, help="Checkpoint file, or run folder (its last checkpoint).")
    parser.add_argument(
        "--tasks", type=str, nargs="+", required=True, help="Names of tasks; base and recall are groups of them."
    )
    parser.add_argument(
        "--max_seq_lengths", type=int, nargs="+", default=[4096], help="Tokens of RULER's contexts (niah_single_1, …)."
    )
    parser.add_function_arguments(evaluate, skip={"ckpt", "tasks", "max_seq_lengths"})
    evaluate(**vars(parser.parse_args(arguments)))


def evaluate(
    ckpt: str,
    tasks: list[str],
    max_seq_lengths: list[int],
    num_fewshot: int | None = None,
    limit: int | None = None,
    include_path: str | None = None,
    batch_size: int = 8,
    max_length: int = 2048,
    add_bos_token: bool = True,
    precision: Literal["32-true", "bf16-mixed"] = "32-true",
    tokenizer: str | None = None,
    device: str | None = None,
    out: str | None = None,
) -> None:
    """Evaluate a checkpoint on tasks of lm-evaluation-harness, and keep the scores in the run's folder.

    Under torchrun each process takes its share of the documents.

    Args:
        ckpt: Checkpoint file, or run folder (its last checkpoint).
        tasks: Names of tasks, or of the groups base and recall.
        max_seq_lengths: Tokens of RULER's contexts.
        num_fewshot: Examples in the context; by default what the group or the task says.
        limit: Only so many documents of each task.
        include_path: A folder with task files of your own.
        batch_size: Sequences a call.
        max_length: Tokens of context at the most; what is longer loses its beginning.
        add_bos_token: Begin each context with the end-of-document token, as in training.
        precision: 32-true, or bf16-mixed as in training.
        tokenizer: A tokenizer.json; by default the run folder's.
        device: Where to compute; by default a GPU if there is one.
        out: The file for the results; by default results/tasks-stepN.json in the run folder.
    """
    if importlib.util.find_spec("lm_eval") is None:
        raise ValueError("the package lm-eval is not installed: pip install 'seqarch[eval]'")
    at_least(1, **({} if limit is None else {"limit": limit}))
    at_least(0, **({} if num_fewshot is None else {"num_fewshot": num_fewshot}))
    from seqarch.evaluation.lm_eval_model import SeqarchLM
    from seqarch.evaluation.tasks import (
        TaskUnavailableError,
        kept_results,
        ruler_metadata,
        shots_of,
        tasks_for,
        write_results,
    )
    from seqarch.evaluation.tasks import evaluate as evaluate_tasks

    for chatty in ("lm_eval", "huggingface_hub", "datasets"):
        logging.getLogger(chatty).setLevel(logging.ERROR)
    lm = SeqarchLM(ckpt, tokenizer, batch_size, max_length, add_bos_token, precision, device)
    if any(task.startswith(("ruler", "niah")) for task in tasks):
        lm.max_length = max(lm.max_length, *(length + 1 for length in max_seq_lengths))
    file = lm.trained.results_file("tasks", out)
    kept_results(file, lm.trained.describe())  # refuses what is no such file before hours pass
    failed = []
    with TemporaryDirectory() as folder:
        manager = tasks_for(tasks, include_path, ruler_metadata(lm.trained.tokenizer, max_seq_lengths, Path(folder)))
        shots = shots_of(tasks, manager.all_tasks)
        if num_fewshot is not None:
            shots = {task: num_fewshot for task in shots}
        for task, found in evaluate_tasks(lm, shots, manager, limit):
            if isinstance(found, TaskUnavailableError):
                failed.append(task)
                if lm.rank == 0:
                    print(f"seqarch: {task} cannot be evaluated: {found}", file=sys.stderr)
                continue
            write_results(file, lm.trained.describe(), {task: found})
            scores = ", ".join(
                f"{metric} {s['value']:.4f}" + ("" if s["stderr"] is None else f" ± {s['stderr']:.4f}")
                for metric, s in found["scores"].items()
            )
            print(f"{task} ({found['num_fewshot']} shots, {found['documents']} documents): {scores}", flush=True)
    if lm.rank == 0 and len(failed) < len(shots):
        print(file)
    lm.leave_processes()
    if failed:
        raise SystemExit(1)
