"""Weights of elements in Adam's update, against plain numpy and against torch's own step."""

import numpy as np
import torch

from gtrace.kernels.compare import adam_weights, weighted_sums


def twin(g, v, decay, correction, eps):
    divisor = np.sqrt((decay * v.astype(np.float64) + (1 - decay) * np.square(g, dtype=np.float64)) / correction) + eps
    with np.errstate(divide="ignore"):
        found = 1 / divisor**2
    return np.where(np.isfinite(found), found, 0.0)


def found(g, v, decay, correction, eps):
    out = np.empty(g.size)
    adam_weights(g, v, decay, correction, eps, out)
    return out


def test_adam_weights_against_numpy():
    rng = np.random.default_rng(0)
    g, v = rng.standard_normal(999).astype(np.float32), rng.exponential(size=999).astype(np.float32)
    g[:9], v[3:12] = 0, 0
    for decay, correction, eps in ((0.999, 0.01, 1e-8), (0.9, 1.0, 1e-3), (1.0, 1.0, 1e-8), (0.99, 0.5, 0.0)):
        np.testing.assert_allclose(found(g, v, decay, correction, eps), twin(g, v, decay, correction, eps), rtol=1e-12)


def test_what_has_no_divisor_has_no_weight():
    v = np.array([0, 0, np.inf, np.nan, -1], np.float32)
    g = np.array([0, 1, 1, 1, 1e-3], np.float32)
    assert (found(g, v, 0.9, 1.0, 0.0) > 0).tolist() == [False, True, False, False, False]


def test_weights_are_those_of_torchs_step():
    """Without momentum Adam's step is lr g / d; what the state held before it leads to the same d."""
    rng = np.random.default_rng(1)
    parameter = torch.nn.Parameter(torch.zeros(50, dtype=torch.float64))
    optimizer = torch.optim.Adam([parameter], lr=1.0, betas=(0.0, 0.99), eps=1e-4)
    for step in range(1, 5):
        g = rng.standard_normal(50).astype(np.float32)
        before, state = parameter.detach().clone(), optimizer.state.get(parameter, {})
        v = state["exp_avg_sq"].numpy().astype(np.float32) if state else np.zeros(50, np.float32)
        parameter.grad = torch.from_numpy(g).double()
        optimizer.step()
        moved = (before - parameter.detach()).numpy()
        weights = found(g, v, 0.99, 1 - 0.99**step, 1e-4)
        np.testing.assert_allclose(np.sqrt(weights) * g, moved, rtol=1e-5)


def test_weighted_sums_against_numpy():
    rng = np.random.default_rng(2)
    for n in (0, 1, 77, 2_100_001):
        g, q = rng.standard_normal((2, n)).astype(np.float32)
        w = rng.exponential(size=n)
        error, energy = weighted_sums(g, q, w)
        np.testing.assert_allclose(error, w @ (q.astype(np.float64) - g) ** 2, rtol=1e-12)
        np.testing.assert_allclose(energy, w @ g.astype(np.float64) ** 2, rtol=1e-12)
