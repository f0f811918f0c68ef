"""Huffman codes, fixed width, blocks that bring their code, floats, and the envelope."""

import math

import naive
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gtrace.coding import ENVELOPE_BYTES, MAX_LENGTH, HuffmanCode, huffman_lengths, open_envelope, seal
from gtrace.coding.fixed import pack_fixed, unpack_fixed, width_for
from gtrace.coding.huffman import (
    CodedBlock,
    Floats,
    decode_block,
    decode_floats,
    pack_lengths,
    tally,
    unpack_lengths,
)
from gtrace.errors import PayloadError
from gtrace.kernels.symbols import packed_bits

weights = st.lists(st.floats(0, 1) | st.just(0.0), min_size=1, max_size=60).filter(any)


@given(weights, st.integers(0, 300), st.integers(0, 2**32 - 1))
@settings(max_examples=200)
def test_huffman_is_an_optimal_prefix_code(values, count, seed):
    w = np.array(values)
    lengths = huffman_lengths(w)
    assert ((lengths > 0) == (w > 0)).all()
    assert sum(2.0 ** -int(n) for n in lengths if n) <= 1
    if np.count_nonzero(w) > 1 and w[w > 0].min() > 2.0**-20:
        assert math.isclose(float(w @ lengths), naive.huffman_cost(values), rel_tol=1e-9)
    code, symbols = HuffmanCode(lengths), np.random.default_rng(seed).choice(np.flatnonzero(w), count).astype(np.uint16)
    data = code.encode(symbols)
    assert len(data) == -(-code.bits(symbols) // 8)
    assert (code.decode(data, count) == symbols).all()


def test_canonical_codes_by_hand_and_long_ones():
    code = HuffmanCode(np.array([2, 1, 3, 3], np.uint8))
    # canonical: 1 -> 0, 0 -> 10, 2 -> 110, 3 -> 111; first bit first, from the low end of each byte
    assert code.encode(np.array([1, 0, 2, 3], np.uint16)) == bytes([0b11011010, 0b1])
    code, symbols = HuffmanCode(np.array([*range(1, 20), 19], np.uint8)), np.tile(np.arange(20, dtype=np.uint16), 3)
    assert (code.decode(code.encode(symbols), symbols.size) == symbols).all()


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


WIDE = pack_lengths(np.array([0, 3, 3, 0], np.uint8), 0)
FLOATS = np.random.default_rng(0).normal(0, 1e-3, 1000).astype(np.float32)
CODED = Floats(FLOATS).encode()


@pytest.mark.parametrize(
    ("decode", "data", "words"),
    [
        (lambda data: HuffmanCode(np.array([1, 1], np.uint8)).decode(data, 10**15), b"abc", "cannot hold"),
        (lambda data: unpack_fixed(data, 10**15, 3, 7), b"abc", "expected"),
        (lambda data: unpack_fixed(data, 1, 4, 10), bytes([0x0F]), "outside"),
        (lambda data: unpack_fixed(data, 1, 4, 10), bytes([0x91]), "padding"),
        *((lambda data: unpack_lengths(data, 4), data, words) for data, words in (
            (WIDE[:5], "too short"),
            (WIDE[:-1], "expected"),
            (WIDE[:2] + bytes([1, 0, 9, 0]) + WIDE[6:], "beyond"),
            (pack_lengths(np.array([1, 1, 1, 1], np.uint8), 1), "do not form a prefix code"),
            (pack_lengths(np.array([25, 1, 0, 0], np.uint8), 0), "24 bits"),
            # first symbol 0, whose length is that outside the span
            (WIDE[:2] + bytes([0, 0, 2, 0]) + pack_fixed(np.array([0, 0, 3, 3], np.uint16), 5), "longer span"),
            # refused before a code is built
            (pack_lengths(np.full(15, 4, np.uint8), 4), "another number of symbols"),
        )),
        *((lambda data: decode_floats(data, 1000, coded=True), data, None) for data in (
            CODED[:-1], CODED + b"\0", CODED[:100], b""
        )),
        (lambda data: decode_floats(data, 10**15, coded=True), CODED, "cannot hold"),
        (lambda data: decode_floats(data, 10**15, coded=False), CODED, "expected"),
        (lambda data: decode_floats(data, 1000, coded=True), Floats(FLOATS * np.inf).encode(), "not finite"),
    ],
)  # fmt: skip
def test_what_no_encoder_writes_is_refused(decode, data, words):
    with pytest.raises(PayloadError, match=words):
        decode(data)


ABOUT = {"codec": "qsgd", "size": 7, "shared": b"s"}
SEALED = seal(b"body", **ABOUT, flags=3)
MANY = {"codec": "signsgd", "size": 2**31, "shared": b""}
BARE = seal(b"", codec="signsgd", size=0, shared=b"")


def test_a_short_body_of_many_elements_is_padded():
    assert len(SEALED) == ENVELOPE_BYTES + 4
    body, flags = open_envelope(SEALED, **ABOUT)
    assert (bytes(body), flags) == (b"body", 3)
    for body in (b"", b"abc", b"\0" * 2019):
        sealed = seal(body, **MANY, flags=1)
        assert 2**31 / 2**20 <= len(sealed) <= 2**31 / 2**20 + 4
        opened, flags = open_envelope(sealed, **MANY)
        assert (bytes(opened), flags) == (body, 1)
    assert len(seal(bytes(2024), **MANY)) == 2048


@pytest.mark.parametrize(
    ("payload", "about", "words"),
    [
        (SEALED, {**ABOUT, "codec": "natural"}, "another codec"),
        (SEALED, {**ABOUT, "size": 8}, "7 elements where 8"),
        (SEALED, {**ABOUT, "shared": b"t"}, "other shared"),
        (b"X" + SEALED[1:], ABOUT, "GTP1"),
        (SEALED[:-1] + b"z", ABOUT, "checksum"),
        (SEALED[:10], ABOUT, "shorter than its envelope"),
        (BARE[:8] + (2**31).to_bytes(8, "little") + BARE[16:], MANY, "24 bytes cannot hold 2147483648 elements"),
        (seal(b"x" + bytes(2040) + (2045).to_bytes(4, "little"), **MANY, flags=1 << 15), MANY, "padding that no"),
        (seal(bytes(2044) + (2**20).to_bytes(4, "little"), **MANY, flags=1 << 15), MANY, "padding that no"),
    ],
)
def test_foreign_and_damaged_envelopes_are_refused(payload, about, words):
    with pytest.raises(PayloadError, match=words):
        open_envelope(payload, **about)


@given(weights, st.integers(0, MAX_LENGTH))
def test_code_lengths_travel(values, outside):
    lengths = huffman_lengths(np.array(values))
    data = pack_lengths(lengths, 0)
    assert 8 * len(data) == packed_bits(lengths, 0)
    found, size = unpack_lengths(data + b"more", lengths.size)
    assert (found == lengths).all()
    assert size == len(data)
    # Symbols outside the span may share any length that leaves a prefix code.
    if sum(2.0 ** -int(n or outside) for n in lengths if n or outside) <= 1:
        filled = np.where(lengths, lengths, outside).astype(np.uint8)
        assert (unpack_lengths(pack_lengths(filled, outside), lengths.size)[0] == filled).all()


@given(st.binary(max_size=30))
def test_any_bytes_as_code_lengths(data):
    try:
        lengths, size = unpack_lengths(data, int.from_bytes(data[:2], "little") + 1)
    except PayloadError:
        return
    assert sum(2.0 ** -int(n) for n in lengths if n) <= 1
    assert data[:size] in {pack_lengths(lengths, outside) for outside in {int(lengths[0]), int(lengths[-1]), 0}}
    HuffmanCode(lengths)


@given(weights, st.integers(0, 3000), st.integers(0, 2**32 - 1), st.sampled_from(["huffman", "fixed"]))
@settings(max_examples=100)
def test_blocks_bring_their_code(values, count, seed, coder):
    w = np.array(values)
    symbols = np.random.default_rng(seed).choice(w.size, count, p=w / w.sum()).astype(np.uint16)
    tallies = tally(symbols, w.size)
    assert (tallies == np.bincount(symbols, minlength=w.size)).all()
    block = CodedBlock.of(tallies, coder=coder)
    data, coded = block.encode(symbols), block.lengths is not None
    assert len(data) == block.size == -(-int(block.bits) // 8)
    assert block.bits <= block.fixed == count * width_for(w.size)
    assert block.entropy <= block.huffman + 1e-9 * count
    assert not coded or coder == "huffman"
    assert (decode_block(data, count, w.size, coded=coded) == symbols).all()
    for bad in {data[:-1], data + b"\0"} - {data}:
        with pytest.raises(PayloadError):
            decode_block(bad, count, w.size, coded=coded)


def test_a_block_of_few_symbols_stays_at_fixed_width_and_one_of_many_does_not():
    assert CodedBlock.of(np.zeros(7, np.int64)).size == 0
    # The smallest and the largest alphabets.
    for alphabet, count, coded in ((1, 9, False), (2, 500_000, False), (65_536, 10, False), (65_536, 500_000, True)):
        symbols = np.minimum(np.arange(count) ** 2 % 977, alphabet - 1).astype(np.uint16)
        symbols[-1] = alphabet - 1
        block = CodedBlock.of(tally(symbols, alphabet))
        assert coded == (block.lengths is not None)
        assert (decode_block(block.encode(symbols), symbols.size, alphabet, coded=coded) == symbols).all()


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=20), st.integers(0, 40))
def test_floats_keep_every_bit(values, times):
    x = np.tile(np.array(values, np.float32), times)
    for coder in ("huffman", "fixed"):
        found = Floats(x, coder=coder)
        data = found.encode()
        assert len(data) <= 4 * x.size
        assert 8 * len(data) - 8 * (found.raw // 8 + 2) <= found.block.bits
        assert decode_floats(data, x.size, coded=found.coded).tobytes() == x.tobytes()
    assert not found.coded
    assert 8 * len(CODED) / FLOATS.size < 27.5, "of like magnitude"
