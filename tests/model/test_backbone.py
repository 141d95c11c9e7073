"""The backbone: shapes, losses, state, initial values, checkpointing."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from seqarch.mixer import Tags, TokenMixer, no_weight_decay
from seqarch.model import SequenceModel, SwiGLU
from seqarch.model.init import cast_parameters, reset


class Mean(TokenMixer):
    """Running mean of a projection, with a gain; shares its first layer's output through the context."""

    def __init__(self, d_model, *, layer_idx=0, n_layers=1, share=False):
        super().__init__(d_model, layer_idx=layer_idx, n_layers=n_layers)
        self.tags = Tags(recurrent=True, constant_state=True, shares_context=share)
        self.proj = nn.Linear(d_model, d_model, bias=False)
        self.gain = no_weight_decay(nn.Parameter(torch.empty(d_model, d_model)))
        self.reset_parameters()

    def reset_parameters(self):
        nn.init.normal_(self.proj.weight)
        nn.init.eye_(self.gain)

    def forward(self, x, *, cu_seqlens=None, state=None, context=None):
        self.check_input(x, cu_seqlens, state)
        total = self.proj(x).cumsum(1)
        count = torch.arange(1, x.shape[1] + 1, dtype=x.dtype)[None, :, None].expand(len(x), -1, 1)
        if state is not None:
            total, count = total + state["total"], count + state["count"]
            state = {"total": total[:, -1:], "count": count[:, -1:]}
        y = total / count @ self.gain
        if context is not None:
            y = y + context.setdefault("first", y)
        return y, state

    def init_state(self, batch_size, max_len, device=None, dtype=None):
        return {"total": torch.zeros(batch_size, 1, self.d_model), "count": torch.zeros(batch_size, 1, 1)}

    def flops(self, T):
        return 4 * T * self.d_model**2


def build(seed=0, mixer=Mean, channel_mixer=SwiGLU, **options):
    with torch.device("meta"):
        model = SequenceModel(50, 16, 3, mixer, channel_mixer, **options)
    model.materialise("cpu", seed)
    return model


IDS = torch.randint(0, 50, (2, 11), generator=torch.Generator().manual_seed(0))


def test_embedding_std_is_that_of_the_embedding_alone():
    small, large = build(tie_embeddings=False), build(tie_embeddings=False, embedding_std=1.0)
    torch.testing.assert_close(large.embedding.weight, 50 * small.embedding.weight)
    assert torch.equal(large.head.weight, small.head.weight)
    assert small.head.weight.std().item() == pytest.approx(0.02, rel=0.1)
    with pytest.raises(ValueError, match="embedding_std must be above 0, got 0"):
        build(embedding_std=0)


def test_losses_are_those_of_the_logits():
    model = build()
    logits, state = model(IDS)
    assert logits.shape == (2, 11, 50)
    assert state is None
    labels = IDS.roll(-1, 1).clone()
    labels[:, -1] = -100
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view_as(labels)
    loss = model(IDS, labels=labels)
    torch.testing.assert_close(loss.nll, expected.sum() / 20)
    torch.testing.assert_close(loss.objective, expected.sum() / 22)  # positions, ignored ones included
    torch.testing.assert_close(model(IDS, labels=labels, per_token=True), expected.detach())


def test_a_batch_of_ignored_labels_is_no_nan():
    loss = build()(IDS, labels=torch.full_like(IDS, -100))
    assert loss.nll == loss.objective == 0


@pytest.mark.parametrize("share", [False, True])
def test_state_continues(share):
    model = build(mixer=partial(Mean, share=share))
    whole, _ = model(IDS)
    state = model.init_state(2, 11)
    parts = []
    for chunk in IDS.split([4, 1, 6], dim=1):
        logits, state = model(chunk, state=state)
        parts.append(logits)
    torch.testing.assert_close(torch.cat(parts, 1), whole)
    last, _ = model(IDS, last_only=True)
    torch.testing.assert_close(last, whole[:, -1:])


def test_initial_values_depend_on_the_seed_alone():
    torch.manual_seed(3)
    first = build(seed=1).state_dict()
    after = torch.rand(1)
    torch.manual_seed(3)
    assert torch.rand(1) == after  # the caller's random state is left alone
    torch.manual_seed(4)
    for name, value in build(seed=1).state_dict().items():
        assert torch.equal(value, first[name]), name
    other = build(seed=2).state_dict()
    assert not torch.equal(other["embedding.weight"], first["embedding.weight"])
    assert not torch.equal(first["blocks.0.mixer.proj.weight"], first["blocks.1.mixer.proj.weight"])


def test_initial_scale():
    with torch.device("meta"):
        model = SequenceModel(1000, 64, 2, Mean, SwiGLU, tie_embeddings=False)
    model.materialise("cpu", 0)
    for weight in (model.embedding.weight, model.head.weight):
        assert weight.std().item() == pytest.approx(0.02, rel=0.02)
    d_ff = model.channel_mixers[0].d_ff
    assert d_ff == 192  # 8/3 · 64 = 170.7, up to a multiple of 64
    assert model.channel_mixers[0].down_proj.weight.std().item() == pytest.approx((2 * 2 * d_ff) ** -0.5, rel=0.03)


def test_shard_sees_every_block_with_values_and_then_the_model():
    seen = []
    with torch.device("meta"):
        model = SequenceModel(50, 16, 3, Mean, SwiGLU)

    def shard(module):
        assert not any(p.is_meta for p in module.parameters())
        seen.append(module)

    model.materialise("cpu", 0, shard)
    assert seen == [*model.blocks, model]


def test_activation_checkpointing_changes_nothing():
    grads = []
    for flag in (False, True):
        model = build(mixer=partial(Mean, share=True), activation_checkpointing=flag)
        loss = model(IDS, labels=IDS).objective
        grads.append(torch.autograd.grad(loss, list(model.parameters())))
    for a, b in zip(*grads, strict=True):
        assert torch.equal(a, b)


def test_hybrids_cycle_and_blocks_can_do_without_a_channel_mixer():
    model = build(mixer=[Mean, partial(Mean, share=True)], channel_mixer=None)
    assert [m.tags.shares_context for m in model.mixers] == [False, True, False]
    assert [m.layer_idx for m in model.mixers] == [0, 1, 2]
    assert model.channel_mixers == []
    assert model.flops(10) == 2 * 10 * 16 * 50 + 3 * 4 * 10 * 16**2


def test_tying():
    tied, untied = build(), build(tie_embeddings=False)
    assert tied.head is None
    assert sum(p.numel() for p in untied.parameters()) - sum(p.numel() for p in tied.parameters()) == 50 * 16


def test_marks_survive_materialisation_and_are_named():
    model = build()
    assert model.no_weight_decay == {f"blocks.{i}.mixer.gain" for i in range(3)}
    assert model.mixers[0].gain._no_weight_decay


def test_casting_keeps_what_must_stay_float32():
    mixer = Mean(8)
    mixer.gain._keep_float32 = True
    cast_parameters(mixer, torch.bfloat16)
    assert mixer.gain.dtype == torch.float32
    assert mixer.proj.weight.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 16, 3, Mean, None), "vocab_size must be at least 1"),
        ((50, 0, 3, Mean, None), "d_model must be at least 1"),
        ((50, 16, 0, Mean, None), "n_layers must be at least 1"),
        ((50, 16, 3, [], None), "mixer is an empty list"),
        ((50, 16, 3, Mean, partial(SwiGLU, d_ff=0)), "d_ff must be at least 1"),
    ],
)
def test_bad_configurations_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        SequenceModel(*arguments)


def test_a_module_without_reset_parameters_is_named():
    class Holder(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.empty(2))

    with pytest.raises(TypeError, match="Holder has parameters"):
        reset(Holder())
