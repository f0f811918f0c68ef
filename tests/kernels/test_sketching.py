"""Bins of a sketch: blocks of them, expectations that walk over blocks instead of bins, and merging."""

import numpy as np
import pytest

from gtrace import MomentSketch
from gtrace.kernels import sketching


def of(bucket=512, norm="l2", size=40_000):
    return MomentSketch.of(np.random.default_rng(1).standard_t(3, size).astype(np.float32), norm, bucket)


@pytest.mark.parametrize("norm", ["l2", "none"])
@pytest.mark.parametrize("mantissa", [10, 3])
def test_edges_of_bins(norm, mantissa):
    sketch = of(None, norm, 500).coarsen(mantissa)
    r = sketch.lower + sketch.sums[:, 1] / sketch.sums[:, 0]
    exponent = np.floor(np.log2(r))
    width = 2.0 ** (exponent - mantissa)
    np.testing.assert_array_equal(sketch.lower, np.floor(r / width) * width)
    np.testing.assert_array_equal(sketch.upper, sketch.lower + width)
    # The bin below the first octave begins at zero.
    tiny = MomentSketch.of([3e38, 1e-45], "l1")
    assert (tiny.rows[0], tiny.lower[0], tiny.upper[0]) == (1, 0.0, 2.0**-149)
    w, w1, w2 = sketch.sums.T[3:]
    assert sketch.energy == pytest.approx(np.sum(w * sketch.lower**2 + 2 * sketch.lower * w1 + w2), rel=1e-14)


@pytest.mark.parametrize("zero", [True, False])
@pytest.mark.parametrize("norm", ["l2", "linf"])
@pytest.mark.parametrize("count", [2, 3, 16, 200])
def test_blocks_give_what_bins_give(zero, norm, count):
    sketch = of(norm=norm)
    inner = np.sort(np.random.default_rng(count).random(count - 1)) ** 3
    levels = np.concatenate([[0.0] if zero else [1e-7], inner[1:] + 1e-6, [1.0]])
    lower, upper, sums = sketch.lower, sketch.upper, sketch.sums
    masses = np.empty((2, levels.size))
    # Bins in which every block ends inside a gap cannot be told from blocks: single bins, one call each.
    alone = np.zeros(3)
    masses[0] = 0.0
    mass = np.empty(levels.size)
    for k in range(sketch.rows.size):
        bin_ = slice(k, k + 1)
        part = sums[bin_]
        alone += sketching.expect_levels(lower[bin_], upper[bin_], part, part, part, levels, not zero, mass)
        masses[0] += mass
    found = sketching.expect_levels(
        lower, upper, sums, sketch.bins().blocks, sketch.bins().large, levels, not zero, masses[1]
    )
    np.testing.assert_allclose(found, alone, rtol=1e-11)
    np.testing.assert_allclose(masses[1], masses[0], rtol=1e-9, atol=1e-9 * sketch.size)


def bins(random, count):
    return np.sort(random.choice(300, count, replace=False)).astype(np.int32), random.random((count, sketching.COLUMNS))


@pytest.mark.parametrize(("first", "second"), [(0, 0), (0, 5), (7, 0), (1, 1), (40, 200), (300, 300), (300, 3)])
def test_merging_is_adding_by_number(first, second):
    random = np.random.default_rng([first, second])
    rows_a, sums_a = bins(random, first)
    rows_b, sums_b = bins(random, second)
    table = np.zeros((300, sketching.COLUMNS))
    half, third = (0.5, 1.5), (0.3, 3.0)
    table[rows_a] += sums_a * np.repeat(half, 3)
    table[rows_b] += sums_b * np.repeat(third, 3)
    rows, sums = sketching.merge_bins(rows_a, sums_a, *half, rows_b, sums_b, *third, 0.7)
    np.testing.assert_array_equal(rows, np.union1d(rows_a, rows_b))
    np.testing.assert_array_equal(sums, table[rows] * 0.7)
