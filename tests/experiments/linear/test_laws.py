"""What the gradients of linear models are on average, how far they scatter, and where training ends because of it."""

import itertools

import numpy as np
import pytest
from helpers_linear import gradients, quantized, uniform_variance

from gtrace_experiments.linear import TASKS, Precision, Prox, Training, column_levels, synthetic, train_linear
from gtrace_experiments.linear.data import Data

DRAWS = 20_000
N = 12


@pytest.fixture(scope="module")
def one():
    """One sample, its target and a model."""
    random = np.random.default_rng(2)
    return random.standard_normal(N).astype(np.float32), 0.7, random.standard_normal(N)


def columns(bits):
    """Levels of columns whose largest magnitude is 3."""
    steps = 2 ** (bits - 1) - 1
    return [3.0 * np.arange(-steps, steps + 1) / steps] * N


def sampled(one, spec):
    a, b, x = one
    precision = Precision.parse(spec)
    return gradients(a, b, precision, x, DRAWS, columns(precision.bits))


def test_naive_gradients_have_the_bias_of_the_squares(one):
    a, b, x = one
    d = uniform_variance(a.astype(float), columns(3))
    g = sampled(one, "naive:bits=3")
    error = g.mean(axis=0) - ((a @ x - b) * a + d * x)
    assert (abs(error) < 4.5 * g.std(axis=0) / np.sqrt(DRAWS)).all()
    assert (abs(d * x) > 9 * g.std(axis=0) / np.sqrt(DRAWS)).any()  # which the same test would have seen


@pytest.mark.parametrize("spec", ["double:bits=4", "symmetrized:bits=4", "double:bits=4,quantize=samples+model"])
def test_independent_samples_have_none(one, spec):
    a, b, x = one
    g = sampled(one, spec)
    error = g.mean(axis=0) - (a @ x - b) * a
    assert (abs(error) < 4.5 * g.std(axis=0) / np.sqrt(DRAWS)).all()


@pytest.mark.parametrize("spec", ["double:bits=4", "symmetrized:bits=4", "double:bits=3"])
def test_variances_are_the_closed_forms(one, spec):
    a, b, x = one
    precision = Precision.parse(spec)
    d = uniform_variance(a.astype(float), columns(precision.bits))
    r, trace, energy = a @ x - b, d.sum(), (d * x**2).sum()
    if precision.sampling == "double":
        wanted = (a @ a) * energy + r**2 * trace + trace * energy
    else:
        wanted = (a @ a) * energy / 2 + r**2 * trace / 2 + r * (a @ (d * x)) + (trace * energy + (d * x) @ (d * x)) / 2
    squared = ((sampled(one, spec) - r * a) ** 2).sum(axis=1)
    assert abs(squared.mean() - wanted) < 4.5 * squared.std() / np.sqrt(DRAWS)


def test_quantized_gradients_and_models_are_unbiased_with_the_row_bound(one):
    a, b, x = one
    steps, count = 2**3 - 1, 4000
    spec = Precision.parse("full:bits=4,quantize=model")
    g = gradients(a, b, spec, x, count, columns(4))
    error = g.mean(axis=0) - (a @ x - b) * a
    assert (abs(error) < 4.5 * g.std(axis=0) / np.sqrt(count)).all()
    spread = g.var(axis=0).sum() / (a @ a)  # of a'(Q(x) - x)
    assert 0 < spread <= (a @ a) * min(N / steps**2, np.sqrt(N) / steps) * (x @ x)


@pytest.mark.parametrize(("task", "degree", "bits"), [("logistic", 5, 4), ("svm", 3, 5)])
def test_polynomials_are_estimated_without_bias(one, task, degree, bits):
    a, _, x = one
    precision = Precision("double", bits=bits, chebyshev=degree, radius=6.0)
    problem = TASKS[task]
    c = problem.polynomial(degree, 6.0, precision.gap)
    g = gradients(a, -1.0, precision, x, DRAWS, columns(bits), task)
    u = (-(a @ x) - problem.center) / 6.0
    wanted = -np.polynomial.chebyshev.chebval(u, c) * a
    assert (abs(g.mean(axis=0) - wanted) < 4.5 * g.std(axis=0) / np.sqrt(DRAWS)).all()


def test_chebyshev_approximations_come_closer_with_their_degree():
    margins = np.linspace(-8, 8, 4001)
    errors = {}
    for name, problem in (("logistic", TASKS["logistic"]), ("svm", TASKS["svm"])):
        away = margins[abs(margins) >= 0.5] if name == "svm" else margins
        for degree in (3, 7, 15, 31):
            found = np.polynomial.chebyshev.chebval(away / 8, problem.polynomial(degree, 8.0, 0.5))
            errors[name, degree] = abs(found - problem.derivative(problem.center + away)).max()
    for name in ("logistic", "svm"):
        falling = [errors[name, degree] for degree in (3, 7, 15, 31)]
        assert all(after < 0.85 * before for before, after in itertools.pairwise(falling)), falling
    # The nearest poles of the logistic function are at i pi, so the error falls as a power of this.
    rho = np.pi / 8 + np.sqrt(1 + (np.pi / 8) ** 2)
    assert errors["logistic", 15] < 2 * rho**-15
    assert errors["svm", 31] < 0.2


def test_naive_training_ends_where_the_biased_equations_say():
    """(A'A/K + D) x = A'b/K."""
    data = synthetic(8, 2000, labels=False, seed=1)
    a = data.a.astype(float)
    levels = column_levels(data.a, 3, "uniform")
    d = np.mean([uniform_variance(row, levels) for row in a], axis=0)
    limit = np.linalg.solve(a.T @ a / len(a) + np.diag(d), a.T @ data.b / len(a))
    exact = np.linalg.lstsq(a, data.b, rcond=None)[0]
    ends = {}
    for name in ("naive", "double"):
        training = Training(TASKS["linear"], data, Precision(name, bits=3), seed=4)
        for epoch in range(60):
            if epoch == 10:
                training.restart_average()
            training.epoch()
        ends[name] = training.average
    apart = np.linalg.norm(limit - exact)
    assert np.linalg.norm(ends["naive"] - limit) < 0.1 * apart
    assert np.linalg.norm(ends["double"] - exact) < 0.1 * apart


#: gap to the optimum at 10,000 samples of 100 features and noise 0.1, with ||x||^2 = 125: the gaps grow with it
TABLE = {
    "naive:bits=5": (0.018, 0.021),
    "double:bits=5": (0.8e-3, 1.2e-3),
    "symmetrized:bits=5": (4e-4, 6e-4),
    "symmetrized:bits=5,quantize=samples+model+gradients": (4e-3, 8e-3),
    "naive:bits=6": (1.1e-3, 1.5e-3),
    "double:bits=6": (2e-4, 4e-4),
    "symmetrized:bits=6": (0.9e-4, 1.6e-4),
    "symmetrized:bits=6,quantize=samples+model+gradients": (1e-3, 2e-3),
}


def test_gaps_at_real_size():
    random = np.random.default_rng(0)
    a, x = random.standard_normal((10_000, 100)), random.standard_normal(100)
    b = a @ (x * np.sqrt(125) / np.linalg.norm(x)) + 0.1 * random.standard_normal(10_000)
    data = Data("made", a.astype(np.float32), b, np.zeros((0, 100), np.float32), np.zeros(0))
    plain, *results = train_linear("linear", list(TABLE), data=data, rate=0.005).results
    assert 0 < plain.gap < 1e-6
    assert len(results) == len(TABLE)
    for result in results:
        low, high = TABLE[result.run]
        # The ranges are of means over seeds; this is one of them.
        assert 0.85 * low <= result.gap <= 1.15 * high, result.run


def test_double_sampling_solves_the_least_squares_machine_too():
    data = synthetic(20, 3000, labels=True, seed=2)
    study = train_linear("lssvm", ["naive:bits=3", "double:bits=3"], data=data, prox=Prox("l2", 0.01), epochs=40)
    plain, naive, double = study.results
    assert set(np.unique(data.b)) == {-1.0, 1.0}
    a = data.a.astype(float)
    ridge = np.linalg.solve(a.T @ a / len(a) + 0.01 * np.eye(20), a.T @ data.b / len(a))
    assert plain.optimum == pytest.approx(np.mean((a @ ridge - data.b) ** 2) + 0.01 * (ridge @ ridge))
    assert 0 <= plain.gap < 1e-4
    assert double.gap < 0.1 * naive.gap
    assert plain.accuracy > 0.75


def test_optimal_levels_never_have_a_larger_variance():
    for name, heavy in (("normal", False), ("lognormal", True)):
        data = synthetic(6, 3000, labels=False, seed=5, heavy=heavy)
        for bits in (2, 3, 5):
            uniform, best = (
                Training(TASKS["linear"], data, Precision("double", bits=bits, levels=rule)).variance
                for rule in ("uniform", "optimal")
            )
            assert best < uniform, name
            sampled = quantized(data.a, data.b, bits, "optimal")
            gaps = np.take_along_axis(
                np.diff(sampled.levels, axis=1).T, np.minimum(sampled.index, sampled.levels.shape[1] - 2), axis=0
            )
            assert best == pytest.approx((sampled.part * (1 - sampled.part) * gaps**2).mean(), rel=1e-4)
