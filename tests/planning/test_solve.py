"""The solver against brute force, its bound, and what no plan may be worse than."""

import numpy as np
import pytest
from scipy.optimize import linprog

from gtrace.planning.solve import ENOUGH, minimize, uniform


def brute_force(cost, error, budget):
    """The least error of all choices within the budget, None where there is none."""
    choices = np.indices((cost.shape[1],) * len(cost)).reshape(len(cost), -1).T
    rows = range(len(cost))
    fits = cost[rows, choices].sum(axis=1) <= budget
    return error[rows, choices].sum(axis=1)[fits].min() if fits.any() else None


@pytest.mark.parametrize("seed", range(60))
def test_brute_force_agrees_on_small_instances(seed):
    rng = np.random.default_rng(seed)
    tensors, options = rng.integers(1, 5), rng.integers(1, 7)
    cost = rng.random((tensors, options)) * rng.lognormal(sigma=2, size=(tensors, 1))
    error = rng.random((tensors, options)) * rng.lognormal(sigma=2, size=(tensors, 1))
    error[rng.random(error.shape) < 0.1] = np.inf
    error[:, 0] = np.where(np.isfinite(error[:, 0]), error[:, 0], 1.0)
    cost = np.where(np.isfinite(error), cost, np.inf)
    budget = rng.uniform(0.8 * cost.min(axis=1).sum(), np.where(np.isfinite(cost), cost, 0).max(axis=1).sum())
    found, best = minimize(cost, error, budget), brute_force(cost, error, budget)
    assert (found is None) == (best is None)
    if found is None:
        return
    assert found.cost == pytest.approx(cost[np.arange(tensors), found.options].sum())
    assert found.cost <= budget * (1 + 1e-9)
    assert best * (1 - 1e-12) <= found.error <= best * (1 + ENOUGH)
    assert found.bound <= best * (1 + 1e-12)
    if found.proved:
        assert found.error == pytest.approx(best)


def scaled_layers(tensors, seed, options=80):
    """Costs and errors of layers whose scales and sizes differ by many orders of magnitude."""
    rng = np.random.default_rng(seed)
    size = np.exp(rng.uniform(3, 12, (tensors, 1)))
    bits = np.linspace(1.2, 9, options) * rng.uniform(0.99, 1.01, (tensors, options))
    energy = np.exp(rng.normal(0, 4, (tensors, 1)))
    return size * bits, size * energy * 4.0**-bits * rng.uniform(1, 1.05, (tensors, options)), size


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("bits", [2.0, 3.0, 5.0])
def test_layers_of_very_different_scale_come_within_a_percent_of_the_bound(seed, bits):
    cost, error, size = scaled_layers(25, seed)
    budget = bits * size.sum()
    found = minimize(cost, error, budget)
    assert found.cost <= budget * (1 + 1e-9)
    assert found.gap < 0.01
    assert found.error <= error[:, uniform(cost, error, budget)].sum()


def test_with_no_room_there_is_no_choice_and_with_room_for_all_nothing_is_left_to_prove():
    cost, error = np.array([[2.0, 3.0]]), np.array([[1.0, 0.5]])
    assert minimize(cost, error, 1.9) is uniform(cost, error, 1.9) is None
    assert minimize(cost, error, 2.0).options.tolist() == [0]
    found = minimize(np.array([[1.0, 2.0, 9.0]]), np.array([[5.0, 1.0, 0.0]]), 100.0)
    assert (found.options.tolist(), found.error, found.gap, found.proved) == ([2], 0.0, 0.0, True)
    cost, error = np.array([[1.0, 2.0, 3.0]] * 2), np.array([[9.0, 3.0, 0.0]] * 2)
    assert [uniform(cost, error, budget) for budget in (2, 4, 5.9, 6)] == [0, 1, 1, 2]


@pytest.mark.parametrize("seed", range(8))
def test_the_bound_is_that_of_the_linear_program(seed):
    rng = np.random.default_rng(seed)
    cost, error = rng.random((2, 5, 6))
    budget = rng.uniform(cost.min(axis=1).sum(), 0.6 * cost.max(axis=1).sum())
    relaxed = linprog(error.ravel(), [cost.ravel()], [budget], np.kron(np.eye(5), np.ones(6)), np.ones(5))
    assert minimize(cost, error, budget).bound == pytest.approx(relaxed.fun, rel=1e-9)


def test_a_start_is_never_left_for_something_worse_also_one_that_greed_misses():
    rows, missed = np.arange(6), 0
    for seed in range(400):
        rng = np.random.default_rng(seed)
        cost, error = rng.random((2, 6, 4))
        start = rng.integers(0, 4, 6)
        budget, lost = cost[rows, start].sum(), error[rows, start].sum()
        missed += minimize(cost, error, budget, search=False).error > lost
        for search in (False, True) if seed < 40 else (False,):
            assert minimize(cost, error, budget, start, search=search).error <= lost
    # Otherwise this test shows nothing.
    assert missed
