"""Heterogeneous sparsity: golden numbers, a general optimizer, and never below the homogeneous one."""

import json
from pathlib import Path

import numpy as np
import pytest
from scipy.optimize import minimize

from gtrace import fitting
from gtrace.distributions import LogNormal
from gtrace.errors import UsageError
from gtrace.sketch import MomentSketch

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "near_lognormal.json").read_text())


def random_tensors(seed, count=6):
    """Laws of any kind, sizes over two decades, some with zeros."""
    rng = np.random.default_rng(seed)
    out = []
    for k in range(count):
        n = int(10 ** rng.uniform(2, 4))
        x = [
            lambda: rng.lognormal(rng.normal(0, 5), rng.uniform(0.3, 3), n),  # noqa: B023
            lambda: rng.standard_t(3, n),  # noqa: B023
            lambda: rng.normal(size=n) * (rng.random(n) < 0.7),  # noqa: B023
            lambda: rng.uniform(-1, 1, n),  # noqa: B023
        ][k % 4]()
        out.append(x.astype(np.float32))
    return out


def cosine(law, sparsity):
    """Of a law or of a tensor with what is left of it at this sparsity."""
    return fitting.pruned_cosine(fitting.threshold("exact", min(float(sparsity), 1 - 1e-12), law), law)


def cosines(laws, sparsities):
    return np.array([cosine(law, s) for law, s in zip(laws, sparsities, strict=True)])


@pytest.mark.parametrize("case", GOLDEN["heterogeneous"], ids=lambda c: c["case"])
def test_golden_allocation(case):
    got = fitting.allocate_sparsity(list(zip(case["sigma"], case["numel"], strict=True)), case["S"])
    assert got == pytest.approx(case["S_layer"], abs=1e-8)
    laws = [LogNormal(0.0, sigma) for sigma in case["sigma"]]
    alphas = [fitting.threshold("exact", float(s), law) for s, law in zip(got, laws, strict=True)]
    assert np.log(alphas) == pytest.approx(case["ln_alpha_minus_mu"], abs=1e-7)
    found = cosines(laws, got)
    assert found == pytest.approx(case["cos_layer"], abs=1e-8)
    assert np.average(found, weights=case["numel"]) == pytest.approx(case["mean_cos"], abs=1e-8)
    alike = [cosine(law, case["S"]) for law in laws]
    assert np.average(alike, weights=case["numel"]) == pytest.approx(case["mean_cos_homogeneous"], abs=1e-8)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("s", [0.6, 0.9])
def test_a_general_optimizer_finds_the_same(seed, s):
    tensors = random_tensors(seed)
    sizes = np.array([x.size for x in tensors]) / sum(x.size for x in tensors)
    there = np.array([np.mean(x == 0) for x in tensors])
    within = {"bounds": [(low, 0.9999) for low in there], "options": {"ftol": 1e-13, "maxiter": 300}}
    within["constraints"] = {"type": "eq", "fun": lambda v: float(sizes @ v) - s}
    best = minimize(lambda v: -float(sizes @ cosines(tensors, v)), np.maximum(s, there), method="SLSQP", **within)
    got = fitting.allocate_sparsity(tensors, s)
    assert best.success
    assert sizes @ cosines(tensors, got) >= -best.fun - 1e-9
    assert got == pytest.approx(best.x, abs=1e-3)
    sketches = [MomentSketch.of(x, norm="none") for x in tensors]
    assert fitting.allocate_sparsity(sketches, s) == pytest.approx(got, abs=1e-4)


def test_the_mean_cosine_is_never_below_that_of_equal_sparsity():
    for seed in range(40):
        tensors = random_tensors(100 + seed, count=2 + seed % 5)
        sizes = np.array([x.size for x in tensors], float)
        for s in (0.3, 0.5, 0.8, 0.95):
            there = np.array([np.mean(x == 0) for x in tensors])
            # No tensor can have fewer zeros than it has, so that is what equal sparsity means.
            alike = np.maximum(s, there)
            mean = float(np.average(alike, weights=sizes))
            got = fitting.allocate_sparsity(tensors, mean)
            assert np.average(got, weights=sizes) == pytest.approx(mean, abs=1e-9)
            assert (got >= there - 1e-12).all()
            gain = np.average(cosines(tensors, got) - cosines(tensors, alike), weights=sizes)
            assert gain >= -1e-12


def test_empty_and_zero_tensors_and_small_ones():
    rng = np.random.default_rng(1)
    x = rng.normal(size=1000)
    got = fitting.allocate_sparsity([x, np.zeros(500), np.empty(0), rng.normal(size=1), np.full(10, 3.0)], 0.8)
    assert got[1:3].tolist() == [1.0, 1.0]
    assert np.average(got, weights=[1000, 500, 0, 1, 10]) == pytest.approx(0.8, abs=1e-9)
    # more zeros than asked for: nothing is left to give
    assert fitting.allocate_sparsity([np.repeat([0.0, 1.0], [30, 10]), np.ones(10)], 0.5).tolist() == [0.75, 0.0]
    assert fitting.allocate_sparsity([np.zeros(3)], 0.5).tolist() == [1.0]
    assert fitting.allocate_sparsity([np.empty(0)], 0.5).tolist() == [1.0]


def test_refusals():
    with pytest.raises(UsageError, match="no tensors"):
        fitting.allocate_sparsity([], 0.5)
    with pytest.raises(UsageError, match="below 1"):
        fitting.allocate_sparsity([np.ones(3)], 1.0)
    with pytest.raises(UsageError, match="its size"):
        fitting.allocate_sparsity([(1.0, 10), LogNormal(0.0, 1.0)], 0.5)
