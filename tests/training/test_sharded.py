import json
from dataclasses import replace

import pytest
from lightning.pytorch.callbacks import Callback

from seqarch.training.documents import read_documents
from seqarch.training.strategy import FSDP2Strategy
from tests.training.sharded import MIXERS, Job
from tests.training.synthetic import SyntheticData, T, rows, tiny, trainer

LAYOUTS = {
    "1": (1, 1),
    "2": (2, 1),
    "4": (4, 1),
    "2x2": (4, 2),
}
"""Processes and nodes; on two nodes the automatic mesh is 2 replicas of 2 shards."""


def difference(found, expected) -> float:
    """The largest relative difference of two records with the same rows."""
    assert [r[:2] for r in found] == [r[:2] for r in expected]
    return max(
        abs(float(a[2]) - float(b[2])) / max(abs(float(b[2])), 1e-12) for a, b in zip(found, expected, strict=True)
    )


def losses(run_dir):
    """Training and validation losses."""
    return [r for r in rows(run_dir) if "loss" in r[1]]


def compare_layouts(tmp_path, mixer, layouts, steps) -> dict[str, float]:
    """Train in one process and in each layout: the largest relative differences of all losses."""
    job = Job(tmp_path / "one", steps, steps, mixer, strategy=None, model={"val_every_n_steps": 10})
    job.run()
    found = {}
    for name in layouts:
        processes, nodes = LAYOUTS[name]
        sharded = replace(job, run_dir=tmp_path / name, strategy={})
        sharded.on(processes, nodes=nodes)
        found[name] = difference(losses(sharded.run_dir), losses(job.run_dir))
        for a, b in zip(*(read_documents(run.run_dir, steps) for run in (sharded, job)), strict=True):
            assert (a.ids.tolist(), a.tokens.tolist(), a.bytes.tolist()) == (
                b.ids.tolist(),
                b.tokens.tolist(),
                b.bytes.tolist(),
            )
            assert a.nats == pytest.approx(b.nats, rel=1e-5)
    return found


def test_a_hybrid_mesh_has_the_losses_of_one_process(tmp_path):
    assert max(compare_layouts(tmp_path, "Mamba2", ["2x2"], 6).values()) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("mixer", MIXERS)
def test_any_number_of_processes_has_the_losses_of_one(tmp_path, mixer):
    found = compare_layouts(tmp_path, mixer, LAYOUTS, 20)
    print(mixer, found)
    assert max(found.values()) < 1e-5, found


class Types(Callback):
    """Notes the types of a block's parameters where they are used, where they are kept, and of what is made of them."""

    def __init__(self, path) -> None:
        self.path = path

    def on_train_start(self, trainer, module) -> None:
        block = module.model.blocks[0]

        def note(_, arguments) -> None:
            self.used = {name: str(p.dtype) for name, p in block.named_parameters()}
            self.input = str(arguments[0].dtype)

        # ahead of the mixer's own work, after FSDP has gathered the block
        block.mixer.register_forward_pre_hook(note)

    def on_train_end(self, trainer, module) -> None:
        kept = {name: str(p.dtype) for name, p in module.model.blocks[0].named_parameters()}
        state = trainer.optimizers[0].state
        moments = {str(s["exp_avg"].dtype) for s in state.values()}
        if trainer.is_global_zero:
            found = {"used": self.used, "input": self.input, "kept": kept, "moments": sorted(moments)}
            self.path.write_text(json.dumps(found))


def test_bfloat16_parameters_with_float32_masters_and_exceptions(tmp_path):
    job = Job(tmp_path / "wide", 6, 6, "Mamba2")
    job.on(2)
    types = tmp_path / "types.json"
    narrow = replace(job, run_dir=tmp_path / "narrow", trainer={"precision": "bf16-mixed"}, callbacks=(Types(types),))
    narrow.on(2)
    found = json.loads(types.read_text())
    wide = {f"mixer.{name}" for name in ("A_log", "D", "dt_bias")}
    assert {name for name, dtype in found["used"].items() if dtype == "torch.float32"} == wide
    assert {name for name, dtype in found["used"].items() if dtype == "torch.bfloat16"} == set(found["used"]) - wide
    assert found["input"] == "torch.bfloat16"
    assert set(found["kept"].values()) == {"torch.float32"}
    assert found["moments"] == ["torch.float32"]
    assert 0 < difference(losses(narrow.run_dir), losses(job.run_dir)) < 0.02
    norms = [[float(r[2]) for r in rows(run) if r[1] == "train/grad_norm"] for run in (job.run_dir, narrow.run_dir)]
    assert norms[0] == pytest.approx(norms[1], rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "model"),
    [
        ({"prefetch": 2, "reshard_after_forward": False}, {}),
        ({}, {"activation_checkpointing": True}),
        ({}, {"compile": True}),
        ({"prefetch": 1}, {"activation_checkpointing": True, "compile": True}),
    ],
)
def test_options_that_save_time_or_memory_change_no_loss(tmp_path, strategy, model):
    for mixer in ("RWKV7", "Top1Chunk"):  # one shares a value between layers
        job = Job(tmp_path / mixer, 6, 6, mixer, strategy=None)
        job.run()
        sharded = replace(job, run_dir=tmp_path / f"{mixer}-sharded", strategy=strategy, model=model)
        sharded.on(2)
        assert difference(rows(sharded.run_dir), rows(job.run_dir)) < 1e-4


def test_what_cannot_be_sharded_is_refused_with_the_way_out(tmp_path):
    with pytest.raises(ValueError, match="prefetch must be at least 0"):
        FSDP2Strategy(prefetch=-1)
    with pytest.raises(ValueError, match="timeout_s must be above 0"):
        FSDP2Strategy(timeout_s=0)
    for strategy, options, message in (
        ({"replicate": 2}, {}, "replicate 2 does not divide the 1 processes"),
        ({"param_dtype": "bfloat16"}, {}, "set that to bf16-mixed"),
    ):
        fitting = trainer(tmp_path, strategy=FSDP2Strategy(**strategy), **options)
        with pytest.raises(ValueError, match=message):
            fitting.fit(tiny(max_tokens=8 * T), datamodule=SyntheticData())
