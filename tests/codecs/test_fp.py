"""The fp codec: choices, payload, closed forms against what encoding does, block formats against gfloat."""

import struct

import gfloat
import ml_dtypes
import numpy as np
import pytest
from gfloat import BlockFormatInfo, compute_scale_amax, quantize_block
from gfloat.formats import (
    format_info_ocp_e2m1,
    format_info_ocp_e2m3,
    format_info_ocp_e3m2,
    format_info_ocp_e4m3,
    format_info_ocp_e5m2,
    format_info_ocp_e8m0,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import gtrace
from gtrace.codecs.fp import FloatFormat, optimal_format, scale_exponent
from gtrace.coding import ENVELOPE_BYTES
from gtrace.errors import UsageError
from gtrace.fitting.floats import candidates, expected_rounding
from gtrace.kernels.floats import rounding_error
from gtrace.sweep import expand
from gtrace.testing import fitted, tensors
from gtrace.types import Key, State

KEY = (11, 12)


def lognormal(n=20_000, mu=-18.0, sigma=3.0, seed=0):
    rng = np.random.default_rng(seed)
    x = (rng.choice([-1, 1], n) * 2.0 ** rng.normal(mu, sigma, n)).astype(np.float32)
    x[::17] = 0
    return x


def sent(spec, x, key=KEY):
    c = gtrace.codec(spec)
    state, _ = fitted(c, x)
    return c.decode(c.shared(state), c.encode(state, x, key), x.size)


# specs


@pytest.mark.parametrize(
    ("given_", "canonical", "bits"),
    [
        ("fp", "fp:bits=8", 8),
        ("fp:bits=5", "fp:bits=5", 5),
        ("fp:scale=best", "fp:bits=8", 8),
        ("fp:bits=5,scale=max,law=normal", "fp:bits=5,law=normal,scale=max", 5),
        ("fp:e3m2", "fp:e3m2", 6),
        ("fp:format=e3m2,bits=6", "fp:e3m2", 6),
        ("fp:1-3-2", "fp:e3m2", 6),
        ("fp:e3m2,scale=mean,rounding=stochastic", "fp:e3m2,scale=mean,rounding=stochastic", 6),
        ("fp:e4m3fn", "fp:e4m3fn", 8),
        ("fp:mxfp4", "fp:mxfp4", 4),
        ("fp:mxfp4,block=32,scale=floor", "fp:mxfp4", 4),
        ("fp:nvfp4", "fp:nvfp4", 4),
        ("fp:e2m1,scale=e4m3", "fp:e2m1,scale=e4m3,block=16", 4),
        ("fp:bits=6,block=32", "fp:bits=6,block=32", 6),
        ("fp:e5m2,exponent=14", "fp:e5m2,exponent=14", 8),
    ],
)
def test_specs(given_, canonical, bits):
    c = gtrace.codec(given_)
    assert str(c) == canonical
    assert c.parameters["bits"] == bits
    assert gtrace.codec(canonical) == c


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("fp:e9m9", "exponents have 1 to 7 bits"),
        ("fp:e3m2,bits=5", "bits=5 contradicts e3m2"),
        ("fp:mxfp4,block=16", "block=16 contradicts mxfp4"),
        ("fp:block=8,scale=max", "with block=8 choose"),
        ("fp:block=8,scale=best", "with block=8 choose"),
        ("fp:law=normal", "scale=best follows no law"),
        ("fp:block=8,exponent=3", "give one of them"),
        ("fp:e3m2,e2m1", "format is given twice"),
        ("fp:nvfp5", "write eXmY"),
        ("fp:bits=17", "out of range"),
        ("qsgd:e3m2", "not key=value"),
    ],
)
def test_specs_that_contradict_themselves(spec, message):
    with pytest.raises(UsageError, match=message):
        gtrace.codec(spec)


def test_expand_names_formats_of_the_asked_bits():
    found = [str(c) for c in expand("fp:all,scale=error,fp,fp:e3m2,fp:mxfp4", {"bits": [4, 5]})]
    assert found == [
        *(f"fp:{word},scale=error" for word in ("e2m1", "e3m0", "e2m2", "e3m1", "e4m0")),
        "fp:bits=4",
        "fp:bits=5",
        "fp:e3m2",
        "fp:mxfp4",
    ]
    assert next(str(c) for c in expand("ef:fp:all")) == "ef:fp:e2m5"
    assert [str(c) for c in expand("fp:all,bits=3")] == ["fp:e2m0"]
    assert "fp:bits=2" in [str(c) for c in expand("all", {"bits": [2]})]


# choices


def lost(x, form, k):
    """The squared error of rounding to nearest at a scale, from the values."""
    off = form.round(x * np.float32(2.0**k)).astype(np.float64) * 2.0**-k - x
    return float(off @ off)


def shapes():
    """Tensors of many laws: what a lognormal law fits, what it does not, spikes, outliers, a few values, ties."""
    rng = np.random.default_rng(9)
    yield "lognormal", lognormal(4000)
    yield "normal", rng.normal(size=4000) * 1e-3
    yield "uniform", rng.uniform(-0.9, 0.9, 4000)
    yield "student", rng.standard_t(2, 4000) * 1e-6
    yield "mixture", np.where(rng.random(4000) < 0.01, rng.normal(size=4000), 1e-4 * rng.normal(size=4000))
    # The best scale gives up a few large values; every scale between is worse than both ends.
    yield "two spikes", np.r_[np.full(4_000, 1.0), np.full(1, 50.0)]
    yield "outlier", np.r_[1e-3 * rng.normal(size=999), 7.0]
    yield "three", np.array([0.3, -0.01, 5e-5])
    yield "one", np.array([-3e-7])
    yield "ties", rng.integers(-40, 41, 4000) / 8
    yield "denormal", rng.normal(size=500) * 1e-43
    yield "huge", rng.normal(size=500) * 1e38


@pytest.mark.parametrize("name", [name for name, _ in shapes()])
@pytest.mark.parametrize("word", ["e2m1", "e4m3", "e5m2", "e3m0", "bits=3", "bits=4", "bits=6", "bits=8"])
def test_the_default_scale_and_format_are_the_best_of_all(word, name):
    x = np.float32(dict(shapes())[name])
    c = gtrace.codec(f"fp:{word}")
    state, sketch = fitted(c, x)
    forms = candidates(c.bits) if c.format == "auto" else [FloatFormat.parse(word)]
    # Products by powers of two up to 2^127 are exact but for denormals, which other cases take.
    powers = range(-60, 110) if name not in ("denormal", "huge") else range(0)
    least = min((lost(x, form, k) for form in forms for k in powers), default=np.inf)
    found = c.expect(state, sketch).squared_error
    assert found <= least * (1 + 1e-9) + 1e-12 * sketch.energy * 2.0**-52
    assert found == pytest.approx(float(np.sum((sent(str(c), x).astype(np.float64) - x) ** 2)), rel=1e-9, abs=1e-300)


MAGNITUDES = st.tuples(
    st.sampled_from(["lognormal", "normal", "uniform", "student", "spikes"]),
    st.floats(-35, 30),
    st.floats(0.0, 8.0),
    st.integers(1, 300),
    st.integers(0, 2**32 - 1),
)


def drawn(law, mu, sigma, count, seed):
    rng = np.random.default_rng(seed)
    spread = {
        "lognormal": lambda: 2.0 ** (sigma * rng.normal(size=count)) * rng.choice([-1, 1], count),
        "normal": lambda: rng.normal(size=count),
        "uniform": lambda: rng.uniform(-1, 1, count),
        "student": lambda: rng.standard_t(1.5, count),
        "spikes": lambda: 2.0 ** rng.integers(-int(2 * sigma) - 1, 1, count),
    }[law]()
    return 2.0**mu * spread


@settings(max_examples=250, deadline=None)
@given(
    st.lists(MAGNITUDES, min_size=1, max_size=3),
    st.sampled_from(["e2m1", "e4m3", "e5m2", "e3m0", "e1m6", "e4m9", *(f"bits={n}" for n in range(2, 17))]),
    st.sampled_from(["nearest", "stochastic"]),
)
def test_the_default_never_loses_to_absmax(parts, word, rounding):
    x = np.clip(np.concatenate([drawn(*part) for part in parts]), -3e38, 3e38).astype(np.float32)
    error = {}
    for scale in ("best", "absmax"):
        c = gtrace.codec(f"fp:{word},scale={scale},rounding={rounding}")
        state, sketch = fitted(c, x)
        error[scale] = c.expect(state, sketch).squared_error
    assert error["best"] <= error["absmax"] * (1 + 1e-12)


@settings(max_examples=60, deadline=None)
@given(MAGNITUDES, st.sampled_from(["e4m3", "e5m2", "e3m4", "e2m5", "e6m1"]))
def test_eight_bits_are_never_worse_than_a_format_of_eight_bits(part, word):
    x = np.clip(drawn(*part), -3e38, 3e38).astype(np.float32)
    error = {}
    for spec in ("fp:bits=8", f"fp:{word}"):
        c = gtrace.codec(spec)
        state, sketch = fitted(c, x)
        error[spec] = c.expect(state, sketch).squared_error
    assert error["fp:bits=8"] <= error[f"fp:{word}"]


@pytest.mark.parametrize("scale", ["max", "mean", "error"])
@pytest.mark.parametrize("sigma", [1.0, 2.5, 5.0])
def test_fit_chooses_the_format_that_is_best_under_its_own_scale(scale, sigma):
    c = gtrace.codec("fp", bits=7, scale=scale)
    x = lognormal(sigma=sigma)
    state, sketch = fitted(c, x)
    count, mu, spread = sketch.log2_moments()
    assert abs(spread - sigma) < 0.1
    errors = {}
    for e in range(2, 7):
        form = FloatFormat(e, 6 - e)
        k = scale_exponent(form, scale, mu, spread, count)
        errors[e] = form.expected_relative_error(mu + k, spread)
    chosen = c.format_of(state)
    assert chosen.exponent == min(errors, key=errors.get)
    assert c.scale_of(state) == scale_exponent(chosen, scale, mu, spread, count)
    # The law promises what the data then show.
    off = np.abs(sent(str(c), x)[x != 0].astype(np.float64) / x[x != 0] - 1)
    assert abs(off.mean() - errors[chosen.exponent]) < 5 * off.std() / np.sqrt(off.size) + 0.02 * off.mean()


def test_absmax_puts_the_largest_value_below_the_largest_number():
    # Uniform magnitudes end where a lognormal law of their moments goes on.
    x = np.random.default_rng(5).uniform(-0.9, 0.9, 20_000).astype(np.float32)
    for bits in (4, 6, 8):
        found = {}
        for rule in ("max", "absmax"):
            c = gtrace.codec("fp", bits=bits, scale=rule)
            state, sketch = fitted(c, x)
            found[rule] = c.expect(state, sketch)
            k, form = c.scale_of(state), c.format_of(state)
        assert form.max / 2 < np.abs(x).max() * 2.0**k <= form.max
        assert found["absmax"].saturated == 0
        assert found["absmax"].squared_error < found["max"].squared_error


def test_formats_under_a_normal_law_a_fixed_scale_and_blocks():
    x = lognormal(sigma=4.0)
    widths = {}
    lawful = ("fp:bits=6,scale=max", "fp:bits=6,scale=max,law=normal")
    for spec in (*lawful, "fp:bits=6,exponent=18", "fp:bits=6,block=32"):
        c = gtrace.codec(spec)
        state, sketch = fitted(c, x)
        widths[spec] = c.format_of(state).exponent
    _, _, sigma = sketch.log2_moments()
    assert widths[lawful[1]] < widths[lawful[0]]
    assert widths["fp:bits=6,block=32"] == optimal_format(6, sigma, "max", count=32).exponent
    fixed = {e: lost(x, FloatFormat(e, 5 - e), 18) for e in range(2, 6)}
    assert widths["fp:bits=6,exponent=18"] == min(fixed, key=fixed.get)


def test_zeros_keep_what_was_fitted_and_a_state_survives_as_arrays():
    c = gtrace.codec("fp:bits=6")
    x = lognormal(500)
    state, _ = fitted(c, x)
    zeros = gtrace.MomentSketch.from_spec(np.zeros(500, np.float32), c.needs)
    assert c.fit(state, zeros, 1) is state
    again = State.from_arrays({k: v.tolist() for k, v in state.to_arrays().items()})
    assert c.encode(again, x, KEY) == c.encode(state, x, KEY)


def test_one_element_is_scaled_by_its_own_logarithm():
    c = gtrace.codec("fp:e3m2,scale=max")
    state, _ = fitted(c, np.array([-3e-7], np.float32))
    assert c.scale_of(state) == int(np.floor(np.log2(28) - np.log2(3e-7)))


# payload


@pytest.mark.parametrize("bits", [3, 4, 5, 6, 7, 8])
def test_a_payload_is_a_scale_and_n_bits_a_value(bits):
    c, x = gtrace.codec("fp", bits=bits, coder="fixed"), lognormal(1001)
    state, sketch = fitted(c, x)
    payload = c.encode(state, x, KEY)
    assert len(payload) == ENVELOPE_BYTES + 4 + -(-1001 * bits // 8)
    (scale,) = struct.unpack_from("<f", payload, ENVELOPE_BYTES)
    assert scale == 2.0 ** -c.scale_of(state)
    form = c.format_of(state)
    expected = form.round(x * np.float32(2.0 ** c.scale_of(state))) * np.float32(scale)
    decoded = c.decode(c.shared(state), payload, x.size)
    assert np.array_equal(decoded, expected)
    assert np.array_equal(np.signbit(decoded), np.signbit(x))
    assert c.expect(state, sketch).bits_payload == bits + 32 / 1001


def test_extreme_values_lose_nothing_to_the_scale():
    tiny, huge = np.float32(1e-45), np.finfo(np.float32).max
    for x in (np.array([tiny, 3 * tiny, -7 * tiny], np.float32), np.array([huge, -huge / 2, huge / 3], np.float32)):
        for spec in ("fp:e5m2", "fp:e2m5", "fp:e7m0", "fp:e1m6", "fp:mxfp8", "fp:nvfp4", "fp:e2m1,scale=rceil"):
            assert np.isfinite(sent(spec, x)).all()
        # Exact where the format has the digits: the scale costs none, whatever float32 thinks of denormals.
        assert np.all(np.abs(sent("fp:e4m9", x).astype(np.float64) / x - 1) <= 2.0**-10)
    c = gtrace.codec("fp:e4m9,exponent=140")
    x = np.array([tiny, 5 * tiny], np.float32)
    state, _ = fitted(c, x)
    assert np.array_equal(c.decode(c.shared(state), c.encode(state, x, KEY), 2), x)


SPECS = st.sampled_from(
    ["fp:bits=4", "fp:e3m2,rounding=stochastic", "fp:e5m0,scale=error", "fp:mxfp6", "fp:nvfp4", "fp:e2m2,scale=rceil"]
)


@settings(max_examples=120, deadline=None)
@given(
    SPECS,
    hnp.arrays(np.float32, st.integers(0, 70), elements=st.floats(width=32, allow_nan=False, allow_infinity=False)),
)
def test_round_trips(spec, x):
    decoded = sent(spec, x)
    assert decoded.shape == x.shape
    assert np.isfinite(decoded).all()
    assert not np.any((decoded != 0) & (np.sign(decoded) != np.sign(x)))
    if "stochastic" not in spec and "block" not in str(gtrace.codec(spec)) and "fp4" not in spec and "mx" not in spec:
        # Under the same scale nothing moves any more.
        c = gtrace.codec(spec)
        state, _ = fitted(c, x)
        assert np.array_equal(c.decode(c.shared(state), c.encode(state, decoded, KEY), x.size), decoded)


# closed forms


@pytest.mark.parametrize(
    "spec", ["fp:bits=8", "fp:bits=4,scale=error", "fp:e2m3,scale=mean", "fp:e5m0", "fp:e3m2,exponent=15"]
)
@pytest.mark.parametrize("name", ["lognormal", "heavy", "wide", "alternating", "one outlier", "constant"])
def test_expectations_of_nearest_rounding_are_what_happens(spec, name):
    x = lognormal() if name == "lognormal" else dict(tensors())[name]
    c = gtrace.codec(spec)
    state, sketch = fitted(c, x)
    expected = c.expect(state, sketch)
    decoded = c.decode(c.shared(state), c.encode(state, x, KEY), x.size)
    off = decoded.astype(np.float64) - x
    assert np.isclose(expected.squared_error, off @ off, rtol=1e-9)
    assert np.isclose(expected.bias, np.sqrt(off @ off), rtol=1e-9)
    assert expected.sparsity == np.mean(decoded == 0)
    top = c.format_of(state).max * 2.0 ** -c.scale_of(state)
    present = np.count_nonzero(x)
    assert np.isclose(expected.saturated, np.count_nonzero(np.abs(x.astype(np.float64)) > top) / present, rtol=1e-12)
    assert np.isclose(expected.flushed, np.count_nonzero((x != 0) & (decoded == 0)) / present, rtol=1e-12)
    assert np.allclose(c.clipping(state, x, decoded), (expected.saturated, expected.flushed), rtol=1e-12)
    levels = c.format_of(state).levels.astype(np.float64) * 2.0 ** -c.scale_of(state)
    counts = np.bincount(
        np.searchsorted(levels, np.abs(decoded.astype(np.float64)) * (1 - 1e-7)), minlength=levels.size
    )
    found = expected.probabilities
    assert np.allclose(found[levels.size - 1 :] + np.append(0, found[: levels.size - 1][::-1]), counts / x.size)


def test_a_sketch_knows_ties_where_a_bin_holds_nothing_else():
    # Multiples of half the smallest number: all ties, to the even code, 1 of 4 of the smallest ones to zero.
    c = gtrace.codec("fp:e3m2,exponent=10")
    x = (np.arange(-60, 61) * (FloatFormat(3, 2).min_positive / 2) * 2.0**-10).astype(np.float32)
    state, sketch = fitted(c, x)
    expected = c.expect(state, sketch)
    decoded = c.decode(c.shared(state), c.encode(state, x, KEY), x.size)
    assert expected.sparsity == np.mean(decoded == 0) == 3 / 121
    assert expected.flushed == 2 / 120
    entries, counts = np.unique(np.abs(decoded), return_counts=True)
    middle = expected.probabilities.size // 2
    found = 2 * expected.probabilities[middle:] * x.size
    codes = FloatFormat(3, 2).encode(entries * 2.0**10)
    assert np.allclose(found[codes][1:], counts[1:])


@pytest.mark.parametrize("stochastic", [False, True])
@pytest.mark.parametrize("word", ["e2m1", "e5m2", "e3m0", "e1m3", "e4m9"])
def test_the_kernel_of_errors_is_its_plain_twin(word, stochastic):
    form, most = FloatFormat.parse(word), float(np.finfo(np.float32).max)
    for x in (lognormal(3000), np.float32([0.75, 1.5, 1.5, -3.0, 0.0]), np.float32([1e-45, 3e-44, 1.0, 3e38])):
        sketch = gtrace.MomentSketch.of(x, norm="none")
        for k in (-127, -2, 0, 9, 17, 30, 149):
            found = rounding_error(sketch.lower, sketch.sums, form.exact_levels, 2.0**-k, most, stochastic)
            wanted = expected_rounding(form, 2.0**-k, sketch, stochastic=stochastic)
            assert found[0] == pytest.approx(wanted.squared_error, rel=1e-12, abs=1e-12 * sketch.energy)
            over = np.maximum(np.abs(x.astype(np.float64)) - min(form.max * 2.0**-k, most), 0)
            assert found[1] == pytest.approx(float(over @ over), rel=1e-9, abs=1e-12 * sketch.energy)


@pytest.mark.parametrize("spec", ["fp:bits=5,rounding=stochastic", "fp:e3m1,scale=error,rounding=stochastic"])
def test_expectations_of_stochastic_rounding_are_means(spec):
    x, c = lognormal(4000, sigma=2.0), gtrace.codec(spec)
    state, sketch = fitted(c, x)
    expected = c.expect(state, sketch)
    draws = [
        c.decode(c.shared(state), c.encode(state, x, Key.derive(0, tensor="t", draw=d)), x.size) for d in range(200)
    ]
    errors = np.array([np.sum((q.astype(np.float64) - x) ** 2) for q in draws])
    assert (
        abs(errors.mean() - expected.squared_error) < 5 * errors.std() / np.sqrt(200) + 1e-12 * expected.squared_error
    )
    flushed = np.array([c.clipping(state, x, q)[1] for q in draws])
    assert abs(flushed.mean() - expected.flushed) < 5 * flushed.std() / np.sqrt(200) + 1e-9
    top = c.format_of(state).max * 2.0 ** -c.scale_of(state)
    over = np.maximum(np.abs(x.astype(np.float64)) - top, 0)
    assert np.isclose(expected.bias, np.sqrt(over @ over), rtol=1e-9, atol=1e-30)
    inside = np.abs(x) <= top
    mean = np.mean(draws, axis=0, dtype=np.float64)[inside]
    deviation = np.std(draws, axis=0, dtype=np.float64)[inside] / np.sqrt(200)
    z = (mean - x[inside])[deviation > 0] / deviation[deviation > 0]
    assert abs(z.mean()) < 5 / np.sqrt(z.size)


def test_the_scale_of_least_error_saturates_the_tail_and_max_does_not():
    x = lognormal(100_000, sigma=4.0)
    cosines, clipped = {}, {}
    for rule in ("max", "error"):
        c = gtrace.codec("fp:e4m0", scale=rule)
        state, sketch = fitted(c, x)
        decoded = c.decode(c.shared(state), c.encode(state, x, KEY), x.size).astype(np.float64)
        cosines[rule] = decoded @ x / np.sqrt(decoded @ decoded * (x.astype(np.float64) @ x))
        clipped[rule] = c.expect(state, sketch).saturated
    assert cosines["max"] > 0.9
    assert cosines["error"] < 0.3
    assert clipped["max"] < 1e-3 < clipped["error"]


def test_blocks_have_no_closed_forms():
    c = gtrace.codec("fp:mxfp4")
    state, sketch = fitted(c, lognormal(100))
    assert not c.expects
    with pytest.raises(UsageError, match="share a block"):
        c.expect(state, sketch)
    with pytest.raises(UsageError, match="needs a sketch"):
        gtrace.codec("fp").expect(state, gtrace.MomentSketch.of([1.0], norm="l2"))


# block formats


def block_cases():
    rng = np.random.default_rng(5)
    yield lognormal(32 * 40, mu=-10, sigma=4)
    yield rng.normal(size=32 * 40).astype(np.float32)
    edges = np.concatenate([FloatFormat(2, 1).levels, [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 5.5, 7.0, 7.9]])
    yield (rng.choice(edges, (40, 32)) * 2.0 ** rng.integers(-30, 30, (40, 1))).astype(np.float32).reshape(-1)
    yield np.concatenate([np.zeros(32), np.full(32, 1e-45), np.full(32, 3e38), rng.normal(size=32)]).astype(np.float32)


@pytest.mark.parametrize(
    ("word", "element"),
    [
        ("mxfp4", format_info_ocp_e2m1),
        ("mxfp6", format_info_ocp_e3m2),
        ("mxfp6e2m3", format_info_ocp_e2m3),
        ("mxfp8", format_info_ocp_e4m3),
        ("mxfp8e5m2", format_info_ocp_e5m2),
    ],
)
def test_mx_formats_are_gfloats_bit_for_bit(word, element):
    info = BlockFormatInfo(word, element, 32, format_info_ocp_e8m0)
    for x in block_cases():
        blocks = x.astype(np.float64).reshape(-1, 32)
        expected = np.concatenate([quantize_block(info, row, compute_scale_amax) for row in blocks])
        assert np.array_equal(sent(f"fp:{word}", x), expected.astype(np.float32))
    assert gtrace.codec(f"fp:{word}").parameters["bits"] == element.bits


def test_mx_payload_is_a_scale_byte_a_block_and_the_codes():
    x, c = lognormal(100), gtrace.codec("fp:mxfp4,coder=fixed")
    state, _ = fitted(c, x)
    body = c.encode(state, x, KEY)[ENVELOPE_BYTES:]
    assert len(body) == 4 + 50
    scales = [int(np.floor(np.log2(np.abs(x[p : p + 32]).max()))) - 2 + 127 for p in range(0, 100, 32)]
    assert list(body[:4]) == scales
    element = np.abs(x[:2].astype(np.float64)) / 2.0 ** (scales[0] - 127)
    codes = gfloat.encode_ndarray(format_info_ocp_e2m1, gfloat.round_ndarray(format_info_ocp_e2m1, element, sat=True))
    assert body[4] & 7 == codes[0]
    assert body[4] >> 4 & 7 == codes[1]


def nvfp4(x):
    """NVFP4 in plain numpy: every step in float32, in the order of NVIDIA's recipe."""
    f, most = np.float32, np.finfo(np.float32).max
    blocks = x.reshape(-1, 16)
    with np.errstate(divide="ignore", over="ignore"):
        encode = min(f(448) * f(6) / np.abs(x).max(), most)
        decode = f(1) / encode
        scales = np.clip(np.abs(blocks).max(axis=1) / f(6) * encode, f(-448), f(448)).astype(ml_dtypes.float8_e4m3fn)
        factors = np.minimum(f(1) / (scales.astype(f) * decode), most)
        elements = np.clip(blocks * factors[:, None], f(-6), f(6)).astype(ml_dtypes.float4_e2m1fn).astype(f)
    values = elements * scales.astype(f)[:, None] * decode
    assert values.dtype == encode.dtype == factors.dtype == f
    return np.clip(values, -most, most).reshape(-1)


def ties(seed=3):
    """Multiples of a quarter of a block's unit: most of them lie halfway between two numbers of e2m1."""
    rng = np.random.default_rng(seed)
    x = rng.integers(-24, 25, (256, 16)) / 4 * rng.uniform(0.5, 1, (256, 1))
    return (x * 0.37).astype(np.float32).reshape(-1)


@pytest.mark.parametrize("size", [1.0, 1e-30, 1e-37, 1e-38, 1e-39, 1e-42, 1e37])
def test_nvfp4_is_the_published_recipe(size):
    for x in (*list(block_cases())[:3], ties(), lognormal(4096, mu=0)):
        x = (x / np.abs(x).max() * np.float32(size)).astype(np.float32)
        assert np.array_equal(sent("fp:nvfp4", x), nvfp4(x))


def test_rceil_blocks_never_saturate_and_are_tight():
    x = lognormal(32 * 60)
    c = gtrace.codec("fp:e2m1,scale=rceil")
    state, _ = fitted(c, x)
    payload = c.encode(state, x, KEY)
    assert c.clipping(state, x, c.decode(c.shared(state), payload, x.size))[0] == 0
    scales = 2.0 ** (np.frombuffer(payload, np.uint8, 60, ENVELOPE_BYTES).astype(float) - 127)
    largest = np.abs(x.reshape(-1, 32)).max(axis=1)
    assert ((largest <= 6 * scales) & (largest > 3 * scales)).all()
    exactly = np.repeat(np.float32([6, 12, 0.75]), 32)
    assert np.array_equal(sent("fp:e2m1,scale=rceil", exactly), exactly)
    payload = c.encode(c.init(96), exactly, KEY)
    assert list(payload[ENVELOPE_BYTES : ENVELOPE_BYTES + 3]) == [127, 128, 124]


# sweeps


def test_a_sweep_reports_saturated_and_flushed_shares(tmp_path):
    others = np.random.default_rng(0).normal(size=(2, 500)).astype(np.float32)
    trace = gtrace.Trace.from_arrays({"a": {k: lognormal(3000, seed=k) for k in (0, 1)}, "b": dict(enumerate(others))})
    specs = ["fp:e3m0", "fp:mxfp4", "qsgd", "fp:e3m0,scope=model", "fp:e3m0,exponent=17", "fp:e3m0,coder=fixed"]
    result = gtrace.run_sweep(trace, specs, draws=1, refit="each", output=tmp_path / "s.db")
    rows = {(r["tensor"], r["step"], r["codec"], r["draw"]): r for r in result.rows()}
    expected, drawn = rows["a", 1, "fp:e3m0", -1], rows["a", 1, "fp:e3m0", 0]
    assert 0 < expected["flushed"] < 1
    for name in ("saturated", "flushed", "sparsity", "squared_error"):
        assert np.isclose(expected[name], drawn[name], rtol=1e-9)
    assert drawn["bits_total"] == np.ceil(3000 * drawn["bits_huffman"] / 8) * 8 / 3000
    assert drawn["bits_entropy"] < drawn["bits_huffman"] < drawn["bits_fixed"] == 4 + 32 / 3000
    assert rows["a", 1, "fp:e3m0,coder=fixed", 0]["bits_total"] == 4 + 32 / 3000
    assert drawn["fitted_on"] == "itself"
    assert rows["a", 1, "fp:mxfp4", 0]["fitted_on"] == rows["a", 1, "fp:e3m0,exponent=17", 0]["fitted_on"] == "-"
    assert ("a", 1, "fp:mxfp4", -1) not in rows
    assert rows["a", 1, "fp:mxfp4", 0]["flushed"] > 0
    assert np.isnan(rows["a", 1, "qsgd:bits=4", 0]["saturated"])
    assert rows["*", 0, "fp:e3m0,scope=model", 0]["n"] == 3500
    # Resumed, nothing is left to do: a codec without closed forms waits for no expectations.
    before = result["squared_error"]
    again = gtrace.run_sweep(trace, specs, draws=1, refit="each", output=tmp_path / "s.db", progress=pytest.fail)
    assert np.array_equal(again["squared_error"], before)
