"""Expected errors of which each element counts as much as it moves the optimizer's update."""

import numpy as np
import pytest
from helpers_variants import VARIANTS

import gtrace
from gtrace import MomentSketch
from gtrace.codecs import expecting
from gtrace.errors import UsageError
from gtrace.types import Key

#: fewer draws of an error with rare large terms would give too small a standard error
SIZE, DRAWS = 3000, 200
# Values and weights have much to do with each other, as a gradient's second moments have.
RNG = np.random.default_rng(3)
VALUES = (RNG.lognormal(-4, 1.5, SIZE) * RNG.choice([-1, 1], SIZE)).astype(np.float32)
VALUES[::97] = 0
WEIGHTS = np.exp(RNG.normal(0, 1, SIZE)) / (0.01 + np.abs(VALUES)) ** 1.5


@pytest.mark.parametrize("spec", [spec for spec in VARIANTS if expecting(gtrace.codec(spec))])
def test_the_weighted_expectation_is_the_mean_of_many_draws(spec):
    codec = gtrace.codec(spec)
    plain = MomentSketch.from_spec(VALUES, codec.needs)
    weighted = MomentSketch.from_spec(VALUES, codec.needs, weights=WEIGHTS)
    state = codec.fit(codec.init(SIZE), plain, 0)
    expected = codec.weighted_error(state, plain, weighted)
    keys = [Key.derive(1, tensor="w", draw=draw) for draw in range(DRAWS)]
    off = [codec.simulate(state, VALUES, key).values.astype(np.float64) - VALUES for key in keys]
    draws = [float(WEIGHTS @ one**2) for one in off]
    error = np.std(draws, ddof=1) / np.sqrt(DRAWS)
    assert abs(np.mean(draws) - expected) <= 4.5 * error + 2e-3 * expected


@pytest.mark.parametrize("tail", ["quantized", "exact"])
@pytest.mark.parametrize("norm", ["l2", "linf", "l1", "none"])
def test_weighted_sums_against_brute_force(norm, tail):
    sketch = MomentSketch.of(VALUES, norm, 512, tail=tail, clip=2.5, weights=WEIGHTS)
    limit = 2.5 * VALUES.std(dtype=np.float64)
    clipped = np.clip(VALUES.astype(np.float64), -limit, limit)
    assert sketch.energy == pytest.approx(WEIGHTS @ clipped**2, rel=1e-6)
    assert sketch.clip_error == pytest.approx(WEIGHTS @ (clipped - VALUES) ** 2, rel=1e-5)
    assert sketch.size == SIZE


def test_levels_fitted_to_a_weighted_sketch_have_less_weighted_error():
    plain, weighted = MomentSketch.of(VALUES, "l2"), MomentSketch.of(VALUES, "l2", weights=WEIGHTS)
    ordinary, own = (gtrace.fitting.optimal_levels(sketch, 4, method="sketch") for sketch in (plain, weighted))
    assert weighted.expected_error(own) < 0.9 * weighted.expected_error(ordinary)
    assert plain.expected_error(ordinary) < 0.9 * plain.expected_error(own)


@pytest.mark.parametrize("weights", [[1.0], [1.0, -1.0], [1.0, np.nan], [1.0, np.inf]])
def test_weights_that_are_none(weights):
    with pytest.raises(UsageError, match="weights"):
        MomentSketch.of([1.0, 2.0], weights=weights)
