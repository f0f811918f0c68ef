"""Sixteen-bit formats, 8-bit integers and MQGrad's quantizer, exhaustively where the format is small; other bits."""

import json
from fractions import Fraction
from pathlib import Path

import naive
import numpy as np
import pytest
from helpers_codecs import body, once
from hypothesis import given
from hypothesis import strategies as st

import gtrace
from gtrace.codecs.casts import Bf16, Fp16
from gtrace.codecs.tables import Int8

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "mqgrad.json").read_text())
LARGEST = {"fp16": 65504.0, "bf16": float(np.array(0x7F7F0000, np.uint32).view(np.float32))}


@pytest.mark.parametrize("c", [Fp16(), Bf16()], ids=str)
@pytest.mark.parametrize("sign", [1, -1])
def test_every_number_comes_back_and_between_two_the_nearest_wins_ties_to_even(c, sign):
    # All finite numbers that are not negative, ascending, with -0 left out.
    bits = np.arange({"fp16": 0x7C00, "bf16": 0x7F80}[c.name], dtype=np.uint16)
    grid = c.parts.grid.values(bits, np.empty(0, np.float32), bits.size, bits.size)
    assert (np.diff(grid.astype(np.float64)) > 0).all()
    assert grid[-1] == LARGEST[c.name]
    assert np.array_equal(once(c, sign * grid).view(np.uint32), (sign * grid).view(np.uint32))
    # What is too large stays finite.
    assert once(c, [sign * np.finfo(np.float32).max]) == sign * LARGEST[c.name]
    low, high = grid[:-1], grid[1:]
    middle = (low.astype(np.float64) + high) / 2
    half = middle.astype(np.float32)
    exact = half == middle
    assert exact.sum() > 0.9 * exact.size
    even = np.where(np.arange(low.size) % 2 == 0, low, high)
    assert np.array_equal(once(c, sign * half[exact]), sign * even[exact])
    for near, wanted in ((np.nextafter(half, np.float32(0)), low), (np.nextafter(half, np.float32(np.inf)), high)):
        kept = (near > low) & (near < high) & exact
        assert np.array_equal(once(c, sign * near[kept]), sign * wanted[kept])


@pytest.mark.parametrize("block", [None, 1, 7, 64])
def test_int8_rounds_to_the_nearest_of_255_codes(block):
    x = np.random.default_rng(1).standard_t(3, 500).astype(np.float32)
    x[64:128] = 0
    got, size = once(Int8(block_size=block), x), block or x.size
    for start in range(0, x.size, size):
        values, decoded = x[start : start + size], got[start : start + size]
        scale = Fraction(float(np.abs(values).max()))
        for v, d in zip(values, decoded, strict=True):
            ratio = Fraction(float(v)) * 127 / scale if scale else Fraction(0)
            wanted = round(ratio) * scale / 127
            assert abs(Fraction(float(d)) - wanted) <= scale * Fraction(1, 2**22), (float(v), float(scale))
    assert len(body(Int8(block_size=block, coder="fixed"), x)) == 500 + 4 * -(-500 // size)
    # The largest stays, and ties go to even.
    assert once(Int8(), [127.0, 0.5, 1.5, -2.5, -127.0]).tolist() == [127, 0, 2, -2, -127]
    huge = np.finfo(np.float32).max
    assert once(Int8(), [huge, -huge, 0]).tolist() == [huge, -huge, 0]


@pytest.mark.parametrize("entry", GOLDEN["quantise"], ids=lambda entry: f"{entry['K']} bits")
def test_golden_codes_with_both_ends_on_a_code(entry):
    c, wanted = gtrace.codec("minmax", bits=entry["K"]), entry["endpoint"]
    assert body(c, entry["g"]) == np.float32([-1, 1]).tobytes() + naive.pack(wanted["codes"], entry["K"])
    assert once(c, entry["g"]) == pytest.approx(wanted["dequant"], rel=1e-6)
    assert c.whole_tensor
    for constant in (0.0, -2.5, 1e-40):
        assert np.array_equal(once(c, [constant] * 9), np.full(9, constant, np.float32))


@given(
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=60), st.integers(1, 16)
)
def test_codes_and_values_are_the_twins(values, bits):
    c, (codes, wanted) = gtrace.codec("minmax", bits=bits, coder="fixed"), naive.minmax(np.float32(values), bits)
    assert body(c, values)[8:] == naive.pack(codes, bits)
    assert once(c, values).tolist() == np.float32(wanted).tolist()
