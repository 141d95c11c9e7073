"""``seqarch probe``: the paper's three principles, measured on any mixer."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from shutil import get_terminal_size
from typing import TYPE_CHECKING, Any

from seqarch.commands.usage import Parser

if TYPE_CHECKING:
    from seqarch.evaluation.probe_jacobian import Layer
    from seqarch.mixer_spec import MixerSpec


def run(name: str, arguments: list[str]) -> None:
    """Parse the arguments and measure."""
    parser = Parser(
        prog=f"seqarch {name}",
        description="Full-sequence visibility, real relation and non-uniformity of mixers. docs/probe.md has the "
        "definitions.",
    )
    parser.add_argument(
        "targets",
        type=str,
        nargs="+",
        metavar="MIXER|CKPT",
        help="Name or 'Name(option=value, ...)' of an installed mixer, or a checkpoint file or run folder.",
    )
    parser.add_argument("--domains", type=str, nargs="+", help="Test domains whose text a checkpoint reads; all.")
    parser.add_function_arguments(probe, skip={"targets", "domains"})
    probe(**vars(parser.parse_args(arguments)))


def probe(
    targets: list[str],
    domains: list[str] | None = None,
    length: int = 256,
    sequences: int = 4,
    directions: int = 1,
    d_model: int = 128,
    seed: int = 0,
    data: str | None = None,
    random_tokens: bool = False,
    tokenizer: str | None = None,
    batch_size: int = 32,
    out: str | None = None,
) -> None:
    """Measure full-sequence visibility, real relation and non-uniformity, on the CPU.

    Args:
        targets: Mixers, which are freshly initialised and get random inputs, and checkpoints, each layer of which is
            measured on the hidden states of text.
        domains: Test domains whose text a checkpoint reads; by default all.
        length: Tokens of a sequence. Costs grow as its square, or faster.
        sequences: How many are averaged over.
        directions: Random directions in which an input is moved.
        d_model: Width of a fresh mixer.
        seed: Of parameters, random inputs, directions and contents.
        data: A prepared corpus for checkpoints, or builtin; by default the one that the run was trained on.
        random_tokens: Give checkpoints random tokens instead of text.
        tokenizer: A tokenizer.json; by default the run folder's.
        batch_size: Sequences a call: memory is that of a mixer's forward pass.
        out: The JSON file for the results, with a PNG beside it; by default results/probe-stepN.json in the run folder
            for a single checkpoint, and none otherwise.
    """
    from rich.console import Console

    from seqarch.data.progress import progress_bar
    from seqarch.evaluation import probe_inputs as inputs
    from seqarch.evaluation.probe import average, measure, steps
    from seqarch.evaluation.probe_table import EXPLANATION, probe_table
    from seqarch.evaluation.trained import load_trained
    from seqarch.options import at_least

    at_least(16, length=length)
    at_least(2, sequences=sequences)
    at_least(1, directions=directions, d_model=d_model, batch_size=batch_size)
    resolved = [_resolve(target, d_model) for target in targets]
    file = None if out is None else Path(out)
    single = len(resolved) == 1 and isinstance(resolved[0], Path)
    if (file is not None or single) and importlib.util.find_spec("matplotlib") is None:
        raise ValueError("the package matplotlib is not installed: pip install 'seqarch[eval]'")
    measured: list[dict[str, Any]] = []
    for target in resolved:
        layers: list[Layer]
        if isinstance(target, Path):
            trained = load_trained(target, tokenizer, "cpu")
            if random_tokens:
                tokens = inputs.random_tokens(trained, sequences, length, seed)
            else:
                tokens = inputs.text_tokens(trained, trained.corpus(data), sequences, length, domains)
            if single:
                file = trained.results_file("probe", out)
            label = f"{trained.results.parent.name}, step {trained.step}"
            entry = {
                "label": label,
                "model": trained.describe(),
                "inputs": "random tokens" if random_tokens else "text",
            }
            layers = inputs.trained_layers(trained, tokens)
        else:
            entry = {"label": target.label, "d_model": d_model, "inputs": "normal"}
            layers = [inputs.fresh_layer(target, d_model, sequences, length, seed)]
        found: list[dict[str, Any]] = []
        with progress_bar(entry["label"], unit="steps", total=sum(map(steps, layers))) as advance:
            for layer in layers:
                options = {"seed": seed, "directions": directions, "batch_size": batch_size}
                found.append(measure(layer, **options, advance=advance))
        names = [{"layer": layer.mixer.layer_idx, "mixer": type(layer.mixer).__name__} for layer in layers]
        entry["layers"] = [name | of_layer for name, of_layer in zip(names, found, strict=True)]
        measured.append(entry | {"mean": average(found)})
    console = Console(width=max(112, get_terminal_size().columns))  # a narrower table would lose the names
    console.print(probe_table(measured))
    console.print(EXPLANATION, style="dim", highlight=False, markup=False, soft_wrap=True)
    if file is not None:
        from seqarch.evaluation.context_plots import keep
        from seqarch.evaluation.probe_plots import plot_probe

        sizes = {"length": length, "sequences": sequences, "directions": directions, "seed": seed}
        keep({**sizes, "mixers": measured}, file, plot_probe)


def _resolve(target: str, d_model: int) -> MixerSpec | Path:
    """A mixer with options, or a checkpoint's file.

    Raises:
        ValueError: If it is neither, with the nearest mixer.
    """
    from seqarch.discovery import plugins
    from seqarch.mixer_spec import parse_mixer
    from seqarch.training.runs import checkpoint_of

    known = {name for plugin in plugins() for name in (plugin.name, plugin.class_name)}
    path = Path(target)
    if target.split("(")[0].strip() in known:
        return parse_mixer(target, d_model)
    if path.exists() or len(path.parts) > 1 or path.suffix == ".ckpt":
        return checkpoint_of(path)
    try:
        return parse_mixer(target, d_model)
    except ValueError as error:
        raise ValueError(f"{error}; nor is there a checkpoint or run folder '{target}'") from error
