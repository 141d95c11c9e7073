"""What Top-1 Chunk's Triton kernels must move and multiply, how long that takes at least, and full attention beside it.

A model, not a measurement. Bytes are what each kernel has to fetch from and write to the GPU's memory if every repeated
read of its own is served by the L2 cache; operations are those of its matrix products, masked halves and unfilled rows
of a block included. The floor of a kernel is the longer of bytes / bandwidth and operations / peak. The expected time
takes the shares of bandwidth and peak that are assumed below, and a launch's delay.

    python benchmarks/kernel_model.py [--kernels T] [--selection approx exact] [--heads 32] [--kv-heads 8]
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

LENGTHS = [2048, 8192, 32768, 102400, 262144, 1048576]
BLOCK = 64  # queries or keys a block, as in seqarch_top1.triton_chunk_attention
SPLIT = 512  # queries of one chunk whose sum to its keys one program makes

# Assumed of kernels that the compiler makes, not measured:
BANDWIDTH_SHARE, PEAK_SHARE, LAUNCH = 0.75, 0.5, 5e-6


@dataclass(frozen=True)
class GPU:
    """Bytes/s of memory, and dense bfloat16 operations/s: NVIDIA's data sheets (twice that with sparsity)."""

    name: str
    bandwidth: float
    peak: float


H100 = GPU("H100 SXM", 3.35e12, 989e12)
H200 = GPU("H200 SXM", 4.8e12, 989e12)

# Best published rates on H100, at lengths and head sizes that suit them: (forward, backward) operations/s.
FLASH = {
    "FlashAttention-2": (335e12, 335e12),  # arXiv 2307.08691, section 4: up to 335 TFLOPs/s on H100
    "FlashAttention-3": (740e12, 1.75 * 335e12),  # arXiv 2407.08608: up to 740 forward; backward 1.5 to 1.75 × FA-2
}


@dataclass(frozen=True)
class Work:
    """One kernel's bytes and operations."""

    kernel: str
    bytes: float
    flops: float = 0.0
    launches: int = 1

    def floor(self, gpu: GPU) -> float:
        """Seconds that it takes at least."""
        return max(self.bytes / gpu.bandwidth, self.flops / gpu.peak)

    def expected(self, gpu: GPU) -> float:
        """Seconds at the assumed shares."""
        moving, multiplying = self.bytes / gpu.bandwidth / BANDWIDTH_SHARE, self.flops / gpu.peak / PEAK_SHARE
        return max(moving, multiplying) + self.launches * LAUNCH


@dataclass(frozen=True)
class Shape:
    """One sequence of T tokens: H query heads, G key-value heads, head size D, chunks of C tokens, bfloat16."""

    T: int
    H: int = 32
    G: int = 8
    D: int = 128
    C: int = 128

    @property
    def q(self) -> float:
        """Bytes of the queries, and of anything of their shape."""
        return 2.0 * self.T * self.H * self.D

    @property
    def k(self) -> float:
        """Bytes of the keys, or of the values."""
        return 2.0 * self.T * self.G * self.D

    @property
    def number(self) -> float:
        """Bytes of one 32-bit number a query and head."""
        return 4.0 * self.T * self.H

    def product(self, keys: float) -> float:
        """Operations of one product of every query with so many keys."""
        return 2.0 * self.T * self.H * self.D * keys


def attention(x: Shape) -> tuple[list[Work], list[Work]]:
    """The kernels of ``triton_chunk_attention``, forward and backward; the queries choose evenly."""
    own = (x.C + min(x.C, BLOCK)) / 2  # the diagonal blocks are multiplied whole
    queries = x.C * x.H / x.G  # that choose a chunk, on average; half a block of them stays unfilled
    selected = x.C * (1 + min(BLOCK, x.C) / 2 / queries)
    q, k, n = x.q, x.k, x.number
    # Radix sort of 32-bit keys with 64-bit numbers: a histogram pass and four passes over both, out and in.
    sort = Work("sort", n + n + (n + 4 * 2 * (n + 2 * n)) + 3 * n, launches=10)
    forward = [
        sort,
        Work("own_forward", 2 * q + 2 * k + n, 2 * x.product(own)),
        Work("selected_forward", 3 * q + 2 * k + 3 * n, 2 * x.product(selected), launches=5),
    ]
    parts = 2 * 2 * k * (1 + queries / SPLIT)  # float32 sums for dk and dv, one more a chunk for every SPLIT queries
    backward = [
        Work("own_queries_backward", 4 * q + 2 * k + 2 * n, 3 * x.product(own)),
        Work("selected_queries_backward", 4 * q + 2 * k + 4 * n, 3 * x.product(selected)),
        Work("selected_keys_backward", 2 * q + 2 * k + parts + 3 * n, 4 * x.product(selected), launches=6),
        Work("own_keys_backward", 2 * q + 2 * k + parts + 2 * k + 2 * n, 4 * x.product(own)),
    ]
    return forward, backward


def routing(x: Shape, exact: bool) -> tuple[list[Work], list[Work]]:
    """Selection by mean keys (one a chunk) or by all keys: forward once over the candidates, backward once more for the
    queries and once for the keys, each of which computes the scores again."""
    candidates = x.T / 2 if exact else x.T / x.C / 2
    keys = x.k if exact else 2 * x.k / x.C  # mean keys in float32
    q, n = x.q, x.number
    means = [] if exact else [Work("mean_keys", x.k + keys)]
    forward = [*means, Work("route_forward", q + keys + 3 * n, x.product(candidates))]
    backward = [
        Work("route_queries_backward", 2 * q + keys + 4 * n, 2 * x.product(candidates)),
        Work("route_keys_backward", q + 2 * keys + 4 * n, 2 * x.product(candidates)),
        # What automatic differentiation adds: dq of both uses of q, dk of both of k.
        Work("add", 3 * q + 3 * x.k, launches=2),
    ]
    return forward, backward


def kernels(x: Shape, exact: bool) -> tuple[list[Work], list[Work]]:
    """All kernels of the mixer's core, forward and backward."""
    (route, route_back), (attend, attend_back) = routing(x, exact), attention(x)
    return route + attend, attend_back + route_back


def flash(x: Shape, name: str) -> float:
    """Seconds of full causal attention, forward and backward, at its best published rate."""
    forward, backward = FLASH[name]
    flops = 2 * x.product(x.T / 2)
    return flops / forward + 2.5 * flops / backward


def print_kernels(x: Shape, gpu: GPU, exact: bool) -> None:
    """One line a kernel."""
    print("| kernel | MB | GFLOP | floor, ms | bound by | expected, ms |\n|---|---|---|---|---|---|")
    for work in [w for part in kernels(x, exact) for w in part]:
        bound = "memory" if work.bytes / gpu.bandwidth >= work.flops / gpu.peak else "products"
        times = f"{1e3 * work.floor(gpu):.3f} | {bound} | {1e3 * work.expected(gpu):.3f}"
        print(f"| {work.kernel} | {work.bytes / 1e6:.0f} | {work.flops / 1e9:.0f} | {times} |")


def print_lengths(options: argparse.Namespace, gpu: GPU, exact: bool) -> None:
    """One line a length: floor and expected time, and how many times as long full attention takes."""
    print("| T | floor, ms | expected, ms | " + " | ".join(f"{name} / expected" for name in FLASH) + " |")
    print("|---" * (3 + len(FLASH)) + "|")
    for T in LENGTHS:
        x = Shape(T, options.heads, options.kv_heads, options.head_dim, options.chunk_size)
        works = [w for part in kernels(x, exact) for w in part]
        floor, expected = sum(w.floor(gpu) for w in works), sum(w.expected(gpu) for w in works)
        ratios = " | ".join(f"{flash(x, name) / expected:.1f}" for name in FLASH)
        print(f"| {T} | {1e3 * floor:.2f} | {1e3 * expected:.2f} | {ratios} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kernels", type=int, metavar="T", help="the kernels one by one, at this length")
    parser.add_argument("--selection", nargs="+", choices=["approx", "exact"], default=["approx", "exact"])
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--chunk-size", type=int, default=128)
    options = parser.parse_args()
    for gpu in (H100, H200):
        for selection in options.selection:
            print(f"\n{gpu.name}, {selection}, forward + backward\n")
            if options.kernels:
                shape = options.heads, options.kv_heads, options.head_dim, options.chunk_size
                print_kernels(Shape(options.kernels, *shape), gpu, selection == "exact")
            else:
                print_lengths(options, gpu, selection == "exact")


if __name__ == "__main__":
    main()
