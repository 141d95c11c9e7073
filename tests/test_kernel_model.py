"""The cost model of the Triton kernels against counts made by hand."""

import pytest

from benchmarks.kernel_model import H100, Shape, attention, element, flash, kernels, routing

X = Shape(T=4096, H=4, G=2, D=64, C=128)


def by_name(x):
    return {work.kernel: work for parts in (attention(x), routing(x, exact=False)) for part in parts for work in part}


def test_own_chunk_is_counted_block_by_block():
    """Blocks of 64 queries against all blocks of 64 keys up to their own, two products of D multiply-adds each."""
    pairs = sum(64 * 64 * (i // 64 % 2 + 1) for i in range(0, X.T, 64))
    assert by_name(X)["own_forward"].flops == X.H * 2 * pairs * 2 * X.D
    q, k = 2 * X.T * X.H * X.D, 2 * X.T * X.G * X.D
    assert by_name(X)["own_forward"].bytes == q + k + k + q + 4 * X.T * X.H


def test_selected_chunk_counts_unfilled_rows():
    """256 queries a chunk of which half a block is wasted: 288 rows, in 32 chunks a key-value head."""
    assert by_name(X)["selected_forward"].flops == 32 * X.G * 288 * X.C * 2 * 2 * X.D


def test_element_is_counted_block_by_block():
    """Blocks of 64 queries against all blocks of 64 keys up to their own: 1 product forward, 4 and 3 backward."""
    pairs = sum(64 * 64 * (block + 1) for block in range(X.T // 64))
    (forward,), (queries, keys, values) = element(X)
    assert [w.flops / (X.H * pairs * 2 * X.D) for w in (forward, queries, keys)] == [1, 4, 3]
    assert [w.exponentials for w in (forward, queries, keys, values)] == [X.H * pairs] * 3 + [0]
    assert values.flops == X.H * 2 * pairs * X.D  # no more than one whole product


def test_full_attention():
    flops = 4 * X.D * X.H * X.T**2 / 2
    assert flash(X, "FlashAttention-2") == pytest.approx(3.5 * flops / 335e12)
    assert flash(X, "FlashAttention-3") == pytest.approx(flops / 740e12 + 2.5 * flops / 586.25e12)


def test_growth():
    """Attention grows linearly, selection by all keys quadratically: exact stays a constant share of full attention."""

    def seconds(T, selection):
        return sum(w.floor(H100) for part in kernels(Shape(T), selection) for w in part)

    assert seconds(1 << 15, "approx") / seconds(1 << 14, "approx") == pytest.approx(2, rel=0.02)
    assert seconds(1 << 23, "exact") / seconds(1 << 22, "exact") == pytest.approx(4, rel=0.02)
    # 1 + 2 + 2 products of queries and keys for selection at peak, against 2 and 5 at the published rates.
    products = flash(Shape(1 << 23), "FlashAttention-2") / seconds(1 << 23, "exact")
    assert products == pytest.approx(7 / 335 / (5 / 989), rel=0.02)
    # Element: 8 products at peak; forward, at a head size of 128, as many exponentials as an H100 makes meanwhile.
    ratio = flash(Shape(1 << 23), "FlashAttention-2") / seconds(1 << 23, "element")
    assert ratio == pytest.approx(7 / 335 / (8 / 989), rel=0.02)
