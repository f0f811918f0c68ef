"""The fp codec: choices, payload, closed forms against what encoding does, NVFP4 against its recipe."""

import struct

import ml_dtypes
import numpy as np
import pytest
from helpers_codecs import fitted_once, once

import gtrace
from gtrace.codecs.fp import FloatFormat
from gtrace.coding import ENVELOPE_BYTES
from gtrace.fitting.floats import candidates, expected_rounding
from gtrace.kernels.floats import rounding_error
from gtrace.testing import fitted, tensors

KEY = (11, 12)


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
    "student": _RNG.standard_t(2, 4000) * 1e-6,
    "mixture": np.where(_RNG.random(4000) < 0.01, _RNG.normal(size=4000), 1e-4 * _RNG.normal(size=4000)),
    # The best scale gives up a few large values; every scale between is worse than both ends.
    "two spikes": np.r_[np.full(4_000, 1.0), np.full(1, 50.0)],
    "outlier": np.r_[1e-3 * _RNG.normal(size=999), 7.0],
    "three": np.array([0.3, -0.01, 5e-5]),
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


# payload


@pytest.mark.parametrize("bits", [3, 8])
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
    assert found.bits_payload == bits + 32 / 1001


# closed forms


@pytest.mark.parametrize("spec", ["fp:bits=8", "fp:bits=4,scale=error", "fp:e2m3,scale=mean", "fp:e3m2,exponent=15"])
@pytest.mark.parametrize("name", ["lognormal", "heavy", "wide", "alternating", "one outlier", "constant"])
def test_expectations_of_nearest_rounding_are_what_happens(spec, name):
    x = lognormal() if name == "lognormal" else dict(tensors())[name]
    c, state, found = expected(spec, x)
    decoded, unit = once(c, x, state, KEY), 2.0 ** -c.scale_of(state)
    off, wide, present = decoded.astype(np.float64) - x, np.abs(x.astype(np.float64)), np.count_nonzero(x)
    assert np.isclose(found.bias, np.sqrt(off @ off), rtol=1e-9)
    assert np.isclose(found.saturated, np.count_nonzero(wide > c.format_of(state).max * unit) / present, rtol=1e-12)
    assert np.isclose(found.flushed, np.count_nonzero((x != 0) & (decoded == 0)) / present, rtol=1e-12)
    assert np.allclose(c.clipping(state, x, decoded), (found.saturated, found.flushed), rtol=1e-12)
    levels = c.format_of(state).levels.astype(np.float64) * unit
    nearest = np.searchsorted(levels, np.abs(decoded.astype(np.float64)) * (1 - 1e-7))
    below, above = found.probabilities[: levels.size - 1], found.probabilities[levels.size - 1 :]
    assert np.allclose(above + np.append(0, below[::-1]), np.bincount(nearest, minlength=levels.size) / x.size)


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


# block formats, whose scales and codes are those of torchao in test_authors.py


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
    for x in (lognormal(1280, mu=-10, sigma=4), rng.normal(size=1280), edges.ravel(), ties.ravel()):
        x = (x / np.abs(x).max() * size).astype(np.float32)
        assert np.array_equal(fitted_once(gtrace.codec("fp:nvfp4"), x), nvfp4(x))


# sweeps
