"""Tokens/s and peak memory of one training step: Transformer++ here, transformers' Llama and litgpt's GPT beside it.

One 9M-parameter architecture (d 256, 6 layers, vocabulary 8192), 8 × 512 tokens, float32, forward + backward + AdamW.
The variants are interleaved in one process, after one warm-up step each. A round in which any of them took over 1.25
times its fastest was disturbed by something else and is left out of the medians; how many were kept is printed. Peak
memory is the resident set's high-water mark of a process of its own, above what it held before the first step.

    pip install transformers litgpt
    python benchmarks/train_step.py [--compile] [--repeats 7]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

D, L, V, H, FF, B, T = 256, 6, 8192, 4, 704, 8, 512


def seqarch(compiled: bool) -> tuple[torch.nn.Module, Callable]:
    from seqarch.model import SequenceModel, SwiGLU
    from seqarch_attention import Attention

    with torch.device("meta"):
        model = SequenceModel(V, D, L, partial(Attention, n_heads=H), partial(SwiGLU, d_ff=FF), tie_embeddings=False)
    model.materialise("cpu", 0)
    if compiled:
        model.compile_blocks()
    return model, lambda x, y: model(x, labels=y).objective


def llama(compiled: bool) -> tuple[torch.nn.Module, Callable]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=V, hidden_size=D, intermediate_size=FF, num_hidden_layers=L, num_attention_heads=H,
        max_position_embeddings=T, tie_word_embeddings=False, use_cache=False, attn_implementation="sdpa",
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    if compiled:
        model.compile()
    return model, lambda x, y: model(input_ids=x, labels=y, shift_labels=y).loss


def litgpt(compiled: bool) -> tuple[torch.nn.Module, Callable]:
    from litgpt import GPT, Config

    config = Config(
        name="bench", block_size=T, vocab_size=V, padded_vocab_size=V, n_layer=L, n_head=H, n_embd=D, bias=False,
        rotary_percentage=1.0, parallel_residual=False, norm_class_name="RMSNorm", mlp_class_name="LLaMAMLP",
        intermediate_size=FF,
    )  # fmt: skip
    model = GPT(config)
    for (
        module
    ) in model.modules():  # litgpt's own initial values are for fine-tuning; normal ones, so that losses compare
        if isinstance(module, (torch.nn.Linear, torch.nn.Embedding)):
            torch.nn.init.normal_(module.weight, std=0.02)
    if compiled:
        model.compile()
    return model, lambda x, y: F.cross_entropy(model(x).flatten(0, 1), y.flatten())


VARIANTS = {"seqarch": seqarch, "llama": llama, "litgpt": litgpt}


def build(name: str, compiled: bool) -> Callable[[], float]:
    """A training step that returns its loss."""
    torch.manual_seed(0)
    model, loss_fn = VARIANTS[name](compiled)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    tokens = torch.randint(0, V, (B, T + 1), generator=torch.Generator().manual_seed(0))
    x, y = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def step() -> float:
        loss = loss_fn(x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    step.parameters = sum(p.numel() for p in model.parameters())  # pyright: ignore[reportFunctionMemberAccess]
    return step


def status(field: str) -> int:
    """A field of /proc/self/status in bytes."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(field + ":"))


def memory(name: str, compiled: bool) -> None:
    step = build(name, compiled)
    before = status("VmRSS")
    if compiled:  # the compiler's own memory is not the step's
        step()
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
    for _ in range(3):
        step()
    print(json.dumps(status("VmHWM") - before))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compile", action="store_true", help="compile the models")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS))
    parser.add_argument("--memory", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.memory:
        memory(args.memory, args.compile)
        return
    steps = {name: build(name, args.compile) for name in args.variants}
    times: dict[str, list[float]] = {name: [] for name in steps}
    for name, step in steps.items():
        print(f"{name}: {step.parameters:,} parameters, first loss {step():.4f}")  # pyright: ignore
    for _ in range(args.repeats):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            times[name].append(time.perf_counter() - start)
    peers = [n for n in steps if n != "seqarch"]
    best = {n: min(t) for n, t in times.items()}
    quiet = [i for i in range(args.repeats) if all(times[n][i] <= 1.25 * best[n] for n in steps)]
    print(f"{len(quiet)} of {args.repeats} rounds kept")
    times = {n: [t[i] for i in quiet] for n, t in times.items()} if quiet else times
    print(f"{'compiled' if args.compile else 'eager'}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    for name, t in times.items():
        used = subprocess.run(
            [sys.executable, __file__, "--memory", name, *(["--compile"] if args.compile else [])],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        median = statistics.median(t)
        spread = f"{B * T / max(t):.0f} … {B * T / min(t):.0f}"
        peak = int(used.stdout.split()[-1]) / 1e9
        print(f"{name:8} {B * T / median:7.0f} tokens/s ({spread})  peak memory above resident {peak:.2f} GB")
    if "seqarch" in steps and peers:
        fastest = min(peers, key=lambda n: statistics.median(times[n]))
        ratio = statistics.median(times[fastest]) / statistics.median(times["seqarch"])
        print(
            f"seqarch / {fastest}: {ratio:.3f}× the speed; {best[fastest] / best['seqarch']:.3f}× at each one's fastest"
        )


if __name__ == "__main__":
    main()
