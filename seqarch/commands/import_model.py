"""``seqarch import``: a checkpoint of an exported model."""

from __future__ import annotations

from pathlib import Path

from seqarch.commands.usage import Parser


def run(name: str, arguments: list[str]) -> None:
    """Parse the arguments and convert."""
    parser = Parser(
        prog=f"seqarch {name}", description="Write a model's folder as a checkpoint that holds its weights."
    )
    parser.add_argument("folder", type=str, help="What `seqarch export` wrote, or another model of such a type.")
    parser.add_argument("out", type=str, help="The checkpoint; its name ends in .safetensors.")
    import_(**vars(parser.parse_args(arguments)))


def import_(folder: str, out: str) -> None:
    """Write a model's folder as a checkpoint that holds its weights.

    Args:
        folder: What ``seqarch export`` wrote, or another model of such a type.
        out: The checkpoint; its name ends in .safetensors.
    """
    from seqarch.export.read import import_model

    target = import_model(folder, out)
    print(f"{target}: {target.stat().st_size / 1e6:,.1f} MB")
    if (tokenizer := Path(folder) / "tokenizer.json").is_file():
        print(f"Its tokenizer: {tokenizer} (--tokenizer of generate, eval, needle and position)")
