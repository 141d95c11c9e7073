"""The contract's own refusals and choices."""

import pytest
import torch
from torch import nn

from seqarch import Backend, Tags, TokenMixer, keep_float32, no_weight_decay
from seqarch.mixer import TORCH


class Identity(TokenMixer):
    backends = (Backend("fast", device="cuda"), Backend("absent", ("no_such_package",), extra="cuda"), TORCH)

    def forward(self, x, *, cu_seqlens=None, state=None):
        self.check_input(x, cu_seqlens, state)
        return x, state

    def reset_parameters(self):
        pass

    def init_state(self, batch_size, max_len, device=None, dtype=None):
        return {"a": torch.zeros(batch_size, max_len, device=device, dtype=dtype)}

    def flops(self, T):
        return 0


X = torch.zeros(1, 4, 8)


def cu(*bounds, dtype=torch.int32):
    return torch.tensor(bounds, dtype=dtype)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.zeros(4, 8), None, None), r"x must be \[B, T, 8\], got \[4, 8\]"),
        ((torch.zeros(1, 4, 7), None, None), r"x must be \[B, T, 8\]"),
        ((torch.zeros(2, 4, 8), cu(0, 4), None), "batch of 1"),
        ((X, cu(0, 4), {}), "cannot be given together"),
        ((X, cu(0, 4, dtype=torch.int64), None), "must be int32"),
        ((X, cu(0), None), "must be int32"),
        ((X, cu(0, 3), None), "must rise from 0 to T = 4"),
        ((X, cu(1, 4), None), "must rise from 0 to T = 4"),
        ((X, cu(0, 3, 2, 4), None), "must rise from 0 to T = 4"),
    ],
)
def test_input_that_breaks_the_contract_is_refused(arguments, message):
    x, cu_seqlens, state = arguments
    with pytest.raises(ValueError, match=message):
        Identity(8)(x, cu_seqlens=cu_seqlens, state=state)


def test_packing_is_refused_where_the_tags_deny_it():
    mixer = Identity(8)
    mixer.tags = Tags(packs_documents=False)
    with pytest.raises(ValueError, match="Identity cannot keep packed documents apart"):
        mixer(X, cu_seqlens=cu(0, 4))


def test_auto_takes_the_first_backend_that_can_serve():
    assert Identity(8).choose_backend(X) == "torch"


def test_a_backend_that_cannot_serve_is_an_error_with_the_reason():
    with pytest.raises(ValueError, match="backend='fast' cannot be used: needs a cuda device, not cpu"):
        Identity(8, backend="fast").choose_backend(X)
    with pytest.raises(ValueError, match=r"no_such_package is not installed: pip install 'seqarch\[cuda\]'"):
        Identity(8, backend="absent").choose_backend(X)
    with pytest.raises(ValueError, match="must be one of auto, fast, absent, torch for Identity, got 'fats'"):
        Identity(8, backend="fats")


def test_state_bytes_are_counted_without_allocating():
    assert Identity(8).state_bytes(10**12, torch.bfloat16) == 2 * 10**12


def test_marks():
    p = keep_float32(no_weight_decay(nn.Parameter(torch.zeros(1))))
    assert p._no_weight_decay
    assert p._keep_float32


def test_d_model_is_checked():
    with pytest.raises(ValueError, match="d_model must be at least 1"):
        Identity(0)
