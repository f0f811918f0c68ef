"""The fp codec: choices, payload, closed forms against what encoding does, block formats against gfloat."""

import struct

import ml_dtypes
import numpy as np
import pytest
from helpers_codecs import fitted_once, once

import gtrace
from gtrace.codecs.fp import FloatFormat, optimal_format, scale_exponent
from gtrace.coding import ENVELOPE_BYTES
from gtrace.fitting.floats import candidates, expected_rounding
from gtrace.kernels.floats import rounding_error
from gtrace.testing import fitted, tensors
from gtrace.types import Key

KEY = (11, 12)
G = np.random.default_rng(0).normal(size=500).astype(np.float32)


def lognormal(n=20_000, mu=-18.0, sigma=3.0, seed=0):
    rng = np.random.default_rng(seed)
    x = (rng.choice([-1, 1], n) * 2.0 ** rng.normal(mu, sigma, n)).astype(np.float32)
    x[::17] = 0
    return x


def expected(spec, x):
    """The codec fitted to values, its state, and what is expected of it."""
    c = gtrace.codec(spec)
    state, sketch = fitted(c, x)
    return c, state, c.expect(state, sketch)


# choices


def lost(x, form, k):
    """The squared error of rounding to nearest at a scale, from the values."""
    off = form.round(x * np.float32(2.0**k)).astype(np.float64) * 2.0**-k - x
    return float(off @ off)


_RNG = np.random.default_rng(9)
#: tensors of many laws: what a lognormal law fits, what it does not, spikes, outliers, a few values, ties
SHAPES = {
    "lognormal": lognormal(4000),
    "normal": _RNG.normal(size=4000) * 1e-3,
    "uniform": _RNG.uniform(-0.9, 0.9, 4000),
    "student": _RNG.standard_t(2, 4000) * 1e-6,
    "mixture": np.where(_RNG.random(4000) < 0.01, _RNG.normal(size=4000), 1e-4 * _RNG.normal(size=4000)),
    # The best scale gives up a few large values; every scale between is worse than both ends.
    "two spikes": np.r_[np.full(4_000, 1.0), np.full(1, 50.0)],
    "outlier": np.r_[1e-3 * _RNG.normal(size=999), 7.0],
    "three": np.array([0.3, -0.01, 5e-5]),
    "one": np.array([-3e-7]),
    "ties": _RNG.integers(-40, 41, 4000) / 8,
    "denormal": _RNG.normal(size=500) * 1e-43,
    "huge": _RNG.normal(size=500) * 1e38,
}


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("word", ["e2m1", "e4m3", "e5m2", "e3m0", "bits=3", "bits=4", "bits=6", "bits=8"])
def test_the_default_scale_and_format_are_the_best_of_all(word, name):
    x = np.float32(SHAPES[name])
    c, state, found = expected(f"fp:{word}", x)
    forms = candidates(c.bits) if c.format == "auto" else [FloatFormat.parse(word)]
    # Products by powers of two up to 2^127 are exact but for denormals, which other cases take.
    powers = range(-60, 110) if name not in ("denormal", "huge") else range(0)
    least = min((lost(x, form, k) for form in forms for k in powers), default=np.inf)
    energy = float(np.sum(x.astype(np.float64) ** 2))
    assert found.squared_error <= least * (1 + 1e-9) + 1e-12 * energy * 2.0**-52
    off = once(c, x, state, KEY).astype(np.float64) - x
    assert found.squared_error == pytest.approx(float(off @ off), rel=1e-9, abs=1e-300)
    best, absmax = (expected(f"fp:{word},rounding=stochastic,scale={scale}", x)[2] for scale in ("best", "absmax"))
    assert best.squared_error <= absmax.squared_error * (1 + 1e-12)


@pytest.mark.parametrize("scale", ["max", "mean", "error"])
@pytest.mark.parametrize("sigma", [1.0, 2.5, 5.0])
def test_fit_chooses_the_format_that_is_best_under_its_own_scale(scale, sigma):
    c, x = gtrace.codec("fp", bits=7, scale=scale), lognormal(sigma=sigma)
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


def test_absmax_puts_the_largest_value_below_the_largest_number():
    # Uniform magnitudes end where a lognormal law of their moments goes on.
    x = np.random.default_rng(5).uniform(-0.9, 0.9, 20_000).astype(np.float32)
    c, state, found = expected("fp:bits=6,scale=absmax", x)
    assert 0.5 < np.abs(x).max() * 2.0 ** c.scale_of(state) / c.format_of(state).max <= 1
    assert found.squared_error < expected("fp:bits=6,scale=max", x)[2].squared_error


def test_formats_under_a_normal_law_a_fixed_scale_and_blocks():
    x, codecs = lognormal(sigma=4.0), [gtrace.codec(f"fp:bits=6,{rest}") for rest in (
        "scale=max", "scale=max,law=normal", "block=32", "exponent=18"
    )]  # fmt: skip
    widths = [c.format_of(fitted(c, x)[0]).exponent for c in codecs]
    sigma = gtrace.MomentSketch.of(x, norm="none").log2_moments().sigma
    fixed = {e: lost(x, FloatFormat(e, 5 - e), 18) for e in range(2, 6)}
    assert widths[1] < widths[0]
    assert widths[2:] == [optimal_format(6, sigma, "max", count=32).exponent, min(fixed, key=fixed.get)]


def test_zeros_keep_what_was_fitted_and_one_element_is_scaled_by_its_own_logarithm():
    for spec in ("fp:bits=6", "fp:bits=6,scale=max"):
        c = gtrace.codec(spec)
        state, _ = fitted(c, lognormal(500))
        assert c.fit(state, gtrace.MomentSketch.from_spec(np.zeros(500, np.float32), c.needs), 1) is state
    c = gtrace.codec("fp:e3m2,scale=max")
    state, _ = fitted(c, np.array([-3e-7], np.float32))
    assert c.scale_of(state) == int(np.floor(np.log2(28) - np.log2(3e-7)))


# payload


@pytest.mark.parametrize("bits", [3, 4, 5, 6, 7, 8])
def test_a_payload_is_a_scale_and_n_bits_a_value(bits):
    x = lognormal(1001)
    c, state, found = expected(f"fp:bits={bits},coder=fixed", x)
    payload = c.encode(state, x, KEY)
    assert len(payload) == ENVELOPE_BYTES + 4 + -(-1001 * bits // 8)
    (scale,) = struct.unpack_from("<f", payload, ENVELOPE_BYTES)
    assert scale == 2.0 ** -c.scale_of(state)
    wanted = c.format_of(state).round(x * np.float32(2.0 ** c.scale_of(state))) * np.float32(scale)
    decoded = c.decode(c.shared(state), payload, x.size)
    assert np.array_equal(decoded, wanted)
    assert np.array_equal(np.signbit(decoded), np.signbit(x))
    assert found.bits_payload == bits + 32 / 1001


def test_extreme_values_lose_nothing_to_the_scale():
    tiny, huge = np.float32(1e-45), np.finfo(np.float32).max
    for x in (np.array([tiny, 3 * tiny, -7 * tiny], np.float32), np.array([huge, -huge / 2, huge / 3], np.float32)):
        for spec in ("fp:e5m2", "fp:e2m5", "fp:e7m0", "fp:e1m6", "fp:mxfp8", "fp:nvfp4", "fp:e2m1,scale=rceil"):
            assert np.isfinite(fitted_once(gtrace.codec(spec), x)).all()
        # Exact where the format has the digits: the scale costs none, whatever float32 thinks of denormals.
        off = fitted_once(gtrace.codec("fp:e4m9"), x).astype(np.float64) / x - 1
        assert np.all(np.abs(off) <= 2.0**-10)
    x = np.array([tiny, 5 * tiny], np.float32)
    assert np.array_equal(fitted_once(gtrace.codec("fp:e4m9,exponent=140"), x), x)


# closed forms


@pytest.mark.parametrize(
    "spec", ["fp:bits=8", "fp:bits=4,scale=error", "fp:e2m3,scale=mean", "fp:e5m0", "fp:e3m2,exponent=15"]
)
@pytest.mark.parametrize("name", ["lognormal", "heavy", "wide", "alternating", "one outlier", "constant"])
def test_expectations_of_nearest_rounding_are_what_happens(spec, name):
    x = lognormal() if name == "lognormal" else dict(tensors())[name]
    c, state, found = expected(spec, x)
    decoded, unit = once(c, x, state, KEY), 2.0 ** -c.scale_of(state)
    off, wide = decoded.astype(np.float64) - x, np.abs(x.astype(np.float64))
    assert np.isclose(found.squared_error, off @ off, rtol=1e-9)
    assert np.isclose(found.bias, np.sqrt(off @ off), rtol=1e-9)
    assert found.sparsity == np.mean(decoded == 0)
    present = np.count_nonzero(x)
    assert np.isclose(found.saturated, np.count_nonzero(wide > c.format_of(state).max * unit) / present, rtol=1e-12)
    assert np.isclose(found.flushed, np.count_nonzero((x != 0) & (decoded == 0)) / present, rtol=1e-12)
    assert np.allclose(c.clipping(state, x, decoded), (found.saturated, found.flushed), rtol=1e-12)
    levels = c.format_of(state).levels.astype(np.float64) * unit
    nearest = np.searchsorted(levels, np.abs(decoded.astype(np.float64)) * (1 - 1e-7))
    below, above = found.probabilities[: levels.size - 1], found.probabilities[levels.size - 1 :]
    assert np.allclose(above + np.append(0, below[::-1]), np.bincount(nearest, minlength=levels.size) / x.size)


def test_a_sketch_knows_ties_where_a_bin_holds_nothing_else():
    # Multiples of half the smallest number: all ties, to the even code, 1 of 4 of the smallest ones to zero.
    form = FloatFormat(3, 2)
    x = (np.arange(-60, 61) * (form.min_positive / 2) * 2.0**-10).astype(np.float32)
    c, state, found = expected("fp:e3m2,exponent=10", x)
    decoded = once(c, x, state, KEY)
    assert found.sparsity == np.mean(decoded == 0) == 3 / 121
    assert found.flushed == 2 / 120
    entries, counts = np.unique(np.abs(decoded), return_counts=True)
    upper = 2 * found.probabilities[found.probabilities.size // 2 :] * x.size
    assert np.allclose(upper[form.encode(entries * 2.0**10)][1:], counts[1:])


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
    x = lognormal(4000, sigma=2.0)
    c, state, found = expected(spec, x)
    draws = [once(c, x, state, Key.derive(0, tensor="t", draw=d)) for d in range(200)]
    flushed = np.array([c.clipping(state, x, q)[1] for q in draws])
    assert abs(flushed.mean() - found.flushed) < 5 * flushed.std() / np.sqrt(200) + 1e-9
    top = c.format_of(state).max * 2.0 ** -c.scale_of(state)
    over = np.maximum(np.abs(x.astype(np.float64)) - top, 0)
    assert np.isclose(found.bias, np.sqrt(over @ over), rtol=1e-9, atol=1e-30)
    inside = np.abs(x) <= top
    mean = np.mean(draws, axis=0, dtype=np.float64)[inside]
    deviation = np.std(draws, axis=0, dtype=np.float64)[inside] / np.sqrt(200)
    z = (mean - x[inside])[deviation > 0] / deviation[deviation > 0]
    assert abs(z.mean()) < 5 / np.sqrt(z.size)


# block formats, whose scales and codes are those of torchao in test_authors.py


def test_rceil_blocks_saturate_nothing():
    c, x = gtrace.codec("fp:e2m1,scale=rceil"), lognormal(100)
    assert c.clipping(c.init(100), x, once(c, x))[0] == 0


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


@pytest.mark.parametrize("size", [1.0, 1e-30, 1e-37, 1e-38, 1e-39, 1e-42, 1e37])
def test_nvfp4_is_the_published_recipe(size):
    rng = np.random.default_rng(5)
    # Multiples of a quarter of a block's unit: most of them lie halfway between two numbers of e2m1.
    ties = rng.integers(-24, 25, (256, 16)) / 4 * rng.uniform(0.5, 1, (256, 1))
    edges = rng.choice(np.arange(32) / 4, (80, 16)) * 2.0 ** rng.integers(-30, 30, (80, 1))
    for x in (
        lognormal(1280, mu=-10, sigma=4),
        rng.normal(size=1280),
        edges.ravel(),
        ties.ravel(),
        lognormal(4096, mu=0),
    ):
        x = (x / np.abs(x).max() * size).astype(np.float32)
        assert np.array_equal(fitted_once(gtrace.codec("fp:nvfp4"), x), nvfp4(x))


# sweeps


def test_a_sweep_reports_saturated_and_flushed_shares(tmp_path):
    trace = gtrace.Trace.from_arrays({"a": {k: lognormal(3000, seed=k) for k in (0, 1)}, "b": {0: G, 1: G}})
    specs = ["fp:e3m0", "fp:mxfp4", "qsgd", "fp:e3m0,scope=model", "fp:e3m0,exponent=17", "fp:e3m0,coder=fixed"]
    result = gtrace.run_sweep(trace, specs, draws=1, refit="each", output=tmp_path / "s.db")
    rows = {(r["step"], r["codec"], r["draw"]): r for r in result.rows() if r["tensor"] != "b"}
    closed, drawn = rows[1, "fp:e3m0", -1], rows[1, "fp:e3m0", 0]
    assert 0 < closed["flushed"] < 1
    for name in ("saturated", "flushed", "sparsity", "squared_error"):
        assert np.isclose(closed[name], drawn[name], rtol=1e-9)
    assert drawn["bits_total"] == np.ceil(3000 * drawn["bits_huffman"] / 8) * 8 / 3000
    assert drawn["bits_entropy"] < drawn["bits_huffman"] < drawn["bits_fixed"] == 4 + 32 / 3000
    assert rows[1, "fp:e3m0,coder=fixed", 0]["bits_total"] == 4 + 32 / 3000
    fitted_on = [rows[1, spec, 0]["fitted_on"] for spec in ("fp:e3m0", "fp:mxfp4", "fp:e3m0,exponent=17")]
    assert fitted_on == ["itself", "-", "-"]
    assert (1, "fp:mxfp4", -1) not in rows
    assert rows[1, "fp:mxfp4", 0]["flushed"] > 0
    assert np.isnan(rows[1, "qsgd:bits=4", 0]["saturated"])
    assert rows[0, "fp:e3m0,scope=model", 0]["n"] == 3500
    # Resumed, nothing is left to do: a codec without closed forms waits for no expectations.
    again = gtrace.run_sweep(trace, specs, draws=1, refit="each", output=tmp_path / "s.db", progress=pytest.fail)
    assert np.array_equal(again["squared_error"], result["squared_error"])
