"""Top-1 Chunk (approx, exact) and Top-1 Element against full attention: forward + backward by length, and peak memory.

float32, 4 heads of 64, chunks of 128, B = 1, random inputs; the routing gradient is included. Full attention is
`torch.nn.functional.scaled_dot_product_attention` (causal). The variants are interleaved in one process and the medians
compared, after one warm-up each. Peak memory is the resident set's high-water mark of a process of its own, above what
it held before the first run (inputs are part of that).

    python benchmarks/top1.py [--lengths 2048 8192 32768 102400] [--repeats 5] [--variants sdpa approx] [--threads 2]
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from seqarch_top1.chunk import top1_chunk
from seqarch_top1.element import top1_element

HEADS, D, C = 4, 64, 128
SCALE = D**-0.5


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=SCALE).transpose(1, 2)


VARIANTS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "sdpa": sdpa,
    "approx": partial(top1_chunk, scale=SCALE, chunk_size=C, exact=False),
    "exact": partial(top1_chunk, scale=SCALE, chunk_size=C, exact=True),
    "element": partial(top1_element, scale=SCALE),
}


def build(name: str, T: int, clustered: bool) -> Callable[[], float]:
    """One forward and backward pass that returns its seconds."""
    g = torch.Generator().manual_seed(0)
    q, k, v, dy = (torch.randn(1, T, HEADS, D, generator=g) for _ in range(4))
    if clustered:  # queries and the keys of one chunk share a direction: nearly all choose that chunk
        direction = torch.randn(HEADS, D, generator=g)
        q += direction
        k[:, C : 2 * C] += direction
    leaves = [t.requires_grad_() for t in (q, k, v)]

    def run() -> float:
        start = time.perf_counter()
        VARIANTS[name](*leaves).backward(dy)
        seconds = time.perf_counter() - start
        for t in leaves:
            t.grad = None
        return seconds

    return run


def status(field: str) -> int:
    """A field of /proc/self/status in bytes."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(field + ":"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 8192, 32768, 102400])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--clustered", action="store_true", help="nearly all queries choose one chunk")
    parser.add_argument("--memory", action="store_true", help="measure peak memory too")
    parser.add_argument("--peak", nargs=2, metavar=("VARIANT", "LENGTH"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.peak:
        build(args.peak[0], 2 * C, args.clustered)()  # libraries and threads are not the variant's
        run, before = build(args.peak[0], int(args.peak[1]), args.clustered), status("VmRSS")
        run()
        print(status("VmHWM") - before)
        return
    print(f"{args.threads} threads, torch {torch.__version__}; seconds: median (fastest … slowest) of {args.repeats}")
    for T in args.lengths:
        runs = {name: build(name, T, args.clustered) for name in args.variants}
        times: dict[str, list[float]] = {name: [] for name in runs}
        for run in runs.values():
            run()
        for _ in range(args.repeats):
            for name, run in runs.items():
                times[name].append(run())
        for name, t in times.items():
            median = statistics.median(t)
            line = f"T {T:6}  {name:8} {median:8.3f} ({min(t):.3f} … {max(t):.3f})"
            if "sdpa" in times:
                line += f"  {statistics.median(times['sdpa']) / median:6.2f}× the speed of sdpa"
            if args.memory:
                command = [sys.executable, __file__, "--peak", name, str(T), "--threads", str(args.threads)]
                command += ["--clustered"] if args.clustered else []
                used = subprocess.run(command, capture_output=True, text=True, check=True)
                line += f"  peak {int(used.stdout.split()[-1]) / 2**20:7.0f} MiB above the inputs"
            print(line, flush=True)


if __name__ == "__main__":
    main()
