"""fla's real Triton kernels, in Triton's interpreter, against the torch op: values and gradients."""

from itertools import pairwise

import pytest
import torch

from seqarch.ops.delta_rule import delta_rule
from tests.interpreter import interpreted
from tests.ops.test_delta_rule import assert_all_close, grads_for, inputs

NAMES = ("q", "k", "v", "beta", "g", "initial_state")


def arguments(T, decay, B=1):
    return {
        n: None if t is None else t.detach().requires_grad_()
        for n, t in zip(NAMES, inputs(T, B, H=2, K=16, V=16, decay=decay, dtype=torch.float32), strict=True)
    }


def ours(arguments, grads):
    outputs = delta_rule(**arguments)
    leaves = {n: t for n, t in arguments.items() if isinstance(t, torch.Tensor) and t.requires_grad}
    return outputs, dict(zip(leaves, torch.autograd.grad(outputs, list(leaves.values()), grads), strict=True))


def test_gated_delta_rule():
    kwargs = arguments(70, decay=0.5)
    grads = grads_for(list(kwargs.values()))
    outputs, gradients = interpreted("seqarch_deltanet.backends:fla_delta_rule", kwargs, grads)
    expected, expected_gradients = ours(kwargs, grads)
    assert_all_close(outputs, expected, 1e-4)
    assert gradients.keys() == expected_gradients.keys()
    assert_all_close(gradients.values(), expected_gradients.values(), 1e-4)


def test_gated_delta_rule_packed():
    bounds = [0, 5, 6, 40]
    kwargs = arguments(bounds[-1], decay=0.5)
    del kwargs["initial_state"]
    packed = kwargs | {"cu_seqlens": torch.tensor(bounds, dtype=torch.int32)}
    grads = [torch.randn(kwargs["v"].shape, generator=torch.Generator().manual_seed(1)), torch.zeros(1, 2, 16, 16)]
    (o, state), gradients = interpreted("seqarch_deltanet.backends:fla_delta_rule", packed, grads)
    expected, expected_gradients = ours(packed, grads)
    assert_all_close((o, state), expected, 1e-4)
    assert_all_close(gradients.values(), expected_gradients.values(), 1e-4)
    # And not by chance: every document alone.
    for a, b in pairwise(bounds):
        alone = delta_rule(**{n: t[:, a:b] for n, t in kwargs.items()})[0]
        assert_all_close([o[:, a:b]], [alone], 1e-4)


def test_delta_rule_step_kernel():
    """The chunk kernel takes no float32, and the interpreter's bfloat16 is not reliable: fla's recurrent kernel."""
    kwargs = arguments(20, decay=None)
    del kwargs["g"]
    grads = grads_for([None, None, kwargs["v"], None, None, kwargs["initial_state"]])
    outputs, gradients = interpreted(
        "fla.ops.delta_rule:fused_recurrent_delta_rule", kwargs | {"output_final_state": True}, grads
    )
    expected, expected_gradients = ours(kwargs, grads)
    assert_all_close(outputs, expected, 1e-4)
    assert_all_close(gradients.values(), expected_gradients.values(), 1e-4)


@pytest.mark.filterwarnings("ignore:Triton is not supported on current platform")
@pytest.mark.parametrize("packed", [False, True])
def test_delta_rule_adapter(monkeypatch, packed):
    """What the adapter hands to fla's chunk kernel, whose other name takes the same arguments and float32."""
    fla = pytest.importorskip("fla.ops.delta_rule")
    calls = []

    def kernel(**kwargs):
        calls.append(kwargs)
        assert kwargs.pop("output_final_state")
        assert kwargs["beta"].dtype == kwargs["q"].dtype
        cu_seqlens = kwargs.pop("cu_seqlens", None)
        o, state = delta_rule(**kwargs, cu_seqlens=cu_seqlens)
        n = 1 if cu_seqlens is None else len(cu_seqlens) - 1
        return o, torch.cat([torch.zeros_like(state)] * (n - 1) + [state])

    monkeypatch.setattr(fla, "chunk_delta_rule", kernel)
    from seqarch_deltanet.backends import fla_delta_rule

    kwargs = {n: t.detach() for n, t in arguments(20, decay=None).items() if t is not None}
    if packed:
        kwargs |= {"initial_state": None, "cu_seqlens": torch.tensor([0, 7, 20], dtype=torch.int32)}
    assert_all_close(fla_delta_rule(**kwargs), delta_rule(**kwargs), 1e-6)
    assert len(calls) == 1
