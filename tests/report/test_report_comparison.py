import math

import numpy as np
import pytest

from gtrace.report.analysis.equal_bits import at_bits, pareto_front

NAN = math.nan


def test_interpolation_is_linear_in_the_logarithm():
    # A quarter of the way from 8 to 0.5: 8 * (1/16)^(1/4) = 4.
    found = at_bits([1.0, 2.0], [8.0, 0.5], 1.25)
    assert found.variance == pytest.approx(4.0, rel=1e-12)
    assert (found.outcome, found.lower, found.upper) == ("interpolated", 0, 1)


def test_only_the_two_neighbours_by_measured_bits_count():
    bits = [5.0, 1.0, 3.0, 2.0]
    variance = [0.001, 100.0, 0.25, 1.0]
    found = at_bits(bits, variance, 2.5)
    assert found.variance == pytest.approx(0.5)
    assert (found.lower, found.upper) == (3, 2)


def test_a_curve_that_turns_is_followed_between_its_neighbours():
    # Nominal bits 2, 3, 4 of a method whose code gets shorter as its grid gets finer.
    found = at_bits([2.2, 1.8, 2.6], [1.0, 4.0, 0.1], 2.0)
    assert found.variance == pytest.approx(2.0)
    assert (found.lower, found.upper) == (1, 0)


def test_of_equal_bits_the_smaller_error_brackets():
    found = at_bits([1.0, 1.0, 2.0, 2.0], [9.0, 4.0, 1.0, 2.0], 1.5)
    assert found.variance == pytest.approx(2.0)
    assert (found.lower, found.upper) == (1, 2)


def test_a_configuration_with_exactly_these_bits_needs_no_neighbours():
    found = at_bits([2.0, 3.0], [0.5, 0.1], 2.0)
    assert (found.variance, found.outcome, found.lower, found.upper) == (0.5, "exact", 0, 0)


@pytest.mark.parametrize(("target", "why"), [(1.0, "all-above"), (4.0, "all-below")])
def test_nothing_is_extrapolated(target, why):
    found = at_bits([1.1, 3.9], [0.5, 0.1], target)
    assert math.isnan(found.variance)
    assert (found.outcome, found.lower, found.upper) == (why, -1, -1)


@pytest.mark.parametrize(("bits", "stands"), [(1.98, True), (2.03, True), (1.95, False), (2.05, False)])
def test_a_single_configuration_stands_for_bits_within_two_percent(bits, stands):
    found = at_bits([bits], [0.3], 2.0)
    assert (found.outcome == "near") == stands
    assert (found.variance == 0.3) == stands


def test_without_error_there_is_no_logarithm():
    assert at_bits([1.0, 2.0], [0.5, 0.0], 1.5).outcome == "lossless"
    assert math.isnan(at_bits([1.0, 2.0], [0.5, 0.0], 1.5).variance)


def test_missing_numbers_are_no_points():
    assert at_bits([], [], 2.0).outcome == "unmeasured"
    assert at_bits([NAN, 1.0], [0.5, NAN], 2.0).outcome == "unmeasured"
    found = at_bits([1.0, NAN, 1.5, 2.0], [4.0, 1.0, NAN, 1.0], 1.5)
    assert found.variance == pytest.approx(2.0)
    assert (found.lower, found.upper) == (0, 3)


def test_pareto_front_by_hand():
    bits = [1.0, 2.0, 2.0, 3.0, 4.0, 5.0]
    variance = [0.9, 0.5, 0.6, 0.5, 0.7, 0.1]
    assert pareto_front(bits, variance).tolist() == [True, True, False, False, False, True]


def test_equal_points_stand_together_and_missing_ones_never():
    assert pareto_front([1.0, 1.0, NAN, 0.5], [0.2, 0.2, 0.0, NAN]).tolist() == [True, True, False, False]
    assert pareto_front([], []).tolist() == []


def test_pareto_front_against_the_definition():
    random = np.random.default_rng(0)
    bits, variance = random.integers(1, 8, (2, 60)) / 8
    naive = [
        not any(
            b <= bits[i] and v <= variance[i] and (b < bits[i] or v < variance[i])
            for b, v in zip(bits, variance, strict=True)
        )
        for i in range(60)
    ]
    assert pareto_front(bits.tolist(), variance.tolist()).tolist() == naive
