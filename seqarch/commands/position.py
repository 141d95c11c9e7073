"""``seqarch position``: loss by position in the document."""

from __future__ import annotations

import importlib.util
from typing import Any

from seqarch.commands.usage import Parser


def run(name: str, arguments: list[str]) -> None:
    """Parse the arguments and measure."""
    parser = Parser(prog=f"seqarch {name}", description="Loss against position in the document, for each test domain.")
    parser.add_argument("ckpt", type=str, help="Checkpoint file, or run folder (its last checkpoint).")
    parser.add_argument("--domains", type=str, nargs="+", help="Test domains; by default all.")
    parser.add_function_arguments(position, skip={"ckpt", "domains"})
    position(**vars(parser.parse_args(arguments)))


def position(
    ckpt: str,
    domains: list[str] | None = None,
    length: int = 512,
    documents: int = 64,
    data: str | None = None,
    batch_size: int = 4,
    chunk: int = 2048,
    tokenizer: str | None = None,
    device: str | None = None,
    out: str | None = None,
) -> None:
    """Loss against position in the document, for each test domain, over documents that are long enough.

    Args:
        ckpt: Checkpoint file, or run folder (its last checkpoint).
        domains: Test domains; by default all.
        length: Positions to look at; shorter documents are left out, so that each position is about the same documents.
        documents: At most so many of each domain.
        data: A prepared corpus, or builtin; by default the one that the run was trained on.
        batch_size: Documents at once.
        chunk: Tokens a call: memory is that of the state and of one chunk.
        tokenizer: A tokenizer.json; by default the run folder's.
        device: Where to compute; by default a GPU if there is one.
        out: The JSON file for the results, with a PNG beside it; by default results/position-stepN.json in the run
            folder.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("the package matplotlib is not installed: pip install 'seqarch[eval]'")
    from seqarch.evaluation.context_plots import keep, plot_position
    from seqarch.evaluation.position import loss_by_position
    from seqarch.evaluation.trained import load_trained

    trained = load_trained(ckpt, tokenizer, device)
    corpus = trained.corpus(data)

    def report(domain: str, curve: dict[str, Any]) -> None:
        first, last = curve["loss"][0], curve["loss"][-1]
        print(f"{domain} ({curve['documents']} documents): {first:.3f} nats at the start, {last:.3f} at the end")

    found = loss_by_position(
        trained, corpus, length, domains, documents, batch_size=batch_size, chunk=chunk, report=report
    )
    keep(found, trained.results_file("position", out), plot_position)
