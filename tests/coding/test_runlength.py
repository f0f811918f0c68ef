import struct

import helpers_mcgq as naive
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gtrace.codecs.mcgq import decode_counts, encode_counts, payload_bits
from gtrace.errors import PayloadError, UsageError


def decode(data, count):
    return decode_counts(data, count, with_norm=False)[0]


def payload(value_bits, run_bits, text=""):
    return struct.pack(">II", value_bits, run_bits) + naive.high_first(text)


@pytest.mark.parametrize("density", [0.0, 0.001, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("size", [1023, 1024, 1025, 5000])
def test_runs_across_blocks(density, size):
    rng = np.random.default_rng(0)
    q = rng.integers(1, 2**20, size) * rng.choice([-1, 1], size) * (rng.random(size) < density)
    data = encode_counts(q)
    assert data == naive.high_first(naive.runlength_bits(q.tolist()))
    assert (decode(data, size) == q).all()


def test_a_long_run_and_wide_values_do_not_fit_one_word():
    q = np.zeros(300_000, np.int64)
    q[[0, -1]] = 2**62, -(2**62)
    assert (decode(encode_counts(q), q.size) == q).all()


@pytest.mark.parametrize(
    ("data", "count", "words"),
    [
        (b"\0\0\0\1\0\0\0", 0, "shorter than"),
        (payload(0, 1), 0, "asks for"),
        (payload(65, 1), 0, "asks for"),
        (payload(2, 65), 0, "asks for"),
        (payload(2, 2, "00" + "00" + "01"), 1, "no zeros"),
        (payload(2, 0, "00" + "01"), 2, "no zeros"),
        (payload(2, 2, "00" + "11" + "01"), 3, "beyond the last|goes on"),
        (payload(2, 2, "01" + "00" + "11"), 3, "beyond the last"),
        (payload(2, 2, "00" + "01" + "00" + "01" + "01"), 3, "two runs"),
        (payload(2, 2, "01" + "10"), 2, "lowest code"),
        (payload(1, 1, "1"), 1, "lowest code"),
        (payload(2, 1, "01" + "1"), 1, "goes on"),
        (payload(2, 1, "01") + b"\0", 1, "goes on"),
        (payload(2, 1), 1, "ends early"),
        (payload(9, 1, "01111111"), 1, "ends early"),
        (payload(3, 9, "000" + "00001"), 1, "ends early"),
        (payload(9, 1, "011111111"), 2, "ends early|no zeros"),
        (payload(3, 2, "001" * 2), 3, "ends early|no zeros"),
        (payload(64, 64, "0" * 64 + "1" * 64), 5, "beyond the last"),
    ],
)
def test_what_no_encoder_writes_is_refused(data, count, words):
    with pytest.raises(PayloadError, match=words):
        decode(data, count)


@given(st.binary(max_size=30), st.integers(1, 12), st.integers(0, 12), st.integers(0, 400))
@settings(max_examples=400)
def test_any_bytes_decode_to_that_many_values_or_are_refused(data, value_bits, run_bits, count):
    try:
        q = decode(struct.pack(">II", value_bits, run_bits) + data, count)
    except PayloadError:
        return
    assert q.shape == (count,)
    assert q.dtype == np.int64
    # Only the widths may be larger than they need be.
    assert payload_bits(q) <= 64 + 8 * len(data)


def test_many_zeros_in_few_bytes():
    q = np.zeros(10**6, np.int64)
    data = encode_counts(q)
    assert len(data) == 11
    assert (decode(data, q.size) == q).all()


def test_what_cannot_be_coded():
    with pytest.raises(UsageError, match="float64"):
        encode_counts([0.5])
    with pytest.raises(UsageError, match="2\\^63"):
        encode_counts(np.array([5, -(2**63)], np.int64))
