"""THC: ranges, the table, and sums of integers; its exchange is tested with the other ways of averaging."""

import numpy as np
import pytest

import gtrace
from gtrace.coding import ENVELOPE_BYTES


def drawn(spec, x, draws):
    c = gtrace.codec(spec)
    return c, [c.simulate(c.init(x.size), x, (k, 3 * k)) for k in range(draws)]


def shrinkage(found, x):
    """The mean relative squared error of some draws, and by how much their mean is too small."""
    values, energy = np.array([one.values for one in found], np.float64), float(np.sum(x.astype(np.float64) ** 2))
    return np.mean(np.sum((values - x) ** 2, axis=1)) / energy, 1 - values.mean(axis=0) @ x / energy


@pytest.mark.parametrize("spec", ["thc:bits=1", "thc", "thc:bits=6,outside=0.001", "thc:bits=3,granularity=7"])
def test_error_and_bits_of_long_tensors_are_known(spec):
    x = np.random.default_rng(1).standard_t(3, 1 << 15).astype(np.float32)
    c, found = drawn(spec, x, 12)
    expected, (error, shrunk) = c.expected_on_normal(x.size), shrinkage(found, x)
    assert error == pytest.approx(expected.squared_error, rel=0.06)
    assert shrunk == pytest.approx(expected.bias, rel=0.15, abs=0.003)
    assert 8 * (found[0].payload_bytes - ENVELOPE_BYTES) / x.size == expected.bits_payload == expected.bits_fixed
    assert found[0].coded.entropy == pytest.approx(expected.bits_entropy, abs=0.01)
    assert found[0].coded.huffman == pytest.approx(expected.bits_huffman, abs=0.02)


@pytest.mark.parametrize("size", [1, 5, 63, 64, 100, 1025])
def test_ranges_hold_what_is_left_over_at_the_end(size):
    """A spike in the last piece: its own range is the largest, and nothing of the spike is cut."""
    x = np.random.default_rng(size).normal(size=size).astype(np.float32)
    x[-1] = 1000
    _, found = drawn("thc:bits=8,block=64", x, 8)
    assert np.mean([one.values[-1] for one in found]) == pytest.approx(1000, rel=0.01)
