"""``seqarch plan`` from the command line: figures that can be worked out by hand, advice that holds, and errors."""

import json

import pytest

from seqarch.cli import main

LARGE = ["--config", "recipes/1.3b_transformer.yaml"]
SMALL = ["--config", "recipes/quickstart.yaml"]


def plan(tmp_path, *arguments):
    file = tmp_path / "plan.json"
    main(["plan", *map(str, arguments), "--json_file", str(file)])
    return json.loads(file.read_text())


def test_the_large_recipe(tmp_path, capsys):
    p = plan(tmp_path, *LARGE, "--gpus", 64)
    D, F, L, V, T = 2048, 5632, 24, 32768, 2048
    assert p["parameters"] == L * (4 * D * D + 3 * D * F + 2 * D) + V * D + D
    assert p["steps"] == -(-100_000_000_000 // (256 * T))
    products = L * (4 * D * D + 3 * D * F) + V * D
    assert p["flops_per_token"] == pytest.approx(6 * products + 3 * L * 2 * D * (T + 1), rel=0.01)
    assert p["tokens_per_s"] == pytest.approx(64 * 989.4e12 * 0.4 / p["flops_per_token"])
    assert p["days"] * 24 * 64 == pytest.approx(p["gpu_hours"])
    assert p["gpu_hours"] == pytest.approx(1e11 / p["tokens_per_s"] / 3600 * 64)
    assert p["checkpoint_bytes"] == pytest.approx(12 * p["parameters"], rel=1e-6)
    assert p["data_bytes"] == 2e11
    setting = p["setting"]
    assert (setting["micro_batch_size"], setting["replicas"], setting["accumulation"]) == (4, 8, 1)
    assert setting["memory"]["weights"] == p["parameters"] * 4 // 8
    assert setting["bound"] == "computation"
    out = capsys.readouterr().out
    assert "set it to 4" in out
    assert "1,300,334,592 parameters" in out


def test_the_advice_fits_and_is_the_largest(tmp_path):
    p = plan(tmp_path, *LARGE, "--gpus", 8, "--memory_gb", 40)
    assert {(s["activation_checkpointing"], s["replicas"]) for s in rows(p)} == {(False, 1), (True, 1)}
    for s in rows(p):
        assert s["memory"]["total"] <= 36e9
        larger = ["--data.micro_batch_size", 2 * s["micro_batch_size"]]
        checkpointing = ["--model.activation_checkpointing", str(s["activation_checkpointing"]).lower()]
        again = plan(tmp_path, *LARGE, "--gpus", 8, "--memory_gb", 40, *larger, *checkpointing)
        assert not again["setting"]["fits"] or s["micro_batch_size"] == 32
        assert s["micro_batch_size"] == 32 or again["bound"].startswith("memory")


def rows(p):
    return [{**s, "activation_checkpointing": s["checkpointing"]} for s in p["settings_that_fit"]]


def test_a_slow_network_bounds_what_is_sharded_across_nodes(tmp_path):
    options = ["--trainer.strategy.replicate", 1, "--network_gbps", 10]
    p = plan(tmp_path, *LARGE, "--gpus", 16, *options)
    assert p["bound"] == "communication"
    seconds = p["setting"]["communication_s"]
    sent = p["setting"]["traffic"]
    assert seconds == pytest.approx((sent["gather"] + sent["scatter"]) / (10e9 / 8))
    assert p["tokens_per_s"] == pytest.approx(p["tokens_per_step"] / seconds)


def test_nothing_fits(tmp_path, capsys):
    p = plan(tmp_path, *LARGE, "--gpus", 1, "--memory_gb", 10)
    assert p["settings_that_fit"] == []
    assert "Nothing fits: take more GPUs" in capsys.readouterr().out


def test_a_recipe_without_a_strategy(tmp_path):
    p = plan(tmp_path, *SMALL, "--gpus", 2)
    assert p["tokens"] == 280 * 8 * 256
    memory = p["setting"]["memory"]
    assert memory["weights"] == memory["gradients"] == 4 * p["parameters"] == memory["buffers"]
    assert p["setting"]["traffic"]["replicate"] == 4 * p["parameters"]


def test_the_state_of_a_recurrent_model_does_not_grow(tmp_path):
    mixer = ["--model.mixer", "Mamba2", "--data.batch_size", 8]
    short, long = (plan(tmp_path, *SMALL, *mixer, "--data.seq_len", T)["decoding_state_bytes"] for T in (256, 512))
    assert short == long


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([*SMALL, "--gpus", "3"], "data.batch_size 8 is not a multiple of 3 GPUs"),
        ([*SMALL, "--gpu", "H1000"], "gpu must be one of H200, H100"),
        ([*SMALL, "--gpus", "12", "--data.batch_size", "24"], "gpus 12 is not a multiple of gpus_per_node 8"),
        ([*SMALL, "--trainer.max_steps", "-1"], "set model.max_tokens or trainer.max_steps"),
        ([*SMALL, "--mfu", "40"], "mfu must be above 0 and at most 1, got 40"),
        ([*SMALL, "--trainer.precision", "transformer-engine"], "trainer.precision"),
        ([*LARGE, "--trainer.strategy.replicate", "3"], "replicate 3 does not divide the 8 GPUs"),
        ([*SMALL, "--gpuss", "3"], "there is no option 'gpuss': did you mean 'gpus'?"),
    ],
)
def test_errors(arguments, message, capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["plan", *arguments])
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err
