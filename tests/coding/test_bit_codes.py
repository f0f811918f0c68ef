"""Codes of integers, runs, positions and pruned values against plain twins, and bytes that no encoder writes."""

import struct
from functools import partial

import helpers_mcgq as naive
import numpy as np
import pytest
from helpers_codecs import encode_sparse
from hypothesis import given, settings
from hypothesis import strategies as st

from gtrace.codecs.mcgq import decode_counts, encode_counts
from gtrace.coding.elias import ELIAS, REACH, EliasCode
from gtrace.coding.fixed import width_for
from gtrace.coding.sparse import PrefixCode, decode_positions, decode_sparse, encode_positions
from gtrace.errors import PayloadError, UsageError

ALPHA = 0.25


def prefix_text(values):
    text = ""
    for v in values:
        word = f"{np.float32(v).view(np.uint32):032b}"[::-1]
        text += "0" if v == 0 else f"10{int(v < 0)}" if abs(v) == ALPHA else "11" + word
    return text


def elias_text(kind):
    return lambda values: "".join(naive.elias(kind, naive.zigzag(v)) for v in values)


INTEGERS = st.integers(-9, 9) | st.integers(-(2**20), 2**20) | st.integers(1 - REACH, REACH - 1)
FLOATS = st.sampled_from([0.0, -0.0, ALPHA, -ALPHA]) | st.floats(width=32, allow_nan=False)
#: code, its values and their type, and the twin
CODES = {
    **{kind: (EliasCode(kind), INTEGERS, np.int64, elias_text(kind)) for kind in ELIAS},
    "prefix": (PrefixCode(ALPHA), FLOATS, np.float32, prefix_text),
}


@pytest.mark.parametrize("name", CODES)
@settings(max_examples=100)
@given(st.data())
def test_streams_are_what_the_twin_writes(name, data):
    code, each, dtype, twin = CODES[name]
    values = data.draw(st.lists(each, max_size=60))
    x, text = np.array(values, dtype), twin(values)
    assert code.bits(x) == len(text)
    assert code.encode(x) == naive.low_first(text)
    back = code.decode(code.encode(x), x.size)
    assert back.dtype == x.dtype
    assert (back == x).all()


@pytest.mark.parametrize("name", CODES)
@settings(max_examples=150)
@given(st.binary(max_size=60), st.integers(0, 500))
def test_any_bytes_are_refused_or_are_the_code_of_what_they_decode_to(name, data, count):
    code = CODES[name][0]
    try:
        values = code.decode(data, count)
    except PayloadError:
        return
    assert values.size == count
    assert code.encode(values) == data


def test_untrusted_counts_take_no_memory():
    with naive.memory_below(1 << 20):
        for code, *_ in CODES.values():
            with pytest.raises(PayloadError, match="cannot hold"):
                code.decode(b"abc", 10**15)
        for method in (0, 1, 2, 3, 16, 50):
            data = bytes([method]) + (2**39).to_bytes(6, "little") + b"abc"
            with pytest.raises(PayloadError):
                decode_positions(data, 2**40)
            with pytest.raises(PayloadError, match="cannot hold"):
                decode_sparse(data, 2**40)


# Elias


@pytest.mark.parametrize(
    ("kind", "textbook"),
    [
        ("gamma", ["1", "010", "011", "00100", "00101"]),
        ("delta", ["1", "0100", "0101", "01100", "01101"]),
        ("omega", ["0", "100", "110", "101000", "101010"]),
    ],
)
def test_elias_codes_are_the_textbooks_and_the_twins(kind, textbook):
    code = EliasCode(kind, origin=1, signed=False)
    assert [code.bits([z]) for z in range(1, 6)] == [len(t) for t in textbook]
    # Up to 3 a group has one bit below its leading one, so that its order does not show.
    assert [naive.elias(kind, z) for z in (1, 2, 3)] == textbook[:3]
    for z in [*range(1, 4200), 2**31, 2**32 - 1, 2**32, 2**53 + 1, 2**62]:
        assert code.encode([z]) == naive.low_first(naive.elias(kind, z))


# runs


# positions


@given(
    st.tuples(st.integers(0, 70) | st.integers(0, 2**40), st.sets(st.integers(0, 2**40), max_size=40)).map(
        lambda t: (t[0], sorted({p % t[0] for p in t[1]} if t[0] else ()))
    )
)
@settings(max_examples=300)
def test_positions_come_back(case):
    size, positions = case
    assert decode_positions(encode_positions(positions, size), size).tolist() == positions


def drawn(density, size=20_000, seed=0):
    return np.flatnonzero(np.random.default_rng(seed).random(size) < density)


#: short bursts far apart, where gaps are either 1 or long
CLUSTERED = (np.arange(50, 99_900, 1900)[:, None] + np.arange(12)).reshape(-1)


@pytest.mark.parametrize(
    ("positions", "size", "methods"),
    [
        (drawn(0.01), 20_000, range(16, 64)),
        (drawn(0.7), 20_000, [16]),
        (CLUSTERED, 100_000, [1, 2, 3]),
        (np.array([2**31]), 2**32, [0]),
        (np.empty(0, np.int64), 10, [0]),
    ],
)
def test_the_shortest_method_is_taken(positions, size, methods):
    data = encode_positions(positions, size)
    assert data[0] in methods
    head = 1 + max(1, -(-size.bit_length() // 8))
    assert int.from_bytes(data[1:head], "little") == positions.size
    gaps = np.diff(positions, prepend=-1).tolist()
    others = [positions.size * width_for(size)]
    others += [sum(len(naive.elias(kind, gap)) for gap in gaps) for kind in ELIAS]
    others += [sum(((gap - 1) >> k) + 1 + k for gap in gaps) for k in range(33)]
    assert len(data) - head == -(-min(others) // 8)
    assert (decode_positions(data, size) == positions).all()


def test_all_methods_by_hand():
    # One position, 2 of 8: fixed 010; the gap from before the start is 3.
    gaps = [naive.low_first(text) for text in (*(naive.elias(kind, 3) for kind in ELIAS), "001", "010")]
    for method, code in zip((0, 1, 2, 3, 16, 17), (bytes([0b010]), *gaps), strict=True):
        assert decode_positions(bytes([method, 1]) + code, 8).tolist() == [2]
    values = np.array([1e-45, -0.0, 3.4e38], np.float32)
    assert decode_sparse(encode_sparse([0, 7, 99], values, 100), 100)[1].tobytes() == values.tobytes()


@given(st.binary(max_size=40), st.integers(0, 300))
@settings(max_examples=400)
def test_any_bytes_are_refused_or_give_ascending_positions(data, size):
    for decode in (decode_sparse, lambda d, n: (decode_positions(d, n),) * 2):
        try:
            found, values = decode(data, size)
        except PayloadError:
            continue
        assert (np.diff(found) > 0).all()
        assert found.size == values.size
        assert found.size == 0 or (found[0] >= 0 and found[-1] < size)


# refusals


def runs(value_bits, run_bits, text=""):
    return struct.pack(">II", value_bits, run_bits) + naive.high_first(text)


GOOD = PrefixCode(ALPHA).encode(np.array([0, ALPHA, -ALPHA, 7, 0, 0.1], np.float32))
# A group of 101 bits, more than an integer has.
ENDLESS = naive.low_first(naive.elias("omega", 100)[:-1] + "1" + "0" * 101)
FULL = naive.low_first("11" + f"{np.float32(ALPHA).view(np.uint32):032b}"[::-1])
SPARSE = encode_sparse([1, 2], [1.0, 2.0], 8)


@pytest.mark.parametrize(
    ("decode", "data", "count", "words"),
    [
        *(("positions", data, 8, words) for data, words in (
            (b"", "shorter"),
            (bytes([4, 0]), "method"),
            (bytes([0, 9]), "9 of them in a tensor of 8"),
            (bytes([0, 2, 0b011_011]), "not ascending"),
            (bytes([0, 1, 0b1010]), "too long"),
            (bytes([1, 2]) + naive.low_first(naive.elias("gamma", 2**62) * 2), "beyond the tensor"),
            (bytes([16, 1]) + naive.low_first("0" * 8 + "1"), "leaves the tensor"),
            (bytes([16, 1, 0]), "ends early"),
            (bytes([16, 1, 1, 0]), "too long"),
            (bytes([16, 8]), "cannot hold"),
        )),
        *((kind, data, 1, "no encoder writes") for kind in ELIAS for data in (
            bytes(40), b"\xff" * 40, bytes(7) + b"\x80" + bytes(20), naive.low_first(naive.elias(kind, 2**63)), ENDLESS
        )),
        ("positions", bytes([0, 1, 0b110]), 6, "not ascending, beyond"),
        # 2^64, which an integer of 64 bits would take for 0
        ("positions", bytes([63, 1, 0, 0]) + naive.low_first("0" * 2**17 + "1" + "0" * 47), 2**17, "leaves the tensor"),
        ("sparse", SPARSE[:9], 8, "cannot hold 2 values"),
        ("sparse", encode_sparse([1, 2], [1.0, np.inf], 8), 8, "not finite"),
        *(("prefix", data, 6, "ends early") for data in (GOOD[:-1], GOOD + b"\0", GOOD[:-1] + b"\x80")),
        ("prefix", b"", 6, "cannot hold"),
        # the threshold, written in full
        ("prefix", FULL, 1, "no encoder writes"),
        ("runs", b"\0\0\0\1\0\0\0", 0, "shorter than"),
        *(("runs", runs(*widths), 0, "asks for") for widths in ((0, 1), (65, 1), (2, 65))),
        ("runs", runs(2, 2, "00" + "00" + "01"), 1, "no zeros"),
        ("runs", runs(2, 2, "00" + "11" + "01"), 3, "beyond the last|goes on"),
        ("runs", runs(2, 2, "00" + "01" + "00" + "01" + "01"), 3, "two runs"),
        ("runs", runs(2, 2, "01" + "10"), 2, "lowest code"),
        ("runs", runs(2, 1, "01" + "1"), 1, "goes on"),
        ("runs", runs(3, 9, "000" + "00001"), 1, "ends early"),
        ("runs", runs(64, 64, "0" * 64 + "1" * 64), 5, "beyond the last"),
    ],
)  # fmt: skip
def test_what_no_encoder_writes_is_refused(decode, data, count, words):
    decoders = {name: code.decode for name, (code, *_) in CODES.items()}
    decoders |= {"positions": decode_positions, "sparse": decode_sparse}
    decoders["runs"] = partial(decode_counts, with_norm=False)
    with pytest.raises(PayloadError, match=words):
        decoders[decode](data, count)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: EliasCode("gamma", origin=REACH), "origin"),
        (lambda: EliasCode("gamma", symbols=7).encode([7]), "7 symbols"),
        (lambda: EliasCode("gamma").encode([1.5]), "float64"),
        (lambda: EliasCode("gamma", signed=False).encode([-1]), "must be"),
        (lambda: EliasCode("gamma").encode(np.array([2**63], np.uint64)), "beyond"),
        (lambda: encode_counts(np.array([5, -(2**63)])), "2\\^63"),
        *((lambda bad=bad: encode_positions(bad, 8), "positions") for bad in ([2, 1], [1, 1], [-1], [8], [0.5])),
        *((lambda a=a: PrefixCode(a), "alpha") for a in (-1.0, float("nan"), 1e-60, 1e60)),
    ],
)
def test_what_cannot_be_coded(make, words):
    with pytest.raises(UsageError, match=words):
        make()
