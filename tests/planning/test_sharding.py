"""What each process keeps, against FSDP2 itself on a process group that only pretends to communicate."""

import math
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from seqarch.model import SequenceModel, SwiGLU
from seqarch.planning.sharding import Sharding, buffers, kept, traffic
from seqarch_attention import Attention

D, V, L = 24, 100, 2


def build():
    with torch.device("meta"):
        return SequenceModel(V, D, L, partial(Attention, n_heads=2), partial(SwiGLU, d_ff=52))


@pytest.fixture
def pretended(request):
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=request.param)
    yield request.param
    dist.destroy_process_group()


def bytes_of(tensors):
    return sum(t.numel() * t.element_size() for t in tensors)


@pytest.mark.parametrize("pretended", [1, 3, 8], indirect=True)
def test_kept_bytes_are_exact(pretended):
    model, mesh = build(), init_device_mesh("cpu", (pretended,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model.materialise("cpu", 0, partial(fully_shard, mesh=mesh, mp_policy=policy))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    ids = torch.zeros(1, 8, dtype=torch.int64)
    model(ids, labels=ids).objective.backward()
    for p in model.parameters():
        torch.nan_to_num_(p.grad.to_local())
    optimizer.step()
    parameters = [p.to_local() for p in model.parameters()]
    planned = kept(build(), pretended)
    assert planned.weights == bytes_of(parameters)
    assert planned.gradients == bytes_of(p.grad.to_local() for p in model.parameters())
    states = [t for state in optimizer.state.values() for t in state.values()]
    assert planned.optimizer == bytes_of(getattr(t, "_local_tensor", t) for t in states)


def test_one_process_keeps_all_of_adamw():
    model = build()
    model.materialise("cpu", 0)
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.zeros(1, 8, dtype=torch.int64)
    model(ids, labels=ids).objective.backward()
    optimizer.step()
    planned = kept(build(), 1)
    assert planned.weights == bytes_of(model.parameters())
    assert planned.gradients == bytes_of(p.grad for p in model.parameters())
    assert planned.optimizer == bytes_of(t for state in optimizer.state.values() for t in state.values())


def block_elements():
    return 4 * D * D + 3 * D * 52 + 2 * D


def test_buffers():
    block, root = block_elements(), V * D + D
    sharding = Sharding(4, 1, True, torch.bfloat16)
    assert buffers(build(), sharding) == 2 * 2 * root + 2 * 2 * block + 2 * block + 4 * block
    kept_whole = Sharding(4, 1, True, torch.bfloat16, reshard=False)
    assert buffers(build(), kept_whole) == 2 * 2 * root + L * 2 * block + 2 * block + 4 * block
    assert buffers(build(), Sharding()) == 0
    assert buffers(build(), Sharding(replicas=2)) == 4 * (L * block + root)


def test_traffic():
    elements = L * block_elements() + V * D + D
    sent = traffic(build(), Sharding(4, 2, True, torch.bfloat16), accumulation=3)
    assert sent.gather == pytest.approx(3 * 2 * 0.75 * 2 * elements)  # both passes, three quarters from elsewhere, bf16
    assert sent.scatter == pytest.approx(3 * 0.75 * 4 * elements)
    assert sent.replicate == pytest.approx(3 * 4 * elements / 4)  # a ring of two sends a half twice
    assert traffic(build(), Sharding(), 1).replicate == 0
    assert math.isclose(traffic(build(), Sharding(replicas=4), 5).replicate, 4 * 1.5 * elements)
