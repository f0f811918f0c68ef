import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gtrace import MomentSketch, codec
from gtrace.errors import UsageError
from gtrace.fitting.pooling import DECAY, Pool, RunningPool, pooled
from gtrace.types import SummarySpec


def gradient(step, size=300):
    """A heavy-tailed gradient whose norm and law drift."""
    random = np.random.default_rng([step, size])
    spread = np.exp((0.3 + 0.01 * step) * random.standard_normal(size))
    return (random.standard_normal(size) * spread * np.exp(0.3 * random.standard_normal())).astype(np.float32)


def totals(sketch):
    return np.array([sketch.size, sketch.zeros, sketch.buckets, sketch.sums[:, 0].sum()])


@given(st.lists(st.integers(0, 50), min_size=1, max_size=5), st.sampled_from(["l2", "linf", "l1"]))
def test_the_pool_is_the_decayed_mean_of_what_was_merged(steps, norm):
    sketches = [MomentSketch.of(gradient(step), norm, 64) for step in steps]
    weights = DECAY ** np.arange(len(steps))[::-1]
    levels = np.linspace(0.0, 1.0, 9)
    found = pooled(sketches)
    share = 1.0 / weights.sum()
    error = sum(w * s.expected_error(levels) / s.energy for w, s in zip(weights, sketches, strict=True))
    seen = MomentSketch.of(np.arange(1, 513) / 512, norm="linf")
    scale = (found.sums[:, 3].sum() + found.zero_weight) / found.size
    # One value that no step had, spread evenly over 0 to 1.
    error += scale * seen.expected_error(levels) / 512
    assert found.expected_error(levels) == pytest.approx(share * error, rel=1e-9)
    counted = sum(w * totals(s) for w, s in zip(weights, sketches, strict=True))
    assert totals(found) == pytest.approx(share * (counted + np.array([1, 0, 0, 1])), rel=1e-12)


@given(st.integers(0, 20), st.floats(0.01, 100), st.floats(1e-9, 1e9))
def test_scaling_multiplies_sums_and_keeps_the_law(step, mass, energy):
    sketch = MomentSketch.of(gradient(step), "l2", 100, clip=2.5, tail="exact")
    scaled = sketch.scaled(mass, energy)
    levels = [0.0, 0.1, 0.3, 1.0]
    assert scaled.energy == pytest.approx(energy * sketch.energy, rel=1e-12)
    assert scaled.expected_error(levels) == pytest.approx(energy * sketch.expected_error(levels), rel=1e-9)
    np.testing.assert_allclose(scaled.probabilities(levels), sketch.probabilities(levels), rtol=1e-9, atol=1e-15)
    assert totals(scaled) == pytest.approx(mass * totals(sketch))
    assert scaled.exact == pytest.approx(mass * sketch.exact)


def test_sketches_of_two_norms_make_no_pool():
    with pytest.raises(UsageError, match="cannot be merged"):
        pooled([MomentSketch.of([1.0], "linf"), MomentSketch.of([1.0], "l2")])


def test_steps_of_zeros_have_no_weight():
    zeros, values = MomentSketch.of(np.zeros(300), "l2"), MomentSketch.of(gradient(3), "l2")
    mixed = pooled([values, zeros])
    assert np.isfinite(mixed.sums).all()
    assert mixed.zeros == pytest.approx(300 / (1 + DECAY))
    assert pooled([zeros, zeros]).sums.size == 0
    fitted = codec("alq:bits=3,bucket_size=none")
    assert fitted.fit(fitted.init(300), pooled([zeros]), 0).arrays.get("levels") is None


def test_a_running_pool_is_the_pool_of_its_window():
    sketches = [MomentSketch.of(gradient(step), "l2", 64) for step in range(6)]
    running = RunningPool()
    for steps in ((0,), (0, 1), (0, 1, 2, 3), (0, 1, 2, 3), (2, 3, 4), (2, 3), (2, 3, 5), (0, 1, 2, 3)):
        chosen = [sketches[step] for step in steps]
        found, expected = running.mean(steps, [sketch.alone for sketch in chosen])[0], pooled(chosen)
        np.testing.assert_array_equal(found.rows, expected.rows)
        np.testing.assert_array_equal(found.sums, expected.sums)
        assert (found.size, found.energy) == (expected.size, expected.energy)


@pytest.mark.parametrize("steps", [0, 1, 3])
@pytest.mark.parametrize("moments", [False, True])
def test_a_pool_comes_back_from_its_arrays(steps, moments):
    spec = SummarySpec("l2", 64, bucket_moments=moments)
    sketches = [MomentSketch.from_spec(gradient(step), spec) for step in range(steps + 1)]
    one = Pool()
    for sketch in sketches[:-1]:
        one.add(sketch.alone)
    other = Pool.from_arrays(one.to_arrays(), spec)
    for pool in (one, other):
        pool.add(sketches[-1].alone)
    a, b = one.mean()[0], other.mean()[0]
    np.testing.assert_array_equal(a.rows, b.rows)
    np.testing.assert_array_equal(a.sums, b.sums)
    assert (a.size, a.zero_weight, a.quantized) == (b.size, b.zero_weight, b.quantized)
    if moments:
        np.testing.assert_array_equal(a.bucket_moments, sketches[-1].bucket_moments)
        np.testing.assert_array_equal(b.bucket_moments, a.bucket_moments)
