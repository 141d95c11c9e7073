import pytest
import torch
from torch._dynamo.utils import counters

from seqarch.training.optimizer import AdamWConfig
from tests.training.synthetic import SyntheticData, T, rows, tiny, trainer

# dynamo looks at .grad of every tensor that it meets
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")


def fit(run_dir, compiled):
    module = tiny(max_tokens=4 * 8 * T, val_every_n_steps=2, compile=compiled, optimizer=AdamWConfig(lr=1e-2))
    if compiled:
        for block in module.model.blocks:
            block.compile = lambda block=block: torch.nn.Module.compile(block, backend="aot_eager")
    trainer(run_dir).fit(module, datamodule=SyntheticData())
    return module


def test_compiled_blocks_train_alike_and_lengths_of_validation_do_not_recompile(tmp_path):
    torch._dynamo.reset()
    counters.clear()
    plain, compiled = fit(tmp_path / "plain", False), fit(tmp_path / "compiled", True)
    a, b = rows(tmp_path / "plain"), rows(tmp_path / "compiled")
    assert [r[:2] for r in a] == [r[:2] for r in b]
    assert [float(r[2]) for r in a] == pytest.approx([float(r[2]) for r in b], rel=1e-4)
    assert plain.state_dict().keys() == compiled.state_dict().keys()
    # one graph serves both blocks, or one each; the two lengths of validation add none
    assert 1 <= counters["stats"]["unique_graphs"] <= 2, counters
    torch._dynamo.reset()
