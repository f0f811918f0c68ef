"""Each kernel against its plain twin."""

import math

import naive
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gtrace.buckets import bucket_scales
from gtrace.codecs.grids import Rule
from gtrace.codecs.parts import Scaled
from gtrace.errors import UsageError
from gtrace.kernels import bits, compare, counter, elementwise, norms, rounding

KEY = (0x0123456789ABCDEF, 0xFEDCBA9876543210)
WORDS = (np.uint64(KEY[0]), np.uint64(KEY[1]))
floats = st.floats(width=32, allow_nan=False, allow_infinity=False)


@pytest.mark.parametrize("start", [0, 7, 2**32 - 5, 2**33 + 123])
def test_uniforms_are_the_hash_of_the_index(start):
    count = 4 if start == 2**32 - 5 else 100
    out, words = np.empty(count, np.float32), np.empty(count, np.uint32)
    counter.fill_uniform(out, *WORDS, start)
    assert out.tolist() == naive.uniforms(*KEY, start, count)
    elementwise.fill_words(*WORDS, start, words)
    assert words.tolist() == naive.hashes(*KEY, start, count)


# norms


@given(
    st.lists(floats, max_size=200),
    st.sampled_from([1, 2, 3, 32, 64, 65, 128, None]),
    st.sampled_from(["l2", "linf", "l1", "none"]),
)
@settings(max_examples=60)
def test_scales(values, bucket, norm):
    parts = naive.buckets(values, bucket)
    found = bucket_scales(np.array(values, np.float32), norm, bucket)
    np.testing.assert_allclose(found, [naive.norm_of(b, norm) for b in parts], rtol=1.2e-7, atol=0)
    if norm != "none":
        assert all((np.abs(b) <= scale).all() for scale, b in zip(found, parts, strict=True))


def test_sums_run_over_fixed_blocks_and_nonfinite_values_are_counted():
    x = np.random.default_rng(0).standard_normal(norms.BLOCK + 777).astype(np.float32)
    total = norms.power_sum(x, 2)
    assert total == norms.power_sum(x[: norms.BLOCK], 2) + norms.power_sum(x[norms.BLOCK :], 2)
    assert math.isclose(total, math.fsum(x.astype(np.float64) ** 2), rel_tol=1e-13)
    odd = np.array([0, -0.0, 1e-45, 3.4e38, np.nan, np.inf, -np.inf, -np.nan], np.float32)
    assert norms.count_nonfinite(odd) == 4


# rounding


def symbols_of(rule, x, bucket, scales, key=KEY):
    return rule.symbols(Scaled(x, scales, bucket or x.size), key)


@pytest.mark.parametrize(
    ("levels", "zero"),
    [
        *(([0.0, 1.0], True), ([1.0], False), ([0.0, 0.01, 0.1, 1.0], True), ([0.2, 0.3, 1.0], False)),
        (np.linspace(0, 1, 16), True),
        (np.concatenate([[0], 2.0 ** np.arange(-30, 1)]), True),
        (np.linspace(0.004, 1, 128), False),
    ],
)
@pytest.mark.parametrize("bucket", [1, 100, None])
def test_both_level_kernels_round_like_the_twin(levels, zero, bucket):
    rng = np.random.default_rng(3)
    x = np.concatenate([rng.standard_t(3, 2500), [0.0, -0.0, 1e-30], rng.normal(0, 1e-3, 600)]).astype(np.float32)
    grid, scales = np.asarray(levels, np.float32), bucket_scales(x, "linf", bucket)
    wanted = naive.round_symbols(x, "linf", bucket, grid, KEY, zero=zero)
    for kind in ("count", "search"):
        assert (symbols_of(Rule(kind, not zero, levels=grid), x, bucket, scales) == wanted).all()


@pytest.mark.parametrize(("steps", "zero"), [(1, True), (3, True), (127, True), (7, False), (255, False), (3, False)])
def test_uniform_kernel_rounds_like_the_twin_but_for_float_ties(steps, zero):
    x = np.random.default_rng(4).standard_normal(2000).astype(np.float32)
    x[::7] = 0
    grid = (np.arange(0 if zero else 1, steps + 1, 1 if zero else 2) / steps).astype(np.float32)
    found = symbols_of(Rule("uniform", not zero, steps), x, 64, bucket_scales(x, "l2", 64)).astype(int)
    wanted = naive.round_symbols(x, "l2", 64, grid, KEY, zero=zero)
    # r * steps and r - k / steps differ in the last float32 digit, which decides one case in a million
    assert np.count_nonzero(found != wanted) <= 1
    assert (np.abs(found - wanted) <= 1).all()


def test_powers_of_two_round_to_their_neighbours():
    x = np.array([0, -0.0, 1.0, -2.0, 3.0, -0.75, 2.0**-126, 1e-45, 1e-40, -3.4e38, 2.0**127], np.float32)
    drawn = [symbols_of(Rule("powers"), x, None, np.ones(1, np.float32), (k, KEY[1])) for k in range(200)]
    seen = [set(column) for column in (np.array(drawn, int) - 255).T.tolist()]
    assert seen[:8] == [{0}, {0}, {127}, {-128}, {128, 129}, {-126, -127}, {1}, {0}]
    assert seen[8] <= {0, 1}
    assert seen[9] <= {-254, -255}
    assert seen[10] == {254}


RULES = [
    Rule("uniform", steps=3),
    Rule("uniform", True, 7),
    Rule("uniform", steps=200),
    Rule("count", levels=np.array([0, 0.1, 1], np.float32)),
    Rule("count", levels=np.array([1], np.float32), mirrored=True),
    Rule("search", True, levels=np.linspace(0.01, 1, 256, dtype=np.float32)),
    Rule("powers"),
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.kind)
@pytest.mark.parametrize("bucket", [1, 7, 100, 1024, 5000])
def test_all_sinks_take_the_same_symbols(rule, bucket):
    """Packed and decoded on the spot is what becomes of the symbols, from any alignment on and in parts."""
    x = np.random.default_rng(5).standard_t(3, 4099).astype(np.float32)[2:]
    scales = np.ones(-(-x.size // bucket), np.float32) if rule.kind == "powers" else bucket_scales(x, "linf", bucket)
    v = Scaled(x, scales, bucket)
    symbols = rule.symbols(v, KEY)
    count = 511 if rule.kind == "powers" else 2 * rule.steps + 1 if rule.steps else 2 * rule.levels.size
    width = int(count).bit_length()
    packed = rule.packed(v, KEY, width)
    assert packed == naive.pack(symbols, width)
    values, decoded = np.random.default_rng(6).standard_normal(count).astype(np.float32), np.empty(x.size, np.float32)
    if rule.kind == "uniform":  # whose values are computed
        values = (np.arange(-rule.steps, rule.steps + 1, 1 + rule.mirrored) / rule.steps).astype(np.float32)
    wanted = values[symbols] * np.repeat(scales, bucket)[: x.size]
    tallies = rule.simulate(v, KEY, values, decoded)
    assert (decoded == wanted).all()
    assert (tallies == np.bincount(symbols, minlength=values.size)).all()
    decoded[:] = np.nan
    raw = np.frombuffer(packed, np.uint8)
    assert rounding.restore_packed(raw, width, bucket, scales, values, decoded)
    assert (decoded == wanted).all()
    assert not rounding.restore_packed(raw, width, bucket, scales, values[: symbols.max()], decoded)
    if rule.kind != "powers":  # norms and checks on the way
        late = Scaled(x, np.empty_like(scales), bucket, norm=norms.LINF)
        assert rule.packed(late, KEY, width) == packed
        assert (late.scales == scales).all()
        for bad in (np.nan, np.inf):
            x[4000] = bad
            with pytest.raises(UsageError, match=f"value 4000 is {bad}"):
                rule.simulate(late, KEY, values, decoded)
        x[4000] = 0
        scales, symbols = bucket_scales(x, "linf", bucket), rule.symbols(late, KEY)
    cut = 2000 // bucket
    whole = cut * bucket
    first = rule.symbols(Scaled(x[:whole], scales[:cut], bucket), KEY)
    rest = rule.symbols(Scaled(x[whole:], scales[cut:], bucket), KEY, whole)
    assert (np.concatenate([first, rest]) == symbols).all()


# fixed width


@pytest.mark.parametrize("width", range(1, 17))
def test_packing(width):
    """Also beyond a chunk, and with words that end before, at and after the end of the data."""
    for size in (*range(0, 70, 3), 1000, 1023, 1024, 1025, 1032, 2100):
        symbols = np.random.default_rng(size).integers(0, 1 << width, size).astype(np.uint16)
        out = np.full(-(-size * width // 8) + bits.SLACK, 255, np.uint8)
        bits.pack(symbols, width, out)
        packed = out[: -bits.SLACK].copy()
        assert packed.tobytes() == naive.pack(symbols, width)
        back = np.empty(size, np.uint16)
        assert bits.unpack(packed, width, back) == symbols.max(initial=0)
        assert (back == symbols).all()


# comparisons


@given(st.lists(st.tuples(floats, floats), min_size=1, max_size=400))
@settings(max_examples=50)
def test_compare(pairs):
    g, q = np.array(pairs, np.float32).T.copy()
    w, out = np.random.default_rng(g.size).exponential(size=g.size), np.empty(compare.SUMS)
    compare.compare(g, q, w, out)
    a, b = g.astype(np.float64), q.astype(np.float64)
    some, off = a != 0, b - a
    sums = (off**2, abs(off), abs(off[some] / a[some]), a * b, b * b, abs(b), w * off**2, b == 0, some)
    for k, (found, terms) in enumerate(zip(out.tolist(), sums, strict=True)):
        unit = math.fsum(abs(a * b)) if k == 3 else 0.0
        assert math.isclose(found, math.fsum(terms), rel_tol=1e-12, abs_tol=1e-12 * (unit or 1))
    assert out[compare.NORM1] == norms.power_sum(q, 1)


@given(st.lists(st.integers(-40, 40), min_size=1, max_size=700), st.integers(0, 2**32 - 1))
@settings(max_examples=50)
def test_distances_of_sorted_values(repeated, seed):
    """As pairs of values and counts, and with the zeros left out, in the order of the plain mean."""
    b = np.sort(np.array(repeated, np.float32))
    rng = np.random.default_rng(seed)
    a = np.sort(rng.normal(0, 20, b.size).astype(np.float32))
    values, counts = np.unique(b, return_counts=True)
    pairs = np.empty((2, values.size), np.uint32)
    mixed = rng.permutation(np.where((b == 0) & (rng.random(b.size) < 0.5), np.float32(-0.0), b))
    assert compare.distinct(mixed, *pairs[:, 1:].copy()) == -1
    assert compare.distinct(mixed, *pairs) == values.size
    assert pairs[0].view(np.float32).tolist() == values.tolist()
    assert pairs[1].tolist() == counts.tolist()
    wanted = [np.abs(a.astype(float) * s - b.astype(float) * t).mean() for s, t in ((1, 1), (0.3, 0.7))]
    found = compare.distances(a, b, 0, 0.3, 0.7)
    np.testing.assert_allclose(found, wanted, rtol=1e-12)
    left = np.empty(np.count_nonzero(b), np.float32)
    compare.nonzeros(b, left)
    assert compare.distances(a, left, int((b < 0).sum()), 0.3, 0.7) == found
    assert compare.spread(a, *pairs, 0.3, 0.7) == found


@pytest.mark.parametrize("size", [0, 1, 2, 500, 4096, 70_000, (1 << 18) - 1, 1 << 18, (1 << 20) + 3])
@pytest.mark.parametrize("law", ["heavy", "few", "bits"])
def test_values_in_order(size, law):
    """Also so many that they are sorted in two halves of their bits, and of one first half."""
    rng = np.random.default_rng(size)
    if law == "heavy":
        x = rng.standard_t(2, size).astype(np.float32)
    elif law == "few":
        x = np.float32(1) + rng.integers(0, 3, size).astype(np.float32) * np.float32(2**-23)
    else:
        x = rng.integers(0, 2**32, size, np.uint32).view(np.float32)
        x = np.where(np.isnan(x), np.float32(np.inf), x)
    wanted = np.sort(x)
    given = x.copy()
    np.testing.assert_array_equal(compare.ascending(x), wanted)
    np.testing.assert_array_equal(x, given)


def test_zeros_have_an_order_and_what_is_no_number_comes_last():
    x = np.array([np.nan, 1, 0, -0.0, -np.inf, np.inf, -1], np.float32)
    found = compare.ascending(x)
    np.testing.assert_array_equal(found, [-np.inf, -1, 0, 0, 1, np.inf, np.nan])
    assert np.signbit(found).tolist() == [True, True, True, False, False, False, False]


@pytest.mark.parametrize(("rows", "size"), [(1, 1), (1, 900), (7, 33), (3, 5000)])
@pytest.mark.parametrize("most", [4, 2**32])
def test_the_largest_of_each_row(rows, size, most):
    ranks = np.random.default_rng(size).integers(0, most, (rows, size), np.uint32)
    for count in {1, -(-size // 50), size}:
        # Stable: of equal ones those that come first.
        order = np.argsort(most - 1 - ranks.astype(np.int64), axis=1, kind="stable")[:, :count]
        wanted = np.sort(order, axis=1) + size * np.arange(rows)[:, None]
        found = np.empty(rows * count + 1, np.int64)
        compare.largest(ranks, count, found)
        np.testing.assert_array_equal(found[:-1], wanted.reshape(-1))


# tables, codes and bits


@pytest.mark.parametrize("count", [1, 2, 15, 96, 97, 127, 128, 255, 256, 300])
def test_places_in_a_table(count):
    rng = np.random.default_rng(count)
    middles = np.sort(rng.standard_normal(count).astype(np.float32))
    scales = np.array([1.0, 0.0, 4.0], np.float32)
    # Values on middles too, which are not above them.
    x = np.concatenate([rng.choice(middles, 700), rng.standard_normal(2300).astype(np.float32) * 2])
    out = np.empty(x.size, np.uint16)
    elementwise.round_to_table(x, 1100, scales, middles, out)
    divisors = np.where(scales == 0, np.float32(np.inf), scales)[np.arange(x.size) // 1100]
    assert out.tolist() == np.searchsorted(middles, x / divisors).tolist()


def test_sums_by_code():
    rng = np.random.default_rng(0)
    x, codes = rng.standard_normal(3000).astype(np.float32), rng.integers(0, 7, 3000).astype(np.uint16)
    sums, counts = np.zeros(9), np.zeros(9, np.int64)
    elementwise.add_by_code(x, codes, sums, counts)
    assert sums.tolist() == np.bincount(codes, x, 9).tolist()
    assert counts.tolist() == np.bincount(codes, minlength=9).tolist()


@pytest.mark.parametrize("bucket", [1, 13, 1000])
def test_two_values_of_each_bucket(bucket):
    rng = np.random.default_rng(bucket)
    flags, values = rng.integers(0, 2, 1000, np.uint8), rng.standard_normal((-(-1000 // bucket), 2)).astype(np.float32)
    out = np.empty(1000, np.float32)
    elementwise.restore(flags, bucket, values, out)
    assert out.tolist() == values[np.arange(1000) // bucket, flags].tolist()
