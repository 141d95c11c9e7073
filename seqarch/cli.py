"""The command ``seqarch``: a list of commands, each imported only when it runs, so that help comes at once."""

from __future__ import annotations

import os
import sys
from difflib import get_close_matches
from importlib import import_module

COMMANDS = {
    "fit": ("seqarch.commands.fit:run", "train a model: seqarch fit --config recipes/quickstart.yaml"),
    "validate": (
        "seqarch.commands.fit:run",
        "losses by domain of a checkpoint: seqarch validate --config … --ckpt_path …",
    ),
    "plan": ("seqarch.commands.plan:run", "memory, time and disk of a recipe on a cluster: seqarch plan --config …"),
    "consolidate": (
        "seqarch.commands.consolidate:run",
        "one safetensors file of a checkpoint: seqarch consolidate RUN model.safetensors",
    ),
    "export": (
        "seqarch.commands.export:run",
        "a model for transformers or fla: seqarch export RUN FOLDER --format hf",
    ),
    "import": (
        "seqarch.commands.import_model:run",
        "a checkpoint from such a folder: seqarch import FOLDER model.safetensors",
    ),
    "generate": ("seqarch.commands.generate:run", "continue a text: seqarch generate --ckpt … --prompt …"),
    "eval": ("seqarch.commands.eval:run", "downstream tasks of a checkpoint: seqarch eval RUN --tasks …"),
    "needle": ("seqarch.commands.needle:run", "find a number in a long text: seqarch needle RUN --lengths 1024 4096"),
    "position": ("seqarch.commands.position:run", "loss by position in the document: seqarch position RUN"),
    "probe": ("seqarch.commands.probe:run", "the paper's three principles, measured: seqarch probe MIXER|RUN…"),
    "mixers": ("seqarch.commands.mixers:run", "list the token mixers that are installed, and their backends"),
    "doctor": ("seqarch.commands.doctor:run", "check every backend of every mixer on this machine's device"),
    "check": ("seqarch.commands.check:run", "does a mixer keep its contract: seqarch check NAME"),
    "new-plugin": ("seqarch.commands.new_plugin:run", "a package for a mixer of your own: seqarch new-plugin my-mixer"),
    "bench": ("seqarch.commands.bench:run", "speed and memory against length: seqarch bench Attention Mamba2"),
    "sweep": ("seqarch.commands.sweep:run", "many runs from one file: architectures × seeds × settings"),
    "compare": ("seqarch.commands.compare:run", "which architecture loses base capabilities: seqarch compare RUN…"),
    "data": ("seqarch.commands.data:run", "prepare token shards, train a tokenizer, inspect a corpus"),
}


def _fail(message: str) -> None:
    print(f"seqarch: error: {message}", file=sys.stderr)
    sys.exit(2)


def main(argv: list[str] | None = None) -> None:
    """Run one command. ``argv`` defaults to the arguments of the process.

    Raises:
        SystemExit: With status 2 for bad input, after one message on standard error.
    """
    arguments = sys.argv[1:] if argv is None else argv
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_help())
        return
    name, *rest = arguments
    if name == "--version":
        from seqarch import __version__

        print(f"seqarch {__version__}")
        return
    if name not in COMMANDS:
        near = get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean '{near[0]}'?" if near else "`seqarch --help` lists them"
        _fail(f"there is no command '{name}': {hint}")
    module, function = COMMANDS[name][0].split(":")
    from seqarch.commands.usage import UsageError

    try:
        getattr(import_module(module), function)(name, rest)
        sys.stdout.flush()
    except UsageError as error:
        _fail(str(error))
    except BrokenPipeError:  # whoever read our output has seen enough; nothing more can be printed, not even at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except (ValueError, OSError) as error:  # what users can mend; SEQARCH_TRACEBACK=1 shows where it arose
        if os.environ.get("SEQARCH_TRACEBACK"):
            raise
        _fail(str(error))
    except KeyboardInterrupt:
        sys.exit(130)


def _help() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {line}" for name, (_, line) in COMMANDS.items()]
    return "\n".join(
        [
            "Pre-train language models with pluggable token mixers, and measure their base capabilities.",
            "",
            "usage: seqarch COMMAND …",
            "",
            *lines,
            "",
            "`seqarch COMMAND --help` tells more.",
        ]
    )
