"""The table of chunks against loops over documents."""

import pytest
import torch

from seqarch_top1.triton_layout import chunk_table
from tests.plugins.triton_chunk_cases import Case, chunks


@pytest.mark.parametrize("S", [1, 15, 16, 17, 64, 100])
def test_one_document(S):
    table = chunk_table(S, 16, None, torch.device("cpu"))
    for ours, expected in zip((table.begin, table.of, table.first), chunks(Case(S)), strict=True):
        assert ours.dtype == torch.int32
        assert ours.tolist() == expected.tolist()


@pytest.mark.parametrize(
    "bounds",
    [
        (0, 100),
        (0, 1, 1, 16, 32, 49, 64, 101),
        (0, 0, 5),
        (0, 5, 5),
        (0, 16, 16, 32),
        (0, *range(1, 20)),
        (0, 15, 32, 49),
    ],
)
def test_packed(bounds):
    S = bounds[-1]
    table = chunk_table(S, 16, torch.tensor(bounds, dtype=torch.int32), torch.device("cpu"))
    begin, of, first = chunks(Case(S, bounds=bounds))
    assert table.of.tolist() == of.tolist()
    assert table.first.tolist() == first.tolist()
    assert all(t.dtype == torch.int32 for t in (table.begin, table.of, table.first))
    # As many as there are at most, the rest empty.
    assert table.begin[: len(begin)].tolist() == begin.tolist()
    assert (table.begin[len(begin) :] == S).all()
    assert len(table.begin) == S // 16 + len(bounds)


def test_nothing_is_read_back():
    """The meta device has nothing to read."""
    bounds = torch.empty(9, dtype=torch.int32, device="meta")
    assert chunk_table(100, 16, bounds, torch.device("meta")).begin.shape == (100 // 16 + 8 + 1,)
