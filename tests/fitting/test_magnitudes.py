import math

import numpy as np
import pytest
from scipy import stats

from gtrace.errors import UsageError
from gtrace.fitting.magnitudes import LAWS, FittedLaw, Magnitudes, fit_magnitudes, ks_distance

#: law -> scipy's, from our parameters
SCIPY = {
    "lognormal": lambda law: stats.lognorm(law.scale, scale=math.exp(law.location)),
    "normal": lambda law: stats.norm(law.location, law.scale),
    "half-normal": lambda law: stats.halfnorm(0, law.scale),
    "laplace": lambda law: stats.laplace(law.location, law.scale),
    "half-laplace": lambda law: stats.expon(0, law.scale),
    "loglaplace": lambda law: stats.loglaplace(1 / law.scale, scale=math.exp(law.location)),
    "cauchy": lambda law: stats.cauchy(law.location, law.scale),
    "uniform": lambda law: stats.uniform(law.location, law.scale),
}
#: law -> scipy's maximum likelihood fit, where it is reliable: magnitudes -> (location, scale)
LIKELIEST = {
    "lognormal": lambda x: stats.norm.fit(np.log(x)),
    "normal": stats.norm.fit,
    "half-normal": lambda x: stats.halfnorm.fit(x, floc=0),
    "laplace": stats.laplace.fit,
    "half-laplace": lambda x: stats.expon.fit(x, floc=0),
    "loglaplace": lambda x: stats.laplace.fit(np.log(x)),
    "uniform": stats.uniform.fit,
}
#: odd and even counts, below and above the size at which only part of the elements is looked at
SIZES = (5, 4096, 20_001)


def gradient(n, seed=0):
    """A signed near-lognormal gradient with zeros in between."""
    rng = np.random.default_rng(seed)
    g = rng.choice([-1, 1], n) * np.exp(rng.normal(-9, 2.2, n))
    g[:: max(n // 3, 2)] = 0
    return g.astype(np.float32)


def naive(g):
    return np.sort(np.abs(g[g != 0]).astype(np.float64))


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("name", LAWS)
def test_distances_are_scipys_with_the_same_parameters(name, n):
    g = gradient(n)
    fit = fit_magnitudes(g)
    expected = stats.kstest(naive(g), SCIPY[name](fit.laws[name]).cdf).statistic
    assert fit.ks[name] == pytest.approx(expected, abs=1e-9)
    assert fit.count + fit.zeros == n


@pytest.mark.parametrize("name", LAWS)
def test_a_law_is_near_its_own_sample_and_has_scipys_quantiles_and_density(name):
    law = {"uniform": FittedLaw(name, 1.0, 3.0)}.get(name, FittedLaw(name, 0.0 if "half" in name else 5.0, 0.1))
    p = np.linspace(0.01, 0.99, 9)
    other = SCIPY[name](law)
    np.testing.assert_allclose(law.quantile(p), other.ppf(p), rtol=1e-12)
    np.testing.assert_allclose(law.density(other.ppf(p)), other.pdf(other.ppf(p)), rtol=1e-12)
    x = other.rvs(20_000, random_state=1)
    assert ks_distance(Magnitudes.of(x[x > 0]).sorted, law) < 0.02


@pytest.mark.parametrize("name", LIKELIEST)
def test_parameters_are_the_likeliest(name):
    x = naive(gradient(3001))
    law = fit_magnitudes(x).laws[name]
    assert (law.location, law.scale) == pytest.approx(LIKELIEST[name](x), rel=1e-5, abs=1e-12)


def test_cauchy_has_the_median_and_half_the_interquartile_range():
    x = naive(gradient(3001))
    law = fit_magnitudes(x).laws["cauchy"]
    low, middle, high = np.quantile(x, [0.25, 0.5, 0.75])
    assert (law.location, law.scale) == pytest.approx((middle, (high - low) / 2), rel=1e-6)


@pytest.mark.parametrize("values", [[], [0.0, -0.0], [math.nan, math.inf]])
def test_nothing_to_fit(values):
    fit = fit_magnitudes(values)
    assert (fit.count, fit.best) == (0, "")
    assert math.isnan(fit.sigma)
    assert all(math.isnan(distance) for distance in fit.ks.values())


def test_what_is_not_finite_is_left_out_and_counted():
    fit = fit_magnitudes([1.0, -2.0, math.nan, -math.inf, 0.0, math.inf])
    assert (fit.count, fit.zeros, fit.nonfinite) == (2, 1, 3)
    assert fit.mu == pytest.approx(math.log(2) / 2)


def test_equal_magnitudes_have_no_width():
    fit = fit_magnitudes(np.full(7, -0.3, np.float32))
    assert (fit.sigma, fit.mu) == (0, pytest.approx(math.log(0.3), abs=1e-6))
    # The half laws have one parameter, which is their width.
    assert {name for name, distance in fit.ks.items() if distance == distance} == {"half-normal", "half-laplace"}


def test_quantiles_and_histogram_are_numpys():
    g = gradient(999)
    magnitudes = Magnitudes.of(g)
    p = np.linspace(0, 1, 33)
    np.testing.assert_allclose(magnitudes.quantiles(p), np.quantile(naive(g), p), rtol=1e-12)
    edges = 2.0 ** np.arange(-40, 20)
    np.testing.assert_array_equal(magnitudes.histogram(edges), np.histogram(naive(g), edges)[0])
    assert math.isnan(Magnitudes.of([0.0]).quantiles([0.5])[0])


def test_errors_say_what_to_do():
    with pytest.raises(UsageError, match="no magnitude"):
        fit_magnitudes(np.array([1j]))
    with pytest.raises(UsageError, match="did you mean normal"):
        FittedLaw("normel", 0, 1)
