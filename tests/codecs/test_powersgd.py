"""PowerSGD: the published algorithm on true matrices, over several workers, and what does not fit into a matrix."""

import math

import numpy as np
import pytest
from helpers_codecs import body, once

from gtrace.codecs.powersgd import PowerSgd
from gtrace.training import Exchange


def orthogonalized(p):
    """Gram-Schmidt, column by column, as in the authors' code."""
    p = p.copy()
    for k in range(p.shape[1]):
        p[:, k] /= np.linalg.norm(p[:, k])
        rest = p[:, k + 1 :]
        rest -= np.outer(p[:, k], p[:, k] @ rest)
    return p


class Published:
    """Algorithms 1 and 2 of Vogels et al. over all workers at once, in float64."""

    def __init__(self, workers, shape, start):
        self.errors = np.zeros((workers, shape[0], math.prod(shape[1:])))
        self.q = start.astype(np.float64)

    def step(self, gradients):
        m = np.stack(gradients).reshape(self.errors.shape) + self.errors
        p = orthogonalized(np.mean(m @ self.q, axis=0))
        self.q = np.mean(m.transpose(0, 2, 1) @ p, axis=0)
        decoded = p @ self.q.T
        self.errors = m - decoded
        return decoded.reshape(-1)


def steps_of(workers, shape, steps=6):
    rng = np.random.default_rng([workers, *shape])
    left, right = (np.linalg.qr(rng.normal(size=(n, 6)))[0] for n in (shape[0], math.prod(shape[1:])))
    common = (left * 3.0 * 0.6 ** np.arange(6) @ right.T).reshape(shape)
    for _ in range(steps):
        yield [(common + 0.05 * rng.normal(size=shape)).astype(np.float32) for _ in range(workers)]


def states_of(exchange):
    return [link[2]["state"] for link in exchange.to_arrays()["links"]]


# linear, convolution (first dimension x rest), and what has no two dimensions
@pytest.mark.parametrize("shape", [(30, 50), (16, 8, 3, 3), (64, 1, 3, 3), (9, 40, 5)], ids=str)
@pytest.mark.parametrize("rank", [1, 2, 4])
@pytest.mark.parametrize("workers", [1, 4])
def test_workers_are_the_published_algorithm(shape, rank, workers):
    c = PowerSgd(rank=rank)
    exchange = Exchange(c, workers)
    reference = Published(workers, shape, c.init(math.prod(shape), shape).arrays["q"])
    for step, gradients in enumerate(steps_of(workers, shape)):
        found = exchange.step(step, [{"w": g} for g in gradients])
        assert found.gradients["w"].reshape(-1) == pytest.approx(reference.step(gradients), abs=1e-5)
        assert found.tally.payload_bits == workers * 32 * rank * (shape[0] + math.prod(shape[1:]))
        for state, error in zip(states_of(exchange), reference.errors, strict=True):
            assert np.array_equal(state["q"], states_of(exchange)[0]["q"])
            assert state["residual"] == pytest.approx(error.reshape(-1), abs=1e-5)


@pytest.mark.parametrize("shape", [(), (64,), (4, 3), (500, 1), (0, 7)], ids=str)
def test_vectors_and_what_factors_would_not_shorten_are_sent_exactly(shape):
    c, size = PowerSgd(rank=2), math.prod(shape)
    x = np.random.default_rng(3).normal(size=shape).astype(np.float32)
    state = c.init(size, shape)
    got = once(c, x, state)
    assert np.array_equal(got, x.reshape(-1))
    assert c.shared(state) == b""
    assert len(body(c, x.reshape(-1), state=state)) == 4 * size
    assert c.update(state, x, got).arrays == {}
    assert not size or np.array_equal(Exchange(c, 3).step(0, [{"w": x}] * 3).gradients["w"], x)
