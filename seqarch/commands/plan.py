"""``seqarch plan``: what a recipe needs on a cluster, before it is started."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.cli import LightningArgumentParser
from rich.console import Console

from seqarch.commands import fit
from seqarch.planning.activations import Precision
from seqarch.planning.hardware import Cluster
from seqarch.planning.plan import Planner, Recipe
from seqarch.planning.report import print_plan, to_plain
from seqarch.training.strategy import FSDP2Strategy


def run(name: str, arguments: list[str]) -> None:
    """Parse a recipe as ``fit`` does, and print its plan."""
    fit.run("fit", arguments, cli=_PlanCLI)


class _PlanCLI(fit.CLI):
    """``fit``'s command line with the cluster's options, which builds the model on the meta device and no trainer."""

    prog = "seqarch plan"
    description = "What a recipe needs on a cluster: memory of each GPU, time, traffic, disk. Takes fit's options, too."

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Those of ``Cluster``, and where the plan goes."""
        super().add_arguments_to_parser(parser)
        parser.add_class_arguments(Cluster, None)
        parser.add_argument("--json_file", type=str | None, default=None, help="Write the plan there, too.")

    def before_instantiate_classes(self) -> None:
        """Nothing: there is no run folder."""

    def instantiate_classes(self) -> None:
        """Build what the plan is made from."""
        self.config_init = self.parser.instantiate_classes(self.config)

    def _set_seed(self) -> None:
        """Nothing: there are no values."""

    def _run_subcommand(self, subcommand: str) -> None:
        init = self.config_init[subcommand]
        given = self.config[subcommand]
        cluster = Cluster(**{f.name: given[f.name] for f in dataclasses.fields(Cluster)})
        planner = Planner(recipe(init), cluster)
        plain = to_plain(planner)
        if given.json_file is not None:
            Path(given.json_file).write_text(json.dumps(plain, indent=1) + "\n")
        print_plan(planner, Console())


_DTYPES = {"bf16": torch.bfloat16, "16": torch.float16, "32": torch.float32, "64": torch.float64}


def recipe(init: Any) -> Recipe:
    """What ``fit``'s options, instantiated, say that a plan needs.

    Raises:
        ValueError: If they do not say how long training is, or use a strategy or precision that cannot be planned.
    """
    module, data, trainer = init.model, init.data, init.trainer
    length = module.max_tokens
    if length is None:
        if trainer.max_steps is None or trainer.max_steps < 1:
            raise ValueError("set model.max_tokens or trainer.max_steps: a plan needs the length of training")
        length = trainer.max_steps * data.batch_size * data.seq_len
    strategy = trainer.strategy
    sharded = isinstance(strategy, FSDP2Strategy)
    if not sharded and strategy not in ("auto", "ddp"):
        raise ValueError(f"trainer.strategy {strategy} cannot be planned: use seqarch.training.strategy.FSDP2Strategy")
    name = str(trainer.precision or "32-true")
    number, _, kind = name.partition("-")
    if number not in _DTYPES or kind not in ("", "true", "mixed"):
        raise ValueError(f"trainer.precision {name} cannot be planned: use bf16-mixed or 32-true")
    dtype, mixed = _DTYPES[number], kind == "mixed"
    options: dict[str, Any] = {}
    precision = Precision(autocast=torch.bfloat16) if mixed else Precision(dtype)  # float16 is of the same size
    if isinstance(strategy, FSDP2Strategy):
        if strategy.param_dtype == "bfloat16" or (strategy.param_dtype == "auto" and name == "bf16-mixed"):
            precision = Precision(torch.bfloat16)
        options = {
            "replicas": None if strategy.replicate == "auto" else strategy.replicate,
            "reshard": strategy.reshard_after_forward,
            "prefetch": strategy.prefetch,
        }
    return Recipe(
        model=module.model,
        seq_len=data.seq_len,
        batch_size=data.batch_size,
        micro_batch_size=data.micro_batch_size,
        max_tokens=length,
        precision=precision,
        master=torch.float32 if mixed else dtype,
        sharded=sharded,
        keep_checkpoints=init.keep_checkpoints,
        **options,
    )
