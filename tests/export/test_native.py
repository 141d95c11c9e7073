"""Native formats: transformers and fla compute the same without a line of ours, and what comes back is the same."""

import json
import subprocess
import sys
from functools import partial

import pytest
import torch
from transformers import AutoModelForCausalLM

from seqarch.export.read import import_model
from seqarch.export.write import export_model
from seqarch.model import SwiGLU
from seqarch.training.rebuild import load_module
from seqarch_attention import Attention
from seqarch_deltanet import DeltaNet, GatedDeltaNet
from seqarch_mamba import Mamba1, Mamba2
from seqarch_rwkv import RWKV6, RWKV7, RWKVChannelMix
from tests.export.fla_on_cpu import compute_with_torch
from tests.export.models import tokens, write_model

UNTIED = {"tie_embeddings": False}
mamba2 = partial(Mamba2, head_dim=16, state_dim=8)

TRANSFORMERS = [
    ("llama", partial(Attention, n_heads=4), SwiGLU, {}),
    ("llama", partial(Attention, n_heads=4, n_kv_heads=2, head_dim=16, rope_base=5e3), partial(SwiGLU, d_ff=40),
     {**UNTIED, "norm_eps": 1e-6}),
    ("mamba", Mamba1, None, {}),
    ("mamba", partial(Mamba1, state_dim=8, expand=3, dt_rank=5, conv_kernel=3), None, {**UNTIED, "norm_eps": 1e-6}),
    ("mamba2", mamba2, None, {}),
    ("mamba2", partial(Mamba2, head_dim=8, state_dim=8, n_groups=2, chunk_size=16, conv_kernel=3), None, UNTIED),
]  # fmt: skip
FLA = [
    ("fla-delta_net", partial(DeltaNet, n_heads=2), SwiGLU, {}),
    ("fla-delta_net", partial(DeltaNet, n_heads=2, head_dim=8, expand_v=2.0, gate=True, conv=False), SwiGLU, UNTIED),
    ("fla-gated_deltanet", partial(GatedDeltaNet, n_heads=2), SwiGLU, {}),
    ("fla-gated_deltanet",
     partial(GatedDeltaNet, n_heads=2, n_v_heads=4, head_dim=8, expand_v=1.5, gate=False, conv=False), SwiGLU, UNTIED),
]  # fmt: skip


@torch.no_grad()
def difference(tmp_path, monkeypatch, fmt, mixer, channel_mixer, options):
    """The largest difference of their logits to ours; what is imported again has ours to the bit."""
    module = write_model(tmp_path / "run", mixer, channel_mixer, **options)
    out = export_model(tmp_path / "run", tmp_path / "out", format=fmt)
    theirs, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(info.values())
    assert not type(theirs).__module__.startswith("seqarch")
    if fmt.startswith("fla-"):
        compute_with_torch(theirs, monkeypatch)
    x = tokens(70)
    ours = module.model(x)[0]
    import_model(out, tmp_path / "back.safetensors")
    back = load_module(tmp_path / "back.safetensors")
    assert torch.equal(back.model(x)[0], ours)
    assert ours.std() > 0.3
    return float((theirs(x, use_cache=False).logits - ours).abs().max())


@pytest.mark.parametrize(("fmt", "mixer", "channel_mixer", "options"), TRANSFORMERS)
def test_transformers_has_the_same_logits(tmp_path, monkeypatch, fmt, mixer, channel_mixer, options):
    assert difference(tmp_path, monkeypatch, fmt, mixer, channel_mixer, options) < 1e-4


@pytest.mark.filterwarnings("ignore:Triton is not supported", "ignore:ShortConvolution is crucial")
@pytest.mark.parametrize(("fmt", "mixer", "channel_mixer", "options"), FLA)
def test_fla_has_the_same_logits(tmp_path, monkeypatch, fmt, mixer, channel_mixer, options):
    pytest.importorskip("fla")
    assert difference(tmp_path, monkeypatch, fmt, mixer, channel_mixer, options) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("fmt", ["llama", "mamba", "mamba2"])
def test_a_native_model_loads_and_generates_where_seqarch_is_not_imported(tmp_path, fmt):
    mixer, channel_mixer = next(case[1:3] for case in TRANSFORMERS if case[0] == fmt)
    write_model(tmp_path / "run", mixer, channel_mixer)
    out = export_model(tmp_path / "run", tmp_path / "out", format=fmt)
    code = f"""
import sys
from transformers import AutoModelForCausalLM, AutoTokenizer
tokenizer, model = (c.from_pretrained({str(out)!r}) for c in (AutoTokenizer, AutoModelForCausalLM))
ids = tokenizer(tokenizer.bos_token + "grey horse", return_tensors="pt").input_ids
assert ids[0, 0] == 0
assert model.generate(ids, max_new_tokens=4, do_sample=False, eos_token_id=None).shape[1] == ids.shape[1] + 4
assert not any(name.split(".")[0].startswith("seqarch") for name in sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("fmt", "mixer", "channel_mixer", "options", "reason"),
    [
        ("llama", partial(Attention, window=8), SwiGLU, {}, "window is 8"),
        ("llama", partial(Attention, position="alibi"), SwiGLU, {}, "position is 'alibi'"),
        ("llama", partial(Attention, relation="random_keys"), SwiGLU, {}, "relation is 'random_keys'"),
        ("llama", partial(Attention, temperature=2.0), SwiGLU, {}, "temperature is 2"),
        ("llama", partial(Attention, qk_norm=True), SwiGLU, {}, "qk_norm is true"),
        ("llama", partial(Attention, n_heads=3, head_dim=8), SwiGLU, {}, r"n_heads \(3\) does not divide d_model"),
        ("llama", Attention, None, {}, "channel_mixer is null"),
        ("llama", Attention, RWKVChannelMix, {}, "channel_mixer is RWKVChannelMix"),
        ("llama", [Attention, partial(Attention, n_heads=4)], SwiGLU, {}, "n_heads differs from layer to layer"),
        ("llama", [Attention, mamba2], SwiGLU, {}, "layer 1 has Mamba2, and every layer must have Attention"),
        ("mamba", mamba2, None, {}, "layer 0 has Mamba2, and every layer must have Mamba1"),
        ("mamba", Mamba1, SwiGLU, {}, "channel_mixer is SwiGLU, and MambaForCausalLM has none"),
        ("mamba", partial(Mamba1, decay="shared"), None, {}, "decay is 'shared'"),
        ("mamba", partial(Mamba1, conv=False), None, {}, "conv is false"),
        ("mamba2", partial(mamba2, norm=False), None, {}, "norm is false"),
        ("mamba2", mamba2, None, {"norm_eps": 1e-6}, "norm_eps is 1e-06"),
        ("fla-gated_deltanet", GatedDeltaNet, None, {}, "channel_mixer is null"),
        ("fla-gated_deltanet", GatedDeltaNet, SwiGLU, {"norm_eps": 1e-6}, "norm_eps is 1e-06"),
        ("fla-rwkv6", partial(RWKV6, n_heads=2), RWKVChannelMix, {}, "RWKV6ForCausalLM has layer norms"),
        ("fla-rwkv7", partial(RWKV7, n_heads=2), partial(RWKVChannelMix, gate=False), {}, "RWKV7ForCausalLM has layer"),
        ("gpt2", Attention, SwiGLU, {}, "--format must be one of hf, fla-delta_net, fla-gated_deltanet, llama"),
    ],
)
def test_what_cannot_be_expressed_is_refused(tmp_path, fmt, mixer, channel_mixer, options, reason):
    write_model(tmp_path / "run", mixer, channel_mixer, **options)
    with pytest.raises(ValueError, match=reason):
        export_model(tmp_path / "run", tmp_path / "out", format=fmt)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run"]


@pytest.mark.parametrize(
    ("fmt", "changed", "reason"),
    [
        ("llama", {"attention_bias": True}, "attention_bias is True"),
        ("llama", {"rope_parameters": {"rope_type": "llama3"}}, "of type 'llama3'"),
        ("llama", {"hidden_size": 64}, r"embedding\.weight is \[300, 32\], and its config\.json makes it \[300, 64\]"),
        ("llama", {"num_hidden_layers": 3}, r"lacks blocks\.2\."),
        ("llama", {"model_type": "gpt2"}, "model_type 'gpt2'; what can be imported: seqarch, "),
        ("llama", {"model_type": "rwkv7"}, "type rwkv7 cannot be imported"),
        ("mamba2", {"time_step_limit": [0.0, 1.0]}, "time_step_limit"),
        ("mamba2", {"layer_norm_epsilon": 1e-6}, "layer_norm_epsilon"),
        ("mamba", {"use_bias": True}, "use_bias is True"),
    ],
)
def test_what_our_classes_cannot_express_is_not_imported(tmp_path, fmt, changed, reason):
    mixer, channel_mixer = next(case[1:3] for case in TRANSFORMERS if case[0] == fmt)
    write_model(tmp_path / "run", mixer, channel_mixer)
    out = export_model(tmp_path / "run", tmp_path / "out", format=fmt)
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(config | changed))
    with pytest.raises(ValueError, match=reason):
        import_model(out, tmp_path / "back.safetensors")
    assert not (tmp_path / "back.safetensors").exists()


@torch.no_grad()
def test_a_llama_that_transformers_saved_is_imported(tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True, rope_parameters={"rope_type": "default", "rope_theta": 5e3},
    )  # fmt: skip
    theirs = LlamaForCausalLM(config).eval()
    theirs.model.embed_tokens.weight.mul_(20)
    theirs.save_pretrained(tmp_path / "llama")
    ours = load_module(import_model(tmp_path / "llama", tmp_path / "back.safetensors"))
    x = tokens(20) % 50
    torch.testing.assert_close(ours.model(x)[0], theirs(x).logits, atol=1e-4, rtol=0)
