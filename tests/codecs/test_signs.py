"""Sign methods and 1-bit SGD against their formulas, written out plainly."""

import numpy as np
import pytest
from helpers_codecs import body, once

import gtrace
from gtrace.codecs.signs import EfSignSgd, OneBit, SignSgd, Signum
from gtrace.coding import ENVELOPE_BYTES
from gtrace.errors import UsageError
from gtrace.kernels import elementwise
from gtrace.sketch import MomentSketch
from gtrace.types import Key, State


def body_bits(c, values):
    return 8 * len(body(c, values))


@pytest.mark.parametrize("size", [1, 7, 8, 9, 1000])
def test_the_packed_signs_are_those_of_the_values(size):
    rng = np.random.default_rng(size)
    x = rng.normal(size=size).astype(np.float32)
    payload = SignSgd().encode(State(size), x, (1, 2))
    body = payload[ENVELOPE_BYTES:]
    assert np.frombuffer(body[:4], "<f4")[0] == np.float32(np.abs(x.astype(np.float64)).mean())
    bits = [body[4 + i // 8] >> (i % 8) & 1 for i in range(size)]
    assert bits == [int(v < 0) for v in x]
    assert body_bits(SignSgd(), x) == 32 + 8 * -(-size // 8)
    assert body_bits(SignSgd(scale="none"), x) == 8 * -(-size // 8)


def test_scales():
    x = np.array([3.0, -1.0, 2.0, -2.0], np.float32)
    assert once(SignSgd(), x).tolist() == [2, -2, 2, -2]
    assert once(SignSgd(scale="energy"), x).tolist() == [2.25, -2.25, 2.25, -2.25]
    assert once(SignSgd(scale="none"), x).tolist() == [1, -1, 1, -1]


def test_a_zero_is_a_fair_coin_of_its_own_key_and_place():
    x = np.zeros(4001, np.float32)
    x[-1] = 4001.0
    first, second = (once(SignSgd(), x, key=Key.derive(seed, tensor="coin"))[:-1] for seed in (1, 2))
    assert set(np.unique(first)) == {-1.0, 1.0}
    for coins in (first, second, first * second, first[1:] * first[:-1]):
        assert abs(coins.mean()) < 4.2 / np.sqrt(coins.size)


def test_coins_are_the_top_bits_of_the_keys_words():
    x = np.array([0.0, -1.0, -0.0, 1.0, 0.0, 0.0], np.float32)
    negative = np.signbit(x)
    words = np.empty(x.size, np.uint32)
    elementwise.fill_words(np.uint64(5), np.uint64(6), words)
    elementwise.toss_zeros(x, np.uint64(5), np.uint64(6), 0, negative)
    assert negative.tolist() == [bool(w >> 31) if v == 0 else v < 0 for v, w in zip(x, words, strict=True)]


def test_the_coins_of_zeros_are_error_but_not_bias():
    x = np.array([3.0, -1.0, 0.0, 0.0], np.float32)
    c = SignSgd()
    expected = c.expect(c.init(4), MomentSketch.from_spec(x, c.needs))
    assert (expected.squared_error, expected.bias) == (pytest.approx(2**2 + 0 + 1 + 1), pytest.approx(2.0))
    with pytest.raises(UsageError, match="needs a sketch"):
        c.expect(c.init(4), MomentSketch.of(x, norm="l2"))


def test_zeros_only_send_nothing():
    for c in (SignSgd(), SignSgd(scale="none"), EfSignSgd(), Signum()):
        assert body_bits(c, np.zeros(100)) == 0
        assert not once(c, np.zeros(100)).any()


def test_the_majority_decides_and_ties_are_zero():
    workers = [np.array(v, np.float32) for v in ([2, -2, 2, -2], [1, 1, -1, -1], [-3, 3, -3, -3])]
    voted = SignSgd().aggregate(workers)
    assert voted.dtype == np.float32
    assert voted.tolist() == [2, 2, -2, -2]
    assert SignSgd().aggregate(workers[:2]).tolist() == [1.5, 0, 0, -1.5]
    assert Signum().aggregate(workers).tolist() == [2, 2, -2, -2]
    assert EfSignSgd().aggregate(workers).tolist() == pytest.approx([0, 2 / 3, -2 / 3, -2])
    with pytest.raises(UsageError, match="no gradients"):
        SignSgd().aggregate([])


def test_signum_follows_its_momentum():
    c, rng = Signum(beta=0.8), np.random.default_rng(3)
    state, m = c.init(50), np.zeros(50)
    for step in range(6):
        g = rng.normal(size=50).astype(np.float32)
        m = 0.8 * m + 0.2 * g
        got = once(c, g, state=state)
        assert np.array_equal(np.sign(got), np.sign(m)), step
        assert np.abs(got) == pytest.approx(np.abs(m).mean(), rel=1e-6)
        state = c.update(state, g, got)
        assert state.arrays["momentum"] == pytest.approx(m, abs=1e-6)


def test_ef_signsgd_is_error_feedback_around_signsgd():
    own, wrapped = EfSignSgd(), gtrace.codec("ef:signsgd")
    states = [own.init(333), wrapped.init(333)]
    rng = np.random.default_rng(4)
    for step in range(5):
        g = rng.normal(size=333).astype(np.float32)
        got = [once(c, g, s, (step, 7)) for c, s in zip((own, wrapped), states, strict=True)]
        assert np.array_equal(*got)
        states = [c.update(s, g, d) for c, s, d in zip((own, wrapped), states, got, strict=True)]
    assert np.array_equal(states[0].arrays["residual"], states[1].arrays["residual"])
    assert states[0].arrays["residual"].any()


def naive_onebit(p, bucket):
    out = np.empty_like(p)
    for start in range(0, p.size, bucket):
        b = p[start : start + bucket]
        for side in (b >= 0, b < 0):
            if side.any():
                out[start : start + bucket][side] = np.float32(b[side].astype(np.float64).mean())
    return out


@pytest.mark.parametrize("bucket", [1, 10, 64, 1000])
def test_onebit_sends_the_means_of_both_sides_and_keeps_the_rest(bucket):
    c, rng = OneBit(bucket_size=bucket), np.random.default_rng(5)
    state, e = c.init(203), np.zeros(203, np.float32)
    for _ in range(4):
        g = rng.standard_t(3, 203).astype(np.float32)
        got = once(c, g, state=state)
        assert got == pytest.approx(naive_onebit(g + e, bucket), rel=1e-6)
        state, e = c.update(state, g, got), g + e - got
        assert np.array_equal(state.arrays["residual"], e)
    assert body_bits(c, np.ones(203)) == 64 * -(-203 // bucket) + 8 * -(-203 // 8)


def test_two_means_and_restore_have_plain_twins():
    rng = np.random.default_rng(6)
    for size, bucket in ((0, 3), (1, 4), (9, 4), (64, 8), (65, 8)):
        x = rng.normal(size=size).astype(np.float32)
        means = np.empty((-(-size // bucket), 2), np.float32)
        elementwise.two_means(x, bucket, means)
        for b, (upper, lower) in enumerate(means):
            values = x[b * bucket : (b + 1) * bucket].astype(np.float64)
            assert upper == np.float32(values[values >= 0].mean() if (values >= 0).any() else 0)
            assert lower == np.float32(values[values < 0].mean() if (values < 0).any() else 0)
        bits = rng.integers(0, 256, -(-size // 8)).astype(np.uint8)
        out = np.empty(size, np.float32)
        elementwise.restore(bits, bucket, means, out)
        assert out.tolist() == [means[i // bucket, bits[i // 8] >> (i % 8) & 1] for i in range(size)]
