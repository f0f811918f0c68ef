"""Expected bits and weighted errors across codecs: codes of what nobody saw before, each coder's bits, wrong bytes."""

import dataclasses
import struct

import numpy as np
import pytest
from helpers_codecs import body_bits, once
from helpers_variants import VARIANTS

import gtrace
from gtrace import MomentSketch
from gtrace.codecs import expecting, grids, level_grid
from gtrace.codecs.level_sets import LevelSets
from gtrace.coding import ENVELOPE_BYTES, open_envelope, seal
from gtrace.coding import huffman as coding_blocks
from gtrace.coding.fixed import sign_first, sign_last
from gtrace.errors import PayloadError, UsageError
from gtrace.testing import fitted
from gtrace.types import Key

KEY = Key.derive(0, tensor="coders")
SIZE = 40_000
LEVELS = [spec for spec in VARIANTS if level_grid(gtrace.codec(spec)) and gtrace.codec(spec).needs]
_OWN = "prune topk-prune fp fp:e4m3 fp:mxfp4 fp:nvfp4 fp:e5m4 minmax minmax:bits=10 int8 randomk:ratio=0.25"
OWN = _OWN.split()


def gradient(seed=0, size=SIZE):
    return (np.random.default_rng(seed).standard_t(4, size) * 1e-3).astype(np.float32)


@pytest.mark.parametrize("spec", ["qsgd:bits=4", "qsgd:bits=8", "qsgd:bits=4,zero=false", "natural"])
def test_one_value_unlike_all_before_does_not_cost_the_code(spec):
    c, x = gtrace.codec(spec), gradient()
    state, sketch = fitted(c, x)
    usual = body_bits(c.encode(state, x, KEY))
    assert usual < 0.9 * c.expect(state, sketch).bits_fixed * SIZE
    # All the energy of a bucket in one value: symbols that the fit never saw.
    if c.needs.norm != "none":
        x[8192:16384] = 0
    x[9000] = 1e6
    assert len(np.unique(once(c, x, state, KEY))) > 1
    found = body_bits(c.encode(state, x, KEY))
    assert found < usual + 64
    assert abs(found - c.expect(state, MomentSketch.from_spec(x, c.needs)).bits_payload * SIZE) < 0.005 * usual


@pytest.mark.parametrize("spec", LEVELS)
def test_bits_are_expected_whatever_comes_after_the_fit(spec):
    c, size, rng = gtrace.codec(spec), 10_000, np.random.default_rng(1)
    state, _ = fitted(c, gradient(size=size))
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
    c, x = gtrace.codec(spec), gradient(2, 10_000)
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


@pytest.mark.parametrize("spec", OWN)
def test_codes_come_near_their_entropy_and_small_tensors_stay_at_fixed_width(spec):
    c, x = gtrace.codec(spec), gradient(3, 1 << 17)
    fixed = dataclasses.replace(c, coder="prefix" if "prune" in spec else "fixed")
    state, sketch = fitted(c, x)
    sent, found = body_bits(c.encode(state, x, KEY)), c.simulate(state, x, KEY)
    at_fixed = body_bits(fixed.encode(state, x, KEY))
    assert sent < at_fixed
    # A zero of a pruned tensor takes a bit, however many there are.
    assert sent / x.size < found.coded.entropy + (0.4 if "prune" in spec else 0.15)
    np.testing.assert_array_equal(once(c, x, state, KEY), once(fixed, x, state, KEY))
    if expecting(c):
        expected = c.expect(state, sketch)
        mirrored = body_bits(c.encode(state, -x, KEY))
        assert abs((sent + mirrored) / 2 - expected.bits_payload * x.size) < 400
        close = {"rel": 0.01} if spec == "prune" else {"abs": 8}
        assert expected.bits_fixed * x.size == pytest.approx(at_fixed, **close)
        assert fixed.expect(state, sketch).bits_payload == pytest.approx(expected.bits_fixed)
    few, _ = fitted(c, x[:9])
    assert c.encode(few, x[:9], KEY)[ENVELOPE_BYTES:] == fixed.encode(few, x[:9], KEY)[ENVELOPE_BYTES:]


@pytest.mark.parametrize("width", [2, 5, 16])
def test_signs_go_behind_their_magnitudes_and_back(width):
    codes = np.arange(1 << width, dtype=np.uint16)
    found = sign_last(codes, width)
    low, sign = codes & ((1 << (width - 1)) - 1), codes >> (width - 1)
    np.testing.assert_array_equal(found, 2 * low + np.where(low, sign, 0))
    np.testing.assert_array_equal(sign_first(found, width), np.where(low, codes, 0))


@pytest.mark.parametrize("spec", [spec for spec in VARIANTS if expecting(gtrace.codec(spec))])
def test_weighted_sketches_need_no_codes(spec, monkeypatch):
    c, x = gtrace.codec(spec), gradient(5, 3000)
    state, plain = fitted(c, x)
    weighted = MomentSketch.from_spec(x, c.needs, weights=np.full(x.size, 2.0))
    wanted = 2 * c.expect(state, plain).squared_error
    for owner, name in ((coding_blocks, "huffman_lengths"), (grids, "_symbols_of"), (LevelSets, "judge")):
        monkeypatch.setattr(owner, name, None)
    assert c.weighted_error(state, plain, weighted) == pytest.approx(wanted, rel=1e-9, abs=1e-18)
    if level_grid(c) and c.needs.bucket_moments is False:
        sets = LevelSets([c])
        found = sets.weighted_error(weighted, sets.grids(plain))
        assert found == pytest.approx([wanted], rel=1e-9, abs=1e-18)


@pytest.mark.parametrize("spec", ["amq:bits=3", "amq:bits=8", "amq:bits=8,zero=false", "amq:bits=2,zero=false"])
def test_amq_sends_its_multiplier(spec):
    c = gtrace.codec(spec, coder="fixed")
    state, _ = fitted(c, gradient(6))
    (p,) = struct.unpack("<4xf", c.shared(state))
    assert state.arrays["levels"][-2] == np.float32(p)
    # Two levels have no multiplier to send.
    c = gtrace.codec("amq:bits=2,coder=fixed")
    assert c.shared(fitted(c, gradient(6))[0]) == b""


@pytest.mark.parametrize("spec", [*OWN, "topk:ratio=0.1", "mem-sgd:ratio=0.1", "qsgd:bits=4", "fp16", "bf16", "onebit"])
def test_coded_payloads_that_are_wrong_are_refused(spec):
    size = 10_000
    c, x = gtrace.codec(spec), gradient(7, size)
    state, _ = fitted(c, x)
    shared = c.shared(state)
    body, flags = open_envelope(c.encode(state, x, KEY), codec=c.name, size=size, shared=shared)
    body = bytes(body)

    def decoded(data, flags=flags):
        return c.decode(shared, seal(data, codec=c.name, size=size, shared=shared, flags=flags), size)

    assert decoded(body).size == size
    wrong = [(data, flags) for data in (body[:-1], body + b"\0", body[: len(body) // 2], body[:3], b"")]
    for data, said in (*wrong, (body, flags ^ 1), (body, flags ^ 0x100), (body, flags | 0x8000)):
        with pytest.raises(PayloadError):
            decoded(data, said)


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


@pytest.mark.parametrize("weights", [[1.0], [1.0, -1.0], [1.0, np.nan], [1.0, np.inf]])
def test_weights_that_are_none(weights):
    with pytest.raises(UsageError, match="weights"):
        MomentSketch.of([1.0, 2.0], weights=weights)
