"""Greedy merging: its guarantee, its number of intervals, and that it always ends."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from helpers_optimal import quadratic_optimum
from hypothesis import given
from hypothesis import strategies as st

from gtrace.errors import UsageError
from gtrace.fitting import objective
from gtrace.fitting.optimal import adaquant

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "zipml.json").read_text())
STREAMS = {
    "lognormal_1k": lambda: np.random.default_rng(1).lognormal(0.0, 1.0, 1000),
    "lognormal_sigma3_5k": lambda: np.random.default_rng(2).lognormal(0.0, 3.0, 5000),
}


def naive_adaquant(x, k, gamma, delta):
    """The paper's algorithm on lists of breakpoints, with ceil((1 + gamma) k) pairs kept."""
    points = sorted({0.0, 1.0, *x})
    values, counts = np.unique(x, return_counts=True)
    keep = math.ceil((1 + gamma) * k)
    cuts = list(points)

    def error(a, b):
        inside = (values > a) & (values < b)
        return float(np.sum(counts[inside] * (b - values[inside]) * (values[inside] - a)))

    while len(cuts) - 1 > 2 * (1 + gamma) * k + delta and (len(cuts) - 1) // 2 > keep:
        pairs = [(i, error(cuts[i], cuts[i + 2])) for i in range(0, 2 * ((len(cuts) - 1) // 2), 2)]
        pairs.sort(key=lambda pair: pair[1])
        merged = {i + 1 for i, _ in pairs[: len(pairs) - keep]}
        cuts = [cut for i, cut in enumerate(cuts) if i not in merged]
    return cuts


@pytest.mark.parametrize("name", sorted(STREAMS))
def test_golden_bounds(name):
    x = STREAMS[name]().astype(np.float32).astype(np.float64)
    r = x / x.max()
    assert len(GOLDEN[name]["adaquant"]) == 12
    for case in GOLDEN[name]["adaquant"]:
        levels = adaquant(r, case["k"], case["gamma"], 2)
        assert (levels[0], levels[-1]) == (0.0, 1.0)
        assert levels.size - 1 <= case["max_intervals"]
        assert objective(r, levels) <= case["bound"] * (1 + 1e-9)


@given(
    st.lists(st.integers(0, 60), min_size=1, max_size=60),
    st.integers(1, 4),
    st.sampled_from([0.1, 0.25, 0.5, 1.0, 1.7, 3.0]),
    st.sampled_from([1.0, 1.5, 2.0, 5.0]),
)
def test_guarantee(points, k, gamma, delta):
    x = np.array(points) / 60
    levels = adaquant(x, k, gamma, delta)
    assert np.isin(levels, [0.0, 1.0, *x]).all()
    spare = (1 + gamma) * k
    assert levels.size - 1 <= max(2 * spare + delta, 2 * math.ceil(spare - 1e-9) + 1)
    best = quadratic_optimum(x, k + 1, lo=0.0, hi=1.0)
    assert objective(x, levels) <= (1 + 1 / gamma) * best * (1 + 1e-9) + 1e-300


@pytest.mark.parametrize("seed", range(6))
def test_matches_the_algorithm_of_the_paper(seed):
    # distinct costs: the order among equal ones is free
    x = np.random.default_rng(seed).random(150 + seed)
    for k, gamma, delta in ((1, 0.5, 1.0), (3, 1.0, 2.0), (5, 0.3, 1.0)):
        assert adaquant(x, k, gamma, delta).tolist() == naive_adaquant(x, k, gamma, delta)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (([0.5], 0, 1.0, 1.0), "k: 0 does not fit"),
        (([0.5], 2, 0.0, 1.0), "gamma: 0.0 must be finite and above 0"),
        (([0.5], 2, 1.0, 0.5), "delta: 0.5 must be finite and at least 1"),
    ],
)
def test_errors(args, message):
    with pytest.raises(UsageError, match=message):
        adaquant(*args)
