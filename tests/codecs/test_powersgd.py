"""PowerSGD: factors, the warm start, and what does not fit into a matrix."""

import numpy as np
import pytest

from gtrace import testing
from gtrace.codecs.powersgd import PowerSgd
from gtrace.coding import ENVELOPE_BYTES, seal
from gtrace.errors import PayloadError

VARIANTS = [PowerSgd(), PowerSgd(rank=1), PowerSgd(rank=4, rows=64), PowerSgd(rank=30, warm=False), PowerSgd(rows=1)]


def once(c, state, values, key=(1, 2)):
    return c.decode(b"", c.encode(state, values, key), values.size)


def bits(c, size):
    return 8 * (len(c.encode(c.init(size), np.ones(size), (1, 2))) - ENVELOPE_BYTES)


def matrix(rows, columns, spectrum, seed=0):
    rng = np.random.default_rng(seed)
    left = np.linalg.qr(rng.normal(size=(rows, len(spectrum))))[0]
    right = np.linalg.qr(rng.normal(size=(columns, len(spectrum))))[0]
    return (left * spectrum @ right.T).astype(np.float32).reshape(-1)


@pytest.mark.parametrize("c", VARIANTS, ids=str)
def test_laws(c):
    testing.check_codec(c, spike=False)


@pytest.mark.parametrize("warm", [True, False])
def test_a_matrix_of_the_codecs_rank_arrives_whole(warm):
    c = PowerSgd(rank=3, rows=40, warm=warm)
    x = matrix(40, 90, [5.0, 2.0, 1.0])
    assert once(c, c.init(x.size), x) == pytest.approx(x, abs=1e-5)


def test_one_step_is_the_papers():
    c = PowerSgd(rank=2, rows=30)
    x = np.random.default_rng(1).normal(size=30 * 50).astype(np.float32)
    state = c.init(x.size)
    m = x.reshape(30, 50).astype(np.float64)
    p = np.linalg.qr(m @ state.arrays["q"])[0]
    wanted = p @ (p.T @ m)
    got = once(c, state, x)
    assert got == pytest.approx(wanted.reshape(-1), abs=1e-5)
    following = c.update(state, x, got)
    assert following.arrays["residual"] == pytest.approx(x - got, abs=1e-6)
    assert following.arrays["q"] == pytest.approx(m.T @ p, abs=1e-5)


def test_a_warm_start_converges_to_the_best_factors():
    x = matrix(60, 60, 0.9 ** np.arange(40.0))
    best = np.sqrt(np.sum((0.9 ** np.arange(4, 40.0)) ** 2))
    errors = {}
    for warm in (True, False):
        c = PowerSgd(rank=4, warm=warm)
        state = c.init(x.size)
        for step in range(25):
            # Without its residual the codec sees the same matrix at every step.
            state = state.with_arrays(residual=np.zeros(x.size, np.float32))
            got = once(c, state, x, (step, 3))
            state = c.update(state, x, got)
        errors[warm] = float(np.linalg.norm(x - got))
    assert best * (1 - 1e-6) <= errors[True] < 1.02 * best
    assert errors[False] > 1.1 * best


def test_nothing_is_lost_over_steps():
    c = PowerSgd(rank=1)
    rng = np.random.default_rng(2)
    state, sent, given = c.init(500), np.zeros(500), np.zeros(500)
    for _ in range(30):
        g = rng.normal(size=500).astype(np.float32)
        got = once(c, state, g)
        state = c.update(state, g, got)
        sent, given = sent + got, given + g
    assert sent + state.arrays["residual"] == pytest.approx(given, abs=1e-4)


def test_a_dead_gradient_does_not_kill_the_start():
    c = PowerSgd(rank=2, rows=40)
    state = c.init(1600)
    zeros = np.zeros(1600, np.float32)
    state = c.update(state, zeros, once(c, state, zeros))
    assert np.array_equal(state.arrays["q"], c.init(1600).arrays["q"])
    x = matrix(40, 40, [3.0, 1.0])
    assert once(c, state, x) == pytest.approx(x, abs=1e-5)


def test_bits_are_those_of_two_factors_or_of_float32_where_these_are_no_shorter():
    assert bits(PowerSgd(rank=2), 100 * 100) == 32 * 2 * 200
    assert bits(PowerSgd(rank=2), 100 * 100 + 1) == 32 * 2 * (100 + 101)
    assert bits(PowerSgd(rank=2, rows=10), 1000) == 32 * 2 * 110
    assert bits(PowerSgd(rank=50), 100 * 100) == 32 * 100 * 100
    assert bits(PowerSgd(rank=2, rows=1), 1000) == 32 * 1000
    assert bits(PowerSgd(rank=2), 3) == 32 * 3
    x = np.arange(3, dtype=np.float32)
    assert np.array_equal(once(PowerSgd(), PowerSgd().init(3), x), x)


def test_starts_are_normal_and_alike_on_every_worker():
    c = PowerSgd(rank=8)
    q = c.init(250_000).arrays["q"]
    assert np.array_equal(q, c.init(250_000).arrays["q"])
    n = q.size
    assert abs(q.mean()) < 4.2 / np.sqrt(n)
    assert abs((q.astype(np.float64) ** 2).mean() - 1) < 4.2 * np.sqrt(2 / n)
    assert abs((q.astype(np.float64) ** 4).mean() - 3) < 4.2 * np.sqrt(96 / n)
    assert "q" not in PowerSgd(warm=False).init(100).arrays


@pytest.mark.parametrize(
    "body", [b"", b"\0" * (4 * 128 + 4), b"\0" * (4 * 127), np.full(128, np.nan, np.float32).tobytes()]
)
def test_a_sealed_body_that_says_nonsense_is_refused(body):
    c = PowerSgd(rank=2)
    assert bits(c, 1000) == 32 * 128
    with pytest.raises(PayloadError):
        c.decode(b"", seal(body, codec=c.name, size=1000, shared=b""), 1000)
