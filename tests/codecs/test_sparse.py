"""Sparsifiers: what they keep, what they send, what they remember."""

import helpers_codecs
import numpy as np
import pytest
from helpers_codecs import body, decode_sealed, encode_sparse, fixed_positions, gradients, once, walk

from gtrace.codecs.sparse import Dgc, RandomK, TopK, largest, magnitudes
from gtrace.coding.huffman import Floats
from gtrace.coding.sparse import encode_positions
from gtrace.sketch import MomentSketch
from gtrace.types import Key


@pytest.mark.parametrize("size", [0, 1, 2, 17, 300])
def test_the_largest_and_of_equal_ones_the_first(size):
    rng = np.random.default_rng(size)
    for spread in (2, 5, 1000):
        x = rng.integers(-spread, spread + 1, size).astype(np.float32)
        for count in {0, min(1, size), size // 3, size - size // 4, size}:
            assert largest(magnitudes(x), count).tolist() == helpers_codecs.largest(x, count)


def test_bits_of_positions_and_values():
    x = np.random.default_rng(1).normal(size=1000).astype(np.float32)
    assert 8 * len(body(TopK(ratio=0.04, coder="fixed"), x)) == 40 * (10 + 32)
    places = largest(magnitudes(x), 10)
    assert body(TopK(ratio=0.01), x) == encode_sparse(places, x[places], 1000)
    places = largest(magnitudes(x), 100)
    head = encode_positions(places, 1000)
    assert body(TopK(ratio=0.1), x) == len(head).to_bytes(4, "little") + head + Floats(x[places]).encode()
    assert 8 * len(body(RandomK(ratio=0.04, coder="fixed"), x)) == 32 + 40 * 32
    x = np.zeros(20, np.float32)
    x[[3, 9]] = [1, 2]
    c, wanted = TopK(ratio=0.1, coder="fixed"), fixed_positions([3, 9], [1, 2])
    assert body(c, x) == wanted
    assert np.array_equal(decode_sealed(c, wanted, 20), x)


def test_a_random_choice_is_fair_and_without_replacement():
    c, counts = RandomK(ratio=0.2), np.zeros(50)
    for draw in range(400):
        got = once(c, np.ones(50), key=Key.derive(0, tensor="t", draw=draw))
        assert np.count_nonzero(got) == 10
        assert np.unique(got).tolist() == [0, 5]
        counts += got / 5
    # A hypergeometric count has this deviation.
    assert np.abs(counts - 80).max() < 4.5 * np.sqrt(400 * 0.2 * 0.8)


@pytest.mark.parametrize(("size", "ratio"), [(1, 1), (10, 0.01), (10, 1), (151, 0.01), (400, 0.1)])
def test_entropy_of_few_values_is_expected_to_be_theirs_not_that_of_all(size, ratio):
    x = (10 ** np.random.default_rng(size).uniform(-9, 0, size)).astype(np.float32)
    x[: size // 5] = 0
    c = RandomK(ratio=ratio)
    state = c.init(size)
    expected = c.expect(state, MomentSketch.from_spec(x, c.needs))
    found = [c.simulate(state, x, Key.derive(0, tensor="t", draw=draw)).coded for draw in range(400)]
    assert expected.bits_fixed == found[0].fixed
    assert np.isclose(expected.bits_entropy, np.mean([bits.entropy for bits in found]), rtol=3e-3)


def test_warm_up_sends_a_quarter_and_then_ever_less():
    counts = [np.count_nonzero(got) for _, got, _ in walk(Dgc(ratio=0.01, warmup=8), gradients(10, 1000))]
    assert counts == [250, 250, 62, 62, 16, 16, 10, 10, 10, 10]
