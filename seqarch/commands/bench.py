"""``seqarch bench``: speed and memory of mixers against length."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from jsonargparse import ActionYesNo

from seqarch.commands.usage import Parser

if TYPE_CHECKING:
    from rich.console import Console

    from seqarch.evaluation.bench_steps import Setup


_FLAGS = {
    "activation_checkpointing": "Keep only each block's input for the backward pass and recompute the rest.",
    "compile": "Compile each block with torch.compile.",
    "overwrite": "Replace the results in the folder.",
}


def run(name: str, arguments: list[str]) -> None:
    """Parse the arguments and measure."""
    parser = Parser(
        prog=f"seqarch {name}",
        description="Train and decode with mixers at a range of lengths: speed, memory, share of the device's peak. "
        "docs/bench.md says how it is measured.",
    )
    parser.add_argument(
        "mixers", type=str, nargs="+", help="Names, with options in quotes: 'Top1Chunk(selection=approx)'."
    )
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096], help="Tokens of a sequence.")
    for flag, meaning in (("train", "Measure training."), ("decode", "Measure decoding.")):
        parser.add_argument(f"--{flag}", action=ActionYesNo(no_prefix="no-"), default=True, help=meaning)
    for flag, meaning in _FLAGS.items():
        parser.add_argument(f"--{flag}", action="store_true", help=meaning)
    parser.add_function_arguments(bench, skip={"mixers", "lengths", "command", "train", "decode", *_FLAGS})
    options = vars(parser.parse_args(arguments))
    bench(command=["seqarch", name, *arguments], **options)


def bench(
    mixers: list[str],
    lengths: list[int],
    command: list[str],
    d_model: int = 256,
    n_layers: int = 2,
    n_heads: int | None = None,
    vocab_size: int = 4096,
    tokens: int = 8192,
    train: bool = True,
    decode: bool = True,
    decode_batch: int = 1,
    decode_tokens: int = 16,
    repeats: int = 5,
    warmup: int = 1,
    time_limit: float = 300.0,
    memory_limit: float | None = None,
    device: str | None = None,
    dtype: Literal["float32", "bfloat16"] = "float32",
    threads: int | None = None,
    backend: str = "auto",
    activation_checkpointing: bool = False,
    compile: bool = False,
    peak_tflops: float | None = None,
    out: str = "bench",
    overwrite: bool = False,
) -> None:
    """Measure mixers in one model, each with the same SwiGLU, and write a table, JSON and two plots.

    Args:
        mixers: Names, with options in quotes.
        lengths: Tokens of a sequence.
        command: The command line, for the record.
        d_model: Width of the model.
        n_layers: Blocks.
        n_heads: Heads of the mixers that have the option and do not set it; by default heads of 64.
        vocab_size: Token ids.
        tokens: Tokens of a training step: as many sequences as fit in, at least one.
        train: Measure training.
        decode: Measure decoding.
        decode_batch: Sequences that decode together.
        decode_tokens: Tokens that each of them decodes in a repetition.
        repeats: Repetitions that count; the mixers take turns.
        warmup: Repetitions before them that do not count.
        time_limit: Seconds that one repetition, or building a model and filling its state, may take.
        memory_limit: GiB for one measurement; by default what is free on a CPU, and the whole card on a GPU.
        device: Where to compute; by default a GPU if there is one.
        dtype: Of parameters and activations.
        threads: Of torch on a CPU; by default its own choice.
        backend: Of the mixers that do not set it.
        activation_checkpointing: Keep only each block's input for the backward pass and recompute the rest.
        compile: Compile each block with torch.compile.
        peak_tflops: The device's peak; by default a GPU's data sheet, or a matrix product measured on the CPU.
        out: Folder for results.json, training.png and decoding.png.
        overwrite: Replace the results in that folder.
    """
    folder = Path(out)
    file = folder / "results.json"
    if file.exists() and not overwrite:
        raise ValueError(f"out: {file} exists: name another folder with --out, or replace it with --overwrite")
    import torch
    from rich.console import Console

    from seqarch.data.progress import progress_bar
    from seqarch.evaluation.bench import Bench, Entry, summarise
    from seqarch.evaluation.bench_report import line, to_plain, write_json
    from seqarch.evaluation.bench_steps import Phase, Setup
    from seqarch.mixer_spec import parse_mixer
    from seqarch.options import at_least

    at_least(1, n_heads=n_heads)
    for option, value in (("memory_limit", memory_limit), ("peak_tflops", peak_tflops)):
        if value is not None and value <= 0:
            raise ValueError(f"{option} must be above 0, got {value}")
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"device: there is no GPU for {device} here; use --device cpu")
    if memory_limit is not None and device == "cpu" and not sys.platform.startswith("linux"):
        raise ValueError("memory_limit: on a CPU it needs Linux; leave it out")
    setup = Setup(
        d_model=d_model,
        n_layers=n_layers,
        vocab_size=vocab_size,
        tokens=tokens,
        decode_batch=decode_batch,
        decode_tokens=decode_tokens,
        device=device,
        dtype=dtype,
        threads=torch.get_num_threads() if threads is None else threads,
        memory_limit=_free_memory(device) if memory_limit is None else int(memory_limit * 2**30),
        activation_checkpointing=activation_checkpointing,
        compile=compile,
    )
    shared = {"n_heads": n_heads or max(1, d_model // 64), "backend": backend}
    specs = [parse_mixer(text, d_model, **shared) for text in mixers]
    phases: list[Phase] = [*(["training"] if train else []), *(["decoding"] if decode else [])]
    runs = Bench(specs, lengths, phases, setup, repeats, warmup, time_limit)
    folder.mkdir(parents=True, exist_ok=True)
    peak, source = _peak(setup, peak_tflops) if train else (None, "not measured")

    def save() -> dict[str, Any]:
        plain = to_plain(runs, command, peak, source)
        write_json(plain, file)
        return plain

    def entry_done(entry: Entry) -> None:
        save()
        (found,) = (e for e, own in zip(summarise(runs.entries, peak), runs.entries, strict=True) if own is entry)
        print(line(found), flush=True)

    try:
        with progress_bar("seqarch bench", unit="repetitions", total=runs.total) as advance:

            def round_done(n: int) -> None:
                advance(n)
                save()

            runs.run(round_done, entry_done)
    finally:  # Ctrl-C keeps what there is
        terminal = sys.stdout.isatty()
        _show(save(), folder, Console(width=None if terminal else 160), terminal)


def _show(plain: dict[str, Any], folder: Path, console: Console, terminal: bool) -> None:
    from seqarch.evaluation.bench_report import describe, reasons, tables

    console.print()
    for text in describe(plain):
        console.print(text, highlight=False, markup=False)
    for table in tables(plain, terminal):
        console.print(table)
    for text in reasons(plain):
        console.print(text, highlight=False, markup=False, soft_wrap=True)
    files = [folder / "results.json"]
    if importlib.util.find_spec("matplotlib") is None:
        console.print("No plots: matplotlib is not installed (pip install 'seqarch[eval]')", markup=False)
    else:
        from seqarch.evaluation.bench_plots import write_plots

        files += write_plots(plain, folder)
    console.print(", ".join(map(str, files)), highlight=False, markup=False)


def _peak(setup: Setup, peak_tflops: float | None) -> tuple[float | None, str]:
    """FLOP/s of the device and where the number comes from."""
    from seqarch.evaluation.bench import measure_peak
    from seqarch.evaluation.bench_report import known_peak

    if peak_tflops is not None:
        return peak_tflops * 1e12, "as given by --peak_tflops"
    if setup.device.startswith("cuda"):
        known = known_peak(setup)
        return known, "unknown card: give --peak_tflops" if known is None else "dense, from the vendor's data sheet"
    measured = measure_peak(setup)
    return measured, "could not be measured" if measured is None else "the best matrix product of 2048 in this run"


def _free_memory(device: str) -> int | None:
    """Bytes that a CPU has free, or None for a GPU and where the system does not say."""
    if device.startswith("cuda"):
        return None
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return None
