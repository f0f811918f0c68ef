"""Reference numbers for fitted levels, and plain twins of the objective."""

import itertools
import json
from pathlib import Path

import numpy as np
from scipy import integrate

from gtrace.distributions import TruncatedNormalMixture

GOLDEN = json.loads((Path(__file__).parent / "golden" / "levels.json").read_text())
#: the golden file's names of the three kinds of grid, as arguments of the public functions
KINDS = {"symmetric_nozero": {"zero": False}, "magnitude_zero": {"zero": True}, "signed_free": {"zero": None}}
STARTS = {"uniform": "uniform", "exp0.5": "exponential"}

#: laws that are not even, not single and not unimodal
MIXTURES = {
    "one": TruncatedNormalMixture([0.0], [0.01], [1.0]),
    "shifted": TruncatedNormalMixture([0.02, -0.05], [0.03, 0.01], [1.0, 3.0]),
    "half": TruncatedNormalMixture([-0.1, 0.2, 0.001], [0.08, 0.03, 0.002], [1.0, 0.5, 2.0], support=(0.0, 1.0)),
    "wide": TruncatedNormalMixture([0.3, -1.1], [0.5, 0.2], [0.2, 0.8]),
    "beside": TruncatedNormalMixture([-0.01], [0.03], [1.0], support=(0.0, 1.0)),
    "clusters": TruncatedNormalMixture([0.1, -0.25, 0.8], [0.007, 0.01, 0.05], [4.0, 5.0, 1.0]),
}


def mixture_of(case):
    p = case["params"]
    return TruncatedNormalMixture(p["mu"], p["sigma"], p["weight"], tuple(p["support"]))


def golden_cases(section):
    """(law, kind, bits, expected) of one section of the golden file."""
    for law, case in GOLDEN[section].items():
        for kind, results in case["results"].items():
            for bits, expected in results.items():
                yield law, kind, int(bits), expected


def cell_error(r, levels, zero):
    """(b - r)(r - a) for every r, with a and b the levels around |r|; l^2 - r^2 below the first when 0 is none."""
    r = np.abs(np.asarray(r, np.float64))
    grid = np.asarray(levels, np.float64)
    if not zero:
        grid = np.concatenate((-grid[:1], grid))
    k = np.clip(np.searchsorted(grid, r, side="right") - 1, 0, grid.size - 2)
    return (grid[k + 1] - r) * (r - grid[k])


def quadrature(f, low, high, points=()):
    """The integral of f, to about 1e-12 of its value, with breaks where f is narrow."""
    breaks = np.unique(np.clip([low, *points, high], low, high))
    parts = [integrate.quad(f, a, b, epsabs=0.0, epsrel=1e-12, limit=200)[0] for a, b in itertools.pairwise(breaks)]
    return float(np.sum(parts))


def around(mixture):
    """Break points for quadrature of the law of |r|: some sigmas from every component."""
    steps = np.array([-12, -8, -5, -3, -2, -1, 0, 1, 2, 3, 5, 8, 12])
    points = (mixture.anchors[:, None] + mixture.sigmas[:, None] * steps).reshape(-1)
    return np.concatenate([np.abs(points), [abs(mixture.support[0]), abs(mixture.support[1])]])


def magnitude_density(mixture, r):
    """The density of |r| at a magnitude."""
    return float(mixture.density(r) + mixture.density(-r))


def true_objective(mixture, levels, zero):
    """The objective of a grid by quadrature of the density of |r|."""

    def f(r):
        return float(cell_error(r, levels, zero)) * magnitude_density(mixture, r)

    return quadrature(f, 0.0, 1.0, [*around(mixture), *levels])


def sampled_error(values, bucket, levels, zero, weighted):
    """The mean error of stochastic rounding, one bucket at a time, and without a sketch."""
    total, weight = 0.0, 0.0
    for start in range(0, values.size, bucket):
        v = values[start : start + bucket].astype(np.float64)
        norm = np.float64(np.float32(np.sqrt(np.sum(v * v))))
        if norm > 0:
            w = norm**2 if weighted else 1.0
            total += w * float(np.sum(cell_error(v / norm, levels, zero)))
            weight += w * v.size
    return total / weight
