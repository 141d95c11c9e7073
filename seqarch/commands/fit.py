"""``seqarch fit`` and ``seqarch validate``: Lightning's command line, with a run folder and short errors."""

from __future__ import annotations

import logging
import shutil
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

from jsonargparse import set_parsing_settings
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback

from seqarch.class_paths import allowed_imports, plugin_packages
from seqarch.commands.errors import condense, explain
from seqarch.commands.usage import UsageError
from seqarch.data import StepDataModule
from seqarch.mixer import TokenMixer
from seqarch.model.channel import ChannelMixer
from seqarch.training.callbacks import run_callbacks
from seqarch.training.callbacks.preemption import REQUEUE, PreemptedError
from seqarch.training.metrics import run_loggers
from seqarch.training.module import SequenceModule, TrainingDivergedError
from seqarch.training.optimizer import AdamWConfig
from seqarch.training.rebuild import check_same_architecture
from seqarch.training.runs import CHECKPOINTS, TOKENIZER, checkpoint_of
from seqarch.training.schedule import Schedule

_DESCRIPTION = {
    "fit": "Train a model. Every option can stand in the file given with --config, or be set here by its full name.",
    "validate": "Losses by domain of a checkpoint (--ckpt_path), with the configuration it was trained with.",
}


def run(name: str, arguments: list[str], cli: type[CLI] | None = None) -> None:
    """Parse the configuration, build everything, and train or validate (or what ``cli`` does instead)."""
    _restrict_imports()
    sys.argv = [sys.argv[0], name, *arguments]  # Lightning starts further processes with these
    _set_up_logging()
    try:
        (cli or CLI)(name)
    except TrainingDivergedError as error:
        raise UsageError(str(error)) from error
    except PreemptedError as error:
        log.warning("%s", error)
        sys.exit(REQUEUE)
    except ValueError as error:  # a constructor's, wrapped where its class is one of a union
        raise ValueError(condense(str(error)) or str(error)) from error


_LIGHTNING = ("callbacks", "loggers", "plugins", "profilers", "strategies")


def _restrict_imports() -> None:
    """Let a configuration name classes of this program, the plugins and Lightning; importing others may run anything.

    Loads the plugins, whose classes must be known before the parser resolves names.
    """
    lightning = [f"lightning.{part}.{name}" for part in ("pytorch", "fabric") for name in _LIGHTNING]
    allowed = ["seqarch", *plugin_packages(), *lightning, *allowed_imports()]
    set_parsing_settings(import_path_denylist=["*"], import_path_allowlist=allowed)


def _set_up_logging() -> None:
    """Our own notes on standard error, as they are; Lightning's without its advertisement."""
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(lambda r: "💡" not in r.getMessage())
    own = logging.getLogger("seqarch")
    own.setLevel(logging.INFO)
    if not own.handlers:
        own.addHandler(logging.StreamHandler())


_CLASSES = (TokenMixer, ChannelMixer, Schedule, AdamWConfig, SequenceModule, StepDataModule)
"""Where options come from, besides the parser's own."""


log = logging.getLogger(__name__)


class _Parser(LightningArgumentParser):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, allow_abbrev=False, **kwargs)  # a misspelt option is an error, not another's beginning

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Raise with one short message."""
        text = explain(message, self, _CLASSES)
        if "parsing config" in text or "Unexpected config" in text:
            files = [file for option, file in pairwise(sys.argv) if option in ("--config", "-c")]
            text = f"{', '.join(files)}: {text}"
        raise UsageError(text) from ex


class _SaveConfig(SaveConfigCallback):
    """Writes config.yaml into the run folder; a resumed run with other options adds config-2.yaml and so on."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Nothing: what is wrong with a configuration may show later."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write on one process. What a run without any checkpoint left is replaced."""
        if not trainer.is_global_zero:
            return
        folder = Path(trainer.default_root_dir)
        if not (folder / CHECKPOINTS / "last.ckpt").exists():
            for stale in (*folder.glob("config*.yaml"), folder / TOKENIZER):
                stale.unlink(missing_ok=True)
        config = self.config.clone()
        config.ckpt_path = None  # where a run goes on from is not part of what it is
        text = self.parser.dump(config)
        path = folder / "config.yaml"
        count = 1
        while path.exists() and path.read_text() != text:
            count += 1
            path = folder / f"config-{count}.yaml"
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        datamodule: Any = trainer.datamodule  # pyright: ignore[reportAttributeAccessIssue]
        if datamodule.tokenizer_path is not None and not (folder / TOKENIZER).exists():
            shutil.copyfile(datamodule.tokenizer_path, folder / TOKENIZER)


class CLI(LightningCLI):
    """The command line of ``fit`` and ``validate``, and, with what it is called there, of a command built on it."""

    prog: str | None = None
    description: str | None = None

    def __init__(self, command: str) -> None:
        self.command = command
        super().__init__(
            SequenceModule,
            StepDataModule,
            subclass_mode_data=True,
            parser_class=_Parser,
            save_config_callback=_SaveConfig,
            seed_everything_default=1,
            auto_configure_optimizers=False,
            parser_kwargs={
                "prog": "seqarch",
                command: {
                    "description": self.description or _DESCRIPTION[command],
                    "prog": self.prog or f"seqarch {command}",
                },
            },
            trainer_defaults={
                "max_epochs": -1,
                "check_val_every_n_epoch": None,
                "use_distributed_sampler": False,
                "gradient_clip_val": 1.0,
                "num_sanity_val_steps": 0,  # a wrong configuration shows at construction
                "enable_model_summary": False,  # its table says little of a model on the meta device
            },
        )

    def subcommands(self) -> dict[str, set[str]]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The one that was asked for: building the parser of another would double the start."""
        return {name: skip for name, skip in LightningCLI.subcommands().items() if name == self.command}

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """The run folder and how often to keep checkpoints."""
        parser.add_argument(
            "--run_dir",
            type=str | None,
            default=None,
            help="Folder of this run: configuration, metrics, checkpoints. By default runs/<name of the config file>.",
        )
        parser.add_argument(
            "--checkpoint_every_n_steps",
            type=int,
            default=1000,
            help="Steps between two checkpoints.",
        )
        parser.add_argument(
            "--keep_checkpoints", type=int, default=3, help="How many of them to keep besides the best and the last."
        )
        parser.add_argument(
            "--peak_flops",
            type=float | None,
            default=None,
            help="FLOP/s of one device, for train/mfu; by default from a table of GPUs.",
        )

    def _parse_ckpt_path(self) -> None:
        """Lightning lets the checkpoint's options override the command line here; they are compared instead."""

    def before_instantiate_classes(self) -> None:
        """Settle the run folder, and the checkpoints that are known by a name."""
        config = self.config[self.command]
        if config.run_dir is None:
            given = config.get("config") or []
            config.run_dir = str(Path("runs") / (Path(str(given[0])).stem if given else "default"))
        config.trainer.default_root_dir = config.run_dir
        if config.ckpt_path is None and self.command == "validate":
            raise ValueError("give --ckpt_path: a checkpoint file, last or best")
        if config.ckpt_path in ("last", "best"):
            file = Path(config.run_dir) / CHECKPOINTS / f"{config.ckpt_path}.ckpt"
            if not file.exists() and self.command == "validate":
                raise ValueError(f"ckpt_path: {file} does not exist: is --run_dir the folder of a run?")
            if not file.exists():  # a job that is queued again may have been stopped before its first checkpoint
                log.warning("%s does not exist: this run starts from the beginning", file)
            config.ckpt_path = str(file) if file.exists() else None
        elif config.ckpt_path is not None:
            config.ckpt_path = str(checkpoint_of(config.ckpt_path))

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """The trainer of the configuration, with the run folder's loggers and callbacks beside those it names."""
        config = self.config[self.command]
        run_dir = Path(config.run_dir)
        trainer = self.config_init[self.command].trainer
        if trainer.logger is None or trainer.logger is True:
            trainer.logger = run_loggers(run_dir)
        callbacks = trainer.callbacks or []
        trainer.callbacks = [
            *(callbacks if isinstance(callbacks, list) else [callbacks]),
            *run_callbacks(
                run_dir,
                every_n_steps=config.checkpoint_every_n_steps,
                keep=config.keep_checkpoints,
                progress_bar=trainer.enable_progress_bar is not False,
                peak_flops=config.peak_flops,
            ),
        ]
        return super().instantiate_trainer(**kwargs)

    def before_fit(self) -> None:
        """Refuse to mix two runs in one folder, and to resume with another architecture."""
        config = self.config[self.command]
        run_dir, ckpt_path = Path(config.run_dir), config.ckpt_path
        if run_dir.exists() and not run_dir.is_dir():
            raise ValueError(f"run_dir: {run_dir} is a file: name a folder")
        if ckpt_path is None and any((run_dir / CHECKPOINTS).glob("*.ckpt")):
            raise ValueError(
                f"{run_dir} already holds a run: continue it with --ckpt_path last, or name another with --run_dir"
            )
        self._check_checkpoint(ckpt_path, training=True)
        if self.trainer.is_global_zero:
            model = self.model.model
            mixers = ", ".join(dict.fromkeys(type(m).__name__ for m in model.mixers))
            size = sum(p.numel() for p in model.parameters())
            start = f", continuing {ckpt_path}" if ckpt_path else ""
            log.info(
                "%s, %d layers, %s parameters; run folder %s%s", mixers, model.n_layers, f"{size:,}", run_dir, start
            )

    def fit(self, **kwargs: Any) -> None:
        """Train; a run that is refused at its start leaves no folder behind."""
        run_dir = Path(self.config[self.command].run_dir)
        existed = run_dir.exists()
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"run_dir: {run_dir} cannot be made ({error.strerror}): name another folder") from error
        try:
            self.trainer.fit(**kwargs)
        except (ValueError, OSError):
            if not existed and self.trainer.global_step == 0:
                shutil.rmtree(run_dir, ignore_errors=True)
            raise

    def after_fit(self) -> None:
        """Say what can be done next."""
        run_dir = self.config[self.command].run_dir
        if self.trainer.is_global_zero and (Path(run_dir) / TOKENIZER).exists():
            log.info("Continue a text with it: seqarch generate --ckpt %s --prompt '…'", run_dir)

    def before_validate(self) -> None:
        """Refuse another architecture."""
        self._check_checkpoint(self.config[self.command].ckpt_path)

    def _check_checkpoint(self, ckpt_path: str | None, *, training: bool = False) -> None:
        if ckpt_path is not None:
            check_same_architecture(Path(str(ckpt_path)), self.model, training=training)
