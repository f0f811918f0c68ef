"""The moment sketch against float64 brute force."""

import math

import naive
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gtrace import MomentSketch
from gtrace.buckets import clip_limit
from gtrace.errors import UsageError
from gtrace.sketch import _MOST_KNOWN

MILLION = 1_000_000


def law(name, n=MILLION):
    rng = np.random.default_rng(11)
    made = {
        "normal": lambda: rng.standard_normal(n),
        "student t3": lambda: rng.standard_t(3, n),
        "lognormal": lambda: rng.lognormal(0, 2, n) * rng.choice([-1, 1], n),
        "laplace": lambda: rng.laplace(size=n),
        "uniform": lambda: rng.uniform(-1, 1, n),
    }
    return made[name]().astype(np.float32)


LAWS = ("normal", "student t3", "lognormal", "laplace", "uniform")
ON_EDGES = [
    ([0, 0.125, 0.25, 0.5, 1], True),
    ([0.125, 0.25, 0.5, 1], False),
    ([0, 1], True),
    (np.concatenate([[0], 2.0 ** np.arange(-126, 1)]), True),
    (np.arange(257) / 256, True),
]
ANYWHERE = [(np.arange(2 ** (b - 1)) / (2 ** (b - 1) - 1), True) for b in (2, 3, 4)] + [
    ((2 * np.arange(2 ** (b - 1)) + 1) / (2**b - 1), False) for b in (2, 3, 4)
]


@pytest.mark.parametrize("name", LAWS)
@pytest.mark.parametrize("norm", ["l2", "linf"])
@pytest.mark.parametrize("bucket", [100, 8192, None])
def test_expected_error_against_brute_force(name, norm, bucket):
    x = law(name, MILLION // 10 if bucket == 100 else MILLION)
    sketch = MomentSketch.of(x, norm, bucket)
    for grids, share in ((ON_EDGES, 1e-12), (ANYWHERE, 1e-6)):
        for levels, zero in grids:
            truth = naive.rounding_error(x, norm, bucket, levels, zero=zero)
            off = abs(sketch.expected_error(levels, zero) - truth)
            assert off <= min(share * truth, sketch.error_bound(levels, zero))


finite = st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-(2.0**99), max_value=2.0**99)


@given(
    st.lists(finite | st.sampled_from([0.0, 1.0, -1.0, 0.5]), min_size=1, max_size=60),
    st.lists(st.floats(0.001, 0.999), max_size=6, unique=True),
    st.sampled_from([1, 7, None]),
    st.sampled_from(["l2", "linf", "l1"]),
    st.booleans(),
)
@settings(max_examples=300)
def test_error_is_never_further_off_than_its_bound(values, inner, bucket, norm, zero):
    levels = np.array(([0.0] if zero else []) + sorted(inner) + [1.0])
    sketch = MomentSketch.of(values, norm, bucket)
    truth = naive.rounding_error(values, norm, bucket, levels, zero=zero)
    error, _, bound, mass = sketch.expect(levels, zero=zero)
    assert abs(error - truth) <= bound + 1e-11 * truth
    assert math.isclose(mass.sum(), 1, rel_tol=1e-9)
    assert (mass >= 0).all()


@pytest.mark.parametrize("norm", ["l2", "linf"])
@pytest.mark.parametrize("zero", [True, False])
def test_probabilities(norm, zero):
    x = law("student t3", 50_000)
    levels = np.array([0, 0.03, 0.2, 1.0]) if zero else np.array([0.03, 0.2, 0.6, 1.0])
    found = MomentSketch.of(x, norm, 512).probabilities(levels, zero)
    assert np.allclose(found, naive.symbol_mass(x, norm, 512, levels, zero=zero), atol=1e-6)


@pytest.mark.parametrize("bucket", [1000, 4096])
def test_merging_halves_equals_the_whole(bucket):
    x = law("student t3", 8 * bucket + 55)
    whole = MomentSketch.of(x, "l2", bucket)
    merged = MomentSketch.of(x[: 3 * bucket], "l2", bucket) + MomentSketch.of(x[3 * bucket :], "l2", bucket)
    assert (merged.rows == whole.rows).all()
    assert np.allclose(merged.sums, whole.sums, rtol=1e-12, atol=0)
    assert (merged.zeros, merged.size, merged.buckets) == (whole.zeros, whole.size, whole.buckets)


def test_zeros_and_zero_buckets():
    x = np.zeros(300, np.float32)
    x[250:] = 2.0
    sketch = MomentSketch.of(x, "l2", 100)
    assert (sketch.zeros, sketch.dead, sketch.buckets) == (250, 200, 3)
    assert math.isclose(sketch.zero_weight, 50 * 200.0, rel_tol=1e-6)
    levels = np.array([0.25, 1.0])
    truth = naive.rounding_error(x, "l2", 100, levels, zero=False)
    assert math.isclose(sketch.expected_error(levels, zero=False), truth, rel_tol=1e-12)


def test_nonfinite_values_are_counted_and_left_out():
    x = np.array([1.0, np.nan, -2.0, np.inf, 0.0], np.float32)
    sketch = MomentSketch.of(x, "linf")
    clean = MomentSketch.of([1.0, 0.0, -2.0, 0.0, 0.0], "linf")
    assert (sketch.nonfinite, sketch.size, sketch.zeros) == (2, 3, 1)
    assert (sketch.sums == clean.sums).all()


@pytest.mark.parametrize("values", [[], [0.0], [0.0, 0.0], [1e-45], [3.4e38, -3.4e38], [1e-45, 3.4e38]])
def test_degenerate_tensors(values):
    for norm in ("l2", "linf", "l1", "none"):
        sketch = MomentSketch.of(values, norm)
        if norm != "none":
            levels = [0, 0.5, 1]
            truth = naive.rounding_error(values, norm, None, levels)
            assert math.isclose(sketch.expected_error(levels), truth, rel_tol=1e-11)
        assert sketch.size == len(values)
        assert math.isfinite(sketch.energy)


def test_no_norm_rounds_the_values_themselves_and_those_above_the_last_level_saturate():
    x = law("normal", 20_000)
    levels = np.array([0, 1, 2, 4, 8.0])
    truth = naive.rounding_error(x, "none", None, levels)
    assert math.isclose(MomentSketch.of(x, "none").expected_error(levels), truth, rel_tol=1e-12)
    error = MomentSketch.of([0.5, 3.0, -5.0], "none").expected_error([0, 0.5, 2.0])
    assert math.isclose(error, 1 + 9, rel_tol=1e-12)


def test_exact_tail_is_kept_apart():
    x = law("normal", 250)
    sketch = MomentSketch.of(x, "l2", 100, tail="exact")
    assert (sketch.quantized, sketch.exact, sketch.buckets) == (200, 50, 2)
    assert math.isclose(sketch.expected_error([0, 1]), naive.rounding_error(x[:200], "l2", 100, [0, 1]), rel_tol=1e-12)
    assert math.isclose(sketch.energy, math.fsum(x.astype(np.float64) ** 2), rel_tol=1e-12)


def test_clipping_is_part_of_the_error():
    x = law("student t3", 5000)
    limit = clip_limit([x], 2.0)
    assert math.isclose(limit, 2 * x.std(dtype=np.float64), rel_tol=1e-7)
    clipped = np.clip(x, -limit, limit)
    sketch = MomentSketch.of(x, "linf", 512, clip=2.0)
    assert sketch.clipped == np.count_nonzero(x != clipped) > 0
    cost = math.fsum((x.astype(np.float64) - clipped) ** 2)
    assert math.isclose(sketch.clip_error, cost, rel_tol=1e-9)
    weighted = MomentSketch.of(x, "linf", 512, clip=2.0, weights=np.arange(x.size))
    assert math.isclose(
        weighted.clip_error, math.fsum(np.arange(x.size) * (x.astype(np.float64) - clipped) ** 2), rel_tol=1e-9
    )
    truth = naive.rounding_error(clipped, "linf", 512, [0, 1]) + cost
    assert math.isclose(sketch.expected_error([0, 1]), truth, rel_tol=1e-11)


@pytest.mark.parametrize(
    ("levels", "zero", "words"),
    [
        ([], True, "at least one"),
        ([0, np.nan], True, "finite"),
        ([0, 0.5, 0.5, 1], True, "ascending"),
        ([0.5, 1], True, "first level must be 0"),
        ([0, 1], False, "0 must not be a level"),
        ([-1, 0, 1], True, "not negative"),
    ],
)
def test_levels_are_checked(levels, zero, words):
    with pytest.raises(UsageError, match=words):
        MomentSketch.of([1.0]).expected_error(levels, zero)


def test_arguments_are_checked():
    with pytest.raises(UsageError, match="cannot be merged"):
        MomentSketch.of([1.0], "l2") + MomentSketch.of([1.0], "linf")
    with pytest.raises(UsageError, match="did you mean linf"):
        MomentSketch.of([1.0], "lnf")
    with pytest.raises(UsageError, match="bucket size: 0"):
        MomentSketch.of([1.0], "l2", 0)


@pytest.mark.parametrize("spread", [0.0, 1e-4, 0.3, 6.0, 25.0])
def test_log2_moments_are_those_of_the_values(spread):
    rng = np.random.default_rng(3)
    x = (rng.choice([-1, 1], 50_000) * 2.0 ** rng.normal(-20, spread, 50_000)).astype(np.float32)
    x[::9] = 0
    logs = np.log2(np.abs(x[x != 0]).astype(np.float64))
    found = MomentSketch.of(x, norm="none").log2_moments()
    assert found.count == logs.size
    assert math.isclose(found.mu, logs.mean(), rel_tol=1e-9)
    assert math.isclose(found.sigma, logs.std(), rel_tol=1e-6, abs_tol=1e-7)


def test_largest_is_exact_where_the_last_bin_holds_one_value_and_a_close_bound_elsewhere():
    x = np.random.default_rng(3).standard_normal(5000).astype(np.float32)
    assert MomentSketch.of(x, "none").largest == float(np.abs(x).max())
    assert MomentSketch.of([], "none").largest == 0.0
    crowd = np.array([1.0, 1.0003, 1.0005], np.float32)
    assert 1.0005 <= MomentSketch.of(crowd, "none").largest < 1.001


def test_results_are_all_returned_though_a_new_one_makes_room():
    sketch = MomentSketch.of([1.0])
    sketch.remember("old", lambda: 1)
    for number in range(_MOST_KNOWN - 1):
        sketch.remember(number, lambda: 0)
    assert sketch.remember_each(["new", "old"], lambda missing: [2] * len(missing)) == [2, 1]
