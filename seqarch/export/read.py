"""A checkpoint of a model that transformers or flash-linear-attention can load: the way back from an export."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from seqarch.discovery import plugins
from seqarch.export.folder import CONFIG, read_json, read_weights
from seqarch.export.formats import format_of_type
from seqarch.model.options import ARCHITECTURE, model_options
from seqarch.training.consolidated import is_consolidated, write_consolidated
from seqarch.training.module import SequenceModule
from seqarch.training.smoothing import SmoothedLoss


def import_model(folder: str | Path, out: str | Path) -> Path:
    """Write a safetensors checkpoint with a model's weights.

    Args:
        folder: With config.json and weights in safetensors; its ``model_type`` is seqarch or that of a native format.
        out: The file, whose name ends in ``.safetensors``.

    Raises:
        ValueError: If it cannot be read or our classes cannot express it, with the entry that stands in the way.
    """
    plugins()
    folder, target = Path(folder), Path(out)
    if not is_consolidated(target):
        raise ValueError(f"{out} must end in .safetensors: that is what is written")
    if target.exists():
        raise ValueError(f"{out} exists already: remove it, or name another")
    config = read_json(folder / CONFIG)
    model_type = str(config.get("model_type"))
    if model_type == "seqarch":
        if missing := sorted(set(ARCHITECTURE) - config.keys()):
            raise ValueError(f"{folder / CONFIG} has no {', '.join(missing)}")
        options = model_options({name: config[name] for name in ARCHITECTURE})
        weights = {name.removeprefix("model."): t for name, t in read_weights(folder).items()}
    else:
        native = format_of_type(model_type)
        options = native.options(config)
        theirs = read_weights(folder)
        if options["tie_embeddings"]:  # some writers store the embedding under both names
            theirs = {name: t for name, t in theirs.items() if not name.startswith("lm_head.")}
        weights = native.to_ours(theirs)
    try:
        module = SequenceModule(**options)
    except Exception as error:  # whatever a plugin's class raises
        raise ValueError(f"{folder} cannot be rebuilt with the versions installed here: {error}") from error
    _check_weights(folder, module, weights)
    write_consolidated(target, _checkpoint(module, weights, config.get("seqarch")))
    return target


def _check_weights(folder: Path, module: SequenceModule, weights: Mapping[str, Tensor]) -> None:
    own = {name: tuple(p.shape) for name, p in module.model.state_dict().items()}
    theirs = {name: tuple(t.shape) for name, t in weights.items()}
    for problem, names in (("lacks", own.keys() - theirs.keys()), ("also has", theirs.keys() - own.keys())):
        if names:
            raise ValueError(f"{folder} {problem} {', '.join(sorted(names)[:5])}{' …' if len(names) > 5 else ''}")
    for name, shape in own.items():
        if theirs[name] != shape:
            raise ValueError(f"{folder}: {name} is {list(theirs[name])}, and its config.json makes it {list(shape)}")


def _checkpoint(module: SequenceModule, weights: Mapping[str, Tensor], origin: Any) -> dict[str, Any]:
    """What a run's checkpoint holds, without what training goes on from."""
    origin = origin if isinstance(origin, Mapping) else {}
    return {
        "state_dict": {f"model.{name}": tensor for name, tensor in weights.items()},
        "hyper_parameters": dict(module.hparams),
        "global_step": int(origin.get("step", 0)),
        "epoch": 0,
        "seqarch": {
            "seed": module.seed,
            "skipped_steps": 0,
            "skipped_in_a_row": 0,
            "tokens": int(origin.get("tokens", 0)),
            "smoothed_loss": SmoothedLoss().state(),
            "seen_tokens": None,
        },
    }
