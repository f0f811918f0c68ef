import helpers_mcgq as naive
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gtrace.coding.elias import ELIAS, REACH, EliasCode
from gtrace.errors import PayloadError, UsageError

kinds = st.sampled_from(ELIAS)
integers = st.one_of(st.integers(-9, 9), st.integers(-(2**20), 2**20), st.integers(1 - REACH, REACH - 1))


@pytest.mark.parametrize(
    ("kind", "textbook"),
    [
        ("gamma", ["1", "010", "011", "00100", "00101"]),
        ("delta", ["1", "0100", "0101", "01100", "01101"]),
        ("omega", ["0", "100", "110", "101000", "101010"]),
    ],
)
def test_lengths_of_the_textbook_codes(kind, textbook):
    code = EliasCode(kind, origin=1, signed=False)
    assert [code.bits([z]) for z in range(1, 6)] == [len(t) for t in textbook]
    # Up to 3 a group has one bit below its leading one, so that its order does not show.
    assert [naive.elias(kind, z) for z in (1, 2, 3)] == textbook[:3]


@pytest.mark.parametrize("kind", ELIAS)
def test_every_code_is_what_the_twin_writes(kind):
    code = EliasCode(kind, origin=1, signed=False)
    for z in [*range(1, 4200), 2**31, 2**32 - 1, 2**32, 2**53 + 1, 2**62]:
        text = naive.elias(kind, z)
        assert code.bits([z]) == len(text)
        assert code.encode([z]) == naive.low_first(text)


@given(kinds, st.lists(integers, max_size=40))
@settings(max_examples=300)
def test_round_trip_and_length(kind, values):
    code = EliasCode(kind)
    text = "".join(naive.elias(kind, naive.zigzag(v)) for v in values)
    data = code.encode(np.array(values, np.int64))
    assert data == naive.low_first(text)
    assert code.bits(values) == len(text)
    assert code.decode(data, len(values)).tolist() == values


@pytest.mark.parametrize("kind", ELIAS)
def test_long_streams_cross_words(kind):
    rng = np.random.default_rng(0)
    values = np.rint(rng.standard_t(2, 5000) * 2.0 ** rng.integers(0, 50, 5000)).astype(np.int64)
    code = EliasCode(kind)
    data = code.encode(values)
    assert len(data) == -(-code.bits(values) // 8)
    assert (code.decode(data, values.size) == values).all()


@pytest.mark.parametrize("kind", ELIAS)
def test_every_small_tensor_comes_back(kind):
    for code in (EliasCode(kind), EliasCode(kind, origin=-2, signed=False)):
        for values in naive.small_tensors():
            data = code.encode(values)
            assert len(data) == -(-code.bits(values) // 8)
            assert tuple(code.decode(data, len(values)).tolist()) == values


@pytest.mark.parametrize("kind", ELIAS)
def test_symbols_of_an_alphabet(kind):
    code = EliasCode(kind, origin=3, symbols=7)
    symbols = np.array([3, 3, 0, 6, 2, 4], np.uint16)
    data = code.encode(symbols)
    assert data == EliasCode(kind).encode(symbols.astype(np.int64) - 3)
    back = code.decode(data, 6)
    assert back.dtype == np.uint16
    assert (back == symbols).all()
    for outside in (-4, 4):
        with pytest.raises(PayloadError, match="no encoder writes"):
            code.decode(EliasCode(kind).encode([outside]), 1)
    with pytest.raises(UsageError, match="7 symbols"):
        code.encode([7])


@pytest.mark.parametrize("kind", ELIAS)
@pytest.mark.parametrize("origin", [0, 7])
def test_expected_length_is_the_mean_of_sampled_ones(kind, origin):
    rng = np.random.default_rng(1)
    probabilities = rng.dirichlet(np.full(15, 0.5))
    code = EliasCode(kind, origin=origin, symbols=15)
    draws = rng.choice(15, (400, 100), p=probabilities).astype(np.uint16)
    lengths = np.array([code.bits(row) for row in draws]) / 100
    assert abs(lengths.mean() - code.expected_bits(probabilities)) < 4 * lengths.std() / 20
    each = [code.bits([k]) for k in range(15)]
    assert code.expected_bits(probabilities) == pytest.approx(float(probabilities @ each), rel=1e-12)


def test_a_symbol_without_a_code_costs_infinitely_much():
    code = EliasCode("gamma", origin=1, signed=False)
    assert code.expected_bits([0.1, 0.9]) == np.inf
    assert code.expected_bits([0.0, 0.5, 0.5]) == 2.0
    assert code.expected_bits([]) == 0.0


@given(kinds, st.binary(max_size=60), st.integers(0, 500))
@settings(max_examples=400)
def test_any_bytes_are_refused_or_are_the_code_of_what_they_decode_to(kind, data, count):
    code = EliasCode(kind)
    try:
        values = code.decode(data, count)
    except PayloadError:
        return
    assert values.size == count
    assert code.encode(values) == data


@pytest.mark.parametrize("kind", ELIAS)
def test_codes_longer_than_any_that_is_written(kind):
    zeros = EliasCode(kind)
    for data in (bytes(40), b"\xff" * 40, bytes(7) + b"\x80" + bytes(20), naive.low_first(naive.elias(kind, 2**63))):
        with pytest.raises(PayloadError):
            zeros.decode(data, 1)
    # a group of 101 bits, more than an integer has
    data = naive.low_first(naive.elias("omega", 100)[:-1] + "1" + "0" * 101)
    with pytest.raises(PayloadError):
        EliasCode("omega").decode(data, 1)


def test_an_untrusted_count_takes_no_memory():
    with naive.memory_below(1 << 20), pytest.raises(PayloadError, match="cannot hold"):
        EliasCode("gamma").decode(b"abc", 10**15)


def test_what_cannot_be_coded():
    with pytest.raises(UsageError, match="unknown"):
        EliasCode("epsilon")
    with pytest.raises(UsageError, match="alphabet"):
        EliasCode("gamma", symbols=0)
    with pytest.raises(UsageError, match="origin"):
        EliasCode("gamma", origin=REACH)
    with pytest.raises(UsageError, match="float64"):
        EliasCode("gamma").encode([1.5])
    with pytest.raises(UsageError, match="must be"):
        EliasCode("gamma").encode([REACH])
    with pytest.raises(UsageError, match="must be"):
        EliasCode("gamma", signed=False).encode([-1])
    with pytest.raises(UsageError, match="beyond"):
        EliasCode("gamma").encode(np.array([2**63], np.uint64))
