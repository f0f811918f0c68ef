import math

import naive
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gtrace.codecs.lengths import complete_lengths, pack_lengths, unpack_lengths
from gtrace.coding import (
    ENVELOPE_BYTES,
    MAX_LENGTH,
    HuffmanCode,
    entropy,
    huffman_code,
    huffman_lengths,
    open_envelope,
    pack_fixed,
    seal,
    unpack_fixed,
)
from gtrace.errors import PayloadError, UsageError

weights = st.lists(st.floats(0, 1) | st.just(0.0), min_size=1, max_size=60).filter(any)


@given(weights)
@settings(max_examples=200)
def test_huffman_is_optimal_and_a_prefix_code(values):
    w = np.array(values)
    lengths = huffman_lengths(w)
    assert ((lengths > 0) == (w > 0)).all()
    assert sum(2.0 ** -int(n) for n in lengths if n) <= 1
    if np.count_nonzero(w) > 1 and w[w > 0].min() > 2.0**-20:
        assert math.isclose(float(w @ lengths), naive.huffman_cost(values), rel_tol=1e-9)


def test_huffman_mean_lies_within_a_bit_of_the_entropy():
    p = np.random.default_rng(0).dirichlet(np.full(31, 0.3))
    assert entropy(p) <= p @ huffman_lengths(p) < entropy(p) + 1


def test_lengths_stay_within_the_limit():
    fibonacci = [1.0, 1.0]
    while len(fibonacci) < 60:
        fibonacci.append(fibonacci[-1] + fibonacci[-2])
    lengths = huffman_lengths(np.array(fibonacci))
    assert lengths.max() <= MAX_LENGTH
    assert sum(2.0 ** -int(n) for n in lengths) <= 1


@given(weights, st.integers(0, 300), st.integers(0, 2**32 - 1))
@settings(max_examples=100)
def test_huffman_round_trip(values, count, seed):
    w = np.array(values)
    code = HuffmanCode(huffman_lengths(w))
    symbols = np.random.default_rng(seed).choice(np.flatnonzero(w), count).astype(np.uint16)
    data = code.encode(symbols)
    assert len(data) == -(-code.bits(symbols) // 8)
    assert (code.decode(data, count) == symbols).all()


def test_long_codes_take_the_walk():
    lengths = np.array([*range(1, 20), 19], np.uint8)
    code = HuffmanCode(lengths)
    symbols = np.tile(np.arange(20, dtype=np.uint16), 3)
    assert (code.decode(code.encode(symbols), symbols.size) == symbols).all()


def test_canonical_codes_by_hand():
    code = HuffmanCode(np.array([2, 1, 3, 3], np.uint8))
    # canonical: 1 -> 0, 0 -> 10, 2 -> 110, 3 -> 111; first bit first, from the low end of each byte
    assert code.encode(np.array([1, 0, 2, 3], np.uint16)) == bytes([0b11011010, 0b1])


@given(weights, st.binary(max_size=40), st.integers(0, 400))
@settings(max_examples=200)
def test_huffman_decoder_survives_any_bytes(values, data, count):
    code = HuffmanCode(huffman_lengths(np.array(values)))
    try:
        symbols = code.decode(data, count)
    except PayloadError:
        return
    assert symbols.size == count
    assert code.encode(symbols) == data


def test_an_untrusted_count_takes_no_memory():
    code = HuffmanCode(np.array([1, 1], np.uint8))
    with pytest.raises(PayloadError, match="cannot hold"):
        code.decode(b"abc", 10**15)
    with pytest.raises(PayloadError, match="expected"):
        unpack_fixed(b"abc", 10**15, 3, 7)


def test_bad_lengths_are_refused():
    with pytest.raises(UsageError, match="no prefix code"):
        HuffmanCode(np.array([1, 1, 1], np.uint8))
    with pytest.raises(UsageError, match="no code"):
        HuffmanCode(np.array([1, 0, 1], np.uint8)).encode(np.array([1], np.uint16))


@given(st.lists(st.integers(0, 9), max_size=50))
def test_fixed_width_round_trip(values):
    symbols = np.array(values, np.uint16)
    assert (unpack_fixed(pack_fixed(symbols, 4), symbols.size, 4, 10) == symbols).all()


def test_fixed_width_refuses_what_no_encoder_writes():
    with pytest.raises(PayloadError, match="outside"):
        unpack_fixed(bytes([0x0F]), 1, 4, 10)
    with pytest.raises(PayloadError, match="padding"):
        unpack_fixed(bytes([0x91]), 1, 4, 10)


def test_envelope_round_trip_and_refusals():
    sealed = seal(b"body", codec="qsgd", size=7, shared=b"s", flags=3)
    assert len(sealed) == ENVELOPE_BYTES + 4
    body, flags = open_envelope(sealed, codec="qsgd", size=7, shared=b"s")
    assert (bytes(body), flags) == (b"body", 3)
    for kwargs, words in [
        ({"codec": "natural"}, "another codec"),
        ({"size": 8}, "7 elements where 8"),
        ({"shared": b"t"}, "other shared"),
    ]:
        with pytest.raises(PayloadError, match=words):
            open_envelope(sealed, **{"codec": "qsgd", "size": 7, "shared": b"s", **kwargs})
    with pytest.raises(PayloadError, match="GTP1"):
        open_envelope(b"X" + sealed[1:], codec="qsgd", size=7, shared=b"s")
    with pytest.raises(PayloadError, match="checksum"):
        open_envelope(sealed[:-1] + b"z", codec="qsgd", size=7, shared=b"s")
    with pytest.raises(PayloadError, match="shorter than its envelope"):
        open_envelope(sealed[:10], codec="qsgd", size=7, shared=b"s")


@given(weights)
def test_code_lengths_travel(values):
    lengths = huffman_lengths(np.array(values))
    assert (unpack_lengths(pack_lengths(lengths), lengths.size) == lengths).all()


def test_a_code_of_another_number_of_symbols_is_refused_before_it_is_built():
    before = huffman_code.cache_info()
    for symbols in (14, 16):
        with pytest.raises(PayloadError, match="another number of symbols"):
            unpack_lengths(pack_lengths(np.full(15, 4, np.uint8)), symbols)
    assert huffman_code.cache_info() == before


@given(st.binary(max_size=30))
def test_any_bytes_as_code_lengths(data):
    try:
        lengths = unpack_lengths(data, int.from_bytes(data[:2], "little"))
    except PayloadError:
        return
    assert sum(2.0 ** -int(n) for n in lengths if n) <= 1
    HuffmanCode(lengths)


def test_unseen_symbols_get_a_code_only_where_it_is_cheap():
    common = np.array([0.0, 0.2, 0.3, 0.2, 0.15, 0.1, 0.05])
    assert complete_lengths(common, 1000)[0] == 0, "a code for it would lengthen the mean by 2 per cent"
    skewed = np.array([0.0, 0.9, 0.05, 0.03, 0.015, 0.004, 0.001])
    assert (complete_lengths(skewed, 10**6) > 0).all()
    binary = np.array([0.0, 0.5, 0.5])
    assert complete_lengths(binary, 10**6).tolist() == [0, 1, 1]
