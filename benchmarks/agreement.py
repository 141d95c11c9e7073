"""How far every mixer and its core are from the peers' pure-torch code, float32: a Markdown table.

Same weights, same inputs; the output (with an initial state, the final state too) and the gradients of every input and
parameter. The errors are relative root mean squares; of a gradient, the worst of all tensors. Peers know no packed
documents: they are called once for each. Layers are given a state by calling ours in two parts. The last two columns
say who is off: the worst error of each against our code in float64, which the tests check against plain loops.

    pip install transformers flash-linear-attention triton
    python -m benchmarks.agreement [--mamba FOLDER] [--only Mamba2]

`--mamba FOLDER` reads `selective_scan_ref` and `ssd_minimal` from a checkout of state-spaces/mamba.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.func import functional_call

from benchmarks.mixers import from_source, torch_only
from seqarch import TokenMixer
from seqarch.ops.delta_rule import delta_rule
from seqarch.ops.diagonal_low_rank import diagonal_low_rank
from seqarch.ops.scalar_decay import scalar_decay_attention
from seqarch.ops.selective_scan import selective_scan
from seqarch.ops.taylor_attention import taylor_attention
from seqarch.ops.vector_decay import vector_decay
from seqarch_deltanet import GatedDeltaNet
from seqarch_linear import Based
from seqarch_mamba import Mamba1, Mamba2
from seqarch_rwkv import RWKV5, RWKV6, RWKV7
from tests.ops import (
    test_delta_rule,
    test_diagonal_low_rank,
    test_scalar_decay,
    test_selective_scan,
    test_taylor_attention,
    test_vector_decay,
)
from tests.plugins import peers

T, D, HEAD = 128, 64, 16
DOCUMENTS = (0, 1, 33, 64, T)
WHOLE_CHUNKS = (0, 64, T)  # for peers that take nothing else

Leaves = dict[str, Tensor]
Function = Callable[..., tuple[Tensor, ...]]


@dataclass(frozen=True)
class Comparison:
    """Two functions of the same named float32 tensors, of which ``sequences`` are ``[B, T, …]``."""

    ours: Function
    theirs: Function
    leaves: Callable[[bool], Leaves]
    sequences: Iterable[str]
    cases: tuple[str, ...] = ("plain", "initial state", "packed", "strong decay")
    documents: tuple[int, ...] = DOCUMENTS


def by_documents(c: Comparison, leaves: Leaves) -> tuple[Tensor, ...]:
    parts = [c.theirs(**leaves | {n: leaves[n][:, a:b] for n in c.sequences})[0] for a, b in pairwise(c.documents)]
    return (torch.cat(parts, dim=1),)


def both_passes(function: Callable[[Leaves], tuple[Tensor, ...]], leaves: Leaves, dtype: torch.dtype) -> list[Leaves]:
    """Outputs and gradients by name."""
    leaves = {n: t.detach().to(dtype).requires_grad_() for n, t in leaves.items()}
    outputs = function(leaves)
    noise = torch.Generator().manual_seed(1)
    weights = [torch.randn(o.shape, generator=noise).to(o.dtype) for o in outputs]
    torch.autograd.backward(outputs, weights)
    grads = {n: torch.zeros_like(t) if t.grad is None else t.grad for n, t in leaves.items()}
    return [dict(zip(("output", "state"), outputs, strict=False)), grads]


def worst(one: Leaves, other: Leaves) -> tuple[float, str]:
    """The largest relative error and its tensor; on 10⁻⁶ of the largest tensor where one is nearly zero."""

    def size(t: Tensor) -> float:
        return float(t.double().square().mean().sqrt())

    floor = 1e-6 * max(size(t) for t in other.values())
    errors = {n: size(one[n].double() - t.double()) / max(size(t), floor) for n, t in other.items()}
    return max((float("inf") if error != error else error, n) for n, error in errors.items())


def rows(c: Comparison) -> Iterator[str]:
    for case in c.cases:
        leaves = c.leaves(case == "strong decay")
        state = leaves.pop("initial_state", None)
        ours, theirs = (partial(_call, f) for f in (c.ours, c.theirs))
        if case == "packed":
            leaves |= {n: leaves[n][:1] for n in c.sequences}
            cu_seqlens = torch.tensor(c.documents, dtype=torch.int32)
            ours = partial(_call, partial(c.ours, cu_seqlens=cu_seqlens))
            theirs = partial(by_documents, c)
        elif case == "initial state" and state is not None:
            leaves["initial_state"] = state
        elif case == "initial state":
            ours = partial(_call, partial(c.ours, split=T // 3))
        found, expected, exact = (
            both_passes(f, leaves, d)
            for f, d in ((ours, torch.float32), (theirs, torch.float32), (ours, torch.float64))
        )
        (output, _), (gradient, name) = (worst(a, b) for a, b in zip(found, expected, strict=True))
        to_exact = [max(worst(a, b)[0] for a, b in zip(one, exact, strict=True)) for one in (found, expected)]
        shown = f"{gradient:.0e}" + (f" ({name})" if gradient > 1e-4 else "")
        yield f"{case} | {output:.0e} | {shown} | {to_exact[0]:.0e} | {to_exact[1]:.0e}"


def _call(function: Function, leaves: Leaves) -> tuple[Tensor, ...]:
    outputs = function(**leaves)
    return outputs if "initial_state" in leaves else outputs[:1]


# --- cores ------------------------------------------------------------------------------------------------------------


def heads_first(function: Callable, *names: str, **options: object) -> Function:
    """A naive function that takes ``[B, H, T, …]``; ``names`` in its order."""

    def call(initial_state: Tensor | None = None, **leaves: Tensor) -> tuple[Tensor, ...]:
        tensors = [leaves.pop(n).transpose(1, 2).contiguous() for n in names]
        extra = {} if initial_state is None else {"initial_state": initial_state}
        o = function(*tensors, *leaves.values(), **extra, **options)
        o, *state = o if isinstance(o, tuple) else (o,)
        return (o.transpose(1, 2), *state)

    return call


def named(names: str, values: list[Tensor | None]) -> Leaves:
    pairs = zip([*names.split(), "initial_state"], values, strict=True)
    return {n: t.detach().float() for n, t in pairs if t is not None}


SHAPE = {"K": HEAD, "V": HEAD}


def simple_gla_inputs(strong: bool) -> Leaves:
    decay = "strong" if strong else "mild"
    tensors = test_scalar_decay.inputs(2, T, 2, 2, **SHAPE, decay=decay, state=True)
    return named("q k v g", list(tensors.values()))


def simple_gla() -> Comparison:
    from fla.ops.simple_gla.naive import naive_recurrent_simple_gla

    return Comparison(scalar_decay_attention, partial(naive_recurrent_simple_gla, scale=1.0), simple_gla_inputs, "qkvg")


def ssd_minimal(mamba: Path) -> Comparison:
    _, ssd = from_source(mamba / "mamba_ssm/modules/ssd_minimal.py", "segsum", "ssd_minimal_discrete")

    def theirs(q: Tensor, k: Tensor, v: Tensor, g: Tensor, initial_state: Tensor | None = None) -> tuple[Tensor, ...]:
        y, state = ssd(v, g, k, q, 32, None if initial_state is None else initial_state.mT[:, None])
        return y, state.mT

    return Comparison(scalar_decay_attention, theirs, simple_gla_inputs, "qkvg", documents=WHOLE_CHUNKS)


def selective_scan_ref(mamba: Path) -> Comparison:
    (scan,) = from_source(mamba / "mamba_ssm/ops/selective_scan_interface.py", "selective_scan_ref")

    def theirs(x: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor) -> tuple[Tensor, ...]:
        return (scan(x.mT, delta.mT, A, B.mT, C.mT).mT,)

    def leaves(strong: bool) -> Leaves:
        strength = 50.0 if strong else 1.0
        tensors = test_selective_scan.inputs(2, T, 16, 8, strength=strength, state=False)
        return named("x delta A B C", tensors)

    return Comparison(selective_scan, theirs, leaves, ("x", "delta", "B", "C"), ("plain", "packed", "strong decay"))


def rwkv6_core(constant: bool) -> Comparison:
    from fla.ops.rwkv6.recurrent_naive import naive_recurrent_rwkv6

    def leaves(strong: bool) -> Leaves:
        made = named("q k v g bonus", test_vector_decay.inputs(T, 2, 2, **SHAPE, decay=100.0 if strong else 1.0))
        if constant:
            made["g"] = made["g"][:1, :1].expand_as(made["g"])
        return made

    naive = partial(naive_recurrent_rwkv6, scale=1.0, output_final_state=True)
    return Comparison(vector_decay, heads_first(naive, *"qkvg"), leaves, "qkvg")


def rwkv7_core(chunks: bool) -> Comparison:
    from fla.ops.generalized_delta_rule.dplr.naive import dplr_chunkwise, dplr_recurrence

    def leaves(strong: bool) -> Leaves:
        decay = 100.0 if strong else 1.0
        return named("q k v a b g", test_diagonal_low_rank.inputs(T, 2, 2, **SHAPE, decay=decay))

    naive = heads_first(dplr_chunkwise if chunks else dplr_recurrence, *"qkvabg")

    def theirs(q: Tensor, **rest: Tensor) -> tuple[Tensor, ...]:
        return naive(q=q * HEAD**0.5, **rest)  # it scales q

    return Comparison(diagonal_low_rank, theirs, leaves, "qkvabg", documents=WHOLE_CHUNKS if chunks else DOCUMENTS)


def delta_core(gated: bool, chunks: bool) -> Comparison:
    from fla.ops.delta_rule.naive import delta_rule_chunkwise, delta_rule_recurrence
    from fla.ops.gated_delta_rule.naive import naive_chunk_gated_delta_rule, naive_recurrent_gated_delta_rule

    def leaves(strong: bool) -> Leaves:
        decay = None if not gated else 25.0 if strong else 1.0
        return named("q k v beta g", test_delta_rule.inputs(T, 2, 2, **SHAPE, decay=decay))

    sequences = ("q", "k", "v", "beta")
    if gated:
        naive = naive_chunk_gated_delta_rule if chunks else naive_recurrent_gated_delta_rule
        return Comparison(delta_rule, partial(naive, output_final_state=True), leaves, (*sequences, "g"))
    naive = heads_first(delta_rule_chunkwise if chunks else delta_rule_recurrence, *sequences)
    cases = ("plain", "packed") if chunks else ("plain", "initial state", "packed")
    return Comparison(delta_rule, naive, leaves, sequences, cases, WHOLE_CHUNKS if chunks else DOCUMENTS)


def based_core(chunks: bool) -> Comparison:
    from fla.ops.based.naive import naive_chunk_based, naive_parallel_based

    def leaves(strong: bool) -> Leaves:
        return named("q k v", [*test_taylor_attention.inputs(T, 2, 2, HEAD, HEAD), None])

    naive = partial(naive_chunk_based, chunk_size=32) if chunks else naive_parallel_based
    cases = ("plain", "packed")
    return Comparison(
        taylor_attention, heads_first(naive, *"qkv"), leaves, "qkv", cases, WHOLE_CHUNKS if chunks else DOCUMENTS
    )


# --- layers -----------------------------------------------------------------------------------------------------------


class Call(nn.Module):
    """A layer with another function of it as its forward."""

    def __init__(self, layer: nn.Module, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.layer, self.function = layer, function

    def forward(self, *args: Tensor) -> Tensor:
        return self.function(self.layer, *args)


def layers(
    ours: TokenMixer,
    theirs: nn.Module,
    strong: Mapping[str, float],
    *,
    forward: Callable[..., Tensor] | None = None,
    source: nn.Module | None = None,
    to_ours: Callable[[Leaves], Leaves] = dict,
    to_theirs: Callable[[Leaves], Leaves] = dict,
    inputs: tuple[str, ...] = ("x",),
) -> Comparison:
    """Two layers as functions of x, perhaps another input, and the parameters of ``source``, by default the peer's.

    Args:
        ours: Our layer.
        theirs: The peer's.
        strong: Values of the parameters that make decays strong.
        forward: What to call in place of the peer's forward.
        source: The layer whose parameters, under its names, both are given.
        to_ours: Maps those to our names.
        to_theirs: Maps them to the peer's.
        inputs: Names of the inputs.
    """
    called = Call(theirs, forward or (lambda layer, x: layer(x)))
    cases = ("plain", "initial state", "packed", *(("strong decay",) if strong else ()))

    def leaves(strongly: bool) -> Leaves:
        noise = torch.Generator().manual_seed(0)
        made = {n: torch.randn(2, T, D, generator=noise) for n in inputs}
        # Initial values of zero would hide faults
        for name, p in (source or theirs).named_parameters():
            made[name] = p.detach() + 0.1 * torch.randn(p.shape, generator=noise)
        if strongly:
            made |= {name: torch.full_like(made[name], value) for name, value in strong.items()}
        return made

    def call_ours(cu_seqlens: Tensor | None = None, split: int | None = None, **every: Tensor) -> tuple[Tensor, ...]:
        x, *context = (every.pop(n) for n in inputs)
        parameters = to_ours(every)
        ends = [(0, T)] if split is None else [(0, split), (split, T)]
        state = None if split is None else ours.init_state(len(x), T, dtype=x.dtype)
        parts = []
        for a, b in ends:
            options: dict[str, object] = {"cu_seqlens": cu_seqlens, "state": state}
            if ours.tags.shares_context:
                options["context"] = {"v_first": context[0][:, a:b]} if context else {}
            y, state = functional_call(ours, parameters, (x[:, a:b],), options)
            parts.append(y)
        return (torch.cat(parts, dim=1),)

    def call_theirs(**every: Tensor) -> tuple[Tensor, ...]:
        tensors = tuple(every.pop(n) for n in inputs)
        parameters = {f"layer.{n}": p for n, p in to_theirs(every).items()}
        return (functional_call(called, parameters, tensors),)

    return Comparison(call_ours, call_theirs, leaves, inputs, cases)


def mamba1() -> Comparison:
    return layers(Mamba1(D), peers.mamba1_layer(D), {"dt_proj.bias": 2.0})


def mamba2() -> Comparison:
    sizes = {"head_dim": HEAD, "state_dim": 16}
    return layers(Mamba2(D, **sizes), peers.mamba2_layer(D, **sizes), {"dt_bias": 1.0})


def gated_deltanet() -> Comparison:
    from transformers.models.qwen3_next import modeling_qwen3_next

    torch_only(modeling_qwen3_next)
    sizes = (2, 4, HEAD, 2 * HEAD)
    ours = GatedDeltaNet(D, n_heads=2, n_v_heads=4, head_dim=HEAD)
    to_ours = partial(_from_qwen3_next, sizes)
    return layers(ours, peers.qwen3_next_layer(*sizes, D), {"dt_bias": 1.0}, to_ours=to_ours)


def _from_qwen3_next(sizes: tuple[int, int, int, int], leaves: Leaves) -> Leaves:
    return peers.from_qwen3_next(leaves, *sizes)


def rwkv5() -> Comparison:
    ours, ranks = RWKV5(D, n_heads=4), {"mix_rank": 4, "decay_rank": 8}
    theirs = peers.rwkv6_layer(D, 4, **ranks)
    to_theirs = partial(peers.rwkv5_as_rwkv6, **ranks)
    strong = {"time_decay": 2.0}
    return layers(ours, theirs, strong, forward=peers.rwkv6_output, source=ours, to_theirs=to_theirs)


def rwkv6() -> Comparison:
    ranks = {"mix_rank": 4, "decay_rank": 8}
    strong = {"w_proj.linear.lora.2.bias": 2.0}
    return layers(RWKV6(D, n_heads=4, **ranks), peers.rwkv6_layer(D, 4, **ranks), strong, forward=peers.rwkv6_output)


def rwkv7(layer_idx: int) -> Comparison:
    ranks = {"decay_rank": 8, "a_rank": 6, "v_rank": 4, "gate_rank": 10}
    ours = RWKV7(D, n_heads=4, layer_idx=layer_idx, n_layers=3, **ranks)
    theirs = peers.rwkv7_layer(D, 4, layer_idx, 3, **ranks)
    strong = {"w_lora.lora.2.bias": 5.0}
    inputs = ("x", "v_first") if layer_idx else ("x",)
    return layers(ours, theirs, strong, forward=peers.rwkv7_output, inputs=inputs)


def based() -> Comparison:
    from fla.layers import BasedLinearAttention

    theirs = BasedLinearAttention(D, feature_dim=16, num_heads=4, num_key_value_heads=4)
    ours = Based(D, n_heads=4, feature_dim=16)
    return layers(ours, theirs, {}, forward=lambda layer, x: layer.forward_reference(x))


def comparisons(mamba: Path | None) -> Iterator[tuple[str, str, Callable[[], Comparison]]]:
    if mamba is not None:
        yield "Mamba1's core", "mamba `selective_scan_ref`", partial(selective_scan_ref, mamba)
    yield "Mamba1", "transformers `MambaMixer`", mamba1
    if mamba is not None:
        yield "Mamba2's core", "mamba `ssd_minimal_discrete`", partial(ssd_minimal, mamba)
    yield "Mamba2's core", "fla `naive_recurrent_simple_gla`", simple_gla
    yield "Mamba2", "transformers `Mamba2Mixer`", mamba2
    yield "RWKV5's core", "fla `naive_recurrent_rwkv6`, constant decays", partial(rwkv6_core, True)
    yield "RWKV5", "fla `RWKV6Attention`, constants, around `naive_recurrent_rwkv6`", rwkv5
    yield "RWKV6's core", "fla `naive_recurrent_rwkv6`", partial(rwkv6_core, False)
    yield "RWKV6", "fla `RWKV6Attention` around `naive_recurrent_rwkv6`", rwkv6
    yield "RWKV7's core", "fla `dplr_recurrence`", partial(rwkv7_core, False)
    yield "RWKV7's core", "fla `dplr_chunkwise`", partial(rwkv7_core, True)
    yield "RWKV7, first layer", "fla `RWKV7Attention` around `dplr_recurrence`", partial(rwkv7, 0)
    yield "RWKV7, later layer", "fla `RWKV7Attention` around `dplr_recurrence`", partial(rwkv7, 2)
    yield "DeltaNet's core", "fla `delta_rule_recurrence`", partial(delta_core, False, False)
    yield "DeltaNet's core", "fla `delta_rule_chunkwise`", partial(delta_core, False, True)
    yield "GatedDeltaNet's core", "fla `naive_recurrent_gated_delta_rule`", partial(delta_core, True, False)
    yield "GatedDeltaNet's core", "fla `naive_chunk_gated_delta_rule`", partial(delta_core, True, True)
    yield "GatedDeltaNet", "transformers `Qwen3NextGatedDeltaNet`", gated_deltanet
    yield "Based's core", "fla `naive_parallel_based`", partial(based_core, False)
    yield "Based's core", "fla `naive_chunk_based`", partial(based_core, True)
    yield "Based", "fla `BasedLinearAttention.forward_reference`", based


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mamba", type=Path, help="a checkout of state-spaces/mamba")
    parser.add_argument("--only", default="", help="rows whose mixer begins with this")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    print("| mixer | peer | case | output | gradient | ours to float64 | peer to float64 |")
    print("|---|---|---|--:|--:|--:|--:|")
    for mixer, peer, build in comparisons(args.mamba):
        if mixer.startswith(args.only):
            torch.manual_seed(0)
            for row in rows(build()):
                print(f"| {mixer} | {peer} | {row} |", flush=True)


if __name__ == "__main__":
    main()
