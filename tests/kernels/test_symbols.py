"""Symbols and codes of level sets against plain numpy."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gtrace.coding.huffman import MAX_LENGTH, huffman_lengths, pack_lengths
from gtrace.kernels import symbols
from gtrace.kernels.bits import entropy


def plain_escape(probabilities, count):
    """What symbols that hardly occur share is the longest length that any of them would get."""
    seldom = probabilities < 0.5 / max(1, count)
    if not seldom.any():
        return huffman_lengths(probabilities)
    mass = max(probabilities[seldom].sum(), 1 / max(1, count))
    lengths = huffman_lengths(np.where(seldom, max(mass / seldom.sum(), 2.0**-20), probabilities))
    lengths[seldom] = lengths[seldom].max()
    return lengths


def plain_symbols(mass, mirrored):
    halves = mass / 2
    if mirrored:
        return np.concatenate([halves[::-1], halves])
    return np.concatenate([halves[:0:-1], mass[:1], halves[1:]])


@pytest.mark.parametrize("mirrored", [False, True])
@pytest.mark.parametrize("mass", [[1.0], [0.7, 0.3], [0.9, 0.1, 0.0, 0.0], [0.5, 0.25, 0.125, 0.125], [0.0, 0.0]])
@pytest.mark.parametrize("count", [0, 7, 10**6])
def test_symbols_of_magnitudes(mass, mirrored, count):
    mass = np.array(mass)
    expected = plain_symbols(mass, mirrored)
    probabilities, numbers = np.full(expected.size, np.nan), np.full(symbols.SYMBOL_NUMBERS, np.nan)
    lengths = np.full(expected.size, 99, np.uint8)
    symbols.tell_symbols(mass, mirrored, count, MAX_LENGTH, probabilities, lengths, numbers)
    np.testing.assert_array_equal(probabilities, expected)
    np.testing.assert_array_equal(lengths, plain_escape(expected, count))
    assert numbers[symbols.ENTROPY] == entropy(expected)
    np.testing.assert_allclose(numbers[symbols.CODED], expected @ lengths, rtol=1e-15)
    assert numbers[symbols.SENT] == 8 * len(pack_lengths(lengths, int(lengths[-1])))


def collector(weights, longest):
    """Package-merge with lists of coins: the lengths of the best code of at most ``longest`` bits."""
    coins = sorted((weight, (k,)) for k, weight in enumerate(weights))
    items = coins
    for _ in range(longest - 1):
        pairs = [(a + b, left + right) for (a, left), (b, right) in zip(items[:-1:2], items[1::2], strict=True)]
        items = sorted(coins + pairs, key=lambda item: item[0])
    counts = np.zeros(len(weights), int)
    for _, taken in items[: 2 * len(weights) - 2]:
        np.add.at(counts, list(taken), 1)
    return counts


def limited(weights, longest):
    lengths = np.full(len(weights), 99, np.uint8)
    symbols.limited_lengths(np.array(weights, np.float64), longest, lengths)
    return lengths.astype(int)


KINDS = {
    "geometric": lambda n, ratio, rng: ratio ** -np.arange(n, dtype=float),
    "fibonacci": lambda n, ratio, rng: np.concatenate([[1.0], np.cumprod(np.full(n - 1, (1 + 5**0.5) / 2))]),
    "powers": lambda n, ratio, rng: 2.0 ** -(rng.integers(0, 1000, n)),
    "equal but one": lambda n, ratio, rng: np.where(np.arange(n) == n // 2, 1e30, 1.0),
    "steps": lambda n, ratio, rng: 10.0 ** -(np.arange(n) // max(1, n // 7) * 6),
    "random": lambda n, ratio, rng: rng.random(n) ** 20 + 1e-300,
    "tiny": lambda n, ratio, rng: np.maximum(ratio ** -np.arange(n, dtype=float), 5e-324),
}


@given(
    st.sampled_from(sorted(KINDS)),
    st.one_of(st.integers(2, 64), st.integers(2, 4096)),
    st.floats(1.05, 4.0),
    st.integers(8, 24),
    st.integers(0, 2**32 - 1),
)
@settings(max_examples=120, deadline=None)
def test_limited_codes_are_complete_short_enough_and_end(kind, n, ratio, longest, seed):
    weights = KINDS[kind](min(n, 1400) if kind == "fibonacci" else n, ratio, np.random.default_rng(seed))
    weights = weights[weights > 0]
    longest = max(longest, int(np.ceil(np.log2(max(2, weights.size)))))
    lengths = limited(weights, longest)
    assert lengths.max() <= longest
    assert lengths.min() >= 1
    if weights.size > 1:
        assert np.sum(2.0 ** (longest - lengths)) == 2.0**longest
    order = np.argsort(weights, kind="stable")
    assert (np.diff(lengths[order]) <= 0).all()
    if weights.size <= 300:
        assert weights @ lengths == pytest.approx(weights @ collector(weights, longest), rel=1e-12)


def test_symbols_without_weight_have_no_code():
    assert limited([0, 3, 0, 1, 1], 2).tolist() == [0, 1, 0, 2, 2]
    assert limited([0, 3, 0], 8).tolist() == [0, 1, 0]
    assert limited([0, 0], 8).tolist() == [0, 0]
