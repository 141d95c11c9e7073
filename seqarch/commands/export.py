"""``seqarch export``: a checkpoint as a model for transformers or flash-linear-attention."""

from __future__ import annotations

from seqarch.commands.usage import Parser


def run(name: str, arguments: list[str]) -> None:
    """Parse the arguments and write the folder."""
    parser = Parser(prog=f"seqarch {name}", description="Write a checkpoint as a folder that other programs load.")
    parser.add_argument("ckpt", type=str, help="Checkpoint, a file or a folder; or run folder (its last checkpoint).")
    parser.add_argument("out", type=str, help="The folder to write.")
    parser.add_function_arguments(export, skip={"ckpt", "out"})
    export(**vars(parser.parse_args(arguments)))


def export(ckpt: str, out: str, format: str = "hf", max_shard_size: str = "5GB", tokenizer: str | None = None) -> None:
    """Write a checkpoint as a folder that other programs load.

    Args:
        ckpt: Checkpoint, a file or a folder; or run folder (its last checkpoint).
        out: The folder to write.
        format: hf, for transformers with seqarch installed, which takes every model; or one that loads without it
            where the architecture is the same: llama, mamba, mamba2, fla-delta_net, fla-gated_deltanet, and what other
            plugins add.
        max_shard_size: Weights larger than this become several files.
        tokenizer: A tokenizer.json; by default the run folder's.
    """
    from seqarch.export.write import export_model

    target = export_model(ckpt, out, format=format, max_shard_size=max_shard_size, tokenizer=tokenizer)
    for path in sorted(target.iterdir()):
        print(f"{path}: {path.stat().st_size / 1e6:,.1f} MB")
