"""``seqarch needle``: find one number in a long text."""

from __future__ import annotations

import importlib.util

from seqarch.commands.usage import Parser


def run(name: str, arguments: list[str]) -> None:
    """Parse the arguments and ask."""
    parser = Parser(prog=f"seqarch {name}", description="Ask for a number that was mentioned once in a long text.")
    parser.add_argument("ckpt", type=str, help="Checkpoint file, or run folder (its last checkpoint).")
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 2048], help="Tokens of the context.")
    parser.add_function_arguments(needle, skip={"ckpt", "lengths"})
    needle(**vars(parser.parse_args(arguments)))


def needle(
    ckpt: str,
    lengths: list[int],
    depths: int = 5,
    samples: int = 8,
    batch_size: int = 1,
    chunk: int = 2048,
    seed: int = 0,
    tokenizer: str | None = None,
    device: str | None = None,
    out: str | None = None,
) -> None:
    """Ask for a number that was mentioned once in a long text, by its depth and the text's length.

    Args:
        ckpt: Checkpoint file, or run folder (its last checkpoint).
        lengths: Tokens of the context, any number.
        depths: How many places of the needle, evenly from the beginning to the end.
        samples: Questions for each length and place.
        batch_size: Questions at once.
        chunk: Tokens a call: memory is that of the state and of one chunk.
        seed: Of words and numbers.
        tokenizer: A tokenizer.json; by default the run folder's.
        device: Where to compute; by default a GPU if there is one.
        out: The JSON file for the results, with a PNG beside it; by default results/needle-stepN.json in the run
            folder.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("the package matplotlib is not installed: pip install 'seqarch[eval]'")
    from seqarch.evaluation.context_plots import keep, plot_needle
    from seqarch.evaluation.needle import needle_test
    from seqarch.evaluation.trained import load_trained

    trained = load_trained(ckpt, tokenizer, device)

    def report(length: int, accuracy: float, nats: float) -> None:
        print(f"{length:>9,} tokens: {accuracy:.1%} found, {nats:.2f} nats for the number (a guess: 16.0)", flush=True)

    found = needle_test(trained, lengths, depths, samples, batch_size=batch_size, chunk=chunk, seed=seed, report=report)
    keep(found, trained.results_file("needle", out), plot_needle)
