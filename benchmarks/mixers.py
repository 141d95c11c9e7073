"""Linear-time mixers and their cores against the peers' pure-torch code: forward + backward on a CPU, float32.

One layer of d_model 256, 4 × 512 and 1 × 4096 tokens. Ours and the peer's are interleaved in one process after one
warm-up each. A round in which either took over 1.25 times its fastest was disturbed and is left out of the medians.
Peak memory is the resident set's high-water mark of a process of its own, above what it held before the first run.

    pip install transformers flash-linear-attention triton
    python benchmarks/mixers.py [--rows mamba2 deltanet_core] [--shapes 4x512 1x4096] [--repeats 7] [--memory]

Mamba's `ssd_minimal` and `selective_scan_ref` stand in modules that need its CUDA package; `--mamba FOLDER` reads the
functions from a checkout of state-spaces/mamba. Rows without their peer are left out, and said to be.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FunctionType, ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

D, HEADS, HEAD = 256, 4, 64
Pass = Callable[..., Tensor]
Pair = tuple[Pass, Pass, Mapping[str, Tensor]]


def random(*shape: int) -> Tensor:
    return torch.randn(shape)


def decay(*shape: int) -> Tensor:
    return -F.softplus(torch.randn(shape) - 3)


def unit(*shape: int) -> Tensor:
    return F.normalize(torch.randn(shape), dim=-1)


def layers(ours: nn.Module, peer: nn.Module, B: int, T: int, call: Callable[[nn.Module, Tensor], Tensor]) -> Pair:
    """Two layers as functions of x and of their own parameters."""
    return lambda x: ours(x)[0], lambda x: call(peer, x), {"x": random(B, T, D)}


def heads_first(function: Callable[..., tuple[Tensor, object]]) -> Pass:
    return lambda *a: function(*(t.transpose(1, 2).contiguous() for t in a))[0].transpose(1, 2)


def from_source(file: Path, *names: str) -> list[Callable]:
    """Functions of a module that cannot be imported here."""
    from einops import rearrange, repeat

    tree = ast.parse(file.read_text())
    tree.body = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in names]
    scope = {"torch": torch, "F": F, "rearrange": rearrange, "repeat": repeat}
    exec(compile(tree, str(file), "exec"), scope)
    return [scope[name] for name in names]


def torch_only(module: ModuleType) -> None:
    """Make a model's module of transformers take its own torch code even where fla is installed, which needs a GPU."""
    for name, function in list(vars(module).items()):
        if isinstance(function, FunctionType) and function.__globals__["__name__"].endswith("hub_kernels"):
            setattr(module, name, inspect.unwrap(function))


def mamba2(B: int, T: int, mamba: Path | None) -> Pair:
    from transformers import Mamba2Config
    from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

    from seqarch_mamba import Mamba2

    config = Mamba2Config(
        hidden_size=D, expand=2, num_heads=2 * D // HEAD, head_dim=HEAD, state_size=128, n_groups=1, num_hidden_layers=1
    )
    return layers(Mamba2(D), Mamba2Mixer(config, layer_idx=0), B, T, lambda m, x: m(x))


def ssd_core(B: int, T: int, mamba: Path | None) -> Pair:
    from seqarch.ops.scalar_decay import scalar_decay_attention

    if mamba is None:
        raise ImportError("--mamba FOLDER is not given")
    _, ssd = from_source(mamba / "mamba_ssm/modules/ssd_minimal.py", "segsum", "ssd_minimal_discrete")
    H, N = 2 * D // HEAD, 128
    inputs = {"x": random(B, T, H, HEAD), "a": decay(B, T, H), "b": random(B, T, 1, N), "c": random(B, T, 1, N)}
    return (
        lambda x, a, b, c: scalar_decay_attention(c, b, x, a)[0],
        lambda x, a, b, c: ssd(x, a, b.expand(-1, -1, H, -1), c.expand(-1, -1, H, -1), 64)[0],
        inputs,
    )


def simple_gla(B: int, T: int, mamba: Path | None) -> Pair:
    from fla.ops.simple_gla.naive import naive_chunk_simple_gla

    from seqarch.ops.scalar_decay import scalar_decay_attention

    inputs = {name: random(B, T, HEADS, HEAD) for name in "qkv"} | {"g": decay(B, T, HEADS)}
    return (
        lambda q, k, v, g: scalar_decay_attention(q, k, v, g, scale=HEAD**-0.5)[0],
        lambda q, k, v, g: naive_chunk_simple_gla(q, k, v, g)[0],
        inputs,
    )


def gated_deltanet(B: int, T: int, mamba: Path | None) -> Pair:
    from transformers import Qwen3NextConfig
    from transformers.models.qwen3_next import modeling_qwen3_next

    from seqarch_deltanet import GatedDeltaNet

    torch_only(modeling_qwen3_next)

    config = Qwen3NextConfig(
        hidden_size=D, num_hidden_layers=1, linear_num_value_heads=HEADS, linear_num_key_heads=HEADS,
        linear_key_head_dim=HEAD, linear_value_head_dim=2 * HEAD, layer_types=["linear_attention"],
    )  # fmt: skip
    ours = GatedDeltaNet(D, n_heads=HEADS, head_dim=HEAD)
    return layers(ours, modeling_qwen3_next.Qwen3NextGatedDeltaNet(config, 0), B, T, lambda m, x: m(x))


def deltanet_core(B: int, T: int, mamba: Path | None) -> Pair:
    from fla.ops.delta_rule.naive import delta_rule_chunkwise

    from seqarch.ops.delta_rule import delta_rule

    inputs = {"q": random(B, T, HEADS, HEAD), "k": unit(B, T, HEADS, HEAD), "v": random(B, T, HEADS, HEAD)}
    inputs["beta"] = torch.rand(B, T, HEADS)
    return lambda q, k, v, beta: delta_rule(q, k, v, beta)[0], heads_first(delta_rule_chunkwise), inputs


def based(B: int, T: int, mamba: Path | None) -> Pair:
    from fla.ops.based.naive import naive_chunk_based

    from seqarch.ops.taylor_attention import taylor_attention

    inputs = {"q": random(B, T, HEADS, 16), "k": random(B, T, HEADS, 16), "v": random(B, T, HEADS, HEAD)}
    return (
        lambda q, k, v: taylor_attention(q, k, v)[0],
        heads_first(lambda q, k, v: (naive_chunk_based(q, k, v), None)),
        inputs,
    )


def rwkv7_core(B: int, T: int, mamba: Path | None) -> Pair:
    from fla.ops.generalized_delta_rule.dplr.naive import dplr_chunkwise

    from seqarch.ops.diagonal_low_rank import diagonal_low_rank

    inputs = {name: random(B, T, HEADS, HEAD) for name in "qkv"}
    a = unit(B, T, HEADS, HEAD)
    inputs |= {"a": -a, "b": a * torch.rand(a.shape), "g": -0.6 * torch.rand(a.shape)}
    return (
        lambda q, k, v, a, b, g: diagonal_low_rank(q * HEAD**-0.5, k, v, a, b, g)[0],
        heads_first(dplr_chunkwise),
        inputs,
    )


def rwkv6_core(B: int, T: int, mamba: Path | None) -> Pair:
    from fla.ops.rwkv6.recurrent_naive import naive_recurrent_rwkv6

    from seqarch.ops.vector_decay import vector_decay

    K = HEAD // 2
    inputs = {"q": random(B, T, HEADS, K), "k": random(B, T, HEADS, K), "v": random(B, T, HEADS, HEAD)}
    inputs |= {"g": decay(B, T, HEADS, K), "u": random(HEADS, K)}

    def peer(q: Tensor, k: Tensor, v: Tensor, g: Tensor, u: Tensor) -> Tensor:
        q, k, v, g = (t.transpose(1, 2) for t in (q, k, v, g))
        return naive_recurrent_rwkv6(q, k, v, g, u, scale=1.0)[0].transpose(1, 2)

    return lambda q, k, v, g, u: vector_decay(q, k, v, g, bonus=u)[0], peer, inputs


def mamba1(B: int, T: int, mamba: Path | None) -> Pair:
    from transformers import MambaConfig
    from transformers.models.mamba.modeling_mamba import MambaMixer

    from seqarch_mamba import Mamba1

    config = MambaConfig(hidden_size=D, expand=2, state_size=16, num_hidden_layers=1, use_mambapy=False)
    return layers(Mamba1(D), MambaMixer(config, layer_idx=0), B, T, lambda m, x: m(x))


def mamba1_core(B: int, T: int, mamba: Path | None) -> Pair:
    from seqarch.ops.selective_scan import selective_scan

    if mamba is None:
        raise ImportError("--mamba FOLDER is not given")
    (scan,) = from_source(mamba / "mamba_ssm/ops/selective_scan_interface.py", "selective_scan_ref")
    inputs = {"x": random(B, T, 2 * D), "delta": F.softplus(random(B, T, 2 * D) - 3), "b": random(B, T, 16)}
    inputs |= {"c": random(B, T, 16), "A": -torch.arange(1.0, 17.0).repeat(2 * D, 1)}
    return (
        lambda x, delta, b, c, A: selective_scan(x, delta, A, b, c)[0],
        lambda x, delta, b, c, A: scan(x.mT, delta.mT, A, b.mT, c.mT).mT,
        inputs,
    )


def mamba1_to_mamba2(B: int, T: int, mamba: Path | None) -> Pair:
    from seqarch_mamba import Mamba1, Mamba2

    return layers(Mamba1(D), Mamba2(D), B, T, lambda m, x: m(x)[0])


ROWS: dict[str, tuple[Callable[..., Pair], str, float]] = {
    "mamba2": (mamba2, "transformers Mamba2Mixer", 3),
    "mamba2_core": (ssd_core, "mamba ssd_minimal", 1.2),
    "gated_deltanet": (gated_deltanet, "transformers Qwen3-Next layer", 3),
    "deltanet_core": (deltanet_core, "fla delta_rule_chunkwise", 1.5),
    "simple_gla": (simple_gla, "fla naive_chunk_simple_gla", 1.2),
    "based": (based, "fla naive_chunk_based", 1.5),
    "rwkv7_core": (rwkv7_core, "fla dplr_chunkwise", 5),
    "rwkv6_core": (rwkv6_core, "fla naive_recurrent_rwkv6", 10),
    "mamba1_to_mamba2": (mamba1_to_mamba2, "our Mamba-2 layer", 1 / 3),
    "mamba1_core": (mamba1_core, "mamba selective_scan_ref", 1),
    "mamba1": (mamba1, "transformers MambaMixer", 100),
}


def timed(function: Pass, inputs: Mapping[str, Tensor]) -> float:
    """Seconds of one forward and backward pass."""
    leaves = [t.detach().requires_grad_() for t in inputs.values()]
    start = time.perf_counter()
    function(*leaves).sum().backward()
    return time.perf_counter() - start


def peak(row: str, who: int, B: int, T: int, mamba: Path | None) -> None:
    """Print the high-water mark of one pass above the resident set before it."""

    def status(field: str) -> int:
        with open("/proc/self/status") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith(field + ":"))

    *functions, inputs = ROWS[row][0](B, T, mamba)
    *_, small = ROWS[row][0](1, 64, mamba)
    timed(functions[who], small)  # libraries and threads are not the pass's
    before = status("VmRSS")
    timed(functions[who], inputs)
    print(status("VmHWM") - before)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--shapes", nargs="+", default=["4x512", "1x4096"])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=60, help="fewer repeats for a row that would take longer")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--memory", action="store_true", help="measure peak memory too")
    parser.add_argument("--mamba", type=Path, help="a checkout of state-spaces/mamba")
    parser.add_argument("--peak", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    warnings.simplefilter("ignore")
    if args.peak:
        B, T = map(int, args.shapes[0].split("x"))
        peak(args.peak[0], int(args.peak[1]), B, T, args.mamba)
        return
    print(f"{args.threads} threads, torch {torch.__version__}; ms, forward + backward: median (fastest … slowest)")
    for row in args.rows:
        build, peer, goal = ROWS[row]
        for shape in args.shapes:
            B, T = map(int, shape.split("x"))
            try:
                *functions, inputs = build(B, T, args.mamba)
            except ImportError as error:
                print(f"{row:17} left out: {error}")
                continue
            first = [timed(f, inputs) for f in functions]
            rounds = max(1, min(args.repeats, int(args.seconds / sum(first))))
            times = [[timed(f, inputs) for f in functions] for _ in range(rounds)]
            best = [min(t) for t in zip(*times, strict=True)]
            quiet = [t for t in times if all(s <= 1.25 * b for s, b in zip(t, best, strict=True))] or times
            (ours, theirs) = columns = list(zip(*quiet, strict=True))
            shown = [f"{1e3 * statistics.median(t):8.1f} ({1e3 * min(t):.1f} … {1e3 * max(t):.1f})" for t in columns]
            ratio = statistics.median(theirs) / statistics.median(ours)
            print(
                f"{row:17} {shape:7} {shown[0]}  {peer}{shown[1]}  {ratio:.2f}× (asked {goal:.3g}×), "
                f"{len(quiet)} of {rounds} rounds",
                flush=True,
            )
            if args.memory:
                command = [sys.executable, __file__, "--shapes", shape, "--threads", str(args.threads)]
                command += ["--mamba", str(args.mamba)] if args.mamba else []
                used = [
                    int(
                        subprocess.run(
                            [*command, "--peak", row, who], capture_output=True, check=True, text=True
                        ).stdout
                    )
                    for who in "01"
                ]
                print(f"{'':25} peak {used[0] / 1e6:.0f} MB, peer {used[1] / 1e6:.0f} MB: {used[0] / used[1]:.2f}")


if __name__ == "__main__":
    main()
