"""Sums about noise, against plain numpy."""

import numpy as np
import pytest

from gtrace.kernels import norms
from gtrace.kernels.noise import contrast, noise_of_two, three_sums, weighted_grams

SIZES = (1, 64, 1500)


def gradients(size, number):
    return list(np.random.default_rng(size).standard_normal((number, size)).astype(np.float32))


@pytest.mark.parametrize("size", [*SIZES, norms.BLOCK + 70])
def test_sums_of_three(size):
    a, b, c = gradients(size, 3)
    wide = [values.astype(np.float64) for values in (a - 2.0 * b.astype(np.float64) + c, a, b, c)]
    total = wide[1] + wide[2] + wide[3]
    found = np.ones(3)
    three_sums(a, b, c, found)
    squares = [float(values @ values) for values in wide]
    np.testing.assert_allclose(found - 1, [squares[0], sum(squares[1:]), float(total @ total)], rtol=1e-12)


@pytest.mark.parametrize("size", SIZES)
def test_noise_of_two_encodings(size):
    x, first, second, near = gradients(size, 4)
    scale, factor, variance = np.linspace(0.5, 2, size), 0.3, np.ones(size)
    lost = noise_of_two(x, first, second, near, scale, factor, variance)
    errors = first - x, second - x
    difference = (errors[0] - errors[1]) * scale * (factor / np.sqrt(2))
    np.testing.assert_allclose(variance, 1 + difference**2, rtol=1e-12)
    np.testing.assert_allclose(lost, (((errors[0] + errors[1]) / 2) * scale) @ (near * scale), rtol=1e-10)
    assert noise_of_two(x, first, first, near, scale, factor, variance) != lost
    np.testing.assert_array_equal(variance, 1 + difference**2)


@pytest.mark.parametrize("size", SIZES)
def test_weighted_grams(size):
    random = np.random.default_rng(0)
    samples, weights = random.standard_normal((5, size)), random.random((3, size))
    found = np.ones((3, 5, 5))
    weighted_grams(samples, weights, found)
    expected = np.triu(1 + np.stack([(samples * row) @ samples.T for row in weights])) + np.tril(np.ones((5, 5)), -1)
    np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("size", SIZES)
def test_contrasts(size):
    values, scale = np.stack(gradients(size, 4)), np.linspace(0.5, 2, size)
    contrasts, found = np.random.default_rng(0).standard_normal((3, 4)), np.full((3, size), np.nan)
    energy = contrast(values, contrasts, scale, found)
    np.testing.assert_allclose(found, (contrasts @ values.astype(np.float64)) * scale, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(energy, np.square(found).sum(), rtol=1e-12)
