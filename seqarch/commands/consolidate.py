"""``seqarch consolidate``: a checkpoint as one safetensors file, and back."""

from __future__ import annotations

from pathlib import Path

from seqarch.commands.usage import Parser


def run(name: str, arguments: list[str]) -> None:
    """Parse the arguments and convert."""
    parser = Parser(prog=f"seqarch {name}", description="Write a checkpoint as one safetensors file, or as shards.")
    parser.add_argument("ckpt", type=str, help="Checkpoint, a file or a folder; or run folder (its last checkpoint).")
    parser.add_argument(
        "out",
        type=str,
        help="A file whose name ends in .safetensors; any other name becomes a folder of shards, from which any number "
        "of processes goes on with --ckpt_path.",
    )
    parser.add_function_arguments(consolidate, skip={"ckpt", "out"})
    consolidate(**vars(parser.parse_args(arguments)))


def consolidate(ckpt: str, out: str, with_optimizer: bool = False) -> None:
    """Write a checkpoint in the other form.

    Args:
        ckpt: Checkpoint, a file or a folder; or run folder (its last checkpoint).
        out: A file whose name ends in .safetensors; any other name becomes a folder of shards.
        with_optimizer: Keep the optimiser's state in a safetensors file, so that training can go on from it; without
            it the file is a third as large.
    """
    from seqarch.discovery import plugins
    from seqarch.training.checkpoint import check_resumable, read_checkpoint
    from seqarch.training.consolidated import is_consolidated, write_consolidated
    from seqarch.training.rebuild import to_shards
    from seqarch.training.runs import checkpoint_of, tokenizer_of

    source, target = checkpoint_of(ckpt), Path(out)
    if target.exists():
        raise ValueError(f"{out} exists already: remove it, or name another")
    if is_consolidated(target):
        checkpoint = read_checkpoint(source)
        if with_optimizer:
            check_resumable(source, checkpoint)
        write_consolidated(target, checkpoint, with_optimizer=with_optimizer)
    else:
        plugins()
        to_shards(source, target)
    size = sum(f.stat().st_size for f in ([target] if target.is_file() else target.iterdir()))
    print(f"{target}: {size / 1e6:,.1f} MB, step {read_checkpoint(target, options_only=True)['global_step']}")
    if (tokenizer := tokenizer_of(source)).is_file():
        print(f"Its tokenizer: {tokenizer} (--tokenizer of generate, eval, needle and position)")
