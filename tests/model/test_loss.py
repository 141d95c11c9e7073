"""The chunked loss against torch's cross-entropy on whole logits."""

import pytest
import torch
import torch.nn.functional as F

from seqarch.model import loss as loss_module
from seqarch.model.loss import linear_cross_entropy, token_nll


def plain(hidden, weight, labels, z_loss):
    logits = F.linear(hidden, weight)
    nll = F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")
    z = (logits.logsumexp(-1).square() * (labels != -100)).sum()
    return nll + z_loss * z, nll


def example(n=37, d=8, v=100, dtype=torch.float64):
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(n, d, generator=g, dtype=dtype, requires_grad=True)
    weight = torch.randn(v, d, generator=g, dtype=dtype, requires_grad=True)
    labels = torch.randint(0, v, (n,), generator=g)
    labels[::5] = -100
    return hidden, weight, labels


@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
@pytest.mark.parametrize("chunk", [1, 100 * 64, 10**9])  # one chunk has at least 64 tokens
def test_values_and_gradients_are_those_of_whole_logits(monkeypatch, z_loss, chunk):
    monkeypatch.setattr(loss_module, "_LOGITS", chunk)
    hidden, weight, labels = example(n=150)
    total, nll = linear_cross_entropy(hidden, weight, labels, z_loss=z_loss)
    expected_total, expected_nll = plain(hidden, weight, labels, z_loss)
    torch.testing.assert_close(total, expected_total)
    torch.testing.assert_close(nll, expected_nll)
    ours = torch.autograd.grad(total * 0.3, (hidden, weight))
    theirs = torch.autograd.grad(expected_total * 0.3, (hidden, weight))
    torch.testing.assert_close(ours, theirs)
    assert not nll.requires_grad


def test_gradcheck():
    hidden, weight, labels = example(n=5, d=3, v=7)
    assert torch.autograd.gradcheck(lambda h, w: linear_cross_entropy(h, w, labels, z_loss=1e-2)[0], (hidden, weight))


def test_only_the_gradients_that_are_asked_for():
    hidden, weight, labels = example()
    total, _ = linear_cross_entropy(hidden, weight.detach(), labels)
    (grad,) = torch.autograd.grad(total, hidden)
    torch.testing.assert_close(grad, torch.autograd.grad(plain(hidden, weight, labels, 0.0)[0], hidden)[0])
    with torch.no_grad():
        torch.testing.assert_close(
            linear_cross_entropy(hidden, weight, labels)[0], plain(hidden, weight, labels, 0.0)[0]
        )


def test_half_precision_accumulates_in_float32():
    hidden, weight, labels = example(n=400, dtype=torch.float64)
    low_h, low_w = (t.detach().bfloat16().requires_grad_() for t in (hidden, weight))
    total, _ = linear_cross_entropy(low_h, low_w, labels)
    assert total.dtype == torch.float32
    expected, _ = plain(low_h.double(), low_w.double(), labels, 0.0)
    assert abs(total.item() / expected.item() - 1) < 3e-3
    grads = torch.autograd.grad(total, (low_h, low_w))
    expected_grads = torch.autograd.grad(expected, (low_h, low_w))
    for ours, theirs in zip(grads, expected_grads, strict=True):
        assert ours.dtype == torch.bfloat16
        assert ((ours - theirs).float().norm() / theirs.float().norm()).item() < 1e-2


def test_autocast_computes_in_the_reduced_precision_and_returns_full_gradients():
    hidden, weight, labels = example(dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        total, _ = linear_cross_entropy(hidden, weight, labels)
    grads = torch.autograd.grad(total, (hidden, weight))
    expected, _ = plain(hidden.bfloat16().float(), weight.bfloat16().float(), labels, 0.0)
    assert grads[0].dtype == grads[1].dtype == torch.float32
    assert abs(total.item() / expected.item() - 1) < 1e-2


def test_token_nll_is_per_label_and_zero_where_ignored():
    hidden, weight, labels = example()
    expected = F.cross_entropy(F.linear(hidden, weight), labels, reduction="none", ignore_index=-100)
    nll = token_nll(hidden, weight, labels)
    torch.testing.assert_close(nll, expected.detach())
    assert (nll[::5] == 0).all()
    assert not nll.requires_grad


def test_logits_are_never_whole():
    """The largest tensor that is made has the size of a chunk of logits, or of the weight, not N · V."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        size = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for t in out if isinstance(out, tuple | list) else [out]:
                if isinstance(t, torch.Tensor):
                    Largest.size = max(Largest.size, t.untyped_storage().nbytes() // t.element_size())
            return out

    n, v = 8192, 4096
    hidden, weight = torch.randn(n, 4, requires_grad=True), torch.randn(v, 4, requires_grad=True)
    with Largest():
        total, _ = linear_cross_entropy(hidden, weight, torch.zeros(n, dtype=torch.int64))
        total.backward()
    assert Largest.size == loss_module._LOGITS < n * v
