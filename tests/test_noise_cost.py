"""What noise costs: weights against simulated optimizers, and filtered ratios against plain matrices."""

import functools
import math

import numpy as np
import pytest
from scipy import linalg

from gtrace.noise import bounded_ratio, filtered_ratio, impulse_weight, ratio_along

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


def test_short_and_long_horizons():
    h = np.array([1e-6, 0.02])
    np.testing.assert_allclose(impulse_weight(h[:1], 10, 0.1), h[:1] / 2 * 0.1**2 * 10, rtol=1e-4)
    np.testing.assert_allclose(impulse_weight(h[1:], 10**6, 0.1), 0.1 / 4, rtol=2e-3)
    assert impulse_weight(0.0, 1000, 0.1) == 0
    assert impulse_weight(np.ones((2, 3)), 5, 0.1).shape == (2, 3)


def test_unstable_steps_cost_everything():
    assert impulse_weight(30.0, 10**5, 0.1) == math.inf
    assert impulse_weight(30.0, 2000, 0.1, schedule=np.ones(2000)) == math.inf


@pytest.mark.parametrize(
    "wrong",
    [
        {"curvature": -1.0},
        {"curvature": math.nan},
        {"steps": 0},
        {"lr": 0.0},
        {"momentum": 1.0},
        {"schedule": [1.0, 0.5]},
    ],
)
def test_what_cannot_be_is_refused(wrong):
    with pytest.raises(ValueError, match=r"must be|out of range|factors"):
        impulse_weight(**{"curvature": 1.0, "steps": 10, "lr": 0.1} | wrong)


def filtered(fisher, weight, weight_decay):
    """W as a matrix of all elements."""
    values, vectors = np.linalg.eigh(fisher)
    return vectors @ np.diag(weight(np.maximum(values, 0) + weight_decay)) @ vectors.T


def plain_ratio(gradients, covariance, weight, samples, batch, weight_decay):
    """The definition with matrices: each sample of noise is weighed by the curvature that the others show."""
    noise = linalg.null_space(np.ones((1, len(gradients)))).T @ gradients * math.sqrt(samples / batch)
    costs = np.zeros(2)
    for own, sample in enumerate(noise):
        rest = np.delete(noise, own, axis=0)
        weights = filtered(batch * rest.T @ rest / len(rest), weight, weight_decay)
        costs += np.trace(weights @ covariance), sample @ weights @ sample
    return costs[0] / costs[1]


@pytest.mark.parametrize("weight_decay", [0.0, 1e-2])
@pytest.mark.parametrize("kind", ["elements", "draws"])
def test_ratios_are_those_of_whole_matrices(weight_decay, kind):
    rng = np.random.default_rng(3)
    gradients = rng.standard_normal((12, 30)) * np.geomspace(1, 0.01, 30) + rng.standard_normal(30)
    errors = rng.standard_normal((5, 30)) * 0.1
    covariance = np.diag(rng.random(30)) if kind == "elements" else errors.T @ errors / 5
    weight = functools.partial(impulse_weight, steps=50, lr=0.1, momentum=0.9)
    found = filtered_ratio(
        gradients @ gradients.T,
        gradients @ covariance @ gradients.T,
        np.trace(covariance),
        weight,
        samples=8,
        batch=64,
        weight_decay=weight_decay,
    )
    expected = plain_ratio(gradients, covariance, weight, 8, 64, weight_decay)
    assert found.ratio == pytest.approx(expected, rel=1e-9)
    assert found.low < found.ratio < found.high


def test_the_interval_holds_the_ratio_of_many_gradients():
    rng = np.random.default_rng(4)
    scale = np.geomspace(1, 0.1, 8)
    covariance = np.diag(np.linspace(0.1, 1, 8))
    weight = functools.partial(impulse_weight, steps=30, lr=0.1)
    weights = filtered(np.diag(scale**2), weight, 0.0)
    truth = np.trace(weights @ covariance) / np.trace(weights @ np.diag(scale**2) / 64)
    held = 0
    for _ in range(100):
        gradients = rng.standard_normal((40, 8)) * scale
        found = filtered_ratio(
            gradients @ gradients.T, gradients @ covariance @ gradients.T, np.trace(covariance), weight,
            samples=1, batch=64,
        )  # fmt: skip
        held += found.low <= truth <= found.high
    assert held >= 85


def test_gradients_that_are_few_or_equal_say_nothing():
    with pytest.raises(ValueError, match="at least 4"):
        filtered_ratio(np.eye(3), np.eye(3), 1.0, lambda h: h, samples=1, batch=1)
    equal = np.ones((4, 4))
    assert math.isnan(filtered_ratio(equal, equal, 1.0, lambda h: h, samples=1, batch=1).ratio)


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
        found.append((bounded_ratio(*arguments, batch=batch), ratio_along(*arguments, batch=batch).ratio))
    off = np.abs([np.log((1 + bounded.ratio) / (1 + truth)) for bounded, _ in found])
    assert np.median(off) < math.log(1.25)
    assert np.median(off) < np.median(np.abs([np.log((1 + other) / (1 + truth)) for _, other in found])) / 2
    assert np.mean([bounded.low <= truth <= bounded.high for bounded, _ in found]) >= 0.75


def test_one_curvature_leaves_nothing_between_the_bounds():
    rng, weight = np.random.default_rng(6), functools.partial(impulse_weight, steps=30, lr=0.1)
    samples = rng.standard_normal((400, 50)) * np.sqrt(0.5 / 8)
    gram, variance = samples @ samples.T, 0.5 / 8
    found = bounded_ratio(gram, variance * gram, 50 * variance, weight, batch=8, weight_decay=0.01)
    assert (found.low, found.ratio, found.high) == pytest.approx((1, 1, 1), rel=0.05)
    with pytest.raises(ValueError, match="at least 4"):
        bounded_ratio(np.eye(3), np.eye(3), 1.0, weight, batch=1)
