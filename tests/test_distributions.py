"""Closed forms of truncated normal mixtures against quadrature, in the middle, in far tails and at the edges."""

import numpy as np
import pytest
from helpers_fitting import MIXTURES, around, quadrature

from gtrace.distributions import LogNormal, TruncatedNormalMixture
from gtrace.errors import UsageError


@pytest.mark.parametrize("name", MIXTURES)
def test_cdf_is_the_integral_of_the_signed_density(name):
    law = MIXTURES[name]
    low, high = law.support
    breaks = [*around(law), *-around(law)]
    for x in np.linspace(-1.1, 1.1, 9):
        upper = min(x, high)
        expected = quadrature(lambda r: float(law.density(r)), low, upper, breaks) if upper > low else 0.0
        assert float(law.cdf(x)) == pytest.approx(expected, rel=1e-10, abs=1e-15)
    assert float(law.cdf(high)) == pytest.approx(1.0, rel=1e-14)


@pytest.mark.parametrize("sigmas_away", [5.0, 30.0, 400.0])
def test_a_mean_far_outside_the_support_leaves_an_exponential(sigmas_away):
    sigma = 0.01
    law = TruncatedNormalMixture([-sigmas_away * sigma], [sigma], [1.0], support=(0.0, 1.0))
    scale = sigma / sigmas_away
    points = scale * np.array([0.1, 1.0, 5.0, 20.0])
    got = law.cdf(points)
    for found, t in zip(got, points, strict=True):
        expected = quadrature(lambda r: float(law.density(r)), 0.0, t, scale * np.arange(1, 20))
        assert found == pytest.approx(expected, rel=1e-9)
    # exp(-r / scale) times a factor that differs from 1 by the order of sigmas_away^-2
    assert got[1] == pytest.approx(1 - np.exp(-1), rel=3 / sigmas_away**2)
    assert float(law.cdf(1.0)) == pytest.approx(1.0, rel=1e-14)


def test_point_masses():
    law = TruncatedNormalMixture([0.0, 0.3, -0.3, 0.1], [0.0, 0.0, 0.0, 0.02], [1.0, 1.0, 1.0, 1.0])
    assert law.cdf([-0.3001, -0.3, 0.0]) == pytest.approx([0.0, 0.25, 0.5], abs=1e-6)
    assert law.cdf([0.2999, 0.3, 1.0]) == pytest.approx([0.75, 1.0, 1.0])
    assert np.isfinite(law.density([0.0, 0.3])).all()


@pytest.mark.parametrize(
    ("mean", "sigma", "at"), [(0.4, 1e-200, 0.4), (5.0, 0.0, 1.0), (-1e9, 1e-9, -1.0), (0.2, 0.0, 0.2)]
)
def test_what_is_too_narrow_for_float64_is_a_point_mass(mean, sigma, at):
    law = TruncatedNormalMixture([mean], [sigma], [2.0])
    assert law.sigmas[0] == 0.0
    assert law.cdf([np.nextafter(at, -2), at]) == pytest.approx([0.0, 1.0])


@pytest.mark.parametrize(
    ("law", "arguments", "said"),
    [
        (TruncatedNormalMixture, ([0.0], [1.0, 2.0], [1.0]), "1 means, 2 sigmas"),
        (TruncatedNormalMixture, ([0.0, np.nan], [1.0, 1.0], [1.0, 1.0]), r"means\[1\]"),
        (TruncatedNormalMixture, ([0.0], [-1.0], [1.0]), "negative"),
        (TruncatedNormalMixture, ([0.0], [1.0], [0.0]), "all weights zero"),
        (TruncatedNormalMixture, ([0.0], [1.0], [1.0], (0.5, 0.5)), "support"),
        (LogNormal, (0.0, -1.0), "negative"),
    ],
)
def test_what_is_no_law_is_refused(law, arguments, said):
    with pytest.raises(UsageError, match=said):
        law(*arguments)


def test_lognormal_closed_forms_are_integrals_of_the_density():
    law = LogNormal(-1.0, 0.7)
    points = np.array([0.05, 0.4, 3.0])
    for found, t in zip(law.cdf(points), points, strict=True):
        expected = quadrature(lambda x: float(law.density(x)), 0.0, t, [0.01, 0.1, 0.3, 1.0])
        assert found == pytest.approx(expected, rel=1e-9)
    assert law.quantile(law.cdf(points)) == pytest.approx(points, rel=1e-12)
    assert law.cdf([-1.0, 0.0]).tolist() == [0.0, 0.0]
    assert law.density([-1.0, 0.0]).tolist() == [0.0, 0.0]
