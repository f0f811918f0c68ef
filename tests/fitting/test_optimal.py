"""Exact levels against reference numbers, plain twins and closed forms, and the proof that comes with them."""

import itertools
import json
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from helpers_optimal import WIDE, laws, monotone_optimum, naive_objective, quadratic_optimum
from hypothesis import given
from hypothesis import strategies as st

from gtrace.errors import UsageError
from gtrace.fitting import certified_levels, objective, optimal_levels
from gtrace.kernels import interval_sums
from gtrace.kernels import optimal as kernels

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "zipml.json").read_text())
SETS = [name for name in GOLDEN if name != "about"]
COUNTS = ("2", "3", "4", "7", "8", "16")


def stored(draw):
    return draw.astype(np.float32).astype(np.float64)


def rng(seed):
    return np.random.default_rng(seed)


def golden_data(name):
    """Signed values, weights or None, and the same as r in [0, 1] with weights or None."""
    if name == "bucket_t3_l2":
        v = stored(rng(120).standard_t(3, 8192))
        norms = np.sqrt(np.sum(v.reshape(-1, 512) ** 2, axis=1))
        return v, None, np.abs(v) / np.repeat(norms, 512), np.repeat(norms**2, 512)
    draws = {
        "lognormal_1k": (lambda: rng(1).lognormal(0.0, 1.0, 1000), None),
        "lognormal_sigma3_5k": (lambda: rng(2).lognormal(0.0, 3.0, 5000), None),
        "w_lognormal_1k": (lambda: rng(101).lognormal(0.0, 1.0, 1000), lambda: rng(102).lognormal(0.0, 1.0, 1000)),
    }
    x = stored(draws[name][0]())
    w = None if draws[name][1] is None else draws[name][1]()
    return x, w, np.abs(x) / np.abs(x).max(), w


def check_certified(x, s, weights=None, **ends):
    """Solve, check everything the result promises about itself, and return the objective."""
    levels, value, bound = certified_levels(x, s, weights, **ends)
    assert levels.dtype == np.float64
    assert 1 <= levels.size <= s
    assert (np.diff(levels) > 0).all()
    assert levels[0] == ends.get("lo", np.min(x))
    assert levels[-1] == ends.get("hi", np.max(x))
    again = naive_objective(x, levels, weights)
    assert value == pytest.approx(again, rel=1e-12, abs=1e-300)
    assert value <= bound * (1 + 1e-9)
    # rounding in the bound's own sums is taken off it
    assert bound <= value * (1 - 5e-11)
    return value


@pytest.mark.parametrize("name", SETS)
def test_golden_streams(name):
    x, _, _, weights = golden_data(name)
    check = GOLDEN[name]["check"]
    assert (x.size, np.unique(x).size) == (check["N"], check["distinct"])
    assert (x.min(), x.max()) == (check["min"], check["max"])
    assert np.sum(x * x) == pytest.approx(check["sumsq"], rel=1e-13)
    if weights is not None:
        assert np.sum(weights) == pytest.approx(GOLDEN[name]["check_weights"]["sum"], rel=1e-13)


@pytest.mark.parametrize("s", COUNTS)
@pytest.mark.parametrize("name", SETS)
def test_golden_optimum(name, s):
    x, w, r, v = golden_data(name)
    entry = GOLDEN[name]
    if "minmax" in entry:
        assert check_certified(x, int(s), w) == pytest.approx(entry["minmax"][s]["optimum"], rel=1e-9)
        uniform = np.linspace(x.min(), x.max(), int(s))
        assert objective(x, uniform, w) == pytest.approx(entry["minmax"][s]["uniform"], rel=1e-9)
    assert check_certified(r, int(s), v, lo=0.0, hi=1.0) == pytest.approx(entry["abs01"][s]["optimum"], rel=1e-9)
    assert objective(r, np.linspace(0, 1, int(s)), v) == pytest.approx(entry["abs01"][s]["uniform"], rel=1e-9)


@pytest.mark.parametrize("s", COUNTS)
@pytest.mark.parametrize("cells", ["32", "256"])
@pytest.mark.parametrize("name", ["lognormal_1k", "lognormal_sigma3_5k"])
def test_golden_grid(name, cells, s):
    r = golden_data(name)[2]
    levels = optimal_levels(r, int(s), lo=0, hi=1, grid=int(cells))
    assert np.isin(levels, np.arange(int(cells) + 1) / int(cells)).all()
    assert objective(r, levels) == pytest.approx(GOLDEN[name]["abs01_grid"][cells][s], rel=1e-9)


@st.composite
def small_cases(draw):
    """A few points with ties, optional weights with zeros, optional ends, and a number of levels."""
    base = draw(st.sampled_from([0.0, 1e6, -3.5, 1e-30]))
    step = draw(st.sampled_from([1.0, 0.125, 1e-3, 1e-30]))
    n = draw(st.integers(1, 60))
    x = base + step * np.array(draw(st.lists(st.integers(0, 40), min_size=n, max_size=n)), np.float64)
    if draw(st.booleans()):
        x[0] += 1e9 * step  # sums are far above what levels cost
    weights = None
    if draw(st.booleans()):
        weights = np.array(draw(st.lists(st.sampled_from([0.0, 1.0, 2.5, 1e-9, 1e9]), min_size=n, max_size=n)))
    ends = {}
    if draw(st.booleans()):
        ends["lo"] = float(x.min() - draw(st.integers(0, 3)) * step)
    if draw(st.booleans()):
        ends["hi"] = float(x.max() + draw(st.integers(0, 3)) * step)
    # Dynamic programming, or the search; with 1 cell per level even these few points need several rounds.
    return x, weights, ends, draw(st.integers(2, 9)), draw(st.sampled_from([(1024, 4), (0, 1), (0, 4)]))


@given(small_cases())
def test_matches_the_quadratic_recursion(case):
    x, weights, ends, s, (few, cells) = case
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "FEW", few)
        patch.setattr(kernels, "CELLS_PER_LEVEL", cells)
        value = check_certified(x, s, weights, **ends)
    assert value == pytest.approx(quadratic_optimum(x, s, weights, **ends), rel=1e-11, abs=1e-300)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", sorted(laws(8, 0)))
def test_matches_twins_on_laws(name, weighted):
    n = 400 if name in WIDE else 1_500
    x = laws(n, 3)[name]
    weights = rng(4).lognormal(0, 2, x.size) * (rng(5).random(x.size) < 0.8) if weighted else None
    twin = quadratic_optimum if name in WIDE else monotone_optimum
    for s in (3, 8, 16):
        value = check_certified(x, s, weights)
        # prefix sums of values as even as these keep about 15 digits
        assert value == pytest.approx(twin(x, s, weights), rel=1e-12 if name in WIDE else 1e-10)


@pytest.mark.parametrize("name", ["t1", "spiked", "rounded"])
def test_certificate_holds_at_two_million_points(name):
    x = laws(2_000_000, 9)[name]
    for s in (2, 16):
        levels, value, bound = certified_levels(x, s)
        assert levels.size == s
        assert 0 < bound <= value <= bound * (1 + 1e-9)


@pytest.mark.parametrize("name", ["normal", "t1", "clusters", "spiked"])
def test_memory_does_not_grow_with_levels_times_points(name):
    x = np.sort(laws(1_000_000, 10)[name])
    optimal_levels(x, 16)  # loads its kernels
    tracemalloc.start()
    optimal_levels(x, 16)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # A float64 copy of the points, and little else; a table of levels times points would take 128 MB.
    assert peak < 3 * x.nbytes


@pytest.mark.parametrize("method", ["exact", "sketch"])
@pytest.mark.parametrize(
    ("x", "ends", "expected"),
    [
        ([3.0], {}, [3.0]),
        ([3.0, 3.0, 3.0], {}, [3.0]),
        ([3.0], {"lo": 3.0, "hi": 3.0}, [3.0]),
        ([0.25], {"lo": 0.0, "hi": 1.0}, [0.0, 0.25, 1.0]),
        ([0.0, 0.0], {"lo": 0.0, "hi": 1.0}, [0.0, 1.0]),
        ([2.0, -1.0, 2.0, 5.0], {}, [-1.0, 2.0, 5.0]),
        ([-0.0, 0.0, 1.0], {}, [0.0, 1.0]),
    ],
)
def test_few_distinct_values_come_back(x, ends, expected, method):
    assert optimal_levels(x, 4, method=method, **ends).tolist() == expected
    levels, value, bound = certified_levels(x, 4, **ends)
    assert (levels.tolist(), value, bound) == (expected, 0.0, 0.0)


@pytest.mark.parametrize("exponent", [-1000, -600, 500, 1000])
def test_extreme_magnitudes(exponent):
    # powers of two scale exactly; squares of the values leave float64's range on both sides
    x = rng(11).standard_t(3, 4000)
    levels, value, bound = certified_levels(x, 8)
    scaled, _, scaled_bound = certified_levels(np.ldexp(x, exponent), 8)
    assert np.ldexp(scaled, -exponent).tolist() == levels.tolist()
    assert scaled_bound == (np.ldexp(bound, 2 * exponent) if abs(exponent) <= 500 else (0, np.inf)[exponent > 0])
    for weight in (1e-200, 1e200):
        w = np.full(x.size, weight)
        assert objective(x, optimal_levels(x, 8, w)) == pytest.approx(value, rel=1e-12)


def test_order_shape_and_type_of_the_input_do_not_matter():
    x = np.round(rng(12).normal(size=3000) * 1000)
    w = rng(13).random(3000)
    order = np.argsort(x, kind="stable")
    levels = optimal_levels(x[order], 9)
    frozen = x.copy()
    frozen.flags.writeable = False
    forms = (x, x.reshape(30, 100), x.astype(np.float32), x.astype(np.int16), list(x), frozen, x[::-1])
    for form in forms:
        assert optimal_levels(form, 9).tolist() == levels.tolist()
    assert optimal_levels(x, 9, w).tolist() == optimal_levels(x[order], 9, w[order]).tolist()
    assert (frozen == x).all()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: optimal_levels([], 3), "values: there is none"),
        (lambda: optimal_levels([1.0, np.nan, 2.0], 3), "element 1 is nan"),
        (lambda: certified_levels([1.0, 2.0], 1), "s: 1 does not fit"),
        (lambda: optimal_levels([1.0, 2.0], 3, [1.0, -0.5]), "weights: element 1 is -0.5"),
        (lambda: optimal_levels([1.0, 2.0], 3, [1.0]), "1 of them for 2 values"),
        (lambda: optimal_levels([1.0, 2.0, 0.5], 3, lo=1.0), "element 2 is 0.5, below"),
        (lambda: optimal_levels([1.0], 3, lo=np.nan), "the ends must be finite"),
        (lambda: optimal_levels([1.0], 3, method="best"), "method: 'best' is unknown"),
        (lambda: optimal_levels([1e6, 1e6 + 1e-9], 3, grid=1000), "finer than float64"),
        (lambda: objective([0.0, 2.0], [0.0, 1.0]), "element 1 is 2.0, above"),
        (lambda: objective([0.0], [1.0, 0.0]), "ascending"),
    ],
)
def test_errors_name_the_place(call, message):
    with pytest.raises(UsageError, match=message):
        call()


def test_objective_matches_a_plain_sum():
    x = rng(14).standard_t(2, 20_000)
    w = rng(15).random(20_000)
    grid = np.unique(np.concatenate([[x.min(), x.max()], rng(16).normal(size=37).clip(x.min(), x.max())]))
    for values, weights in ((x, w), (np.sort(x), None)):
        assert objective(values, grid, weights) == pytest.approx(naive_objective(values, grid, weights), rel=1e-13)
    assert objective([2.0, 2.0], [2.0]) == 0.0


@given(st.integers(1, 12), st.integers(0, 10_000))
def test_grid_matches_the_quadratic_recursion(cells, seed):
    x = rng(seed).normal(size=40)
    low, high = x.min() - 0.25, x.max()
    grid = low + (high - low) * (np.arange(cells + 1) / cells)
    grid[-1] = high
    w = rng(seed).random(40)
    levels = optimal_levels(x, 4, w, lo=low, hi=high, grid=cells)
    assert np.isin(levels, grid).all()
    expected = quadratic_optimum(x, 4, w, low, high, candidates=grid)
    assert objective(x, levels, w) == pytest.approx(expected, rel=1e-9)


@given(st.lists(st.integers(0, 30), min_size=1, max_size=300), st.data())
def test_spans_are_the_sums_they_stand_for(points, data):
    x = np.sort(np.array(points, np.float64))
    w = rng(len(points)).random(x.size)
    nodes = np.empty((-(-x.size // interval_sums.NODE), interval_sums.COLUMNS))
    interval_sums.sum_nodes(x, w, nodes)
    start = data.draw(st.integers(0, x.size - 1))
    stop = data.draw(st.integers(start + 1, x.size))
    cells = np.empty((1, interval_sums.COLUMNS))
    interval_sums.first_cells(x, w, nodes, np.array([start, stop]), 0.0, 0.0, cells)
    y, v = x[start:stop], w[start:stop]
    up, down = y - y[0], y[-1] - y
    expected = [y[0], y[-1], v.sum(), v @ up, v @ down, v @ (up * down)]
    assert cells[0] == pytest.approx(expected, rel=1e-13, abs=1e-300)


@pytest.mark.parametrize("seed", range(6))
def test_bounds_hold_for_all_points_of_two_cells(seed):
    """Also where the intervals of a later level begin before those of an earlier one; cells of one point are exact."""
    random = rng(seed)
    x, w = np.sort(random.standard_normal(80) ** 3), random.random(80)
    nodes = np.empty((2, interval_sums.COLUMNS))
    interval_sums.sum_nodes(x, w, nodes)
    spread = np.empty(2)
    interval_sums.spread(x, nodes, spread)
    own = kernels.divide(kernels.Ordered(x, w, nodes, spread, x[0] - 0.1, x[-1]), 20)
    cells, first, live, *_ = own = own._replace(high=np.array([0, *(random.integers(0, r) for r in own.live[1:])]))
    rows, parts = kernels.exact_lengths(own, np.inf)
    highest, start, count, table = rows
    bounds, price = table.copy(), 1000.0
    # near those of some intervals, so that levels between the ends of their cells count
    some = start + (random.random(live.size) * count).astype(int)
    slope = parts[kernels.TILT][some] * random.uniform(0.8, 1.4, live.size)
    slope[0] = 0.5
    kernels.bound_paths(own, rows._replace(table=bounds), slope, parts, price, np.inf)
    points = [x[a:b] if a < b else cells[c, :1] for c, (a, b) in enumerate(itertools.pairwise(first))]

    def cost(y, z):
        inside = (x > y) & (x < z)
        return float(w[inside] @ ((x[inside] - y) * (z - x[inside])))

    for r in live[1:]:
        for q in range(highest[r], -1, -1):
            entry = start[r] + highest[r] - q
            assert table[entry] == pytest.approx(cost(points[q][0], points[r][0]), rel=1e-12, abs=1e-300)
            moved = [
                cost(y, z) + price + slope[q] * (y - points[q][0]) - slope[r] * (z - points[r][0])
                for y in points[q]
                for z in points[r]
            ]
            assert bounds[entry] <= min(moved) + 1e-12 * (1 + table[entry])
            if len(moved) == 1:
                assert bounds[entry] == pytest.approx(moved[0], rel=1e-12)
