"""Levels at a given entropy, against equal steps, an exhaustive search, and the bound on any unbiased code."""

import numpy as np
import pytest

import gtrace
from gtrace.fitting.entropy import MOST, entropy_levels, least_error, spaced_levels
from gtrace.kernels.symbols import spaced_entropy


def sketch(law, size=1 << 16):
    rng = np.random.default_rng(1)
    values = {"normal": rng.normal(size=size), "laplace": rng.laplace(size=size), "student": rng.standard_t(3, size)}
    return gtrace.MomentSketch.of(values[law].astype(np.float32), norm="linf", bucket_size=1024), values[law]


def drawn(values, levels, bucket=1024):
    """Symbols and error of one draw, without the sketch."""
    x = values[: values.size // bucket * bucket].reshape(-1, bucket)
    scale = np.abs(x).max(axis=1, keepdims=True)
    r = np.abs(x) / scale
    k = np.clip(np.searchsorted(levels, r, side="right") - 1, 0, levels.size - 2)
    up = np.random.default_rng(2).random(r.shape) * (levels[k + 1] - levels[k]) < r - levels[k]
    symbols = np.where(x < 0, -1, 1) * (k + up)
    return symbols, float(np.sum((np.sign(symbols) * levels[np.abs(symbols)] * scale - x) ** 2))


def symbol_entropy(found, levels):
    """Entropy of signed symbols, in plain numpy."""
    magnitudes = found.probabilities(levels)
    rest = magnitudes[magnitudes > 0]
    return float(-(rest @ np.log2(rest)) + magnitudes[1:].sum())


def entropy(symbols):
    share = np.unique(symbols, return_counts=True)[1] / symbols.size
    return -float(share @ np.log2(share))


@pytest.mark.parametrize("law", ["normal", "laplace", "student"])
@pytest.mark.parametrize("bits", [1.5, 3.0])
def test_levels_meet_their_entropy_with_less_error_than_equal_steps(law, bits):
    found, values = sketch(law)
    levels = spaced_levels(*entropy_levels(found, bits))
    symbols, error = drawn(values, levels)
    assert symbol_entropy(found, levels) == pytest.approx(bits, abs=0.005)
    assert entropy(symbols) == pytest.approx(bits, abs=0.02)
    assert error == pytest.approx(found.expected_error(levels), rel=0.03)
    # Equal steps of any width, at this entropy or less.
    equal = [spaced_levels(step, 1.0) for step in np.geomspace(1 / 127, 0.99, 400)]
    errors = [found.expected_error(one) for one in equal if symbol_entropy(found, one) <= bits]
    assert found.expected_error(levels) <= min(errors) * 1.002
    assert found.expected_error(levels) >= least_error(found, bits) > 0


@pytest.mark.parametrize("step", [1 / 127, 0.01, 0.2, 0.25, 0.77, 1 - 1e-6])
@pytest.mark.parametrize("exponent", [0.5, 1.0, 2.3])
def test_the_entropy_of_spaced_levels_is_that_of_the_levels(step, exponent):
    found, _ = sketch("student", 1 << 12)
    wanted = symbol_entropy(found, spaced_levels(step, exponent))
    assert spaced_entropy(found.bins(), step, exponent, MOST) == pytest.approx(wanted, rel=1e-12, abs=1e-15)


def test_limits_that_no_levels_meet():
    found, _ = sketch("normal", 1 << 12)
    assert spaced_levels(*entropy_levels(found, 16.0)).size == MOST
    assert spaced_levels(*entropy_levels(found, 0.01)).size == 2
    assert least_error(gtrace.MomentSketch.of(np.zeros(9, np.float32), norm="linf"), 3.0) == 0.0


@pytest.mark.parametrize("zeros", [0.5, 0.9])
def test_exact_zeros_cost_no_bits_and_leave_them_to_the_others(zeros):
    values = np.random.default_rng(3).normal(size=1 << 16).astype(np.float32)
    values[: int(zeros * values.size)] = 0.0
    found = gtrace.MomentSketch.of(values, norm="linf", bucket_size=None)
    alone = gtrace.MomentSketch.of(values[values != 0], norm="linf", bucket_size=None)
    for bits in (1.0, 3.0):
        assert least_error(found, bits) == pytest.approx(least_error(alone, bits / (1 - zeros)), rel=3e-3)
        # A code that sends where the zeros are, and fine levels for the others, does no better.
        flags = -zeros * np.log2(zeros) - (1 - zeros) * np.log2(1 - zeros)
        left = (bits - flags) / (1 - zeros)
        if left > 1:
            assert alone.expected_error(spaced_levels(*entropy_levels(alone, left))) > least_error(found, bits)


def test_the_bound_is_shannons_for_a_normal_law():
    """Of values with one scale: D / (1 - D) with 2^(-2 bits) for D."""
    values = np.random.default_rng(3).normal(size=1 << 20)
    found = gtrace.MomentSketch.of(values.astype(np.float32), norm="linf", bucket_size=None)
    for bits in (1.0, 2.0, 4.0):
        shannon = 2.0 ** (-2 * bits)
        assert least_error(found, bits) / found.energy == pytest.approx(shannon / (1 - shannon), rel=0.03)
