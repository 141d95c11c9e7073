"""Mixers with one fault each, and the checks that notice it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from seqarch.mixer import State, Tags, TokenMixer
from tests.testing.toy_mixers import ToyAttention, ToyEMA, ToySelection


class NaNGradientAtChunk(ToyEMA):
    """The backward pass divides by zero when the sequence is exactly one chunk."""

    def forward(self, x: Tensor, **kwargs: Any) -> tuple[Tensor, State | None]:
        y, state = super().forward(x, **kwargs)
        if x.shape[1] == self.chunk_size and state is None and y.requires_grad:
            y.register_hook(lambda g: g * float("nan"))
        return y, state


class RoundingLeak(ToyEMA):
    """The scale of a reduction over all tokens leaks into each, within rounding."""

    def sequence(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        y, state = super().sequence(x, state)
        return y * (1 + 1e-13 * x.detach().mean(dim=1, keepdim=True)), state


class GrossLeak(ToyEMA):
    """Every output sees the mean of all inputs."""

    def sequence(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        y, state = super().sequence(x, state)
        return y + 0.01 * x.mean(dim=1, keepdim=True), state


class GradientLeak(ToySelection):
    """The value is causal, its gradient flows to the mean of all inputs."""

    def forward(self, x: Tensor, **kwargs: Any) -> tuple[Tensor, State | None]:
        y, state = super().forward(x, **kwargs)
        mean = 0.01 * x.mean(dim=1, keepdim=True)
        return y + (mean - mean.detach()), state


class ForgetsTail(ToyEMA):
    """A continuation of less than a convolution forgets what was before it."""

    def convolve(self, value: Tensor, tail: Tensor) -> tuple[Tensor, Tensor]:
        return super().convolve(value, torch.zeros_like(tail) if value.shape[1] == self.kernel - 1 else tail)


class ForgetsAverage(ToyEMA):
    """With a state, three tokens at once lose the moving average."""

    def forward(self, x: Tensor, *, state: State | None = None, **kwargs: Any) -> tuple[Tensor, State | None]:
        if state is not None and x.shape[1] == 3:
            state = {**state, "h": torch.zeros_like(state["h"])}
        return super().forward(x, state=state, **kwargs)


class WrongFastPath(ToyEMA):
    """From the second single token on, decoding takes a path that rounds."""

    previous = 0

    def forward(self, x: Tensor, *, state: State | None = None, **kwargs: Any) -> tuple[Tensor, State | None]:
        y, new = super().forward(x, state=state, **kwargs)
        if state is not None and x.shape[1] == self.previous == 1:
            y = y.float().to(x.dtype)
        self.previous = x.shape[1]
        return y, new


class DetachesTail(ToyEMA):
    """The gradient stops at the convolution's part of the state."""

    def convolve(self, value: Tensor, tail: Tensor) -> tuple[Tensor, Tensor]:
        u, tail = super().convolve(value, tail)
        return u, tail.detach()


class TimeFirstState(ToyEMA):
    """The convolution's part of the state has the batch second."""

    def init_state(self, *args: Any, **kwargs: Any) -> State:
        state = super().init_state(*args, **kwargs)
        return {**state, "tail": state["tail"].transpose(0, 1)}

    def convolve(self, value: Tensor, tail: Tensor) -> tuple[Tensor, Tensor]:
        u, tail = super().convolve(value, tail.transpose(0, 1))
        return u, tail.transpose(0, 1)


class LowersState(ToyEMA):
    """The float32 state comes back in the parameters' precision."""

    def sequence(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        y, state = super().sequence(x, state)
        return y, {**state, "h": state["h"].to(x.dtype)}


class IgnoresParameterDtype(ToyEMA):
    """The state is float32 by default, whatever the parameters are."""

    def init_state(
        self,
        batch_size: int,
        max_len: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> State:
        return super().init_state(batch_size, max_len, device, dtype or torch.float32)


class StateClass(dict[str, Tensor]):
    """A dict that ``torch.load(weights_only=True)`` does not know."""


class StateOfOwnClass(ToyEMA):
    """The state is no plain dict."""

    def sequence(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        y, state = super().sequence(x, state)
        return y, StateClass(state)


class ConvolvesAcross(ToyEMA):
    """The convolution of packed documents ignores their boundaries."""

    def packed(self, x: Tensor, bounds: list[int]) -> Tensor:
        state, out = self.init_state(1, 0, x.device, x.dtype), []
        for a, b in pairwise(bounds):
            y, after = self.sequence(x[:, a:b], state) if b > a else (x[:, a:b], state)
            state = {**state, "tail": after["tail"]}
            out.append(y)
        return torch.cat(out, dim=1)


class PackedGradient(ToyEMA):
    """The backward pass of packed documents loses a part."""

    def packed(self, x: Tensor, bounds: list[int]) -> Tensor:
        y = super().packed(x, bounds)
        return 0.99 * y + 0.01 * y.detach()


class IgnoresBoundaries(ToySelection):
    """The tags deny packed documents, yet ``cu_seqlens`` is accepted and ignored."""

    def check_input(self, x: Tensor, cu_seqlens: Tensor | None, state: State | None) -> None:
        super().check_input(x, None, state)


class AcceptsAnyDtype(ToyEMA):
    """The tags deny bfloat16, yet it is accepted."""

    def __init__(self, d_model: int, **kwargs: Any) -> None:
        super().__init__(d_model, **kwargs)
        self.tags = replace(self.tags, dtypes=(torch.float64, torch.float32))


class ChecksNothing(ToyEMA):
    """Arguments are not looked at."""

    def check_input(self, x: Tensor, cu_seqlens: Tensor | None, state: State | None) -> None:
        pass


class DropsOldest(ToyAttention):
    """A full cache silently forgets its oldest keys."""

    def extend(self, k: Tensor, v: Tensor, state: State) -> tuple[Tensor, Tensor, State]:
        room = state["k"].shape[2]
        excess = max(0, int(state["pos"][0]) + k.shape[2] - room)
        if excess:
            every = {name: torch.cat((state[name], x), dim=2)[:, :, -room:] for name, x in (("k", k), ("v", v))}
            return every["k"], every["v"], {**every, "pos": state["pos"].clamp(max=room)}
        return super().extend(k, v, state)


class GuessesLength(ToyEMA):
    """Zeros at the end are taken for padding, and the rest is scaled for it."""

    def sequence(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        y, state = super().sequence(x, state)
        return y * (1 + 0.01 * (x[:, -1:] == 0).all(dim=-1, keepdim=True).to(y.dtype)), state


class BatchMean(ToyEMA):
    """Sequences are centred over the batch."""

    def sequence(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        y, state = super().sequence(x, state)
        return y - 1e-3 * y.mean(dim=0, keepdim=True), state


class LosesGradientAlone(ToySelection):
    """A batch of one has a memory layout in which the backward pass writes to a copy."""

    def weights(self, scores: Tensor) -> Tensor:
        weights = super().weights(scores)
        return weights.detach() if scores.shape[0] == 1 else weights


class WrongGradient(ToyEMA):
    """The gradient has a term that the value has not."""

    def sequence(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        y, state = super().sequence(x, state)
        return y + 0.01 * (x - x.detach()), state


class _Clip(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0].clamp(-0.5, 0.5)


class ClipsGradient(ToySelection):
    """The straight-through gradient is clipped, so that it is not linear."""

    def forward(self, x: Tensor, **kwargs: Any) -> tuple[Tensor, State | None]:
        y, state = super().forward(x, **kwargs)
        return _Clip.apply(y), state  # pyright: ignore


class RoundsFloat32(ToyEMA):
    """In float32 the input goes through bfloat16."""

    def sequence(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        return super().sequence(x.bfloat16().to(x.dtype) if x.dtype == torch.float32 else x, state)


class RoundsState(ToyEMA):
    """A float32 state is rounded to bfloat16 at every call, so that steps lose what one call keeps."""

    def sequence(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        y, state = super().sequence(x, state)
        return y, {**state, "h": state["h"].bfloat16().float()} if x.dtype == torch.float32 else state


class AssumesUnitStride(ToyEMA):
    """The memory of the input is read as if channels were adjacent."""

    def forward(self, x: Tensor, **kwargs: Any) -> tuple[Tensor, State | None]:
        if x.ndim == 3 and x.shape[-1] == self.d_model:
            x = x.as_strided(x.shape, (x.stride(0), x.stride(1), 1))
        return super().forward(x, **kwargs)


class ClobbersBoundaries(ToyEMA):
    """``cu_seqlens`` is used as scratch memory."""

    def forward(self, x: Tensor, *, cu_seqlens: Tensor | None = None, **kwargs: Any) -> tuple[Tensor, State | None]:
        result = super().forward(x, cu_seqlens=cu_seqlens, **kwargs)
        if cu_seqlens is not None:
            cu_seqlens.zero_()
        return result


class NoisyGradient(ToyEMA):
    """Two backward passes differ by rounding, as with atomic additions."""

    def sequence(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        y, state = super().sequence(x, state)
        if y.requires_grad:
            y.register_hook(lambda g: g * (1 + 1e-13 * torch.rand_like(g)))
        return y, state


class RemembersLastCall(ToyEMA):
    """A cache of an earlier call is read in the next one."""

    cached: Tensor | None = None

    def log_decay(self, gate: Tensor) -> Tensor:
        log_a = super().log_decay(gate)
        last, self.cached = self.cached, log_a.detach()[0, 0]
        return log_a if last is None else log_a * (1 + 1e-14 * last)


class SkipsBias(ToyEMA):
    """``reset_parameters`` leaves to the constructor what only the constructor does."""

    def reset_parameters(self) -> None:
        if not hasattr(self, "ready"):
            self.ready = True
            return super().reset_parameters()
        bias = self.conv_bias.data.clone()
        super().reset_parameters()
        self.conv_bias.data.copy_(bias)
        return None


class PlainTensor(ToyEMA):
    """A tensor that is neither parameter nor buffer stays on the meta device."""

    def __init__(self, d_model: int, **kwargs: Any) -> None:
        super().__init__(d_model, **kwargs)
        self.taps = torch.ones(d_model)

    def log_decay(self, gate: Tensor) -> Tensor:
        return super().log_decay(gate) * self.taps.to(torch.promote_types(gate.dtype, torch.float32))


class SkipsReset(ToyEMA):
    """The constructor leaves the projection as ``nn.Linear`` does."""

    def __init__(self, d_model: int, **kwargs: Any) -> None:
        super().__init__(d_model, **kwargs)
        self.in_proj.reset_parameters()


class RandomBufferNotSaved(ToyEMA):
    """Random signs that outputs depend on are not part of the ``state_dict``."""

    def __init__(self, d_model: int, **kwargs: Any) -> None:
        super().__init__(d_model, **kwargs)
        self.register_buffer("signs", torch.empty(d_model), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if hasattr(self, "signs"):
            self.get_buffer("signs").bernoulli_().mul_(2).sub_(1)

    def log_decay(self, gate: Tensor) -> Tensor:
        return super().log_decay(gate * self.get_buffer("signs").to(gate.dtype))


class HoldsLambda(ToyEMA):
    """An attribute cannot be pickled."""

    def __init__(self, d_model: int, **kwargs: Any) -> None:
        super().__init__(d_model, **kwargs)
        self.activation = lambda x: x


class DeadParameter(ToyEMA):
    """A parameter is read without its gradient."""

    def convolve(self, value: Tensor, tail: Tensor) -> tuple[Tensor, Tensor]:
        u, tail = super().convolve(value, tail)
        return u + self.gain.detach() * value, tail

    def __init__(self, d_model: int, **kwargs: Any) -> None:
        super().__init__(d_model, **kwargs)
        self.gain = nn.Parameter(torch.empty(d_model))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if hasattr(self, "gain"):
            nn.init.zeros_(self.gain)


class UnusedParameter(DeadParameter):
    """A parameter is not used."""

    def convolve(self, value: Tensor, tail: Tensor) -> tuple[Tensor, Tensor]:
        return ToyEMA.convolve(self, value, tail)


class HalfTheBytes(ToyEMA):
    """``state_bytes`` is that of another precision."""

    def state_bytes(self, T: int, dtype: torch.dtype = torch.float32) -> int:
        return super().state_bytes(T, dtype) // 2


class ClaimsConstantState(ToyAttention):
    """A cache that grows is tagged constant."""

    tags = Tags(constant_state=True)


class ClaimsRecurrent(ToyAttention):
    """Attention over all keys is tagged recurrent."""

    tags = Tags(recurrent=True)


class ForgetsProjections(ToyEMA):
    """``flops`` counts the recurrence alone."""

    def flops(self, T: int) -> int:
        return super().flops(T) - 6 * T * self.d_model**2


class AttentionFormula(ToyEMA):
    """``flops`` is that of attention."""

    def flops(self, T: int) -> int:
        return super().flops(T) + 2 * T * (T + 1) * self.d_model


class CannotBeBuilt(ToyEMA):
    """The constructor raises."""

    def __init__(self, d_model: int, **kwargs: Any) -> None:
        super().__init__(d_model, **kwargs)
        raise KeyError("an option")


class BreaksGraph(ToyEMA):
    """Python in the middle of the graph, although the tags promise one graph."""

    def log_decay(self, gate: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return super().log_decay(gate)


@dataclass(frozen=True)
class Broken:
    """A fault and exactly the checks that notice it; the first is the one that the fault is made for."""

    mixer: type[TokenMixer]
    noticed_by: tuple[str, ...]
    d_model: int = 8


BROKEN = (
    Broken(NaNGradientAtChunk, ("check_lengths",)),
    Broken(RoundingLeak, ("check_causality",)),
    Broken(
        GrossLeak,
        (
            "check_causality",
            "check_causality_gradients",
            "check_state_split",
            "check_step_by_step",
            "check_state_split_gradients",
            "check_state_batch_first",
            "check_right_padding",
            "check_reduced_precision",
        ),
    ),
    Broken(GradientLeak, ("check_causality_gradients", "check_state_split_gradients")),
    Broken(ForgetsTail, ("check_state_split",)),
    Broken(ForgetsAverage, ("check_state_split",)),
    Broken(WrongFastPath, ("check_step_by_step",)),
    Broken(DetachesTail, ("check_state_split_gradients",)),
    Broken(TimeFirstState, ("check_state_batch_first",)),
    Broken(LowersState, ("check_state_dtype", "check_state_bytes")),
    Broken(IgnoresParameterDtype, ("check_state_dtype",)),
    Broken(StateOfOwnClass, ("check_state_save",)),
    Broken(ConvolvesAcross, ("check_packed_documents", "check_packed_gradients")),
    Broken(PackedGradient, ("check_packed_gradients",)),
    Broken(IgnoresBoundaries, ("check_refuses_what_tags_deny",)),
    Broken(AcceptsAnyDtype, ("check_refuses_what_tags_deny",)),
    Broken(ChecksNothing, ("check_refuses_bad_arguments",)),
    Broken(DropsOldest, ("check_refuses_overflow",)),
    Broken(GuessesLength, ("check_right_padding",)),
    Broken(BatchMean, ("check_batch",)),
    Broken(LosesGradientAlone, ("check_batch",)),
    Broken(AssumesUnitStride, ("check_non_contiguous",)),
    Broken(ClobbersBoundaries, ("check_nothing_mutated",)),
    Broken(NoisyGradient, ("check_determinism",)),
    Broken(RemembersLastCall, ("check_determinism", "check_causality", "check_state_save", "check_copies")),
    Broken(WrongGradient, ("check_gradcheck",)),
    Broken(ClipsGradient, ("check_straight_through",)),
    Broken(RoundsFloat32, ("check_reduced_precision",)),
    Broken(RoundsState, ("check_reduced_precision",)),
    Broken(SkipsBias, ("check_meta_initialisation",)),
    Broken(PlainTensor, ("check_meta_initialisation",)),
    Broken(SkipsReset, ("check_constructor_initialises",), d_model=32),  # enough values to tell distributions apart
    Broken(RandomBufferNotSaved, ("check_state_dict",)),
    Broken(HoldsLambda, ("check_copies",)),
    Broken(UnusedParameter, ("check_parameter_gradients",)),
    Broken(DeadParameter, ("check_parameter_gradients", "check_gradcheck")),
    Broken(HalfTheBytes, ("check_state_bytes",)),
    Broken(ClaimsConstantState, ("check_constant_state",)),
    Broken(ClaimsRecurrent, ("check_recurrent",)),
    Broken(ForgetsProjections, ("check_flops",)),
    Broken(AttentionFormula, ("check_flops",)),
    Broken(BreaksGraph, ("check_compile",)),
)
