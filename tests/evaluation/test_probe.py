"""The probe of installed mixers and of checkpoints, through the command."""

import json
import math
import re
from functools import partial

import pytest
import torch

from seqarch.cli import main
from seqarch.data.corpus import Corpus
from seqarch.evaluation.probe import average, measure, steps
from seqarch.evaluation.probe_inputs import fresh_layer, random_tokens, text_tokens, trained_layers
from seqarch.evaluation.probe_plots import properties
from seqarch.mixer_spec import MixerSpec, parse_mixer
from seqarch_rwkv import RWKV7
from seqarch_top1 import Top1Element
from tests.evaluation.trained_models import trained, write_run
from tests.testing.toy_mixers import ToyAttention, ToySelection, ToySharing


def test_a_third_party_mixer_whose_output_starts_at_zero():
    spec = MixerSpec("ToyAttention", ToyAttention, {"n_heads": 1})
    assert not spec.build(8).get_submodule("o_proj").weight.any()
    layer = fresh_layer(spec, 8, 2, 24)
    calls = []
    found = measure(layer, advance=calls.append)
    assert sum(calls) == steps(layer)
    assert found["visibility"]["reach"] == 23
    assert found["relation"]["shares"]["pair"] > 0.5
    selection = measure(fresh_layer(MixerSpec("ToySelection", ToySelection, {"n_heads": 1}), 8, 2, 24))
    assert selection["non_uniformity"] == {"entropy": 0.0, "inputs": 1.0, "top1": 1.0}
    assert properties(selection)["non-uniformity"] == 1.0


def test_fresh_inputs_are_normalised_and_repeat():
    spec = parse_mixer("Attention(n_heads=2)")
    state = torch.get_rng_state()
    one, two, other = (fresh_layer(spec, 8, 2, 16, seed) for seed in (3, 3, 4))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(one.inputs, two.inputs)
    assert not torch.equal(one.inputs, other.inputs)
    for p, same in zip(one.mixer.parameters(), two.mixer.parameters(), strict=True):
        assert torch.equal(p, same)
    torch.testing.assert_close(one.inputs.square().mean(-1), torch.ones(2, 16).double())
    assert measure(one) == measure(two)


@pytest.mark.parametrize("mixer", [partial(RWKV7, head_dim=16), ToySharing, partial(Top1Element, n_heads=2)])
def test_layers_of_a_model_get_what_they_get_in_its_forward_pass(mixer):
    model = trained(mixer)
    for m in model.model.mixers:
        torch.nn.init.normal_(m.get_parameter("o_proj.weight" if hasattr(m, "o_proj") else "out_proj.weight"))
    tokens = random_tokens(model, 2, 16)
    outputs = []
    layers = trained_layers(model, tokens)
    hooks = [m.register_forward_hook(lambda module, args, out: outputs.append(out[0])) for m in model.model.mixers]
    with torch.no_grad():
        model.model(tokens)
        for hook in hooks:
            hook.remove()
        assert [layer.mixer.layer_idx for layer in layers] == [0, 1]
        for layer, y in zip(layers, outputs, strict=True):
            assert y.dtype == torch.float64
            for n in range(2):
                torch.testing.assert_close(layer(layer.inputs[[n, n]], n), y[[n, n]], rtol=1e-12, atol=1e-12)
    assert measure(layers[1])["visibility"]["reach"] > 0


def test_text_is_that_of_test_documents(corpus_path):
    corpus = Corpus(corpus_path)
    model = trained(Top1Element, tokenizer_path=corpus.tokenizer_path)
    tokens = text_tokens(model, corpus, 4, 12, ["cc", "c4"])
    assert tokens.shape == (4, 12)
    assert tokens[:, 0].eq(model.eos_id).all()
    for n, row in enumerate(tokens):
        stream = corpus.stream("test", ("cc", "c4")[n % 2], "domains")
        documents = [stream.document(i)[:11].tolist() for i in range(stream.n_documents)]
        assert row[1:].tolist() in documents
    with pytest.raises(ValueError, match=r"length: only 0 test documents of .* have 99999 tokens, and 2 are needed"):
        text_tokens(model, corpus, 2, 100_000)
    with pytest.raises(ValueError, match="has another tokenizer than the model"):
        text_tokens(trained(Top1Element), corpus, 2, 12)


def test_average():
    layers = [
        {"a": {"b": 1.0, "distances": [1]}, "curve": [1.0, 3.0], "none": None, "some": None},
        {"a": {"b": 3.0, "distances": [2]}, "curve": [3.0, 5.0], "none": None, "some": {"c": 7.0}},
    ]
    assert average(layers) == {"a": {"b": 2.0}, "curve": [2.0, 4.0], "none": None, "some": {"c": 7.0}}


def small(*targets):
    return ["probe", *targets, "--length", "16", "--sequences", "2", "--d_model", "16"]


def test_the_command_compares_mixers(tmp_path, capsys):
    targets = ["Attention(n_heads=1, window=4)", "top1_element(n_heads=1)", "Attention(n_heads=1, window=1)"]
    main([*small(*targets), "--out", str(tmp_path / "new" / "probe.json")])
    text = (tmp_path / "new" / "probe.json").read_text()
    found = json.loads(text, parse_constant=pytest.fail)
    assert [m["label"] for m in found["mixers"]] == targets
    window, top1, nothing = (m["mean"] for m in found["mixers"])
    assert window["visibility"]["reach"] == 3
    assert top1["non_uniformity"]["top1"] == 1.0
    assert nothing["relation"]["shares"] is None
    assert len(window["visibility"]["curve"]) == 15
    assert (found["length"], found["sequences"]) == (16, 2)
    assert (tmp_path / "new" / "probe.png").read_bytes().startswith(b"\x89PNG")
    out = capsys.readouterr().out
    assert "window=4" in out
    assert "non-uniformity: entropy" in out


def test_the_command_on_a_checkpoint(tmp_path, corpus_path, capsys):
    run = write_run(tmp_path / "run", Corpus(corpus_path).tokenizer_path)
    main([*small(str(run)), "--data", str(corpus_path)])
    found = json.loads((run / "results" / "probe-step1.json").read_text())
    (mixer,) = found["mixers"]
    assert (mixer["label"], mixer["inputs"], mixer["model"]["step"]) == ("run, step 1", "text", 1)
    layers, mean = mixer["layers"], mixer["mean"]
    assert [(layer["layer"], layer["mixer"]) for layer in layers] == [(i, "Attention") for i in range(len(layers))]
    assert len(layers) > 1
    spans = [layer["visibility"]["span_share"] for layer in layers]
    assert math.isclose(mean["visibility"]["span_share"], sum(spans) / len(spans))
    assert (run / "results" / "probe-step1.png").read_bytes().startswith(b"\x89PNG")
    assert "layer 1: Attention" in capsys.readouterr().out

    beside = tmp_path / "beside.json"
    main(
        [
            *small(str(run / "checkpoints" / "last.ckpt"), "Attention(n_heads=2)"),
            "--random_tokens",
            "true",
            "--out",
            str(beside),
        ]
    )
    assert [m["inputs"] for m in json.loads(beside.read_text())["mixers"]] == ["random tokens", "normal"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["Atention"], "did you mean 'Attention'.*nor is there a checkpoint or run folder 'Atention'"),
        (["runs/nothing"], "runs/nothing: there is no such checkpoint, nor a run folder of that name"),
        (["nothing.ckpt"], "nothing.ckpt: there is no such checkpoint"),
        (["Attention(windw=4)"], "has no option 'windw': did you mean 'window'"),
        (["Attention(n_heads=3)"], r"Attention\(n_heads=3\): n_heads \(3\) must divide d_model"),
        (["Attention", "--length", "8"], "length must be at least 16, got 8"),
        (["Attention", "--sequences", "1"], "sequences must be at least 2, got 1"),
        ([], "required: targets"),
    ],
)
def test_bad_input_is_one_clear_line(arguments, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["probe", *arguments])
    assert stopped.value.code == 2
    error = capsys.readouterr().err.strip()
    assert len(error.splitlines()) == 1
    assert re.search(message, error)
