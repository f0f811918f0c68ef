import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gtrace.coding.sparse import PrefixCode
from gtrace.errors import PayloadError, UsageError


def naive(values, alpha):
    """The stream as a list of bits, first bit first."""
    out = []
    for v in values:
        if v == 0:
            out += [0]
        elif abs(v) == alpha:
            out += [1, 0, int(v < 0)]
        else:
            word = struct.unpack("<I", struct.pack("<f", v))[0]
            out += [1, 1] + [(word >> k) & 1 for k in range(32)]
    return out


def as_bytes(bits):
    bits = bits + [0] * (-len(bits) % 8)
    return bytes(sum(bits[p + k] << k for k in range(8)) for p in range(0, len(bits), 8))


@given(st.lists(st.sampled_from([0.0, -0.0, 0.25, -0.25]) | st.floats(width=32, allow_nan=False), max_size=80))
def test_against_the_twin(values):
    x = np.array(values, np.float32)
    code = PrefixCode(0.25)
    bits = naive(x, np.float32(0.25))
    assert code.bits(x) == len(bits)
    assert code.encode(x) == as_bytes(bits)
    back = code.decode(code.encode(x), x.size)
    assert (back == x).all()
    assert back.dtype == np.float32


def test_long_runs_of_full_values():
    x = np.random.default_rng(0).standard_normal(5000).astype(np.float32)
    x[::3] = 0
    code = PrefixCode(2.0)
    assert (code.decode(code.encode(x), x.size) == x).all()


@given(st.binary(max_size=60), st.integers(0, 300))
def test_any_bytes_are_refused_or_decoded(data, count):
    code = PrefixCode(1.5)
    try:
        values = code.decode(data, count)
    except PayloadError:
        return
    assert values.size == count
    assert code.encode(values) == data


def test_truncated_oversized_and_flipped():
    x = np.array([0, 1.5, -1.5, 7, 0, 0.1], np.float32)
    code = PrefixCode(1.5)
    data = code.encode(x)
    for bad in (data[:-1], data + b"\0", b"", data[:-1] + bytes([data[-1] | 0x80])):
        with pytest.raises(PayloadError):
            code.decode(bad, x.size)
    with pytest.raises(PayloadError, match="cannot hold"):
        code.decode(data, 10**15)


def test_a_threshold_written_in_full_is_no_code():
    word = struct.unpack("<I", struct.pack("<f", 1.5))[0]
    with pytest.raises(PayloadError):
        PrefixCode(1.5).decode(as_bytes([1, 1] + [(word >> k) & 1 for k in range(32)]), 1)


def test_expected_bits_are_the_mean():
    rng = np.random.default_rng(1)
    x = rng.choice(np.array([0, 0.5, -0.5, 3], np.float32), 10_000, p=[0.8, 0.1, 0.05, 0.05])
    found = PrefixCode(0.5).bits(x) / x.size
    wanted = PrefixCode.expected_bits(float(np.mean(x == 0)), float(np.mean(np.abs(x) == 0.5)))
    assert found == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("alpha", [0.0, -1.0, float("nan"), float("inf"), 1e-60, 1e60])
def test_alpha_is_checked(alpha):
    with pytest.raises(UsageError, match="alpha"):
        PrefixCode(alpha)
