"""MQGrad's quantizer against its twin and the golden numbers; codecs whose bits change."""

import json
from pathlib import Path

import naive
import numpy as np
import pytest
from helpers_codecs import body, fitted_once, once
from hypothesis import given
from hypothesis import strategies as st

import gtrace
from gtrace.codecs import codec_names
from gtrace.testing import fitted

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "mqgrad.json").read_text())
floats = st.floats(width=32, allow_nan=False, allow_infinity=False)


@pytest.mark.parametrize("entry", GOLDEN["quantise"], ids=lambda entry: f"{entry['K']} bits")
def test_golden_codes_with_both_ends_on_a_code(entry):
    c, wanted = gtrace.codec("minmax", bits=entry["K"]), entry["endpoint"]
    assert body(c, entry["g"]) == np.float32([-1, 1]).tobytes() + naive.pack(wanted["codes"], entry["K"])
    assert once(c, entry["g"]) == pytest.approx(wanted["dequant"], rel=1e-6)
    assert c.whole_tensor
    for constant in (0.0, -2.5, 1e-40):
        assert np.array_equal(once(c, [constant] * 9), np.full(9, constant, np.float32))


@given(st.lists(floats, min_size=1, max_size=60), st.integers(1, 16))
def test_codes_and_values_are_the_twins(values, bits):
    c, (codes, wanted) = gtrace.codec("minmax", bits=bits), naive.minmax(np.float32(values), bits)
    assert body(c, values)[8:] == naive.pack(codes, bits)
    assert once(c, values).tolist() == np.float32(wanted).tolist()


WITH_BITS = [name for name in codec_names() if "bits" in gtrace.codec(name).parameters]


@pytest.mark.parametrize(
    "spec", ["mcgq:accumulate=true", *(f"{prefix}{name}" for prefix in ("", "ef:", "ef:rotate:") for name in WITH_BITS)]
)
def test_bits_can_change_and_what_arrives_gets_closer(spec):
    x = np.random.default_rng(0).normal(size=4096).astype(np.float32)
    c = gtrace.codec(spec, bits=3)
    more = c.at_bits(6)
    assert more == gtrace.codec(spec, bits=6)
    state = c.update(c.init(x.size), x, once(c, x, fitted(c, x)[0]))
    renewed = more.renewed(state)
    assert renewed.arrays.keys() == more.init(x.size).arrays.keys()
    if c.stateful:
        memory = "residual" if spec.startswith("ef:") else "accumulated"
        assert np.array_equal(renewed.arrays[memory], state.arrays[memory])
        assert renewed.arrays[memory].any()
    else:
        assert np.linalg.norm(fitted_once(more, x) - x) < np.linalg.norm(fitted_once(c, x) - x)
