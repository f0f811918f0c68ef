"""Bins of a sketch: blocks of them, expectations that walk over blocks instead of bins, and merging."""

from dataclasses import replace

import numpy as np
import pytest

from gtrace import MomentSketch
from gtrace.fitting.pooling import Pool
from gtrace.kernels import sketching
from gtrace.sketch import COUNTED, SketchSet
from gtrace.types import SummarySpec


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


SIZES = [(0, 0), (0, 5), (7, 0), (1, 1), (40, 200), (300, 300), (300, 3)]


def test_merging_is_adding_by_number():
    """All pairs in one call, the last time without the second ones."""
    random = np.random.default_rng(0)
    pairs = [(bins(random, first), bins(random, second)) for first, second in SIZES * 2]
    half, third = random.random((2, len(pairs), 2))
    third[len(SIZES) :] = 0.0
    sides = []
    for side, weights in ((0, half), (1, third)):
        bounds = np.cumsum([0, *(len(pair[side][0]) for pair in pairs)])
        rows, sums = (np.concatenate([pair[side][part] for pair in pairs]) for part in (0, 1))
        sides += [rows, sums, np.stack([bounds[:-1], bounds[1:]], axis=1), weights]
    rows, sums, starts = sketching.merge_bins(*sides, 0.7)
    for place, ((rows_a, sums_a), (rows_b, sums_b)) in enumerate(pairs):
        table = np.zeros((300, sketching.COLUMNS))
        table[rows_a] += sums_a * np.repeat(half[place], 3)
        table[rows_b] += sums_b * np.repeat(third[place], 3)
        wanted = np.union1d(rows_a, rows_b) if place < len(SIZES) else rows_a
        own = slice(*starts[place : place + 2])
        np.testing.assert_array_equal(rows[own], wanted)
        np.testing.assert_array_equal(sums[own], table[wanted] * 0.7)


SPECS = [
    SummarySpec("l2", 64),
    SummarySpec("linf", 100, "exact"),
    SummarySpec("l1", None),
    SummarySpec("none", None),
    SummarySpec("l2", 7, "exact", 2.0),
]


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("steps", [1, 3])
def test_sketches_of_several_tensors_are_those_of_each(spec, steps):
    """And so are their pools."""
    sizes, random = [300, 0, 1, 64, 777, 50, 90], np.random.default_rng(3)
    bounds = np.cumsum([0, *sizes])
    values = [random.standard_t(3, bounds[-1]).astype(np.float32) for _ in range(steps)]
    for each in values:
        each[bounds[-3] : bounds[-2]] = 0.0
        each[:40] = 0.0
        each[bounds[-2] :] *= np.float32(1e-42)
    sets = [SketchSet.of_values(each, bounds, spec) for each in values]
    several = [[MomentSketch.from_spec(part, spec) for part in np.split(each, bounds[1:-1])] for each in values]
    together, alone, pools = Pool(), [Pool() for _ in sizes], []
    for found, sketches in zip(sets, several, strict=True):
        together.add(found)
        for pool, sketch in zip(alone, sketches, strict=True):
            pool.add(sketch.alone)
    pools = [pool.mean()[0] for pool in alone]
    for found, wanted in ((sets[-1], several[-1]), (SketchSet.of(several[0]), several[0]), (together.mean(), pools)):
        assert len(found) == len(sizes)
        assert found.energies.tolist() == [sketch.energy for sketch in wanted]
        many = found.bins()
        for place, sketch in enumerate(wanted):
            for name in ("spec", "mantissa", *COUNTED):
                assert getattr(found[place], name) == getattr(sketch, name), (place, name)
            for ours, theirs in zip(found[place].bins(), sketch.bins(), strict=True):
                np.testing.assert_array_equal(ours, theirs)
            np.testing.assert_array_equal(found[place].rows, sketch.rows)
            np.testing.assert_array_equal(many.numbers[place], sketch.bins()[5:])
    assert sets[0].bare().energies.tolist() == sets[0].energies.tolist()


def test_moments_of_buckets_are_merged_if_both_are_known():
    spec = SummarySpec("l2", 64, bucket_moments=True)
    first, second = (MomentSketch.from_spec(np.arange(1.0, size), spec) for size in (200, 90))
    merged = np.concatenate([first.bucket_moments, second.bucket_moments])
    np.testing.assert_array_equal((first + second).bucket_moments, merged)
    assert (first + replace(second, bucket_moments=None)).bucket_moments is None
    assert (first.size, (first + second).size) == (199, 288)
