"""Fitted multipliers against reference numbers, closed forms and a dense search."""

import numpy as np
import pytest
from helpers_fitting import GOLDEN, MIXTURES, golden_cases, mixture_of
from hypothesis import given
from hypothesis import strategies as st

from gtrace.fitting import alq_levels, amq_levels, amq_multiplier, expected_variance
from gtrace.fitting.laws import as_law
from gtrace.fitting.levels import _Powers
from gtrace.sketch import MomentSketch

CASES = list(golden_cases("amq"))
IDS = [f"{law}-{kind}-{bits}" for law, kind, bits, _ in CASES]
ZERO = {"nozero": False, "with_zero": True}


def error_of(law, p, bits, zero):
    return expected_variance(law, amq_levels(p, bits, zero), zero)


def powers(law, bits, zero):
    return _Powers(as_law(law), 1 << (bits - 1), zero)


@pytest.mark.parametrize(("law", "kind", "bits", "expected"), CASES, ids=IDS)
def test_the_optimum_of_the_reference(law, kind, bits, expected):
    mixture, zero = mixture_of(GOLDEN["amq"][law]), ZERO[kind]
    p = amq_multiplier(mixture, bits, zero)
    assert p == pytest.approx(expected["p"], rel=1e-11)
    assert error_of(mixture, p, bits, zero) == pytest.approx(expected["objective"], rel=1e-12)
    assert error_of(mixture, 0.5, bits, zero) == pytest.approx(expected["objective_at_p0.5"], rel=1e-12)
    if "dPsi_dp_at_p0.5" in expected:
        assert powers(mixture, bits, zero).slope(0.5) == pytest.approx(expected["dPsi_dp_at_p0.5"], rel=1e-12)


@pytest.mark.parametrize("zero", [True, False])
@pytest.mark.parametrize("bits", [3, 4, 8])
@pytest.mark.parametrize("name", MIXTURES)
def test_no_multiplier_is_better(name, bits, zero):
    law = MIXTURES[name]
    p = amq_multiplier(law, bits, zero)
    objective = powers(law, bits, zero)
    tried = 1 / (1 + np.exp(-np.linspace(-13, 8.5, 2500)))
    tried = tried[tried > objective.least]
    errors = objective.errors(tried)
    assert error_of(law, p, bits, zero) <= errors.min() * (1 + 1e-9)
    assert abs(objective.slope(p)) <= 1e-9 * abs(objective.slope(0.5)) + 1e-15


@pytest.mark.parametrize("zero", [True, False])
@pytest.mark.parametrize("weighted", [True, False])
def test_multipliers_of_sketches(weighted, zero):
    values = np.random.default_rng(4).standard_t(3, 60_000).astype(np.float32)
    sketch = MomentSketch.of(values, bucket_size=8192)
    for bits in (3, 4, 8):
        p = amq_multiplier(sketch, bits, zero, weighted)
        reached = expected_variance(sketch, amq_levels(p, bits, zero), zero, weighted)
        for other in np.linspace(0.02, 0.98, 97):
            levels = amq_levels(other, bits, zero)
            assert reached <= expected_variance(sketch, levels, zero, weighted) * (1 + 1e-9)
        free = expected_variance(sketch, alq_levels(sketch, bits, zero, weighted), zero, weighted)
        assert free <= reached


def test_slopes_are_differences_of_errors():
    sketch = MomentSketch.of(np.random.default_rng(4).standard_t(3, 60_000), bucket_size=8192)
    for law in (sketch, MIXTURES["shifted"]):
        for zero in (True, False):
            objective = powers(law, 4, zero)
            for p in (0.1, 0.4, 0.7):
                above, below = objective.errors(np.array([p + 1e-6, p - 1e-6]))
                assert objective.slope(p) == pytest.approx((above - below) / 2e-6, rel=1e-3)


def test_levels_are_powers():
    assert amq_levels(0.5, 3).tolist() == [0.0, 0.25, 0.5, 1.0]
    assert amq_levels(0.1, 2, zero=False) == pytest.approx([0.1, 1.0])
    assert amq_levels(0.3, 2).tolist() == [0.0, 1.0]
    tiny = amq_levels(0.01, 8)
    assert tiny.size < 128
    assert tiny[0] == 0.0
    assert (np.diff(tiny.astype(np.float32)) > 0).all()
    assert (np.diff(amq_levels(0.01, 8, zero=False).astype(np.float32)) > 0).all()


@pytest.mark.parametrize("zero", [True, False])
@given(
    values=st.lists(st.floats(allow_nan=True, allow_infinity=True, width=32), max_size=30),
    norm=st.sampled_from(["l2", "linf"]),
)
def test_whatever_the_values_there_is_a_multiplier(zero, values, norm):
    sketch = MomentSketch.of(np.asarray(values, np.float32), norm)
    for method in ("search", "gd"):
        p = amq_multiplier(sketch, 4, zero, method=method, steps=20)
        assert 0 < p < 1
        assert np.isfinite(expected_variance(sketch, amq_levels(p, 4, zero), zero))
