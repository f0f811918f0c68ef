"""MQGrad's quantizer against its twin and the golden numbers; codecs whose bits change."""

import json
from pathlib import Path

import naive
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gtrace
from gtrace.codecs import codec_class, codec_names
from gtrace.coding import ENVELOPE_BYTES
from gtrace.errors import UsageError

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "mqgrad.json").read_text())
KEY = (1, 2)
floats = st.floats(width=32, allow_nan=False, allow_infinity=False)


def sent(values, bits):
    """Body of the payload, and what it decodes to."""
    x = np.asarray(values, np.float32)
    codec = gtrace.codec("minmax", bits=bits)
    payload = codec.encode(codec.init(x.size), x, KEY)
    return payload[ENVELOPE_BYTES:], codec.decode(b"", payload, x.size)


@pytest.mark.parametrize("entry", GOLDEN["quantise"], ids=lambda entry: f"{entry['K']} bits")
def test_golden_codes_with_both_ends_on_a_code(entry):
    body, decoded = sent(entry["g"], entry["K"])
    wanted = entry["endpoint"]
    assert body == np.float32([-1, 1]).tobytes() + naive.pack(wanted["codes"], entry["K"])
    assert decoded == pytest.approx(wanted["dequant"], rel=1e-6)


@given(st.lists(floats, min_size=1, max_size=60), st.integers(1, 16))
def test_codes_and_values_are_the_twins(values, bits):
    body, decoded = sent(values, bits)
    codes, wanted = naive.minmax(np.float32(values), bits)
    assert body[8:] == naive.pack(codes, bits)
    assert decoded.tolist() == np.float32(wanted).tolist()


@pytest.mark.parametrize("bits", [2, 5, 8])
def test_no_value_moves_by_more_than_half_a_step(bits):
    x = np.random.default_rng(bits).standard_t(3, 10_000).astype(np.float32)
    decoded = sent(x, bits)[1].astype(np.float64)
    step = (float(x.max()) - float(x.min())) / (2**bits - 1)
    assert np.abs(decoded - x).max() <= step / 2 * (1 + 1e-6)
    assert len(np.unique(decoded)) <= 2**bits
    assert {decoded.min(), decoded.max()} == {x.min(), x.max()}


@pytest.mark.parametrize("value", [0.0, -2.5, 1e-40])
def test_a_constant_tensor_decodes_to_itself(value):
    x = np.full(9, value, np.float32)
    assert np.array_equal(sent(x, 3)[1], x)


@pytest.mark.parametrize("name", [name for name in codec_names() if "bits" in gtrace.codec(name).parameters])
def test_bits_can_change_and_what_arrives_gets_closer(name):
    x = np.random.default_rng(0).normal(size=4096).astype(np.float32)
    errors = []
    for prefix in ("", "ef:", "ef:rotate:"):
        codec = gtrace.codec(f"{prefix}{name}", bits=3)
        start = codec.init(x.size)
        state = codec.update(start, x, through(codec, start, x))
        more = codec.at_bits(6)
        assert str(more) == str(gtrace.codec(f"{prefix}{name}", bits=6))
        renewed = more.renewed(state)
        assert renewed.arrays.keys() == more.init(x.size).arrays.keys()
        if prefix:
            assert np.array_equal(renewed.arrays["residual"], state.arrays["residual"])
            assert renewed.arrays["residual"].any()
        else:
            errors = [np.linalg.norm(through(c, c.init(x.size), x) - x) for c in (codec, more)]
    assert errors[1] < errors[0]


def through(codec, state, x):
    if codec.needs is not None:
        state = codec.fit(state, gtrace.MomentSketch.from_spec(codec.view(state, x), codec.needs), 0)
    return codec.decode(codec.shared(state), codec.encode(state, x, KEY), x.size)


def test_accumulated_gradients_survive_a_change_of_bits():
    codec = gtrace.codec("mcgq:bits=3,accumulate=true")
    x = np.random.default_rng(1).normal(size=500).astype(np.float32)
    state = codec.update(codec.init(500), x, through(codec, codec.init(500), x))
    kept = codec.at_bits(5).renewed(state).arrays["accumulated"]
    assert kept.any()
    assert np.array_equal(kept, state.arrays["accumulated"])


@pytest.mark.parametrize("spec", ["terngrad", "ef:topk", "none", "fp:e4m3"])
def test_codecs_without_a_choice_of_bits_say_so(spec):
    with pytest.raises(UsageError, match="bits"):
        gtrace.codec(spec).at_bits(5)


def test_the_range_hangs_on_the_whole_tensor():
    assert codec_class("minmax")().whole_tensor
