"""Levels from bins: close to the exact ones on every law, and exact where a bin's contents are known."""

import numpy as np
import pytest
from helpers_optimal import laws
from hypothesis import given
from hypothesis import strategies as st

from gtrace import MomentSketch
from gtrace.errors import UsageError
from gtrace.fitting import certified_levels, objective, optimal_level_sets, optimal_levels
from gtrace.fitting.optimal import _halves, bin_points, solve
from gtrace.sketch import SketchSet

SMOOTH = ("normal", "t1", "t3", "lognormal3")


def excess(r, levels, s, weights=None, **ends):
    """How far these levels are above the optimum, relative; 0 where both are exact."""
    best = certified_levels(r, s, weights, **ends)[1]
    found = objective(r, levels, weights)
    return found / best - 1 if best else found


@pytest.mark.parametrize("n", [50, 1000, 5000, 100_000])
@pytest.mark.parametrize("name", SMOOTH)
def test_levels_of_a_sketch_are_nearly_optimal(name, n):
    v = laws(n, 20)[name]
    r = np.abs(v.astype(np.float64))
    r /= r.max()
    sketch = MomentSketch.of(v, norm="linf")
    for s, limit in ((4, 1e-4), (8, 1e-4), (16, 1e-4), (256, 2e-2)):
        levels = optimal_levels(sketch, s)
        assert levels.size <= s
        assert (levels[0], levels[-1]) == (0.0, 1.0)
        assert (np.diff(levels) > 0).all()
        assert -1e-9 <= excess(r, levels, s, lo=0, hi=1) <= limit


@pytest.mark.parametrize("method", ["exact", "sketch"])
def test_a_merged_sketch_gives_the_levels_of_all_its_values(method):
    parts = [laws(5000, seed)["t3"] / np.float32(40) for seed in (22, 23)]
    both = np.clip(np.concatenate(parts), -1, 1)
    sketches = [MomentSketch.of(part, norm="none") for part in np.split(both, 2)]
    levels = optimal_levels(sketches[0] + sketches[1], 8, method=method)
    assert levels.tolist() == optimal_levels(MomentSketch.of(both, norm="none"), 8).tolist()


@pytest.mark.parametrize("name", [*SMOOTH, "offset", "spiked", "rounded", "denormal", "even"])
def test_unsorted_signed_values_in_one_pass(name):
    x = laws(40_000, 24)[name]
    w = np.random.default_rng(25).lognormal(0, 1, x.size)
    for weights in (None, w):
        for s in (4, 8, 16):
            levels = optimal_levels(x, s, weights, method="sketch")
            assert (levels[0], levels[-1]) == (x.min(), x.max())
            assert excess(x, levels, s, weights) <= 1e-4


@pytest.mark.parametrize(
    ("values", "levels"), [([], [0, 1]), ([0] * 9, [0, 1]), ([-3, 0, 0], [0, 1]), ([4, -1, 2], [0, 0.25, 0.5, 1])]
)
def test_empty_and_one_sided_sketches(values, levels):
    sketch = MomentSketch.of(np.array(values, np.float32), norm="linf")
    assert optimal_levels(sketch, 8).tolist() == pytest.approx(levels, rel=1e-15)


def test_free_values_need_their_own_end():
    sketch = MomentSketch.of(np.array([1.0, 2.0, 5.0], np.float32), norm="none")
    with pytest.raises(UsageError, match="reach from 0 to 5"):
        optimal_levels(sketch, 3)
    with pytest.raises(UsageError, match="the ends must be finite"):
        optimal_levels(sketch, 3, hi=np.inf)
    assert optimal_levels(sketch, 3, hi=5.0).tolist() == [0, 2, 5]
    with pytest.raises(UsageError, match="brings its own"):
        optimal_levels(sketch, 3, [1.0], hi=5.0)


def test_levels_of_several_counts_are_those_of_each():
    values = np.random.default_rng(30).standard_t(3, 700).astype(np.float32)
    for v in (values, values[:5]):
        sketch, fresh = (MomentSketch.of(v, bucket_size=512) for _ in range(2))
        one = optimal_levels(sketch, 8)
        one[1] = -1.0  # the caller's own copy
        sets = optimal_level_sets(sketch.alone, (4, 8, 2, 4, 300))
        assert [levels[0, : sizes[0]].tolist() for levels, sizes in sets] == [
            optimal_levels(fresh, count).tolist() for count in (4, 8, 2, 4, 300)
        ]
    with pytest.raises(UsageError, match="s: 1 does not fit"):
        optimal_level_sets(sketch.alone, (4, 1))


@pytest.mark.parametrize("scale", [1.0, 1e-42, 1e38])
def test_levels_of_several_sketches_are_those_of_each(scale):
    """Also of too few values for as many levels, of zeros, of nothing, and beyond what squares can hold."""
    rng = np.random.default_rng(5)
    drawn = [rng.standard_t(3, size) / 20 for size in (3000, 1, 2, 40)] + [rng.integers(-3, 4, 900) / 3]
    values = [each * scale for each in [*drawn, np.zeros(9), np.zeros(0), rng.standard_normal(9) / 20]]
    fresh = [MomentSketch.of(each.astype(np.float32), "linf", 512) for each in values]
    weights = [np.full(3000, 1e-318), np.full(3000, 1e304), np.arange(3000) % 7 == 0]
    fresh += [MomentSketch.of(drawn[0], "linf", 512, weights=each) for each in weights]
    fresh.append(MomentSketch.of([-4, 1, 2, 3, 0.5], "linf", weights=[1, 0, 2, 0, 0]))
    counts = (8, 2, 4, 16)
    for (levels, sizes), count in zip(optimal_level_sets(SketchSet.of(fresh), counts), counts, strict=True):
        each = [solve(_halves(sketch, 0.0, 1.0), count)[0] for sketch in fresh]
        assert [row[:size].tolist() for row, size in zip(levels, sizes, strict=True)] == [one.tolist() for one in each]
    free = MomentSketch.of(np.array([1.0, 2.0], np.float32), norm="none")
    with pytest.raises(UsageError, match="reach from 0 to 2"):
        optimal_level_sets(SketchSet.of([free, free]), counts)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12), st.integers(0, 1000))
def test_the_points_of_a_bin_keep_its_moments(inside, seed):
    d = np.array(inside) * 0.25
    w = np.random.default_rng(seed).random(d.size)
    plain, weighted = [d.size, d.sum(), d @ d], [w.sum(), w @ d, w @ (d * d)]
    x, mass = bin_points(np.array([2.0]), np.array([2.25]), np.array([plain + weighted]), 0.0, 10.0)
    assert (np.diff(x) >= 0).all()
    assert (x >= 2.0).all()
    assert (x <= 2.25).all()
    assert (mass >= 0).all()
    assert mass.sum() == pytest.approx(w.sum(), rel=1e-14)
    if d.size <= 2:
        assert x[[0, -1]] == pytest.approx(2.0 + np.array([d.min(), d.max()]), abs=1e-6)
    # with equal weights all three moments survive
    x, mass = bin_points(np.array([2.0]), np.array([2.25]), np.array([plain + plain]), 0.0, 10.0)
    assert mass @ x == pytest.approx(2.0 * d.size + d.sum(), rel=1e-14)
    assert mass @ (x - 2.0) ** 2 == pytest.approx(d @ d, rel=1e-6, abs=1e-12)
