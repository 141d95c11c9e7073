"""Downstream tasks through lm-evaluation-harness: which ones, with how many shots, and what is kept of the results."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lm_eval.evaluator import simple_evaluate
from lm_eval.tasks import TaskManager

from seqarch.data.manifest import write_aside
from seqarch.evaluation.lm_eval_model import SeqarchLM

if TYPE_CHECKING:
    from tokenizers import Tokenizer

GROUPS: dict[str, dict[str, int]] = {
    "base": {
        "mmlu": 5,
        "openbookqa": 0,
        "arc_easy": 0,
        "arc_challenge": 0,
        "boolq": 0,
        "race": 0,
        "social_iqa": 0,
        "sciq": 0,
        "hellaswag": 0,
        "copa": 0,
        "piqa": 0,
        "winogrande": 0,
    },
    "recall": {"swde": 0, "squad_completion": 0, "fda": 0},
}
"""Groups of tasks, each with its usual number of examples in the context."""


class Tasks(TaskManager):
    """lm-eval's tasks and those of a folder, with an error of its own for a task whose data cannot be had."""

    def load(self, task_list: Any) -> Any:
        """Load tasks by name.

        Raises:
            TaskUnavailableError: If the data or a package that a task needs is missing.
        """
        try:
            return super().load(task_list)
        except Exception as error:  # tasks run code of their own, and fail in as many ways
            raise TaskUnavailableError(error) from error


class TaskUnavailableError(Exception):
    """A task cannot be loaded or evaluated. The message is the reason, on one line."""

    def __init__(self, error: Exception) -> None:
        reason = " ".join(str(error).split()) or type(error).__name__
        if isinstance(error, ConnectionError):
            reason += "; run it once where there is a network (its data is then in the cache), or give local task files"
        super().__init__(reason)


def tasks_for(names: Sequence[str], include_path: str | None = None, metadata: dict[str, Any] | None = None) -> Tasks:
    """The tasks of a folder, and lm-eval's own (whose 15,000 files take a while to read) if they do not hold all names.

    Args:
        names: Of tasks that are needed.
        include_path: A folder with task files.
        metadata: Given to tasks that make their data, see `ruler_metadata`.

    Raises:
        ValueError: If there is no such folder.
    """
    if include_path is not None:
        if not Path(include_path).is_dir():
            raise ValueError(f"include_path: there is no folder {include_path}")
        local = Tasks(include_path=include_path, include_defaults=False, metadata=metadata)
        if set(names) <= set(local.all_tasks):
            return local
    return Tasks(include_path=include_path, metadata=metadata)


RULER_LENGTHS = (4096, 8192, 16384, 32768, 65536, 131072)
"""The lengths of context for which lm-eval's RULER tasks have a metric."""


def ruler_metadata(tokenizer: Tokenizer, lengths: Sequence[int], folder: Path) -> dict[str, Any]:
    """What lm-eval's RULER tasks need to make their data: lengths, and the tokenizer as transformers reads it.

    Args:
        tokenizer: The model's.
        lengths: Of the contexts, in tokens, the answer included.
        folder: An empty folder for the tokenizer, needed as long as tasks are loaded.

    Raises:
        ValueError: For a length that RULER does not have.
    """
    for length in lengths:
        if length not in RULER_LENGTHS:
            known = ", ".join(map(str, RULER_LENGTHS))
            raise ValueError(f"max_seq_lengths: {length} is none of RULER's {known}; `seqarch needle` takes any")
    (folder / "tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}', encoding="utf-8")
    return {"tokenizer": str(folder), "max_seq_lengths": list(lengths)}


def shots_of(names: Sequence[str], known: Sequence[str]) -> dict[str, int | None]:
    """The tasks that names mean, groups resolved, each with its number of shots (None: as lm-eval has it).

    Raises:
        ValueError: For a name that is neither in ``known`` nor a group.
    """
    found: dict[str, int | None] = {}
    for name in names:
        if name in GROUPS:
            found |= GROUPS[name]
        elif name in known:
            found[name] = None
        else:
            near = get_close_matches(name, [*known, *GROUPS], n=1)
            hint = f"did you mean '{near[0]}'?" if near else "`lm-eval ls tasks` lists them"
            raise ValueError(f"tasks: there is no task '{name}': {hint}")
    return found


def evaluate(
    lm: SeqarchLM, shots: Mapping[str, int | None], manager: Tasks, limit: int | None = None
) -> Iterator[tuple[str, dict[str, Any] | TaskUnavailableError]]:
    """Evaluate one task after the other.

    Args:
        lm: The model.
        shots: Tasks with their number of shots.
        manager: Knows the tasks.
        limit: Only so many documents of each task.

    Yields:
        The name of a task, and its results as they come (nothing on other processes than the first), with the scores
        of each document under ``samples``; or why it could not be loaded or evaluated.
    """
    for name, n in shots.items():
        try:
            found = simple_evaluate(
                lm, tasks=[name], num_fewshot=n, limit=limit, task_manager=manager, log_samples=True
            )
        except TaskUnavailableError as error:
            yield name, error
            continue
        except (ValueError, LookupError, TypeError) as error:  # no documents, too few examples, a wrong template
            if lm.world_size > 1:
                raise  # others may have come further
            yield name, TaskUnavailableError(error)
            continue
        if found is not None:
            settings = {"limit": limit, **lm.settings}
            yield name, {**settings, **_condensed(dict(found), name)}


def _condensed(found: dict[str, Any], name: str) -> dict[str, Any]:
    """Of lm-eval's results what is worth keeping: scores with their standard errors, and how they came about."""
    scores = {task: _scores(values) for task, values in found["results"].items()}
    better = found["higher_is_better"].get(name) or {}
    documents, samples = _samples(found["samples"])
    shots = sorted({n for n in found["n-shot"].values() if n is not None})
    return {
        "num_fewshot": shots[0] if len(shots) == 1 else shots,
        "documents": sum(n["effective"] for n in found["n-samples"].values()),
        "documents_sha256": documents,
        "version": found["versions"].get(name),
        "higher_is_better": {metric: better.get(metric.partition(",")[0]) for metric in scores.get(name, {})},
        "scores": scores.pop(name, {}),
        "subtasks": scores,
        "samples": samples,
    }


def _samples(found: Mapping[str, Sequence[Mapping[str, Any]]]) -> tuple[str, dict[str, list[float]]]:
    """A hash of all documents, and by metric the score of each: subtasks by name, documents by number."""
    digest = hashlib.sha256()
    scores: dict[str, list[float]] = {}
    for subtask, samples in sorted(found.items()):
        for sample in sorted(samples, key=lambda s: (s["filter"], s["doc_id"])):
            digest.update(f"{subtask}/{sample['filter']}/{sample['doc_id']}/{sample['doc_hash']}\n".encode())
            for metric in sample["metrics"]:
                value = sample[metric]
                if isinstance(value, (int, float)):
                    key = metric if sample["filter"] == "none" else f"{metric},{sample['filter']}"
                    scores.setdefault(key, []).append(round(float(value), 12))
    return digest.hexdigest(), scores


def _scores(values: dict[str, Any]) -> dict[str, dict[str, float | None]]:
    """lm-eval's ``acc,none`` and ``acc_stderr,none`` as one entry ``acc``; a filter's name stays."""
    scores: dict[str, dict[str, float | None]] = {}
    for key, value in values.items():
        metric, comma, name = key.partition(",")
        if not comma or metric.endswith("_stderr") or not isinstance(value, (int, float)):
            continue
        if metric.isdecimal() and value == -1:
            continue  # RULER's: a length that was not asked for
        error = values.get(f"{metric}_stderr,{name}")
        scores[metric if name == "none" else key] = {
            "value": float(value),
            "stderr": float(error) if isinstance(error, (int, float)) else None,
        }
    return scores


def write_results(path: Path, model: dict[str, Any], tasks: dict[str, dict[str, Any]]) -> None:
    """Put tasks' results into a file, beside those of other tasks that it has.

    Args:
        path: A JSON file: ``{"model": …, "tasks": {name: …}}``; its folder is made. The scores of each document,
            ``samples``, go into another one, ``<name>-samples.json``: ``{"model": …, "tasks": {name: {"scores": …}}}``.
        model: Which model it was; tasks of another one are dropped from the files.
        tasks: Results by name.
    """
    by_document = {name: {"scores": found["samples"]} for name, found in tasks.items()}
    condensed = {name: {k: v for k, v in found.items() if k != "samples"} for name, found in tasks.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    for file, entries, indent in ((_samples_file(path), by_document, None), (path, condensed, 1)):
        kept = kept_results(file, model)
        write_aside(file, json.dumps({"model": model, "tasks": {**kept, **entries}}, indent=indent).encode())


def kept_results(path: Path, model: dict[str, Any]) -> dict[str, Any]:
    """The results of ``model`` that a file holds.

    Raises:
        ValueError: If there is a file that does not hold results.
    """
    try:
        old = json.loads(path.read_text(encoding="utf-8"))
        return old["tasks"] if old["model"] == model else {}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} is there, but holds no results of tasks: move it away, or name another --out"
        ) from error


def _samples_file(path: Path) -> Path:
    return path.with_name(f"{path.stem}-samples.json")
