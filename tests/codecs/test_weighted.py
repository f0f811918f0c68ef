"""Expected errors of which each element counts as much as it moves the optimizer's update."""

import numpy as np
import pytest
from helpers_variants import VARIANTS

import gtrace
from gtrace import MomentSketch
from gtrace.codecs import expecting
from gtrace.codecs.level_sets import LevelSets, judged_together
from gtrace.errors import UsageError
from gtrace.types import Key

EXPECTING = [spec for spec in VARIANTS if expecting(gtrace.codec(spec))]
#: fewer draws of an error with rare large terms would give too small a standard error
SIZE, DRAWS = 3000, 200


@pytest.fixture(scope="module")
def gradient():
    """Values and weights that have much to do with each other, as a gradient's second moments have."""
    rng = np.random.default_rng(3)
    values = (rng.lognormal(-4, 1.5, SIZE) * rng.choice([-1, 1], SIZE)).astype(np.float32)
    values[::97] = 0
    return values, np.exp(rng.normal(0, 1, SIZE)) / (0.01 + np.abs(values)) ** 1.5


@pytest.mark.parametrize("spec", EXPECTING)
def test_the_weighted_expectation_is_the_mean_of_many_draws(spec, gradient):
    values, weights = gradient
    codec = gtrace.codec(spec)
    plain = MomentSketch.from_spec(values, codec.needs)
    weighted = MomentSketch.from_spec(values, codec.needs, weights=weights)
    state = codec.fit(codec.init(SIZE), plain, 0)
    expected = codec.weighted_error(state, plain, weighted)
    draws = []
    for draw in range(DRAWS):
        arrived = codec.simulate(state, values, Key.derive(1, tensor="w", draw=draw)).values
        draws.append(float(weights @ (arrived.astype(np.float64) - values) ** 2))
    error = np.std(draws, ddof=1) / np.sqrt(DRAWS)
    assert abs(np.mean(draws) - expected) <= 4.5 * error + 2e-3 * expected
    # The same weight for all elements says what the plain sketch says.
    level = codec.weighted_error(state, plain, MomentSketch.from_spec(values, codec.needs, weights=np.full(SIZE, 3.0)))
    assert level == pytest.approx(3 * codec.expect(state, plain).squared_error, rel=1e-9, abs=1e-15)


def test_many_level_sets_are_weighed_as_each_of_them(gradient):
    values, weights = gradient
    codecs = [gtrace.codec(f"qsgdinf:bits={bits},bucket_size=512") for bits in (2, 3, 5)]
    assert all(map(judged_together, codecs))
    sets = LevelSets(codecs)
    plain = MomentSketch.from_spec(values, sets.needs)
    weighted = MomentSketch.from_spec(values, sets.needs, weights=weights)
    together = sets.expect(sets.judge(weighted), sets.fit(plain, SIZE)).squared_error
    alone = [c.weighted_error(c.fit(c.init(SIZE), plain, 0), plain, weighted) for c in codecs]
    assert together == pytest.approx(alone, rel=1e-12)


@pytest.mark.parametrize("tail", ["quantized", "exact"])
@pytest.mark.parametrize("norm", ["l2", "linf", "l1", "none"])
def test_weighted_sums_against_brute_force(norm, tail, gradient):
    values, weights = gradient
    sketch = MomentSketch.of(values, norm, 512, tail=tail, clip=2.5, weights=weights)
    limit = 2.5 * values.std(dtype=np.float64)
    clipped = np.clip(values.astype(np.float64), -limit, limit)
    assert sketch.energy == pytest.approx(weights @ clipped**2, rel=1e-6)
    assert sketch.clip_error == pytest.approx(weights @ (clipped - values) ** 2, rel=1e-5)
    assert sketch.size == SIZE


def test_levels_fitted_to_a_weighted_sketch_have_less_weighted_error(gradient):
    values, weights = gradient
    plain, weighted = MomentSketch.of(values, "l2"), MomentSketch.of(values, "l2", weights=weights)
    ordinary, own = (gtrace.fitting.optimal_levels(sketch, 4, method="sketch") for sketch in (plain, weighted))
    assert weighted.expected_error(own) < 0.9 * weighted.expected_error(ordinary)
    assert plain.expected_error(ordinary) < 0.9 * plain.expected_error(own)


@pytest.mark.parametrize("weights", [[1.0], [1.0, -1.0], [1.0, np.nan], [1.0, np.inf]])
def test_weights_that_are_none(weights):
    with pytest.raises(UsageError, match="weights"):
        MomentSketch.of([1.0, 2.0], weights=weights)
