import helpers_mcgq as naive
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gtrace.coding.fixed import width_for
from gtrace.coding.sparse import decode_positions, decode_sparse, encode_positions
from gtrace.errors import PayloadError, UsageError

sets = st.tuples(st.one_of(st.integers(0, 70), st.integers(0, 2**40)), st.sets(st.integers(0, 2**40), max_size=40)).map(
    lambda t: (t[0], sorted({p % t[0] for p in t[1]} if t[0] else ()))
)


@given(sets)
@settings(max_examples=300)
def test_round_trip_and_length(case):
    size, positions = case
    data = encode_positions(positions, size)
    assert decode_positions(data, size).tolist() == positions


def drawn(density, size=20_000, seed=0):
    return np.flatnonzero(np.random.default_rng(seed).random(size) < density)


def clustered(size=100_000):
    """Short bursts far apart, where gaps are either 1 or long."""
    starts = np.arange(50, size - 100, 1900)
    return (starts[:, None] + np.arange(12)).reshape(-1)


@pytest.mark.parametrize(
    ("positions", "size", "methods"),
    [
        (drawn(0.01), 20_000, range(16, 64)),
        (drawn(0.7), 20_000, [16]),
        (clustered(), 100_000, [1, 2, 3]),
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
    others += [sum(len(naive.elias(kind, gap)) for gap in gaps) for kind in ("gamma", "delta", "omega")]
    others += [sum(((gap - 1) >> k) + 1 + k for gap in gaps) for k in range(33)]
    assert len(data) - head == -(-min(others) // 8)
    assert (decode_positions(data, size) == positions).all()


def test_all_methods_by_hand():
    # one position, 2 of 8: fixed 010; the gap from before the start is 3
    assert decode_positions(bytes([0, 1, 0b010]), 8).tolist() == [2]
    assert decode_positions(bytes([1, 1]) + naive.low_first(naive.elias("gamma", 3)), 8).tolist() == [2]
    assert decode_positions(bytes([2, 1]) + naive.low_first(naive.elias("delta", 3)), 8).tolist() == [2]
    assert decode_positions(bytes([3, 1]) + naive.low_first(naive.elias("omega", 3)), 8).tolist() == [2]
    assert decode_positions(bytes([16, 1]) + naive.low_first("001"), 8).tolist() == [2]
    assert decode_positions(bytes([17, 1]) + naive.low_first("01" + "0"), 8).tolist() == [2]


def test_long_unary_parts():
    data = bytes([16, 1, 0, 0]) + naive.low_first("0" * 70_000 + "1")
    assert decode_positions(data, 2**17).tolist() == [70_000]
    # 2^64, which an integer of 64 bits would take for 0
    data = bytes([16 + 47, 1, 0, 0]) + naive.low_first("0" * 2**17 + "1" + "0" * 47)
    with pytest.raises(PayloadError, match="leaves the tensor"):
        decode_positions(data, 2**17)


def encode_sparse(positions, values, size):
    return encode_positions(positions, size) + np.asarray(values, "<f4").tobytes()


def test_every_small_tensor_comes_back():
    for values in naive.small_tensors():
        dense = np.array(values, np.float32)
        at = np.flatnonzero(dense)
        data = encode_sparse(at, dense[at], dense.size)
        positions, found = decode_sparse(data, dense.size)
        back = np.zeros(dense.size, np.float32)
        back[positions] = found
        assert tuple(back.tolist()) == values


def test_values_keep_every_bit():
    values = np.array([1e-45, -0.0, 3.4e38], np.float32)
    positions, found = decode_sparse(encode_sparse([0, 7, 99], values, 100), 100)
    assert positions.tolist() == [0, 7, 99]
    assert found.tobytes() == values.tobytes()


@given(st.binary(max_size=40), st.integers(0, 300))
@settings(max_examples=400)
def test_any_bytes_are_refused_or_give_ascending_positions(data, size):
    for decode in (decode_positions, lambda d, n: decode_sparse(d, n)[0]):
        try:
            found = decode(data, size)
        except PayloadError:
            continue
        assert (np.diff(found) > 0).all()
        assert found.size == 0 or (found[0] >= 0 and found[-1] < size)


@pytest.mark.parametrize("positions", [drawn(0.05, 400), drawn(0.6, 400), np.array([7, 9, 300]), clustered()])
def test_damage(positions):
    rng = np.random.default_rng(4)
    size = int(positions[-1]) + 1
    data = encode_sparse(positions, np.ones(positions.size), size)
    for bad in naive.damaged(data, rng, 500):
        try:
            found, values = decode_sparse(bad, size)
        except PayloadError:
            continue
        assert (np.diff(found) > 0).all()
        assert found.size == values.size
        assert found.size == 0 or found[-1] < size


@pytest.mark.parametrize(
    ("data", "size", "words"),
    [
        (b"", 8, "shorter"),
        (bytes([4, 0]), 8, "method"),
        (bytes([64, 0]), 8, "method"),
        (bytes([0, 9]), 8, "9 of them in a tensor of 8"),
        (bytes([0, 2, 0b011_011]), 8, "not ascending"),
        (bytes([0, 1, 0b110]), 6, "not ascending, beyond"),
        (bytes([0, 1, 0b1010]), 8, "too long"),
        (bytes([1, 1]) + naive.low_first(naive.elias("gamma", 9)), 8, "beyond the tensor"),
        (bytes([1, 2]) + naive.low_first(naive.elias("gamma", 2**62) * 2), 8, "beyond the tensor"),
        (bytes([16, 1]) + naive.low_first("0" * 8 + "1"), 8, "leaves the tensor"),
        (bytes([16, 1, 0]), 8, "ends early"),
        (bytes([16, 1, 1, 0]), 8, "too long"),
        (bytes([16, 1, 3]), 8, "too long"),
        (bytes([63, 1, 1, 0]), 8, "ends early"),
        (bytes([16, 8]), 8, "cannot hold"),
    ],
)
def test_what_no_encoder_writes_is_refused(data, size, words):
    with pytest.raises(PayloadError, match=words):
        decode_positions(data, size)


def test_values_that_are_missing_or_not_finite():
    data = encode_sparse([1, 2], [1.0, 2.0], 8)
    with pytest.raises(PayloadError, match="cannot hold 2 values"):
        decode_sparse(data[:9], 8)
    with pytest.raises(PayloadError, match="not finite"):
        decode_sparse(encode_sparse([1, 2], [1.0, np.inf], 8), 8)


def test_an_untrusted_count_takes_no_memory():
    size = 2**40
    head = (2**39).to_bytes(6, "little")
    with naive.memory_below(1 << 20):
        for method in (0, 1, 2, 3, 16, 50):
            with pytest.raises(PayloadError):
                decode_positions(bytes([method]) + head + b"abc", size)
            with pytest.raises(PayloadError, match="cannot hold"):
                decode_sparse(bytes([method]) + head + b"abc", size)


@pytest.mark.parametrize("bad", [[2, 1], [1, 1], [-1], [8], [0.5]])
def test_what_cannot_be_coded(bad):
    with pytest.raises(UsageError, match="positions"):
        encode_positions(bad, 8)


def test_sizes_that_no_tensor_has():
    for size in (-1, 2**49):
        with pytest.raises(UsageError, match="elements"):
            encode_positions([], size)
        with pytest.raises(UsageError, match="elements"):
            decode_positions(b"ab", size)
