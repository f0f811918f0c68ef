"""Sums about noise, and weights of elements in Adam's update, against plain numpy and torch's own step."""

import numpy as np
import pytest

from gtrace.kernels import norms
from gtrace.kernels.compare import adam_weights, weighted_sums
from gtrace.kernels.noise import contrast, noise_of_two, three_sums, weighted_grams


@pytest.fixture(params=[1, 64, 1500])
def gradients(request):
    """Four gradients, and a scale for each of their elements."""
    values = np.random.default_rng(request.param).standard_normal((4, request.param)).astype(np.float32)
    return values, np.linspace(0.5, 2, request.param)


@pytest.mark.parametrize("size", [1, 64, norms.BLOCK + 70])
def test_sums_of_three(size):
    a, b, c = np.random.default_rng(size).standard_normal((3, size)).astype(np.float32)
    wide = [values.astype(np.float64) for values in (a - 2.0 * b.astype(np.float64) + c, a, b, c)]
    found, total = np.ones(3), wide[1] + wide[2] + wide[3]
    three_sums(a, b, c, found)
    squares = [float(values @ values) for values in wide]
    np.testing.assert_allclose(found - 1, [squares[0], sum(squares[1:]), float(total @ total)], rtol=1e-12)


def test_noise_of_two_encodings(gradients):
    (x, first, second, near), scale = gradients
    factor, variance = 0.3, np.ones(x.size)
    lost = noise_of_two(x, first, second, near, scale, factor, variance)
    errors = first - x, second - x
    difference = (errors[0] - errors[1]) * scale * (factor / np.sqrt(2))
    np.testing.assert_allclose(variance, 1 + difference**2, rtol=1e-12)
    np.testing.assert_allclose(lost, (((errors[0] + errors[1]) / 2) * scale) @ (near * scale), rtol=1e-10)


def test_weighted_grams_and_contrasts(gradients):
    values, scale = gradients
    random, found = np.random.default_rng(0), np.ones((3, 5, 5))
    samples, weights = random.standard_normal((5, scale.size)), random.random((3, scale.size))
    weighted_grams(samples, weights, found)
    expected = np.triu(1 + np.stack([(samples * row) @ samples.T for row in weights])) + np.tril(np.ones((5, 5)), -1)
    np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-12)
    contrasts, found = random.standard_normal((3, 4)), np.full((3, scale.size), np.nan)
    energy = contrast(values, contrasts, scale, found)
    np.testing.assert_allclose(found, (contrasts @ values.astype(np.float64)) * scale, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(energy, np.square(found).sum(), rtol=1e-12)


def twin(g, v, decay, correction, eps):
    divisor = np.sqrt((decay * v.astype(np.float64) + (1 - decay) * np.square(g, dtype=np.float64)) / correction) + eps
    with np.errstate(divide="ignore"):
        found = 1 / divisor**2
    return np.where(np.isfinite(found), found, 0.0)


def found(g, v, decay, correction, eps):
    out = np.empty(g.size)
    adam_weights(g, v, decay, correction, eps, out)
    return out


def test_adam_weights_against_numpy():
    rng = np.random.default_rng(0)
    g, v = rng.standard_normal(999).astype(np.float32), rng.exponential(size=999).astype(np.float32)
    g[:9], v[3:12] = 0, 0
    for decay, correction, eps in ((0.999, 0.01, 1e-8), (0.9, 1.0, 1e-3), (1.0, 1.0, 1e-8), (0.99, 0.5, 0.0)):
        np.testing.assert_allclose(found(g, v, decay, correction, eps), twin(g, v, decay, correction, eps), rtol=1e-12)
    # What has no divisor has no weight.
    v = np.array([0, 0, np.inf, np.nan, -1], np.float32)
    g = np.array([0, 1, 1, 1, 1e-3], np.float32)
    assert (found(g, v, 0.9, 1.0, 0.0) > 0).tolist() == [False, True, False, False, False]


def test_weighted_sums_against_numpy():
    rng = np.random.default_rng(2)
    for n in (0, 1, 77, 2_100_001):
        g, q = rng.standard_normal((2, n)).astype(np.float32)
        w = rng.exponential(size=n)
        error, energy = weighted_sums(g, q, w)
        np.testing.assert_allclose(error, w @ (q.astype(np.float64) - g) ** 2, rtol=1e-12)
        np.testing.assert_allclose(energy, w @ g.astype(np.float64) ** 2, rtol=1e-12)
