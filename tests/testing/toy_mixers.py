"""Small mixers that keep the contract; the broken ones derive from them.

Shape legend: B batch, T tokens, S keys (S ≥ T), D model width, H heads, C chunk size.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seqarch.mixer import State, Tags, TokenMixer, keep_float32, no_weight_decay


class ToyAttention(TokenMixer):
    """Causal softmax attention, scores written out, with a preallocated cache."""

    def __init__(
        self, d_model: int, *, layer_idx: int = 0, n_layers: int = 1, n_heads: int = 2, backend: str = "auto"
    ) -> None:
        super().__init__(d_model, layer_idx=layer_idx, n_layers=n_layers, backend=backend)
        self.n_heads = n_heads
        self.qkv_proj = nn.Linear(d_model, 3 * d_model, bias=False)
        self.o_proj = nn.Linear(d_model, d_model, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.qkv_proj.weight, std=self.d_model**-0.5)
        nn.init.zeros_(self.o_proj.weight)

    def weights(self, scores: Tensor) -> Tensor:
        return scores.softmax(dim=-1)

    def forward(
        self, x: Tensor, *, cu_seqlens: Tensor | None = None, state: State | None = None
    ) -> tuple[Tensor, State | None]:
        self.check_input(x, cu_seqlens, state)
        B, T, D = x.shape
        q, k, v = self.qkv_proj(x).view(B, T, 3, self.n_heads, -1).permute(2, 0, 3, 1, 4)
        if state is not None:
            k, v, state = self.extend(k, v, state)
        S = k.shape[2]
        i, j = torch.arange(S - T, S)[:, None], torch.arange(S)
        visible = j <= i
        if cu_seqlens is not None:
            document = torch.repeat_interleave(torch.arange(len(cu_seqlens) - 1), cu_seqlens.diff())
            visible = visible & (document[:, None] == document)
        scores = (q @ k.transpose(2, 3) * (D // self.n_heads) ** -0.5).masked_fill(~visible, float("-inf"))
        o = self.weights(scores) @ v
        return self.o_proj(o.transpose(1, 2).reshape(B, T, D)), state

    def extend(self, k: Tensor, v: Tensor, state: State) -> tuple[Tensor, Tensor, State]:
        start = int(state["pos"][0])
        end, room = start + k.shape[2], state["k"].shape[2]
        if end > room:
            raise ValueError(f"the state has room for max_len = {room} tokens, not for {end}")
        new = {
            "k": state["k"].slice_scatter(k, dim=2, start=start, end=end),
            "v": state["v"].slice_scatter(v, dim=2, start=start, end=end),
            "pos": state["pos"] + k.shape[2],
        }
        return new["k"][:, :, :end], new["v"][:, :, :end], new

    def init_state(
        self,
        batch_size: int,
        max_len: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> State:
        shape = (batch_size, self.n_heads, max_len, self.d_model // self.n_heads)
        dtype = dtype or self.o_proj.weight.dtype
        return {
            "k": torch.zeros(shape, device=device, dtype=dtype),
            "v": torch.zeros(shape, device=device, dtype=dtype),
            "pos": torch.zeros(batch_size, device=device, dtype=torch.int64),
        }

    def flops(self, T: int) -> int:
        return 8 * T * self.d_model**2 + 2 * T * (T + 1) * self.d_model


class ToySelection(ToyAttention):
    """Each query takes the value of its best key alone; the gradient is that of the softmax (straight-through)."""

    tags = Tags(packs_documents=False, straight_through=True, discontinuous=True)

    def weights(self, scores: Tensor) -> Tensor:
        soft = scores.softmax(dim=-1)
        hard = F.one_hot(scores.argmax(dim=-1), scores.shape[-1]).to(soft.dtype)
        return hard + (soft - soft.detach())


class ToyEMA(TokenMixer):
    """Gated exponential moving average behind a short convolution, in chunks of C.

    u = conv(value), a = σ(gate) ^ exp(rate), h_t = a_t h_{t-1} + (1 - a_t) u_t, y = out(h).
    """

    kernel = 4

    def __init__(
        self, d_model: int, *, layer_idx: int = 0, n_layers: int = 1, chunk_size: int = 8, backend: str = "auto"
    ) -> None:
        super().__init__(d_model, layer_idx=layer_idx, n_layers=n_layers, backend=backend)
        self.tags = Tags(recurrent=True, constant_state=True, chunk_size=chunk_size)
        self.chunk_size = chunk_size
        self.in_proj = nn.Linear(d_model, 2 * d_model, bias=False)
        self.conv = nn.Parameter(torch.empty(self.kernel, d_model))
        self.conv_bias = nn.Parameter(torch.empty(d_model))
        self.rate = keep_float32(no_weight_decay(nn.Parameter(torch.empty(d_model))))
        self.register_buffer("floor", torch.empty(d_model))
        self.out_proj = nn.Linear(d_model, d_model, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.in_proj.weight, std=self.d_model**-0.5)
        nn.init.normal_(self.conv, std=0.5)
        nn.init.zeros_(self.conv_bias)
        nn.init.uniform_(self.rate, -1.0, 1.0)
        nn.init.constant_(self.get_buffer("floor"), -8.0)
        nn.init.normal_(self.out_proj.weight, std=self.d_model**-0.5)

    def forward(
        self, x: Tensor, *, cu_seqlens: Tensor | None = None, state: State | None = None
    ) -> tuple[Tensor, State | None]:
        self.check_input(x, cu_seqlens, state)
        if cu_seqlens is not None:
            return self.packed(x, cu_seqlens.tolist()), None
        carried = self.init_state(x.shape[0], 0, x.device, x.dtype) if state is None else state
        y, carried = self.sequence(x, carried)
        return y, None if state is None else carried

    def packed(self, x: Tensor, bounds: list[int]) -> Tensor:
        documents = [x[:, a:b] for a, b in pairwise(bounds) if b > a]
        return torch.cat([self.sequence(d, self.init_state(1, 0, x.device, x.dtype))[0] for d in documents], dim=1)

    def sequence(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        value, gate = self.in_proj(x).chunk(2, dim=-1)
        u, tail = self.convolve(value, state["tail"])
        log_a = self.log_decay(gate)
        h, last = self.scan(log_a, u.to(log_a.dtype), state["h"].to(log_a.dtype))
        return self.out_proj(h.to(x.dtype)), {"h": last.to(state["h"].dtype), "tail": tail}

    def convolve(self, value: Tensor, tail: Tensor) -> tuple[Tensor, Tensor]:
        T, every = value.shape[1], torch.cat((tail, value), dim=1)
        u = sum((every[:, i : i + T] * self.conv[i] for i in range(self.kernel)), self.conv_bias)
        return torch.as_tensor(u), every[:, every.shape[1] - tail.shape[1] :]

    def log_decay(self, gate: Tensor) -> Tensor:
        wide = gate.to(torch.promote_types(gate.dtype, torch.float32))
        return F.logsigmoid(wide) * self.rate.exp() + self.get_buffer("floor").exp() * -1.0

    def scan(self, log_a: Tensor, u: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        """All of h ``[B, T, D]`` and the last ``[B, D]``."""
        out = []
        for log_c, u_c in zip(log_a.split(self.chunk_size, dim=1), u.split(self.chunk_size, dim=1), strict=True):
            total = log_c.cumsum(dim=1)
            later = torch.ones(log_c.shape[1], log_c.shape[1], dtype=torch.bool).tril()[:, :, None]
            decay = (total[:, :, None] - total[:, None]).masked_fill(~later, float("-inf")).exp()
            inside = (decay * ((1 - log_c.exp()) * u_c)[:, None]).sum(dim=2)
            out.append(inside + total.exp() * h[:, None])
            h = out[-1][:, -1]
        return torch.cat(out, dim=1), h

    def init_state(
        self,
        batch_size: int,
        max_len: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> State:
        """``h`` ``[B, D]``, float32 at least, and ``tail`` ``[B, kernel - 1, D]``, the convolution's last inputs."""
        dtype = dtype or self.out_proj.weight.dtype
        wide = torch.promote_types(dtype, torch.float32)
        return {
            "h": torch.zeros(batch_size, self.d_model, device=device, dtype=wide),
            "tail": torch.zeros(batch_size, self.kernel - 1, self.d_model, device=device, dtype=dtype),
        }

    def flops(self, T: int) -> int:
        return T * self.d_model * (6 * self.d_model + 2 * self.kernel + 6)


class ToySharing(ToyEMA):
    """The moving average of an input to which later layers add layer 0's input, taken from the context."""

    def __init__(self, d_model: int, *, layer_idx: int = 0, n_layers: int = 1, backend: str = "auto") -> None:
        super().__init__(d_model, layer_idx=layer_idx, n_layers=n_layers, backend=backend)
        self.tags = Tags(recurrent=True, constant_state=True, chunk_size=8, shares_context=True)

    def forward(
        self,
        x: Tensor,
        *,
        cu_seqlens: Tensor | None = None,
        state: State | None = None,
        context: dict[str, Tensor] | None = None,
    ) -> tuple[Tensor, State | None]:
        assert context is not None
        if self.layer_idx > 0:
            return super().forward(x + context["first"], cu_seqlens=cu_seqlens, state=state)
        context["first"] = x.sin()
        return super().forward(x, cu_seqlens=cu_seqlens, state=state)
