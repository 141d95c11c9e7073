"""Comparing backends: agreement, a wrong value, a wrong gradient, a crash, and a refusal are told apart."""

from functools import partial

import pytest
import torch
from torch import nn

from seqarch import Backend
from seqarch.cli import main
from seqarch.mixer import TORCH, TokenMixer
from seqarch.testing.backends import compare_backends
from seqarch_attention import Attention


class _WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):  # pyright: ignore
        return 1.01 * grad


class Running(TokenMixer):
    """The mean of the tokens so far, in several backends."""

    backends = (
        *(Backend(name) for name in ("value", "gradient", "crash", "nan")),
        Backend("absent", ("no_such_package",)),
        TORCH,
    )

    def __init__(self, d_model, *, layer_idx=0, n_layers=1, backend="auto"):
        super().__init__(d_model, layer_idx=layer_idx, n_layers=n_layers, backend=backend)
        self.proj = nn.Linear(d_model, d_model, bias=False)
        self.tags = type(self.tags)(packs_documents=False)

    def forward(self, x, *, cu_seqlens=None, state=None):
        self.check_input(x, cu_seqlens, state)
        backend = self.choose_backend(x)
        if backend == "crash":
            raise RuntimeError("out of resource: shared memory\nRequired: 300000")
        y = self.proj(x).cumsum(1) / torch.arange(1, x.shape[1] + 1, device=x.device)[:, None]
        if backend == "gradient":
            y = _WrongGradient.apply(y)
        if backend == "nan":
            y = y * float("nan")
        return y * (1.001 if backend == "value" else 1.0), None

    def reset_parameters(self):
        self.proj.reset_parameters()

    def init_state(self, batch_size, max_len, device=None, dtype=None):
        return {}

    def flops(self, T):
        return 0


def test_every_kind_of_fault_is_named():
    found = {c.backend: c for c in compare_backends(Running, "cpu", d_model=16)}
    assert [name for name, c in found.items() if c.wrong] == ["value", "gradient", "crash", "nan"]
    assert found["value"].output == pytest.approx(1e-3, rel=0.01)
    assert found["gradient"].output < 1e-6
    assert found["gradient"].gradient == pytest.approx(1e-2, rel=0.01)
    assert found["crash"].reason == "RuntimeError: out of resource: shared memory"
    assert (found["absent"].dtype, "no_such_package is not installed" in found["absent"].reason) == (None, True)
    assert found["torch"].output < 1e-6


def test_a_mixer_that_cannot_be_built_is_one_entry():
    (found,) = compare_backends(partial(Attention, n_heads=5), "cpu", d_model=32)
    assert (found.dtype, found.wrong) == (None, False)
    assert "cannot be built with its defaults: ValueError: n_heads (5) must divide d_model (32)" in found.reason


def test_attention_agrees_and_says_what_is_missing():
    found = {c.backend: c for c in compare_backends(partial(Attention, n_heads=2), "cpu", d_model=32)}
    assert not any(c.wrong for c in found.values())
    assert 0 < found["torch"].output < 1e-5
    assert "flash_attn is not installed" in found["flash_attn"].reason


def test_the_command_prints_a_table(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    main(["doctor", "--device", "cpu", "--mixer", "Attention"])
    out = capsys.readouterr().out
    assert "torch 2." in out
    row = next(line for line in out.splitlines() if "float32" in line)
    assert "agrees" in row


def test_the_command_fails_where_a_backend_is_wrong(capsys, monkeypatch):
    monkeypatch.setattr("seqarch.discovery.find", lambda name: Running)
    with pytest.raises(SystemExit) as exit_:
        main(["doctor", "--device", "cpu", "--mixer", "Running"])
    assert exit_.value.code == 1
    assert "Do not use Running's value, Running's gradient, Running's crash, Running's nan here" in " ".join(
        capsys.readouterr().out.split()
    )
