"""Where tokens lie when documents are cut into chunks."""

import pytest
import torch

from seqarch.ops.chunks import ChunkLayout


def cu(*bounds):
    return torch.tensor(bounds, dtype=torch.int32)


@pytest.mark.parametrize(("T", "C", "n"), [(1, 4, 1), (4, 4, 1), (5, 4, 2), (8, 4, 2), (3, 1, 3)])
def test_one_document(T, C, n):
    layout = ChunkLayout(T, C)
    x = torch.arange(1.0, 2 * T + 1).view(2, T)
    chunks = layout.split(x)
    assert layout.n_chunks == n
    assert layout.resets == frozenset()
    assert chunks.shape == (2, n, C)
    assert torch.equal(chunks.flatten(1)[:, :T], x)
    assert not chunks.flatten(1)[:, T:].any()
    assert torch.equal(layout.join(chunks), x)


def test_no_chunk_holds_two_documents():
    layout = ChunkLayout(10, 4, cu(0, 5, 6, 10))
    chunks = layout.split(torch.arange(1, 11)[None, :, None])
    want = [[1, 2, 3, 4], [5, 0, 0, 0], [6, 0, 0, 0], [7, 8, 9, 10]]
    assert chunks[0, :, :, 0].tolist() == want
    assert layout.resets == {2, 3}


def test_empty_documents_take_no_chunk():
    layout = ChunkLayout(6, 4, cu(0, 0, 2, 2, 6, 6))
    assert layout.n_chunks == 2
    assert layout.resets == {1}


@pytest.mark.parametrize("bounds", [(0, 13), (0, 1, 13), (0, 4, 8, 13), (0, 3, 3, 12, 13), (0, 0, 13)])
@pytest.mark.parametrize("C", [1, 2, 4, 16])
def test_join_reverses_split_and_so_do_their_gradients(bounds, C):
    layout = ChunkLayout(13, C, cu(*bounds))
    x = torch.randn(1, 13, 2, 3, requires_grad=True)
    chunks = layout.split(x)
    assert chunks.shape == (1, layout.n_chunks, C, 2, 3)
    assert torch.equal(layout.join(chunks), x)
    weight = torch.randn_like(x)
    (grad,) = torch.autograd.grad(layout.join(chunks), x, weight)
    assert torch.equal(grad, weight)
