"""RWKV's channel mix: its formula, fla's parameters, documents and state."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from seqarch.model import SequenceModel
from seqarch.model.init import marked
from seqarch_rwkv import RWKV6, RWKV7, RWKVChannelMix

D = 32
X = torch.randn(2, 9, D, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
SHIFTED = F.pad(X, (0, 0, 1, -1))


def build(**options):
    torch.manual_seed(0)
    mixer = RWKVChannelMix(D, **options).double()
    with torch.no_grad():
        for p in mixer.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return mixer


def test_formula_with_a_gate():
    mixer = build()
    k = mixer.key.linear(X + (SHIFTED - X) * mixer.key.mu)
    r = mixer.receptance.linear(X + (SHIFTED - X) * mixer.receptance.mu)
    torch.testing.assert_close(mixer(X)[0], r.sigmoid() * mixer.value(k.clamp(min=0) ** 2))


def test_formula_without_a_gate():
    mixer = build(gate=False)
    k = mixer.key(X + (SHIFTED - X) * mixer.x_k)
    torch.testing.assert_close(mixer(X)[0], mixer.value(k.clamp(min=0) ** 2))


@pytest.mark.parametrize(("gate", "width"), [(True, 224), (False, 256)])
def test_width_and_flops(gate, width):
    mixer = RWKVChannelMix(64, gate=gate)
    assert mixer.d_ff == width
    assert mixer.flops(10) == 2 * 10 * sum(p.numel() for p in mixer.parameters() if p.ndim == 2)
    assert RWKVChannelMix(36, gate=gate).d_ff == (128 if gate else 160)
    with pytest.raises(ValueError, match="d_ff must be at least 1"):
        RWKVChannelMix(D, d_ff=0, gate=gate)


def test_mixes_are_not_decayed_and_stay_float32():
    for gate, names in ((True, {"key.mu", "receptance.mu"}), (False, {"x_k"})):
        assert marked(build(gate=gate), "_no_weight_decay") == names
        assert marked(build(gate=gate), "_keep_float32") == names


@pytest.mark.parametrize(
    ("module", "name", "gate"),
    [("rwkv6", "RWKV6FeedForward", True), ("rwkv7", "RWKV7FeedForward", False)],
)
def test_state_dicts_of_fla_load_both_ways(module, name, gate):
    models = pytest.importorskip(f"fla.models.{module}.modeling_{module}")
    theirs = getattr(models, name)(D, layer_idx=1, **({} if gate else {"num_hidden_layers": 3}))
    ours = RWKVChannelMix(D, gate=gate)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    theirs.load_state_dict(ours.state_dict(), strict=True)


@pytest.mark.parametrize(
    ("mixer", "gate"), [(partial(RWKV6, n_heads=2), True), (partial(RWKV7, n_heads=2), False)], ids=["rwkv6", "rwkv7"]
)
def test_in_a_model_documents_stay_apart_and_pieces_are_the_whole(mixer, gate):
    with torch.device("meta"):
        model = SequenceModel(50, D, 2, mixer, partial(RWKVChannelMix, gate=gate))
    model.materialise("cpu", seed=0)
    model.double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn(p.shape, generator=generator, dtype=p.dtype))
        ids = torch.randint(50, (1, 70), generator=generator)
        packed, _ = model(ids, cu_seqlens=torch.tensor([0, 1, 38, 70], dtype=torch.int32))
        alone = [model(piece)[0] for piece in ids.split([1, 37, 32], dim=1)]
        torch.testing.assert_close(packed, torch.cat(alone, 1))

        whole, _ = model(ids)
        assert (whole - packed).abs().max() > 1e-3  # the documents do differ from one sequence
        state, pieces = model.init_state(1, 70), []
        for piece in ids.split([1, 1, 36, 32], dim=1):
            y, state = model(piece, state=state)
            pieces.append(y)
        torch.testing.assert_close(torch.cat(pieces, 1), whole)
