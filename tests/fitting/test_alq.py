"""Fitted levels against reference numbers, against every grid on small data, and on laws that leave nothing to fit."""

import itertools

import numpy as np
import pytest
from helpers_fitting import GOLDEN, KINDS, MIXTURES, STARTS, golden_cases, mixture_of, sampled_error
from hypothesis import given
from hypothesis import strategies as st

from gtrace.distributions import TruncatedNormalMixture
from gtrace.errors import UsageError
from gtrace.fitting import alq_level_sets, alq_levels, amq_multiplier, expected_variance
from gtrace.fitting.laws import as_law
from gtrace.sketch import MomentSketch, SketchSet

CASES = list(golden_cases("alq"))
IDS = [f"{law}-{kind}-{bits}" for law, kind, bits, _ in CASES]
DESCENTS = [
    (law, kind, bits, start, expected["coordinate_descent"][start])
    for law, kind, bits, expected in CASES
    if bits <= 5 or kind == "magnitude_zero"
    for start in expected.get("coordinate_descent", {})
]


def sketch_of(values, bucket=None, norm="l2"):
    return MomentSketch.of(np.asarray(values, np.float32), norm, bucket)


def student(n=8192 * 8, seed=0, df=3):
    return np.random.default_rng(seed).standard_t(df, n).astype(np.float32)


@pytest.mark.parametrize(("law", "kind", "bits", "expected"), CASES, ids=IDS)
def test_the_optimum_of_the_reference(law, kind, bits, expected):
    mixture, options = mixture_of(GOLDEN["alq"][law]), KINDS[kind]
    reference = np.array(expected["levels"])
    assert expected_variance(mixture, reference, **options) == pytest.approx(expected["objective"], rel=1e-12)
    levels = alq_levels(mixture, bits, **options)
    assert levels == pytest.approx(reference, rel=1e-11, abs=1e-13)
    assert expected_variance(mixture, levels, **options) == pytest.approx(expected["objective"], rel=1e-12)


@pytest.mark.parametrize(("law", "kind", "bits", "start", "expected"), DESCENTS)
def test_every_sweep_of_the_reference(law, kind, bits, start, expected):
    mixture, options = mixture_of(GOLDEN["alq"][law]), KINDS[kind]
    last = 300 if bits == 8 else 3000
    sweeps = 30 if bits == 8 else last
    _, history = alq_levels(mixture, bits, method="cd", start=STARTS[start], history=True, sweeps=sweeps, **options)
    assert (np.diff(history) <= 1e-12 * history[1:]).all()

    def after(sweeps):
        return history[min(sweeps, history.size - 1)]

    assert after(0) == pytest.approx(expected["objective_start"], rel=1e-12)
    for sweep in (1, 10, 30) if bits == 8 else (1, 10, 30, last):
        assert after(sweep) == pytest.approx(expected[f"objective_after_{sweep}"], rel=1e-10)
    if bits < 8:
        best = GOLDEN["alq"][law]["results"][kind][str(bits)]["objective"]
        for excess in ("1e-2", "1e-4", "1e-8"):
            needed = int(np.argmax(history <= best * (1 + float(excess))))
            assert needed == expected[f"sweeps_to_{excess}"]


def test_a_step_along_the_gradient_is_that_of_the_formula():
    law = MIXTURES["wide"]
    start = np.array([0.0, 0.05, 0.6, 1.0])
    _, slopes = as_law(law).gradient(start, False)
    most = np.minimum(np.diff(start)[:-1], np.diff(start)[1:]) / 2
    assert abs(slopes[0]) > most[0]
    assert abs(slopes[1]) < most[1]
    expected = start[1:-1] - np.sign(slopes) * np.minimum(np.abs(slopes), most)
    levels, history = alq_levels(law, 3, method="gd", start=start, history=True, sweeps=1)
    assert levels[1:-1] == pytest.approx(expected, rel=1e-3)
    assert history.size == 2


def every_grid(candidates, count, zero):
    for inner in itertools.combinations(candidates, count - (2 if zero else 1)):
        yield np.array([*([0.0] if zero else []), *inner, 1.0])


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("zero", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_fits_of_small_data_are_as_good_as_every_grid(seed, zero, weighted):
    rng = np.random.default_rng(seed)
    values = (rng.standard_normal(24) * np.exp(rng.standard_normal(24))).astype(np.float32)
    values[:3] = 0.0
    sketch = sketch_of(values, 8)
    levels = alq_levels(sketch, 3, zero, weighted)
    norms = np.repeat([np.sqrt(np.sum(values[i : i + 8].astype(float) ** 2)) for i in (0, 8, 16)], 8)
    r = np.unique(np.abs(values) / norms)
    candidates = r[(r > 0) & (r < 1)]
    if not zero:
        # the first level has its best place between values too
        candidates = np.unique(np.concatenate([candidates, np.geomspace(0.01, 0.9, 12)]))
    best = min(sampled_error(values, 8, grid, zero, weighted) for grid in every_grid(candidates[-20:], 4, zero))
    assert sampled_error(values, 8, levels, zero, weighted) <= best * (1 + 1e-9)


def test_fewer_values_than_levels_are_the_levels():
    sketch = sketch_of([0, 3, -3, 4, 0.5, 0], norm="linf")
    levels, history = alq_levels(sketch, 4, history=True)
    assert levels == pytest.approx([0, 0.125, 0.75, 1])
    assert history == pytest.approx([0.0], abs=1e-12)
    law = TruncatedNormalMixture([0.2, -0.2, 0.7], [0, 0, 0], [1, 1, 1])
    assert alq_levels(law, 4).tolist() == [0, 0.2, 0.7, 1]
    assert alq_levels(law, 4, zero=False).tolist() == [0.2, 0.7, 1]


@pytest.mark.parametrize(
    "nothing", [MomentSketch.of([]), MomentSketch.of(np.zeros(64)), TruncatedNormalMixture([0.0], [0.0], [1.0])]
)
def test_a_law_without_weight_keeps_its_start(nothing):
    assert alq_levels(nothing, 3) == pytest.approx([0, 1 / 3, 2 / 3, 1])
    levels, history = alq_levels(nothing, 3, zero=False, start=[0.1, 0.2, 0.3, 1.0], history=True)
    assert levels.tolist() == [0.1, 0.2, 0.3, 1.0]
    assert history.tolist() == [0.0]


def laws_to_fit():
    """Mixtures, and sketches of many values."""
    rng = np.random.default_rng(11)
    yield from MIXTURES.items()
    yield "student", sketch_of(rng.standard_t(3, 60_000), 8192)
    yield "lognormal", sketch_of(rng.lognormal(0, 2, 60_000), 8192)
    yield "sparse", sketch_of(rng.standard_normal(60_000) * (rng.random(60_000) < 0.1), 8192)


@pytest.mark.parametrize("zero", [True, False])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("law", [pytest.param(law, id=name) for name, law in laws_to_fit()])
def test_no_descent_ends_at_a_better_grid(law, bits, zero):
    best = expected_variance(law, alq_levels(law, bits, zero), zero)
    for start in ("uniform", "exponential", "companding"):
        levels, history = alq_levels(law, bits, zero, method="cd", start=start, history=True, sweeps=40)
        assert (np.diff(history) <= 1e-12 * history[1:] + 1e-15).all()
        assert best <= history[-1] * (1 + 1e-6)
        assert expected_variance(law, levels, zero) == pytest.approx(history[-1], rel=1e-6)


ANY_FLOAT = st.floats(width=32) | st.sampled_from([0.0, 1.0, -1.0, 1e-45, 3e38, 1.0000001])


@pytest.mark.parametrize("method", ["newton", "cd", "gd"])
@pytest.mark.parametrize("zero", [True, False])
@given(
    values=st.lists(ANY_FLOAT, max_size=40),
    bucket=st.sampled_from([None, 1, 7]),
    norm=st.sampled_from(["l2", "linf", "l1"]),
)
def test_whatever_the_values_levels_ascend(method, zero, values, bucket, norm):
    sketch = sketch_of(values, bucket, norm)
    levels = alq_levels(sketch, 4, zero, method=method, sweeps=25)
    assert levels.size <= 8
    assert (np.diff(levels.astype(np.float32)) > 0).all()
    assert levels[-1] == 1.0
    assert levels[0] == 0.0 if zero else levels[0] > 0
    assert np.isfinite(expected_variance(sketch, levels, zero))


@pytest.mark.parametrize(
    ("fit", "arguments", "said"),
    [
        (alq_levels, {"bits": 1}, "from 2 to 12"),
        (alq_levels, {"bits": 2.5}, "2.5 is not an integer"),
        (alq_levels, {"bits": 3, "method": "sgd"}, "did you mean"),
        (alq_levels, {"bits": 3, "start": [0.0, 1.0]}, "give 4 ascending levels, first 0 and last 1"),
        (alq_levels, {"bits": 3, "start": [0.0, 0.2, 0.3, 1.0], "zero": False}, "first one above 0"),
        (alq_levels, {"bits": 3, "sweeps": -1}, "negative"),
        (amq_multiplier, {"bits": 3, "method": "newton"}, "unknown"),
        (amq_multiplier, {"bits": 3, "start": 1.0}, "between 0 and 1"),
    ],
)
def test_what_cannot_be_fitted_is_refused(fit, arguments, said):
    with pytest.raises(UsageError, match=said):
        fit(MIXTURES["one"], **arguments)


@pytest.mark.parametrize("zero", [True, False])
@pytest.mark.parametrize("size", [6, 900, 40_000])
def test_fits_of_several_numbers_of_bits_are_those_of_each(size, zero):
    values = np.random.default_rng(size).standard_t(3, size)
    bits = (5, 2, 8, 3, 2)
    sketch, fresh = (MomentSketch.of(values, bucket_size=512) for _ in range(2))
    alq_levels(sketch, 3, zero)[:] = 0.0  # the caller's own copy
    sets = [levels[0, : sizes[0]].tolist() for levels, sizes in alq_level_sets(sketch.alone, bits, zero)]
    assert sets == [alq_levels(fresh, each, zero).tolist() for each in bits]
    # the same from candidates to the end step by step
    assert sets == [alq_levels(fresh, each, zero, history=True)[0].tolist() for each in bits]


@pytest.mark.parametrize("zero", [True, False])
@pytest.mark.parametrize("weighted", [True, False])
def test_fits_of_several_sketches_are_those_of_each(zero, weighted):
    """Also of few values, of zeros and of nothing."""
    rng = np.random.default_rng(8)
    drawn = [rng.standard_t(3, size) for size in (3000, 1, 2, 6, 40)] + [rng.integers(-3, 4, 900) / 3]
    fresh = [MomentSketch.of(each, "l2", 512) for each in [*drawn, np.zeros(9), np.zeros(0), rng.random(70) > 0.9]]
    bits = (2, 5, 3, 8)
    for (levels, sizes), each in zip(alq_level_sets(SketchSet.of(fresh), bits, zero, weighted), bits, strict=True):
        own = [alq_levels(sketch, each, zero, weighted, history=True)[0].tolist() for sketch in fresh]
        assert [row[:size].tolist() for row, size in zip(levels, sizes, strict=True)] == own
    with pytest.raises(UsageError, match="norm none"):
        alq_level_sets(MomentSketch.of(drawn[0], "none").alone, (3,))
