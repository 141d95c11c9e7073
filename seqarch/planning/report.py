"""A plan as tables, and as plain data."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from seqarch.planning.plan import Planner, Setting

_PARTS = {
    "weights": "parameters, kept",
    "gradients": "gradients, kept",
    "optimizer": "AdamW's moments",
    "buffers": "gathered parameters, gradients on their way",
    "activations": "activations, held for the backward pass",
    "working": "working memory of a block or the head",
}


def to_plain(planner: Planner) -> dict[str, Any]:
    """The plan as JSON takes it; bytes, seconds and operations without a prefix."""
    recipe, setting = planner.recipe, planner.as_written()
    tokens_per_s = recipe.tokens_per_step / setting.step_s
    seconds = recipe.max_tokens / tokens_per_s
    return {
        "cluster": asdict(planner.cluster),
        "parameters": sum(p.numel() for p in recipe.model.parameters()),
        "tokens": recipe.max_tokens,
        "tokens_per_step": recipe.tokens_per_step,
        "steps": -(-recipe.max_tokens // recipe.tokens_per_step),
        "flops_per_token": planner.flops_per_step / recipe.tokens_per_step,
        "tokens_per_s": tokens_per_s,
        "days": seconds / 86400,
        "gpu_hours": seconds / 3600 * planner.cluster.gpus,
        "bound": setting.bound,
        "usable_bytes": planner.cluster.usable,
        "checkpoint_bytes": planner.checkpoint_bytes,
        "disk_bytes": planner.disk_bytes,
        "data_bytes": planner.data_bytes,
        "decoding_state_bytes": planner.state_bytes,
        "activation_bytes": {
            name: planner.activations(setting.micro_batch_size, checkpointing).total
            for name, checkpointing in (("kept", False), ("checkpointed", True))
        },
        "setting": _setting(setting),
        "settings_that_fit": [_setting(s) for s in planner.that_fit()],
    }


def _setting(s: Setting) -> dict[str, Any]:
    return {**asdict(s), "memory": {**asdict(s.memory), "total": s.memory.total}, "step_s": s.step_s, "bound": s.bound}


def print_plan(planner: Planner, console: Console) -> None:
    """Two tables, and what they mean."""
    plan, recipe, cluster, setting = to_plain(planner), planner.recipe, planner.cluster, planner.as_written()
    mixers = ", ".join(dict.fromkeys(type(m).__name__ for m in recipe.model.mixers))

    def say(text: str) -> None:
        console.print(text, highlight=False, soft_wrap=True)

    say(
        f"{mixers}, {recipe.model.n_layers} layers, {plan['parameters']:,} parameters; {recipe.seq_len:,} tokens × "
        f"{recipe.batch_size} sequences a step, {plan['steps']:,} steps, {plan['tokens']:.3g} tokens"
    )
    nodes = f"{cluster.nodes} node{'s' if cluster.nodes > 1 else ''}"
    say(f"{cluster.gpus} × {cluster.gpu} on {nodes}, {cluster.network_gbps:g} Gbit/s a GPU between nodes")
    share = recipe.batch_size // cluster.gpus
    if setting.micro_batch_size != recipe.micro_batch_size:
        say(
            f"data.micro_batch_size {recipe.micro_batch_size} does not divide the {share} sequences of a GPU in a "
            f"step: set it to {setting.micro_batch_size}, which this plan is for"
        )
    table = Table(title=f"Memory of each GPU, {_words(setting)}", title_justify="left")
    table.add_column("for")
    table.add_column("GB", justify="right")
    for name, words in _PARTS.items():
        table.add_row(words, f"{getattr(setting.memory, name) / 1e9:.2f}")
    table.add_section()
    table.add_row("all together", f"{setting.memory.total / 1e9:.2f}")
    table.add_row(f"may be used ({cluster.reserve:.0%} left free)", f"{cluster.usable / 1e9:.2f}")
    console.print(table)
    both = [planner.activations(setting.micro_batch_size, checkpointing).total / 1e9 for checkpointing in (False, True)]
    say(f"Activations at the peak: {both[0]:.3g} GB without, {both[1]:.3g} GB with activation checkpointing")
    sent = setting.traffic
    say(
        f"Work: {plan['flops_per_token']:.3g} FLOPs a token; a step computes for {setting.compute_s:.3g} s at "
        f"{cluster.mfu:.0%} of the peak, and sends for {setting.communication_s:.3g} s beside it: each GPU gathers "
        f"{sent.gather / 1e9:.3g} GB, reduces {sent.scatter / 1e9:.3g} GB, and between copies "
        f"{sent.replicate / 1e9:.3g} GB"
    )
    say(f"Bound by {setting.bound}")
    say(
        f"Time: {plan['tokens_per_s']:,.0f} tokens/s, {plan['days']:.3g} days, {plan['gpu_hours']:,.0f} GPU-hours, "
        "without validation, checkpoints and restarts"
    )
    say(
        f"Disk: {plan['checkpoint_bytes'] / 1e9:.3g} GB a checkpoint, {plan['disk_bytes'] / 1e9:.3g} GB for all that "
        f"are kept; {plan['data_bytes'] / 1e9:.3g} GB of token shards"
    )
    say(f"Decoding: a state of {plan['decoding_state_bytes'] / 1e6:.3g} MB a sequence of {recipe.seq_len:,} tokens")
    say("Activations are counted on the torch backend; fused kernels and torch.compile hold less, as a rule.")
    fitting = planner.that_fit()
    if not fitting:
        say(
            "Nothing fits: take more GPUs (--gpus), larger ones (--gpu), or a shorter data.seq_len; strategy "
            "FSDP2Strategy with replicate 1 needs the least"
        )
        return
    table = Table(title="The largest micro batches that fit, the fastest setting first", title_justify="left")
    for column in ("data.micro_batch_size", "model.activation_checkpointing", "replicate", "GB", "sends for, s"):
        table.add_column(column, justify="right")
    for s in fitting:
        row = (s.micro_batch_size, str(s.checkpointing).lower(), s.replicas, f"{s.memory.total / 1e9:.1f}")
        table.add_row(*map(str, row), f"{s.communication_s:.3g}")
    console.print(table)


def _words(s: Setting) -> str:
    checkpointing = "with" if s.checkpointing else "without"
    copies = f", {s.replicas} copies of the model" if s.replicas > 1 else ""
    return f"micro batches of {s.micro_batch_size}, {checkpointing} activation checkpointing{copies}"
