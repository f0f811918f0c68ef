"""Thresholds of stochastic pruning: closed forms against mpmath and golden numbers, rules against the data."""

import json
import math
from pathlib import Path

import mpmath
import numpy as np
import pytest

from gtrace import fitting
from gtrace.distributions import LogNormal
from gtrace.errors import UsageError
from gtrace.sketch import MomentSketch

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "near_lognormal.json").read_text())
SIGMAS = (0.1, 0.3, 1.0, 2.0, 4.0, 8.0)
SPARSITIES = (1e-6, 1e-3, 0.2, 0.5, 0.8, 0.95, 0.999, 1 - 1e-6)


def exact_sparsity(a, sigma):
    """(S, 1 - S) to 60 digits, by the textbook formula."""
    with mpmath.workdps(80):
        a, sigma = mpmath.mpf(a), mpmath.mpf(sigma)
        t = a / sigma
        s = mpmath.ncdf(t) - mpmath.exp(sigma**2 / 2 - a) * mpmath.ncdf(t - sigma)
        return s, 1 - s


def naive_sparsity(alpha, x):
    return float(np.mean(np.maximum(0.0, 1.0 - np.abs(np.asarray(x, np.float64)) / alpha)))


@pytest.mark.parametrize("case", GOLDEN["forward"], ids=lambda c: f"{c['sigma']}")
def test_golden_sparsities(case):
    alpha = math.exp(case["ln_alpha"])
    assert float(fitting.sparsity(alpha, case["mu"], case["sigma"])) == pytest.approx(case["S"], rel=1e-11, abs=0)
    assert float(fitting.unpruned(alpha, case["mu"], case["sigma"])) == pytest.approx(
        case["one_minus_S"], rel=1e-11, abs=0
    )


@pytest.mark.parametrize("case", GOLDEN["inverse"], ids=lambda c: f"{c['sigma']}-{c['S']}")
def test_golden_thresholds(case):
    got = fitting.pruning_threshold(case["S"], case["mu"], case["sigma"])
    assert math.log(got) == pytest.approx(case["ln_alpha"], abs=1e-9)


@pytest.mark.parametrize("sigma", SIGMAS)
def test_sparsity_and_its_rest_have_all_digits(sigma):
    a = sigma * np.linspace(-9.0, 9.0, 37) + np.where(np.arange(37) % 2, 0.0, sigma**2)
    for value, s, rest in zip(
        a, *(f(np.exp(a), 0.0, sigma) for f in (fitting.sparsity, fitting.unpruned)), strict=True
    ):
        exact, exact_rest = exact_sparsity(math.log(math.exp(value)), sigma)
        assert s == pytest.approx(float(exact), rel=1e-11, abs=0)
        assert rest == pytest.approx(float(exact_rest), rel=1e-11, abs=0)


@pytest.mark.parametrize("sigma", SIGMAS)
@pytest.mark.parametrize("mu", [0.0, -9.0])
def test_thresholds_are_right_to_1e_8_in_the_logarithm(sigma, mu):
    for s in SPARSITIES:
        a = math.log(fitting.pruning_threshold(s, mu, sigma)) - mu
        found, rest = exact_sparsity(a, sigma)
        # d S / d a = exp(sigma^2 / 2 - a) Phi(a / sigma - sigma)
        slope = mpmath.exp(mpmath.mpf(sigma) ** 2 / 2 - a) * mpmath.ncdf(mpmath.mpf(a) / sigma - sigma)
        off = (found - s) if s < 0.5 else (1 - mpmath.mpf(s)) - rest
        assert abs(float(off / slope)) < 1e-8


def test_refusals():
    for s in (-0.1, 1.0, math.nan):
        with pytest.raises(UsageError, match="below 1"):
            fitting.pruning_threshold(s, 0.0, 1.0)
    with pytest.raises(UsageError, match="must not be negative"):
        fitting.sparsity(1.0, 0.0, -1.0)
    with pytest.raises(UsageError, match="unknown"):
        fitting.threshold("ecaxt", 0.5, [1.0])
    with pytest.raises(UsageError, match="norm none"):
        fitting.threshold("exact", 0.5, MomentSketch.of([1.0], norm="l2"))


def tensors():
    rng = np.random.default_rng(5)
    yield "lognormal", rng.choice([-1, 1], 50_000) * rng.lognormal(-7, 2, 50_000)
    yield "normal", rng.normal(0, 1e-3, 20_000)
    yield "zeros", np.where(rng.random(30_000) < 0.4, 0, rng.standard_t(3, 30_000))
    yield "ten", rng.normal(size=10)
    yield "ten with a pair", np.array([1, 1.0003, 1.0005, 1.0006, -1.0007, 1.0004, 1.00035, 1.00055, 1.00065, 1.00075])
    yield "one", np.array([-0.3])
    yield "constant", np.full(777, 0.25)
    yield "two values", np.repeat([1e-20, 3.0], [5, 5])
    yield "grid", rng.integers(-3, 4, 1000)


@pytest.mark.parametrize(("name", "x"), list(tensors()), ids=lambda v: v if isinstance(v, str) else "")
def test_the_exact_rule_reaches_every_sparsity_of_every_tensor(name, x):
    x = np.asarray(x, np.float32)
    sketch = MomentSketch.of(x, norm="none")
    there = float(np.mean(x == 0))
    for s in (0.01, 0.3, 0.5, 0.8, 0.95, 0.999):
        sure = fitting.threshold("exact", s, x)
        fast = fitting.threshold("exact", s, sketch)
        if there > s:
            assert sure == fast == 0.0
            continue
        assert naive_sparsity(sure, x) == pytest.approx(s, abs=1e-9)
        assert naive_sparsity(fast, x) == pytest.approx(s, abs=2e-4 if x.size < 100 else 2e-6)
        assert fitting.achieved_sparsity(sure, x) == pytest.approx(s, abs=1e-9)
        assert fitting.achieved_sparsity(fast, sketch) == pytest.approx(s, abs=1e-9)


def test_rules_with_zeros_in_the_data():
    rng = np.random.default_rng(3)
    dense = rng.lognormal(-5, 1.5, 200_000)
    x = np.concatenate([dense, np.zeros(100_000)])
    sketch = MomentSketch.of(x, norm="none")
    for s in (0.5, 0.9):
        inner = (s - 1 / 3) / (2 / 3)
        assert fitting.threshold("lognormal", s, sketch) == pytest.approx(
            fitting.pruning_threshold(inner, np.log(dense).mean(), np.log(dense).std()), rel=1e-5
        )
        assert fitting.achieved_sparsity(fitting.threshold("lognormal", s, sketch), sketch) == pytest.approx(
            s, abs=5e-3
        )
        assert fitting.threshold("topk", s, sketch) == pytest.approx(np.quantile(x, s), rel=2e-3)
    for rule in ("exact", "lognormal", "normal", "topk"):
        assert fitting.threshold(rule, 0.2, sketch) == 0.0
        assert fitting.threshold(rule, 0.9, np.zeros(5)) == 0.0
        assert fitting.threshold(rule, 0.9, np.empty(0)) == 0.0
    assert fitting.achieved_sparsity(0.0, sketch) == pytest.approx(1 / 3)


def test_the_cosine_of_a_pruned_tensor():
    rng = np.random.default_rng(6)
    x = rng.lognormal(0, 1.0, 20_000)
    alpha = fitting.threshold("exact", 0.8, x)
    pruned = np.where(x > alpha, x, np.where(rng.random((50, x.size)) * alpha < x, alpha, 0.0))
    cosine = pruned @ x / np.linalg.norm(x) / np.linalg.norm(pruned, axis=1)
    for data in (x, MomentSketch.of(x, norm="none")):
        assert fitting.pruned_cosine(alpha, data) == pytest.approx(cosine.mean(), abs=2e-3)
    law = LogNormal(0.0, 1.0)
    got = fitting.pruned_cosine(fitting.threshold("exact", 0.8, law), law)
    assert got == pytest.approx(fitting.pruned_cosine(alpha, x), abs=0.02)
    assert fitting.pruned_cosine(1.0, np.zeros(3)) != fitting.pruned_cosine(1.0, np.zeros(3))
    assert fitting.pruned_cosine(1e-9, x) == 1.0
