"""Sums about noise, against plain numpy."""

import numpy as np
import pytest

from gtrace.kernels import norms
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
    assert noise_of_two(x, first, first, near, scale, factor, variance) != lost
    np.testing.assert_array_equal(variance, 1 + difference**2)


def test_weighted_grams_and_contrasts(gradients):
    values, scale = gradients
    random = np.random.default_rng(0)
    samples, weights, found = (
        random.standard_normal((5, scale.size)),
        random.random((3, scale.size)),
        np.ones((3, 5, 5)),
    )
    weighted_grams(samples, weights, found)
    expected = np.triu(1 + np.stack([(samples * row) @ samples.T for row in weights])) + np.tril(np.ones((5, 5)), -1)
    np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-12)
    contrasts, found = random.standard_normal((3, 4)), np.full((3, scale.size), np.nan)
    energy = contrast(values, contrasts, scale, found)
    np.testing.assert_allclose(found, (contrasts @ values.astype(np.float64)) * scale, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(energy, np.square(found).sum(), rtol=1e-12)
