"""Gradients of linear models against their plain twin, and proximal steps against their definition."""

import math

import naive
import numpy as np
import pytest
from helpers_linear import drawn, keyed, quantized, rounded
from scipy.optimize import minimize

from gtrace_experiments.linear import TASKS, Precision, Prox, kernels

K, N = 7, 40


def training_set(labels):
    random = np.random.default_rng(3)
    a = random.standard_normal((K, N))
    b = np.where(random.random(K) < 0.5, -1.0, 1.0) if labels else random.standard_normal(K)
    return a, b, random.standard_normal(N) / 4


def slope(task, z, b):
    if task == "linear":
        return z - b
    return -b / (1 + math.exp(b * z)) if task == "logistic" else -b * (b * z < 1)


def twin(samples, precision, task, x, chosen, step, keys):
    """The mean gradient by the formulas, one sample after the other."""
    rule, draws = precision.rule(TASKS[task], Prox()), max(precision.draws, 1)
    y = rounded(x, rule.model_steps, keys[1], step) if rule.model_steps else x
    total = np.zeros(N)
    for k in chosen:
        b, exact = samples.targets[k], samples.values[k].astype(float)
        q = [drawn(samples, k, d, draws, keys) for d in range(precision.draws)]
        if not q:
            total += slope(task, exact @ y, b) * exact
        elif precision.chebyshev:
            u = [(b * (one @ y) - rule.center) / rule.radius for one in q[1:]]
            t = [1.0, u[0]]
            for one in u[1:]:
                t.append(2 * one * t[-1] - t[-2])
            total += b * np.dot(rule.coefficients, t) * q[0]
        elif precision.sampling == "symmetrized":
            total += (slope(task, q[1] @ y, b) * q[0] + slope(task, q[0] @ y, b) * q[1]) / 2
        else:
            z = q[-1] @ y
            exactly = False
            if precision.refetch == "l1":
                levels = [int(np.argmin(abs(samples.levels[i] - q[-1][i]))) for i in range(N)]
                slack = sum(samples.reach[i, levels[i]] * abs(y[i]) for i in range(N))
                exactly = abs(1 - b * z) <= slack
            elif precision.refetch == "jl":
                z = sketched(exact, y, precision.rows, keys[3], step)
                slack = rule.quantile * math.sqrt(((exact @ exact) * (y @ y) + 1) / precision.rows)
                exactly = abs(1 - b * z) <= slack
            total += slope(task, exact @ y, b) * exact if exactly else slope(task, z, b) * q[0]
    return total / len(chosen)


def sketched(a, y, rows, key, step):
    """Product of a and y from projections onto signs, 32 of them to a hash."""
    blocks = -(-N // 32)
    words = naive.hashes(*key, step << 32, rows * blocks)
    total = 0.0
    for row in range(rows):
        bits = [word >> i & 1 for word in words[row * blocks : (row + 1) * blocks] for i in range(32)]
        signs = np.where(bits[:N], 1.0, -1.0)
        total += (signs @ a) * (signs @ y)
    return total / rows


@pytest.mark.parametrize(
    ("task", "spec"),
    [
        ("linear", "none"),
        ("linear", "naive:bits=3"),
        ("linear", "double:bits=5,levels=optimal"),
        ("linear", "symmetrized:bits=4,quantize=samples+model"),
        ("linear", "full:bits=3,quantize=model"),
        ("logistic", "double:bits=4"),
        ("logistic", "double:bits=6,chebyshev=4"),
        ("svm", "naive:bits=4"),
        ("svm", "double:bits=6,chebyshev=3"),
        ("svm", "naive:bits=6,refetch=l1"),
        ("svm", "naive:bits=4,refetch=jl,rows=9,failure=0.2"),
    ],
)
def test_the_gradient_is_that_of_the_formulas(task, spec):
    a, b, x = training_set(labels=task != "linear")
    precision = Precision.parse(spec)
    samples = quantized(a, b, precision.bits, precision.levels)
    streams, keys = keyed()
    found, counts = np.empty(N), np.zeros(2, np.int64)
    rule = precision.rule(TASKS[task], Prox())
    for step, chosen in enumerate([[4], [0, 2, 6]]):
        kernels.batch_gradient(samples, rule, streams, np.array(chosen), step, x, found, counts)
        wanted = twin(samples, precision, task, x, chosen, step, keys)
        np.testing.assert_allclose(found, wanted, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("batch", [1, 3])
def test_an_epoch_is_its_steps(batch):
    a, b, x = training_set(labels=False)
    precision, prox = Precision.parse("double:bits=5,quantize=samples+model+gradients"), Prox("l1", 0.05)
    samples, rule = quantized(a, b, 5), precision.rule(TASKS["linear"], prox)
    streams, keys = keyed(9)
    order = np.random.default_rng(0).permutation(K)
    found, total, counts = x.copy(), np.zeros(N), np.zeros(2, np.int64)
    kernels.epoch(samples, rule, streams, order, batch, 0.02, found, total, counts)
    wanted, summed = x.copy(), np.zeros(N)
    for step in range(-(-K // batch)):
        chosen = order[step * batch : (step + 1) * batch]
        g = twin(samples, precision, "linear", wanted, chosen, step, keys)
        moved = wanted - 0.02 * rounded(g, rule.gradient_steps, keys[2], step)
        wanted = np.sign(moved) * np.maximum(abs(moved) - 0.02 * 0.05, 0)
        summed += wanted
    np.testing.assert_allclose(found, wanted, rtol=1e-10, atol=1e-13)
    np.testing.assert_allclose(total, summed, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("kind", ["none", "l1", "l2", "ball"])
def test_proximal_steps_are_what_their_definition_says(kind):
    random = np.random.default_rng(1)
    prox = Prox() if kind == "none" else Prox(kind, 0.7)
    for scale in (0.1, 3.0):
        x, g, rate = scale * random.standard_normal(6), random.standard_normal(6), 0.3
        found = x.copy()
        kernels.descend(found, g, rate, prox.code, prox.strength)

        def cost(y, at=x - rate * g, rate=rate):
            inside = kind != "ball" or np.linalg.norm(y) <= 0.7 * (1 + 1e-9)
            return ((y - at) ** 2).sum() / 2 + rate * prox.value(y) if inside else np.inf

        best = min(minimize(cost, start, method="Nelder-Mead", tol=1e-9).fun for start in (found, found + 0.01))
        assert cost(found) <= best + 1e-8
        # No point nearby is better, whichever way one goes.
        assert all(cost(found + 1e-4 * random.standard_normal(6)) >= cost(found) - 1e-12 for _ in range(200))
