"""Expected bits and weighted errors across codecs: codes of what nobody saw before, each coder's bits."""

import numpy as np
import pytest
from helpers_codecs import body_bits
from helpers_variants import VARIANTS

import gtrace
from gtrace import MomentSketch
from gtrace.codecs import expecting, level_grid
from gtrace.testing import fitted
from gtrace.types import Key

KEY = Key.derive(0, tensor="coders")
LEVELS = [spec for spec in VARIANTS if level_grid(gtrace.codec(spec)) and gtrace.codec(spec).needs]


def gradient(seed=0, size=10_000):
    return (np.random.default_rng(seed).standard_t(4, size) * 1e-3).astype(np.float32)


@pytest.mark.parametrize("spec", LEVELS)
def test_bits_are_expected_whatever_comes_after_the_fit(spec):
    c, size, rng = gtrace.codec(spec), 10_000, np.random.default_rng(1)
    state, _ = fitted(c, gradient())
    for x in (rng.normal(0, 1, size), np.where(np.arange(size) % 500, 0, 3.0), rng.uniform(-1, 1, size)):
        values = x.astype(np.float32)
        expected = c.expect(state, MomentSketch.from_spec(values, c.needs))
        if c.coder in ("huffman", "fixed"):
            assert expected.bits_payload <= expected.bits_fixed
        keys = [Key.derive(0, tensor="later", draw=draw) for draw in range(6)]
        lengths = [body_bits(c.encode(state, values * np.float32(1 - 2 * (k % 2)), key)) for k, key in enumerate(keys)]
        error = np.std(lengths, ddof=1) / np.sqrt(6)
        # Codes of a symbol and its opposite differ by a bit, and a sketch does not know which sign comes more often.
        signs = 0.0 if c.parts.grid.zero else np.sqrt(size / 6)
        assert abs(np.mean(lengths) - expected.bits_payload * size) < 6 * error + signs + 32


@pytest.mark.parametrize("spec", VARIANTS)
def test_every_codec_says_its_bits_under_each_coder(spec):
    c, x = gtrace.codec(spec), gradient(2)
    state, _ = fitted(c, x)
    bits, coded = body_bits(c.encode(state, x, KEY)) / x.size, c.simulate(state, x, KEY).coded
    assert 0 < coded.entropy <= coded.huffman + 1e-9
    assert coded.huffman <= coded.fixed
    inner = c
    while hasattr(inner, "inner"):
        inner = inner.inner
    coder = inner.parameters.get("coder")
    if spec in ("none", "bf16", "signsgd", "mcgq"):
        assert len(set(coded)) == 1, "no symbols"
    if coder == "fixed":
        assert abs(coded.fixed - bits) * x.size < 8
    elif not level_grid(inner):
        assert abs(coded.huffman - bits) * x.size < 40
    elif coder == "huffman":
        # The codec's own code is the sketch's, and its lengths are in the shared bytes. It has room for symbols that
        # did not come: at most half a bit, where two are nearly all.
        assert coded.entropy <= bits + 1e-9
        assert bits <= coded.huffman + 8 * len(c.shared(state)) / x.size + 0.5


# weights of elements, as they move an optimizer's update

#: fewer draws of an error with rare large terms would give too small a standard error
FEW, DRAWS = 3000, 200
# Values and weights have much to do with each other, as a gradient's second moments have.
RNG = np.random.default_rng(3)
VALUES = (RNG.lognormal(-4, 1.5, FEW) * RNG.choice([-1, 1], FEW)).astype(np.float32)
VALUES[::97] = 0
WEIGHTS = np.exp(RNG.normal(0, 1, FEW)) / (0.01 + np.abs(VALUES)) ** 1.5


@pytest.mark.parametrize("spec", [spec for spec in VARIANTS if expecting(gtrace.codec(spec))])
def test_the_weighted_expectation_is_the_mean_of_many_draws(spec):
    codec = gtrace.codec(spec)
    plain = MomentSketch.from_spec(VALUES, codec.needs)
    weighted = MomentSketch.from_spec(VALUES, codec.needs, weights=WEIGHTS)
    state = codec.fit(codec.init(FEW), plain, 0)
    expected = codec.weighted_error(state, plain, weighted)
    keys = [Key.derive(1, tensor="w", draw=draw) for draw in range(DRAWS)]
    off = [codec.simulate(state, VALUES, key).values.astype(np.float64) - VALUES for key in keys]
    draws = [float(WEIGHTS @ one**2) for one in off]
    error = np.std(draws, ddof=1) / np.sqrt(DRAWS)
    assert abs(np.mean(draws) - expected) <= 4.5 * error + 2e-3 * expected


@pytest.mark.parametrize("tail", ["quantized", "exact"])
@pytest.mark.parametrize("norm", ["l2", "linf", "l1", "none"])
def test_weighted_sums_against_brute_force(norm, tail):
    sketch = MomentSketch.of(VALUES, norm, 512, tail=tail, clip=2.5, weights=WEIGHTS)
    limit = 2.5 * VALUES.std(dtype=np.float64)
    clipped = np.clip(VALUES.astype(np.float64), -limit, limit)
    assert sketch.energy == pytest.approx(WEIGHTS @ clipped**2, rel=1e-6)
    assert sketch.clip_error == pytest.approx(WEIGHTS @ (clipped - VALUES) ** 2, rel=1e-5)
    assert sketch.size == FEW
