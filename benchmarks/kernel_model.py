"""What Top-1's Triton kernels must move and multiply, how long that takes at least, and full attention beside it.

A model, not a measurement. Bytes are what each kernel has to fetch from and write to the GPU's memory if every repeated
read of its own is served by the L2 cache; operations are those of its matrix products, masked halves and unfilled rows
of a block included; exponentials are one a score. The floor of a kernel is the longest of bytes / bandwidth,
operations / peak and exponentials / their rate. The expected time takes the shares of bandwidth and peak that are
assumed below, no share of the exponentials' rate, and a launch's delay. Other arithmetic on scores is not counted.

    python benchmarks/kernel_model.py [--kernels T] [--selection approx exact element] [--heads 32] [--kv-heads 8]
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

SELECTIONS = ["approx", "exact", "element"]  # of Top-1 Chunk, and Top-1 Element
LENGTHS = [2048, 8192, 32768, 102400, 262144, 1048576]
BLOCK = 64  # queries or keys a block, as in seqarch_top1.triton_chunk_attention and triton_element
SPLIT = 512  # queries of one chunk whose sum to its keys one program makes

# Assumed of kernels that the compiler makes, not measured:
BANDWIDTH_SHARE, PEAK_SHARE, LAUNCH = 0.75, 0.5, 5e-6


@dataclass(frozen=True)
class GPU:
    """Bytes/s of memory, and dense bfloat16 operations/s: NVIDIA's data sheets (twice that with sparsity); and
    exponentials/s (arXiv 2407.08608, section 1)."""

    name: str
    bandwidth: float
    peak: float
    exponentials: float = 3.9e12


H100 = GPU("H100 SXM", 3.35e12, 989e12)
H200 = GPU("H200 SXM", 4.8e12, 989e12)

# Best published rates on H100, at lengths and head sizes that suit them: (forward, backward) operations/s.
FLASH = {
    "FlashAttention-2": (335e12, 335e12),  # arXiv 2307.08691, section 4: up to 335 TFLOPs/s on H100
    "FlashAttention-3": (740e12, 1.75 * 335e12),  # arXiv 2407.08608: up to 740 forward; backward 1.5 to 1.75 × FA-2
}


@dataclass(frozen=True)
class Work:
    """One kernel's bytes, operations and exponentials."""

    kernel: str
    bytes: float
    flops: float = 0.0
    launches: int = 1
    exponentials: float = 0.0

    def limits(self, gpu: GPU) -> dict[str, float]:
        """Seconds that each of its parts takes at least."""
        return {
            "memory": self.bytes / gpu.bandwidth,
            "products": self.flops / gpu.peak,
            "exponentials": self.exponentials / gpu.exponentials,
        }

    def floor(self, gpu: GPU) -> float:
        """Seconds that it takes at least."""
        return max(self.limits(gpu).values())

    def expected(self, gpu: GPU) -> float:
        """Seconds at the assumed shares."""
        limits = self.limits(gpu)
        moving, multiplying = limits["memory"] / BANDWIDTH_SHARE, limits["products"] / PEAK_SHARE
        return max(moving, multiplying, limits["exponentials"]) + self.launches * LAUNCH


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

    def scores(self, keys: float) -> float:
        """How many scores that gives."""
        return self.T * self.H * keys


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
        Work("own_forward", 2 * q + 2 * k + n, 2 * x.product(own), 1, x.scores(own)),
        Work("selected_forward", 3 * q + 2 * k + 3 * n, 2 * x.product(selected), 5, x.scores(selected)),
    ]
    parts = 2 * 2 * k * (1 + queries / SPLIT)  # float32 sums for dk and dv, one more a chunk for every SPLIT queries
    backward = [
        Work("own_queries_backward", 4 * q + 2 * k + 2 * n, 3 * x.product(own), 1, x.scores(own)),
        Work("selected_queries_backward", 4 * q + 2 * k + 4 * n, 3 * x.product(selected), 1, x.scores(selected)),
        Work("selected_keys_backward", 2 * q + 2 * k + parts + 3 * n, 4 * x.product(selected), 6, x.scores(selected)),
        Work("own_keys_backward", 2 * q + 2 * k + parts + 2 * k + 2 * n, 4 * x.product(own), 1, x.scores(own)),
    ]
    return forward, backward


def routing(x: Shape, exact: bool) -> tuple[list[Work], list[Work]]:
    """Selection by mean keys (one a chunk) or by all keys: forward once over the candidates, backward once more for the
    queries and once for the keys, each of which computes the scores again."""
    candidates = x.T / 2 if exact else x.T / x.C / 2
    keys = x.k if exact else 2 * x.k / x.C  # mean keys in float32
    q, n, scores = x.q, x.number, x.scores(candidates)
    means = [] if exact else [Work("mean_keys", x.k + keys)]
    forward = [*means, Work("route_forward", q + keys + 3 * n, x.product(candidates), 1, scores)]
    backward = [
        Work("route_queries_backward", 2 * q + keys + 4 * n, 2 * x.product(candidates), 1, scores),
        Work("route_keys_backward", q + 2 * keys + 4 * n, 2 * x.product(candidates), 1, scores),
        # What automatic differentiation adds: dq of both uses of q, dk of both of k.
        Work("add", 3 * q + 3 * x.k, launches=2),
    ]
    return forward, backward


def element(x: Shape) -> tuple[list[Work], list[Work]]:
    """The kernels of ``triton_element``, forward and backward."""
    keys = (x.T + BLOCK) / 2
    q, k, n, scores = x.q, x.k, x.number, x.scores(keys)
    forward = [Work("element_forward", 3 * q + k + 2 * n, x.product(keys), 1, scores)]  # q, the fetched values, o
    # Where no two queries of a block choose from one block of values, each fills a tile of BLOCK² scores.
    tiles = min(keys, BLOCK**2)
    backward = [
        Work("element_queries_backward", 4 * q + 2 * k + 2 * n, 4 * x.product(keys), 1, scores),
        Work("element_keys_backward", 2 * q + 3 * k + 2 * n, 3 * x.product(keys), 1, scores),
        Work("element_values_backward", q + k + n, x.product(tiles)),
    ]
    return forward, backward


def kernels(x: Shape, selection: str) -> tuple[list[Work], list[Work]]:
    """All kernels of the mixer's core, forward and backward."""
    if selection == "element":
        return element(x)
    (route, route_back), (attend, attend_back) = routing(x, selection == "exact"), attention(x)
    return route + attend, attend_back + route_back


def flash(x: Shape, name: str) -> float:
    """Seconds of full causal attention, forward and backward, at its best published rate."""
    forward, backward = FLASH[name]
    flops = 2 * x.product(x.T / 2)
    return flops / forward + 2.5 * flops / backward


def print_kernels(x: Shape, gpu: GPU, selection: str) -> None:
    """One line a kernel."""
    print("| kernel | MB | GFLOP | floor, ms | bound by | expected, ms |\n|---|---|---|---|---|---|")
    for work in [w for part in kernels(x, selection) for w in part]:
        limits = work.limits(gpu)
        bound = max(limits, key=lambda name: limits[name])
        times = f"{1e3 * work.floor(gpu):.3f} | {bound} | {1e3 * work.expected(gpu):.3f}"
        print(f"| {work.kernel} | {work.bytes / 1e6:.0f} | {work.flops / 1e9:.0f} | {times} |")


def print_lengths(options: argparse.Namespace, gpu: GPU, selection: str) -> None:
    """One line a length: floor and expected time, and how many times as long full attention takes."""
    print("| T | floor, ms | expected, ms | " + " | ".join(f"{name} / expected" for name in FLASH) + " |")
    print("|---" * (3 + len(FLASH)) + "|")
    for T in LENGTHS:
        x = Shape(T, options.heads, options.kv_heads, options.head_dim, options.chunk_size)
        works = [w for part in kernels(x, selection) for w in part]
        floor, expected = sum(w.floor(gpu) for w in works), sum(w.expected(gpu) for w in works)
        ratios = " | ".join(f"{flash(x, name) / expected:.1f}" for name in FLASH)
        print(f"| {T} | {1e3 * floor:.2f} | {1e3 * expected:.2f} | {ratios} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kernels", type=int, metavar="T", help="the kernels one by one, at this length")
    parser.add_argument("--selection", nargs="+", choices=SELECTIONS, default=SELECTIONS)
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
                print_kernels(Shape(options.kernels, *shape), gpu, selection)
            else:
                print_lengths(options, gpu, selection)


if __name__ == "__main__":
    main()
