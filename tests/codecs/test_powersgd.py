"""PowerSGD: the published algorithm on true matrices, over several workers, and what does not fit into a matrix."""

import math

import numpy as np
import pytest
from helpers_codecs import once

import gtrace
from gtrace.codecs.base import Averaged, advance
from gtrace.codecs.powersgd import PowerSgd
from gtrace.coding import ENVELOPE_BYTES
from gtrace.errors import UsageError
from gtrace.training import Exchange
from gtrace.types import State

#: linear, convolution (first dimension x rest), and what has no two dimensions
SHAPES = [(30, 50), (16, 8, 3, 3), (64, 1, 3, 3), (9, 40, 5)]


def bits(c, shape):
    size = math.prod(shape)
    return 8 * (len(c.encode(c.init(size, shape), np.ones(size), (1, 2))) - ENVELOPE_BYTES)


def matrix(rows, columns, spectrum, seed=0):
    rng = np.random.default_rng(seed)
    left = np.linalg.qr(rng.normal(size=(rows, len(spectrum))))[0]
    right = np.linalg.qr(rng.normal(size=(columns, len(spectrum))))[0]
    return (left * spectrum @ right.T).astype(np.float32)


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
        self.shape = shape
        self.errors = np.zeros((workers, shape[0], math.prod(shape[1:])))
        self.q = start.astype(np.float64)

    def step(self, gradients):
        m = np.stack(gradients).reshape(self.errors.shape) + self.errors
        p = orthogonalized(np.mean(m @ self.q, axis=0))
        self.q = np.mean(m.transpose(0, 2, 1) @ p, axis=0)
        decoded = p @ self.q.T
        self.errors = m - decoded
        return decoded.reshape(self.shape)


def steps_of(workers, shape, steps=6):
    rng = np.random.default_rng([workers, *shape])
    rows, columns = shape[0], math.prod(shape[1:])
    common = matrix(rows, columns, 3.0 * 0.6 ** np.arange(6))
    for _ in range(steps):
        yield [
            (common + 0.05 * rng.normal(size=(rows, columns))).astype(np.float32).reshape(shape) for _ in range(workers)
        ]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("rank", [1, 2, 4])
def test_one_worker_is_the_published_algorithm(shape, rank):
    c = PowerSgd(rank=rank)
    state = c.init(math.prod(shape), shape)
    reference = Published(1, shape, state.arrays["q"])
    for step, (gradient,) in enumerate(steps_of(1, shape)):
        got = once(c, gradient, state, (step, 0))
        state = c.update(state, gradient, got)
        assert got.reshape(shape) == pytest.approx(reference.step([gradient]), abs=1e-5)
        assert state.arrays["residual"] == pytest.approx(reference.errors.reshape(-1), abs=1e-5)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("rank", [1, 2, 4])
def test_four_workers_are_the_published_algorithm(shape, rank):
    c = PowerSgd(rank=rank)
    exchange = Exchange(c, 4)
    reference = Published(4, shape, c.init(math.prod(shape), shape).arrays["q"])
    rows, columns = shape[0], math.prod(shape[1:])
    for step, gradients in enumerate(steps_of(4, shape)):
        found = exchange.step(step, [{"w": g} for g in gradients])
        assert found.gradients["w"] == pytest.approx(reference.step(gradients), abs=1e-5)
        assert found.tally.payload_bits == 4 * 32 * rank * (rows + columns)
        states = [link[2]["state"] for link in exchange.to_arrays()["links"]]
        assert len(states) == 4
        for state, error in zip(states, reference.errors, strict=True):
            assert np.array_equal(state["q"], states[0]["q"])
            assert state["residual"] == pytest.approx(error.reshape(-1), abs=1e-5)


@pytest.mark.parametrize("shape", [(), (64,), (4000,), (4, 3), (1, 500), (500, 1), (0, 7)], ids=str)
def test_vectors_and_what_factors_would_not_shorten_are_sent_exactly(shape):
    c, size = PowerSgd(rank=2), math.prod(shape)
    x = np.random.default_rng(3).normal(size=shape).astype(np.float32)
    state = c.init(size, shape)
    got = once(c, x, state)
    assert np.array_equal(got, x.reshape(-1))
    assert c.shared(state) == b""
    assert bits(c, shape) == 32 * size
    assert c.update(state, x, got).arrays == {}
    found = Exchange(c, 3).step(0, [{"w": x}] * 3) if size else None
    assert found is None or np.array_equal(found.gradients["w"], x)


@pytest.mark.parametrize("warm", [True, False])
def test_a_matrix_of_the_codecs_rank_arrives_whole(warm):
    c = PowerSgd(rank=3, warm=warm)
    x = matrix(40, 90, [5.0, 2.0, 1.0])
    assert once(c, x, c.init(x.size, x.shape)) == pytest.approx(x.reshape(-1), abs=1e-5)


def test_the_shape_of_a_kernel_decides():
    """As a matrix of the first dimension times the rest this one has rank 2; near-square it has more."""
    x = matrix(16, 72, [5.0, 2.0])
    c = PowerSgd(rank=2)
    assert once(c, x, c.init(x.size, (16, 8, 3, 3))) == pytest.approx(x.reshape(-1), abs=1e-5)
    assert np.linalg.norm(once(c, x, c.init(x.size)) - x.reshape(-1)) > 0.1 * np.linalg.norm(x)


def test_a_warm_start_converges_to_the_best_factors():
    x = matrix(60, 60, 0.9 ** np.arange(40.0))
    best = np.sqrt(np.sum((0.9 ** np.arange(4, 40.0)) ** 2))
    errors = {}
    for warm in (True, False):
        c = PowerSgd(rank=4, warm=warm)
        state = c.init(x.size, x.shape)
        for step in range(25):
            # Without its residual the codec sees the same matrix at every step.
            state = state.with_arrays(residual=np.zeros(x.size, np.float32))
            got = once(c, x, state, (step, 3))
            before, state = state, c.update(state, x, got)
            assert not np.array_equal(state.arrays["q"], before.arrays["q"])
        errors[warm] = float(np.linalg.norm(x.reshape(-1) - got))
    assert best * (1 - 1e-6) <= errors[True] < 1.02 * best
    assert errors[False] > 1.1 * best


@pytest.mark.parametrize("warm", [True, False])
def test_workers_keep_the_same_start(warm):
    exchange = Exchange(PowerSgd(rank=2, warm=warm), 3)
    for step, gradients in enumerate(steps_of(3, (20, 30), 3)):
        exchange.step(step, [{"w": g} for g in gradients])
        q = [link[2]["state"]["q"] for link in exchange.to_arrays()["links"]]
        assert np.array_equal(q[0], q[1])
        assert np.array_equal(q[0], q[2])


def test_a_dead_gradient_does_not_kill_the_start():
    c = PowerSgd(rank=2)
    state = c.init(1600, (40, 40))
    zeros = np.zeros(1600, np.float32)
    state = c.update(state, zeros, once(c, zeros, state))
    assert np.array_equal(state.arrays["q"], c.init(1600, (40, 40)).arrays["q"])
    x = matrix(40, 40, [3.0, 1.0])
    assert once(c, x, state) == pytest.approx(x.reshape(-1), abs=1e-5)


def test_bits_are_those_of_two_factors_and_the_number_of_rows_is_shared_once():
    assert bits(PowerSgd(rank=2), (100, 100)) == 32 * 2 * 200
    assert bits(PowerSgd(rank=2), (10, 100)) == 32 * 2 * 110
    assert bits(PowerSgd(rank=2), (10, 4, 5, 5)) == 32 * 2 * 110
    assert bits(PowerSgd(rank=50), (100, 100)) == 32 * 100 * 100
    c = PowerSgd(rank=2)
    assert c.shared(c.init(1000, (10, 100))) == b"\x0a\0\0\0"
    # Without a shape the matrix is as square as possible.
    flat = c.init(100 * 100 + 1)
    payload = c.encode(flat, np.ones(100 * 100 + 1), (1, 2))
    assert 8 * (len(payload) - ENVELOPE_BYTES) == 32 * 2 * (100 + 101)


def test_starts_are_normal_and_the_same_on_every_worker():
    c = PowerSgd(rank=8)
    q = c.init(250_000).arrays["q"]
    assert np.array_equal(q, c.init(250_000).arrays["q"])
    n = q.size
    assert abs(q.mean()) < 4.2 / np.sqrt(n)
    assert abs((q.astype(np.float64) ** 2).mean() - 1) < 4.2 * np.sqrt(2 / n)
    assert abs((q.astype(np.float64) ** 4).mean() - 3) < 4.2 * np.sqrt(96 / n)


def test_a_worker_that_cannot_send_leaves_the_mean_to_the_others_and_all_memories_alone():
    exchange = Exchange(PowerSgd(rank=2), 2, nonfinite="skip")
    first, second = steps_of(2, (20, 30), 2)
    exchange.step(0, [{"w": g} for g in first])
    before = exchange.to_arrays()["links"]
    spoilt = second[1].copy()
    spoilt[3, 4] = np.nan
    found = exchange.step(1, [{"w": second[0]}, {"w": spoilt}])
    assert np.array_equal(found.gradients["w"], second[0])
    assert found.tally.payload_bits == 32 * 600
    for old, new in zip(before, exchange.to_arrays()["links"], strict=True):
        for name in ("q", "residual"):
            assert np.array_equal(old[2]["state"][name], new[2]["state"][name])


@pytest.mark.parametrize(
    "spec", ["powersgd", "momentum:powersgd", "ef:powersgd", "accumulate:powersgd", "rotate:powersgd"]
)
def test_wrappers_pass_the_rounds_on(spec):
    """One worker's rounds are its payload, decoded; workers with the same gradient have its result."""
    c = gtrace.codec(spec)
    assert c.linear
    alone, exchange = c.init(600, (20, 30)), Exchange(c, 3)
    for step, (g,) in enumerate(steps_of(1, (20, 30), 4)):
        got = once(c, g, alone, (step, 1))
        alone = c.update(alone, g, got)
        found = exchange.step(step, [{"w": g}] * 3)
        assert found.gradients["w"].reshape(-1) == pytest.approx(got, abs=2e-6)
        for link in exchange.to_arrays()["links"]:
            for name, array in alone.arrays.items():
                assert link[2]["state"][name] == pytest.approx(array, abs=2e-5)
        # What each sent adds up to what arrived.
        state = State.from_arrays(exchange.to_arrays()["links"][0][2]["state"])
        run = c.rounds(state, g, (step, 1))
        message = advance(run)
        while not isinstance(message, Averaged):
            message = advance(run, message)
        assert np.array_equal(message.own, message.decoded)


def test_other_codecs_have_no_rounds():
    c = gtrace.codec("topk")
    assert not c.linear
    with pytest.raises(UsageError, match="no rounds"):
        c.rounds(c.init(4), np.ones(4), (1, 2))
