"""Symbols and codes of level sets against plain numpy."""

import numpy as np
import pytest

import gtrace
from gtrace.codecs.lengths import pack_lengths
from gtrace.codecs.level_sets import LevelSets
from gtrace.coding import MAX_LENGTH, entropy, huffman_lengths
from gtrace.kernels import symbols
from gtrace.sketch import MomentSketch


def plain_complete(probabilities, count):
    tight = huffman_lengths(probabilities)
    full = huffman_lengths(np.maximum(probabilities, 0.25 / max(1, count)))
    return full if probabilities @ full <= 1.01 * (probabilities @ tight) else tight


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
    tight, kept = np.full((2, expected.size), 99, np.uint8)
    symbols.tell_symbols(mass, mirrored, count, MAX_LENGTH, probabilities, tight, kept, numbers)
    np.testing.assert_array_equal(probabilities, expected)
    np.testing.assert_array_equal(tight, huffman_lengths(expected))
    np.testing.assert_array_equal(kept, plain_complete(expected, count))
    assert numbers[symbols.ENTROPY] == entropy(expected)
    np.testing.assert_allclose(numbers[symbols.TIGHT], expected @ tight, rtol=1e-15)
    np.testing.assert_allclose(numbers[symbols.COMPLETE], expected @ kept, rtol=1e-15)
    assert numbers[symbols.SENT] == 8 * len(pack_lengths(kept))


def test_a_symbol_without_a_code_costs_infinitely_much():
    lengths, probabilities = np.array([1, 2, 0, 1], np.uint8), np.array([0.5, 0.5, 0.0, 0.0])
    assert symbols.mean_length(lengths, probabilities) == 1.5
    assert symbols.mean_length(lengths, probabilities[::-1].copy()) == np.inf
    out = np.empty(2)
    symbols.mean_lengths(lengths, probabilities, np.array([0, 1, 4]), out)
    assert out.tolist() == [0.5, 1.0]


@pytest.mark.parametrize("longest", [5, 12])
def test_long_codes_are_shortened(longest):
    weights = 2.0 ** -np.arange(20.0)
    lengths = np.empty(weights.size, np.uint8)
    symbols.limited_lengths(weights[-longest:] / weights.sum(), longest, lengths[-longest:])
    assert lengths[-longest:].max() == longest - 1
    weights = weights[: 2 ** (longest - 1)]
    symbols.limited_lengths(weights, longest, lengths[: weights.size])
    used = lengths[: weights.size].astype(int)
    assert used.max() <= longest
    assert (2.0**-used).sum() == 1
    assert (np.diff(used) >= 0).all()


@pytest.mark.parametrize("values", [[], [0.0, 0.0], [1.0], np.random.default_rng(0).standard_t(4, 5000)])
def test_many_sets_at_once(values):
    codecs = [gtrace.codec(f"qsgd:bits={bits},zero={zero}") for bits in (2, 3, 7) for zero in (True, False)]
    codecs.append(gtrace.codec("nuqsgd:bits=8,p=0.01"))
    sketch = MomentSketch.of(values, "l2", 8192)
    sets = LevelSets(codecs)
    judged = sets.judge(sketch)
    codes = sets.fit(judged, len(values))
    expected = sets.expect(judged, codes)
    start = 0
    for k, item in enumerate(codecs):
        levels = item.levels(item.init(0))
        error, plain, bound, mass = sketch.expect(levels, zero=item.has_zero)
        numbers = judged.numbers[k]
        assert (expected.squared_error[k], numbers[symbols.PLAIN], expected.error_bound[k]) == (error, plain, bound)
        assert numbers[symbols.LOWEST] == mass[0]
        probabilities = plain_symbols(mass, not item.has_zero)
        stop = start + probabilities.size
        np.testing.assert_array_equal(judged.probabilities[start:stop], probabilities)
        state = item.fit(item.init(len(values)), sketch, 0)
        assert codes.adopted[k] == ("lengths" in state.arrays)
        assert codes.sent[k] == len(item.shared(state))
        if codes.adopted[k]:
            np.testing.assert_array_equal(codes.lengths[start:stop], state.arrays["lengths"])
        start = stop
    assert not sets.differ(codes, codes).any()
    other = sets.fit(sets.judge(MomentSketch.of(np.linspace(-1, 1, 5000), "l2", 8192)), 5000)
    assert sets.differ(codes, other)[4:6].all()
