"""Every ablation: its base with one option changed, which changes the function computed."""

from pathlib import Path

import pytest
import torch

from seqarch.model import SequenceModel
from seqarch_mamba import Mamba1, Mamba2
from tests.test_recipes import parse

ABLATIONS = sorted(Path("recipes/ablations").glob("*.yaml"))
BASES = {
    "transformer": "110m_transformer",
    "top1chunk": "110m_top1chunk",
    "mamba1": "110m_mamba1",
    "mamba2": "110m_mamba2",
}
SAME = {"decay_data", "position_rope", "window_full", "temperature_1", "selection_approx"}
"""Rows of the paper's table that are the base itself."""


def base_of(ablation):
    return Path("recipes") / f"{BASES[ablation.stem.split('_')[0]]}.yaml"


def flat(config, prefix=""):
    for name, value in vars(config).items():
        if hasattr(value, "__dict__") and not isinstance(value, (str, type)):
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def changed(ablation):
    """Options of a recipe that differ from its base, with their values."""
    (_, base), (_, config) = parse(base_of(ablation)), parse(base_of(ablation), ablation)
    before, after = dict(flat(base)), dict(flat(config))
    assert before.keys() == after.keys()
    return {n: (before[n], after[n]) for n in before if before[n] != after[n] and n != "config"}, config


@pytest.mark.parametrize("ablation", ABLATIONS, ids=lambda a: a.stem)
def test_one_option_differs_and_changes_the_function(ablation):
    differences, config = changed(ablation)
    option = ablation.read_text().strip().splitlines()[-1].split(":")[0].strip()
    name = f"model.mixer.init_args.{option}"
    assert option in ablation.stem or option in ("conv", "norm")
    row = ablation.stem.split("_", 1)[1]
    assert set(differences) == (set() if row in SAME else {name})
    if row in SAME:
        return
    before, after = differences[name]
    own = vars(config.model.mixer.init_args)
    small = {"n_heads": 2, "chunk_size": 16, "head_dim": 16, "max_len": 160}
    given = [n for n in own if n not in ("d_model", "layer_idx", "n_layers") and own[n] is not None]
    options = {n: small.get(n, own[n]) for n in given}
    length = 1040 if option == "window" and after > 128 else 160
    outputs = [output(config.model.mixer.class_path, {**options, option: value}, length) for value in (before, after)]
    assert (outputs[0] - outputs[1]).abs().max() > 1e-4


def output(class_path, options, length):
    """Logits of 2 layers of width 32 for the same seed and input."""
    from importlib import import_module

    module, name = class_path.rsplit(".", 1)
    mixer = getattr(import_module(module), name)
    if "max_len" in options:
        options["max_len"] = length
    with torch.device("meta"):
        model = SequenceModel(64, 32, 2, lambda d, **place: mixer(d, **options, **place), None)
    model.materialise("cpu", 1)
    ids = torch.randint(64, (1, length), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        return model(ids)[0]


@pytest.mark.parametrize("mixer", [Mamba1, Mamba2])
def test_without_decay_nothing_is_forgotten(mixer):
    """With B, C and Δ of the input alone, what a token adds to the state stays there whole."""
    torch.manual_seed(0)
    layer = mixer(32, decay="none", conv=False)
    x = torch.randn(1, 40, 32)
    name = "ssm" if "ssm" in layer.init_state(1, 1) else next(n for n in layer.init_state(1, 1) if "conv" not in n)
    with torch.no_grad():
        states = []
        for document in (x[:, :20], x[:, 20:], x):
            _, state = layer(document, state=layer.init_state(1, 64))
            states.append(state[name])
    torch.testing.assert_close(states[0] + states[1], states[2], rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        decayed = mixer(32, decay="data", conv=False)
        parts = [decayed(d, state=decayed.init_state(1, 64))[1][name] for d in (x[:, :20], x[:, 20:], x)]
    assert not torch.allclose(parts[0] + parts[1], parts[2], rtol=1e-2)
