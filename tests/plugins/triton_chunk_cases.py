"""Cases for the attention kernels of Top-1 Chunk, and the dense float64 answer to them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch


@dataclass(frozen=True)
class Case:
    """T queries, the last of S keys (default T), of documents between ``bounds`` (default one).

    ``choice`` says which earlier chunk of its document a query selects: "any", or "first" for all the same.
    """

    T: int
    S: int | None = None
    B: int = 1
    H: int = 2
    G: int = 1
    D: int = 16
    C: int = 16
    bounds: tuple[int, ...] | None = None
    choice: str = "any"

    def __str__(self) -> str:
        return "-".join(f"{n}{v}" for n, v in vars(self).items() if v != getattr(Case, n, None))


ATTENTION = [
    Case(40),
    Case(37, B=2, H=4, G=2),
    Case(53, H=4, G=2, choice="first"),
    Case(5),
    Case(16),
    Case(1, S=33),
    Case(21, S=60),
    Case(101, bounds=(0, 1, 1, 16, 32, 49, 64, 101)),
    Case(70, C=32, D=80),
    Case(90, C=32, D=64, H=1),
]
LONG = [
    Case(300, C=32, choice="first"),  # more than one split of the queries of a chunk
    Case(300, C=128, D=128),
    Case(300, C=64, D=64, H=3, G=3),
    Case(600, C=256, D=32, H=1),
    Case(400, C=64, D=64, H=8, G=2, bounds=(0, 63, 127, 192, 193, 400)),
]


def chunks(case: Case) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Where chunks begin (and the end), the chunk of each key, and the first chunk of its document."""
    S = case.S or case.T
    begin, of, first = [], [], []
    for a, b in pairwise(case.bounds or (0, S)):
        n = len(begin)
        begin += range(a, b, case.C)
        of += [n + s // case.C for s in range(b - a)]
        first += [n] * (b - a)
    return torch.tensor([*begin, S], dtype=torch.int32), torch.tensor(of), torch.tensor(first)


def inputs(case: Case, dtype: torch.dtype) -> tuple[dict[str, Any], torch.Tensor]:
    """Arguments of ``chunk_attention`` with a random selection, and the gradient of the output."""
    generator = torch.Generator().manual_seed(case.T)
    S = case.S or case.T
    shapes = {"q": (case.T, case.H), "k": (S, case.G), "v": (S, case.G), "do": (case.T, case.H)}
    x = {
        n: torch.randn(case.B, *shape, case.D, generator=generator).to(dtype).requires_grad_(n != "do")
        for n, shape in shapes.items()
    }
    begin, of, first = (t[S - case.T :] if i else t for i, t in enumerate(chunks(case)))
    u = torch.rand(case.B, case.H, case.T, generator=generator) * (case.choice == "any")
    index = torch.where(of > first, first + (u * (of - first)).long(), -1).int()
    P = torch.rand(case.B, case.H, case.T, generator=generator).requires_grad_()
    do = x.pop("do")
    n0 = 0 if case.bounds else (S - case.T) // case.C
    return {
        **x, "index": index, "P": P, "begin": begin, "scale": case.D**-0.5, "chunk_size": case.C, "n0": n0,
    }, do  # fmt: skip


def dense(case: Case, arguments: dict[str, Any], do: torch.Tensor) -> dict[str, torch.Tensor]:
    """The output and all gradients in float64, every score written out."""
    leaves = {n: arguments[n].detach().double().requires_grad_() for n in ("q", "k", "v", "P")}
    index, P = arguments["index"], leaves["P"]
    k, v = (leaves[n].repeat_interleave(case.H // case.G, dim=2) for n in ("k", "v"))
    S = k.shape[1]
    _, of, _ = chunks(case)
    place = torch.arange(S)
    query = place[S - case.T :, None]
    own = (of == of[query]) & (place <= query)
    selected = of == index[..., None]
    s = torch.einsum("bthd,bshd->bhts", leaves["q"], k) * case.D**-0.5
    w = s.masked_fill(~(own | selected), -torch.inf).softmax(-1)
    w = torch.where(selected, w * (1 + P - P.detach())[..., None], w)
    o = torch.einsum("bhts,bshd->bthd", w, v)
    gradients = torch.autograd.grad(o, list(leaves.values()), do.double())
    return {"o": o.detach(), **dict(zip(leaves, gradients, strict=True))}
