import pytest
import torch

from seqarch.mixer import TokenMixer, no_weight_decay
from seqarch.model import SequenceModel, SwiGLU
from seqarch.training.optimizer import AdamWConfig, build_adamw, configure_groups, decayed, gradient_norm


class Marked(TokenMixer):
    """A mixer with a matrix that must not be decayed, and one that is."""

    def __init__(self, d_model: int, *, layer_idx: int = 0, n_layers: int = 1) -> None:
        super().__init__(d_model, layer_idx=layer_idx, n_layers=n_layers)
        self.decay = no_weight_decay(torch.nn.Parameter(torch.empty(2, 3)))
        self.proj = torch.nn.Parameter(torch.empty(d_model, d_model))
        self.reset_parameters()

    def reset_parameters(self):
        torch.nn.init.ones_(self.decay)
        torch.nn.init.ones_(self.proj)

    def forward(self, x, *, cu_seqlens=None, state=None):
        return x @ self.proj, state

    def init_state(self, batch_size, max_len, device=None, dtype=None):
        return {}

    def flops(self, T):
        return 0


def model(**options):
    m = SequenceModel(11, 8, 1, Marked, SwiGLU, **options)
    m.materialise("cpu", 0)
    return m


def test_which_parameters_decay():
    names = {n for n, yes in decayed(model(tie_embeddings=False)).items() if not yes}
    assert names == {
        "embedding.weight",
        "blocks.0.mixer_norm.weight",
        "blocks.0.channel_norm.weight",
        "blocks.0.mixer.decay",
        "norm.weight",
    }


def test_a_tied_head_is_the_embedding():
    m = model(tie_embeddings=True)
    assert decayed(m)["embedding.weight"] is False
    assert "head.weight" not in decayed(m)
    assert decayed(model(tie_embeddings=False))["head.weight"] is True


def test_groups_hold_every_parameter_once_and_decay_as_configured():
    m = model()
    optimizer = build_adamw(AdamWConfig(lr=0.5, betas=(0.8, 0.9), weight_decay=0.3), m, loss_scaling=False)
    members = [p for g in optimizer.param_groups for p in g["params"]]
    assert sorted(map(id, members)) == sorted(map(id, m.parameters()))
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.3, 0.0]
    assert all(g["betas"] == (0.8, 0.9) and g["lr"] == 0.5 for g in optimizer.param_groups)


def test_one_step_is_adamw_by_hand():
    m = model()
    before = {n: p.detach().clone() for n, p in m.named_parameters()}
    optimizer = build_adamw(AdamWConfig(lr=0.01, weight_decay=0.5, eps=1e-8), m, loss_scaling=False)
    for p in m.parameters():
        p.grad = torch.full_like(p, 2.0)
    optimizer.step()
    for name, p in m.named_parameters():
        shrunk = before[name] * (1 - 0.01 * 0.5) if decayed(m)[name] else before[name]
        # after one step the bias-corrected moments are g and g², so that the update is lr · g/|g|
        torch.testing.assert_close(p.detach(), shrunk - 0.01, rtol=1e-5, atol=1e-6)


def test_fused_is_the_default_but_not_with_loss_scaling():
    assert build_adamw(AdamWConfig(), model(), loss_scaling=False).defaults["fused"] is True
    assert build_adamw(AdamWConfig(fused=False), model(), loss_scaling=False).defaults["fused"] is False
    assert build_adamw(AdamWConfig(), model(), loss_scaling=True).defaults["fused"] is False
    with pytest.raises(ValueError, match="fused=true cannot be used with 16-mixed"):
        build_adamw(AdamWConfig(fused=True), model(), loss_scaling=True)


def test_fused_and_plain_agree():
    results = []
    for fused in (True, False):
        m = model()
        optimizer = build_adamw(AdamWConfig(fused=fused), m, loss_scaling=False)
        for step in range(3):
            for i, p in enumerate(m.parameters()):
                p.grad = torch.sin(torch.arange(p.numel(), dtype=torch.float32) + i + step).view_as(p)
            optimizer.step()
        results.append([p.detach() for p in m.parameters()])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


def test_a_restored_optimizer_takes_the_options_of_the_configuration():
    m = model()
    old = build_adamw(AdamWConfig(betas=(0.5, 0.6), weight_decay=0.7), m, loss_scaling=False)
    new = build_adamw(AdamWConfig(betas=(0.9, 0.95), weight_decay=0.1, eps=1e-6), m, loss_scaling=False)
    new.load_state_dict(old.state_dict())
    configure_groups(AdamWConfig(betas=(0.9, 0.95), weight_decay=0.1, eps=1e-6), new)
    assert [(g["betas"], g["weight_decay"], g["eps"]) for g in new.param_groups] == [
        ((0.9, 0.95), 0.1, 1e-6),
        ((0.9, 0.95), 0.0, 1e-6),
    ]


def test_gradient_norm_is_that_of_all_gradients_as_one_vector():
    m = model()
    generator = torch.Generator().manual_seed(0)
    for p in m.parameters():
        p.grad = torch.randn(p.shape, generator=generator)
    flat = torch.cat([p.grad.flatten() for p in m.parameters() if p.grad is not None])
    torch.testing.assert_close(gradient_norm(m.parameters()), flat.norm())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": 0.0}, "lr must be above 0"),
        ({"betas": (0.9, 1.0)}, "betas must be from 0 to below 1"),
        ({"eps": 0.0}, "eps must be above 0"),
        ({"weight_decay": -0.1}, "weight_decay must not be negative"),
    ],
)
def test_errors_name_the_option(options, message):
    with pytest.raises(ValueError, match=message):
        AdamWConfig(**options)
