"""Sign methods and 1-bit SGD against their formulas, written out plainly."""

import numpy as np
import pytest
from helpers_codecs import body, once

from gtrace.codecs.signs import EfSignSgd, SignSgd, Signum
from gtrace.errors import UsageError
from gtrace.kernels import elementwise
from gtrace.sketch import MomentSketch


@pytest.mark.parametrize("size", [1, 7, 8, 9, 1000])
def test_the_packed_signs_are_those_of_the_values(size):
    x = np.random.default_rng(size).normal(size=size).astype(np.float32)
    sent = body(SignSgd(), x)
    assert np.frombuffer(sent[:4], "<f4")[0] == np.float32(np.abs(x.astype(np.float64)).mean())
    bits = [sent[4 + i // 8] >> (i % 8) & 1 for i in range(size)]
    assert bits == [int(v < 0) for v in x]
    assert len(sent) == 4 + -(-size // 8)
    assert body(SignSgd(scale="none"), x) == sent[4:]
    for scale, unit in (("mean", 2), ("energy", 2.25), ("none", 1)):
        assert once(SignSgd(scale=scale), [3.0, -1.0, 2.0, -2.0]).tolist() == [unit, -unit, unit, -unit]


def test_a_zero_is_a_fair_coin_of_its_own_key_and_place():
    """It is the top bit of the key's word."""
    x = np.array([0.0, -1.0, -0.0, 1.0, 0.0, 0.0], np.float32)
    negative, words = np.signbit(x), np.empty(x.size, np.uint32)
    elementwise.fill_words(np.uint64(5), np.uint64(6), 0, words)
    elementwise.toss_zeros(x, np.uint64(5), np.uint64(6), 0, negative)
    assert negative.tolist() == [bool(w >> 31) if v == 0 else v < 0 for v, w in zip(x, words, strict=True)]


def test_the_coins_of_zeros_are_error_but_not_bias_and_zeros_only_send_nothing():
    for c in (SignSgd(), SignSgd(scale="none"), EfSignSgd(), Signum()):
        assert body(c, np.zeros(100)) == b""
        assert not once(c, np.zeros(100)).any()
    x, c = np.array([3.0, -1.0, 0.0, 0.0], np.float32), SignSgd()
    expected = c.expect(c.init(4), MomentSketch.from_spec(x, c.needs))
    assert (expected.squared_error, expected.bias) == (pytest.approx(2**2 + 0 + 1 + 1), pytest.approx(2.0))


def test_the_majority_decides_and_ties_are_zero():
    workers = [np.array(v, np.float32) for v in ([2, -2, 2, -2], [1, 1, -1, -1], [-3, 3, -3, -3])]
    for c, sent, wanted in (
        (SignSgd(), workers, [2, 2, -2, -2]),
        (SignSgd(), workers[:2], [1.5, 0, 0, -1.5]),
        (Signum(), workers, [2, 2, -2, -2]),
        (EfSignSgd(), workers, [0, 2 / 3, -2 / 3, -2]),
    ):
        assert c.aggregate(sent).dtype == np.float32
        assert c.aggregate(sent).tolist() == pytest.approx(wanted)
    with pytest.raises(UsageError, match="no gradients"):
        SignSgd().aggregate([])
