"""What noise costs: weights against simulated optimizers, and filtered ratios against plain matrices."""

import functools
import math

import numpy as np
import pytest

from gtrace.noise import bounded_ratio, filtered_ratio, impulse_weight

CURVATURES = np.array([0.0, 1e-4, 0.01, 0.3, 2.0])
OPTIMIZERS = {
    "sgd": {},
    "momentum": {"momentum": 0.9},
    "nesterov": {"momentum": 0.8, "nesterov": True},
    "adam": {"momentum": 0.9, "averaging": True},
    "adamw": {"momentum": 0.9, "averaging": True, "decay": 0.1},
}


def trained(noise, h, rates, momentum=0.0, nesterov=False, averaging=False, decay=0.0):
    """Weights after steps with given noise, (steps, ...) and (...): the optimizer as torch writes it."""
    x, v = np.zeros(np.broadcast_shapes(noise.shape[1:], np.shape(h))), 0.0
    for rate, drawn in zip(rates, noise, strict=True):
        gradient = h * x + drawn
        x = x * (1 - rate * decay)
        v = momentum * v + (1 - momentum if averaging else 1) * gradient
        x = x - rate * (gradient + momentum * v if nesterov else v)
    return x


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("steps", [1, 2, 7, 100])
@pytest.mark.parametrize("decaying", [False, True])
def test_weights_are_the_squared_responses_to_single_impulses(optimizer, steps, decaying):
    factors = np.linspace(1, 0.1, steps) if decaying else np.ones(steps)
    # One impulse at each step in turn, all at once; responses add up.
    noise = np.eye(steps)[..., None]
    responses = trained(noise, CURVATURES, 0.1 * factors, **OPTIMIZERS[optimizer])
    expected = CURVATURES / 2 * (responses**2).sum(axis=0)
    found = impulse_weight(CURVATURES, steps, 0.1, schedule=factors if decaying else None, **OPTIMIZERS[optimizer])
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-300)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("steps", [20, 100, 400])
def test_the_loss_of_noisy_training_on_a_quadratic_is_the_predicted_one(optimizer, steps):
    curvature, deviation = np.array([1.0, 0.05, 0.002]), np.array([0.3, 1.0, 2.0])
    drawn = np.random.default_rng(steps).standard_normal((steps, 2000, 3)) * deviation
    weights = trained(drawn, curvature, np.full(steps, 0.05), **OPTIMIZERS[optimizer])
    losses = (curvature / 2 * weights**2).sum(axis=1)
    predicted = float(impulse_weight(curvature, steps, 0.05, **OPTIMIZERS[optimizer]) @ deviation**2)
    assert abs(losses.mean() - predicted) < 3 * losses.std() / math.sqrt(len(losses))


def test_short_and_long_horizons_and_unstable_steps():
    h = np.array([1e-6, 0.02])
    np.testing.assert_allclose(impulse_weight(h[:1], 10, 0.1), h[:1] / 2 * 0.1**2 * 10, rtol=1e-4)
    np.testing.assert_allclose(impulse_weight(h[1:], 10**6, 0.1), 0.1 / 4, rtol=2e-3)
    assert impulse_weight(0.0, 1000, 0.1) == 0
    assert impulse_weight(np.ones((2, 3)), 5, 0.1).shape == (2, 3)
    assert impulse_weight(30.0, 10**5, 0.1) == impulse_weight(30.0, 2000, 0.1, schedule=np.ones(2000)) == math.inf
    for wrong in ({"curvature": math.nan}, {"steps": 0}, {"momentum": 1.0}, {"schedule": [1.0]}):
        with pytest.raises(ValueError, match=r"must be|out of range|factors"):
            impulse_weight(**{"curvature": 1.0, "steps": 10, "lr": 0.1} | wrong)


@pytest.mark.parametrize("kind", ["elements", "draws"])
def test_ratios_of_gradients_at_the_same_weights(kind):
    """Gradients of 8 samples with an expectation of their own, for a codec at batch 64."""
    rng = np.random.default_rng(3)
    curvature = np.array([2.0, 0.5, 0.1, 0.02, 0.004])
    errors = rng.standard_normal((200, 5)) * [0.1, 0.2, 0.3, 0.1, 0.1]
    covariance = np.diag(rng.random(5)) if kind == "elements" else errors.T @ errors / 200
    weight = functools.partial(impulse_weight, steps=50, lr=0.1, momentum=0.9)
    gradients = rng.standard_normal((1500, 5)) * np.sqrt(curvature / 8) + rng.standard_normal(5)
    coded, plain = gradients @ gradients.T, gradients @ covariance @ gradients.T
    found = filtered_ratio(coded, plain, np.trace(covariance), weight, samples=8, batch=64, weight_decay=0.01)
    weights = weight(curvature + 0.01)
    expected = weights @ np.diag(covariance) / (weights @ curvature / 64)
    assert found.low * 0.95 < expected < found.high * 1.05
    assert found.ratio == pytest.approx(expected, rel=0.15)


def test_few_samples_of_noise_bound_the_ratio():
    # 300 directions with curvatures over four decades, and 16 samples: their own directions alone look far too steep.
    curvature, batch, rng = np.geomspace(3, 3e-4, 300), 64, np.random.default_rng(5)
    codec = np.full(300, 2 * curvature.sum() / 300 / batch)
    weight = functools.partial(impulse_weight, steps=400, lr=0.1)
    truth = weight(curvature) @ codec / (weight(curvature) @ curvature / batch)
    found = []
    for _ in range(50):
        samples = rng.standard_normal((16, 300)) * np.sqrt(curvature / batch)
        arguments = (samples @ samples.T, (samples * codec) @ samples.T, codec.sum(), weight)
        found.append(bounded_ratio(*arguments, batch=batch))
    off = np.abs([np.log((1 + bounded.ratio) / (1 + truth)) for bounded in found])
    assert np.median(off) < math.log(1.25)
    assert np.mean([bounded.low <= truth <= bounded.high for bounded in found]) >= 0.75


def test_one_curvature_leaves_nothing_between_the_bounds_and_few_or_equal_gradients_say_nothing():
    rng, weight = np.random.default_rng(6), functools.partial(impulse_weight, steps=30, lr=0.1)
    samples = rng.standard_normal((400, 50)) * np.sqrt(0.5 / 8)
    gram = samples @ samples.T
    found = bounded_ratio(gram, 0.5 / 8 * gram, 50 * 0.5 / 8, weight, batch=8, weight_decay=0.01)
    assert (found.low, found.ratio, found.high) == pytest.approx((1, 1, 1), rel=0.05)
    with pytest.raises(ValueError, match="at least 4"):
        bounded_ratio(np.eye(3), np.eye(3), 1.0, weight, batch=1)
    with pytest.raises(ValueError, match="at least 5"):
        filtered_ratio(np.eye(4), np.eye(4), 1.0, weight, samples=1, batch=1)
    equal = np.ones((6, 6))
    assert math.isnan(filtered_ratio(equal, equal, 1.0, weight, samples=1, batch=1).ratio)
