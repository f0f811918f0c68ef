import math
from fractions import Fraction

import helpers_mcgq as naive
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gtrace
from gtrace.codecs import mcgq
from gtrace.coding import ENVELOPE_BYTES
from gtrace.coding.runlength import measure_runs
from gtrace.errors import PayloadError, UsageError
from gtrace.kernels import counter
from gtrace.kernels.mcgq import CHAIN
from gtrace.metrics import Reference
from gtrace.types import Key, State

GOLDEN = naive.golden()
FLOAT32_MAX = float(np.finfo(np.float32).max)


def xi_of(key):
    drawn = np.empty(1, np.float32)
    counter.fill_uniform(drawn, np.uint64(key[0]), np.uint64(key[1]), 0)
    return float(drawn[0])


# Counts


@pytest.mark.parametrize("case", GOLDEN["counts"], ids=lambda case: case["name"])
def test_golden_counts(case):
    q = mcgq.counts(case["g"], case["K"], case["xi"])
    assert q.dtype == np.int64
    assert q.tolist() == case["counts"] != case["loose"]
    assert mcgq.sample_count(len(case["g"]), case["K"]) == case["N"]
    assert naive.moments(case["g"], case["N"])[0] == case["scale"]
    assert mcgq.payload_bits(q) == case["bits"]
    assert mcgq.payload_bits(q, with_norm=True) == case["bits_with_norm"]
    assert measure_runs(q).value_bits == case["max_bits"]


def tie_heavy(seed):
    """A few small or rounded values, and an offset that puts samples on the boundaries between them."""
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, 9))
    g = rng.integers(-4, 5, n).astype(np.float32)
    if rng.random() < 0.2:
        # sums that round, so that it is the float64 sums that count
        g = (g * 2.0 ** rng.integers(-60, 3, n)).astype(np.float32)
    elif rng.random() < 0.7:
        # a norm that is a power of two: every boundary lies on the grid of offsets
        rest = int(np.abs(g[:-1]).sum())
        g[-1] = rng.choice([-1, 1]) * ((1 << rest.bit_length()) - rest)
    amount = float(rng.choice([0.2, 0.25, 1 / 3, 0.5, 1, 1, 1, 1.5, 2, 3]))
    kind = rng.integers(9)
    if kind == 0:
        return g, amount, 0.0
    if kind == 1:
        return g, amount, float(rng.choice([1, 3, 2**22, 2**23, 2**24 - 1])) * 2.0**-24
    if kind == 2:
        return g, amount, float(rng.integers(0, 2**24)) * 2.0**-24
    sums = naive.running_sums(g)
    boundary = mcgq.sample_count(n, amount) * sums[int(rng.integers(max(1, n - 1)))] / (sums[-1] or 1)
    return g, amount, min(float(boundary % 1), 1 - 2.0**-53)


def test_counts_are_those_of_the_literal_loop_also_at_ties():
    ties = 0
    for seed in range(4000):
        g, amount, xi = tie_heavy(seed)
        samples = mcgq.sample_count(g.size, amount)
        found = mcgq.counts(g, amount, xi)
        assert found.tolist() == naive.literal_counts(g, samples, xi), (g, amount, xi)
        assert np.abs(found).sum() == (samples if g.any() else 0)
        sums = naive.running_sums(g)
        ties += bool(g.any()) and any((samples * s / sums[-1] - Fraction(xi)) % 1 == 0 for s in sums[:-1])
    assert ties > 1500


def test_ties_among_more_samples_than_a_window_of_fixed_width_would_see():
    rng = np.random.default_rng(1)
    for _ in range(300):
        g = rng.integers(-9, 10, 6).astype(np.float32)
        g[0] = 1
        samples = int(rng.integers(2**30, 2**47))
        samples -= samples % int(np.abs(g).sum()) if rng.random() < 0.5 else 0
        xi = float(rng.choice([0.0, 2.0**-24, 0.5, 1 - 2.0**-24]))
        starts = mcgq._starts(g)
        x = mcgq._sample(g, mcgq._total(g, starts), starts, samples, xi)
        assert x.tolist() == naive.exact_counts(g, samples, xi)


@pytest.mark.parametrize("amount", [0.01, 1.0, 3.0])
def test_long_tensors_follow_the_sequential_float64_sum(amount):
    g = np.random.default_rng(2).standard_t(3, 100_003).astype(np.float32)
    sums = np.cumsum(np.abs(g).astype(np.float64))
    xi = 0.3
    ends = np.ceil(mcgq.sample_count(g.size, amount) * sums / sums[-1] - xi)
    assert (mcgq.counts(g, amount, xi) == np.sign(g) * np.diff(ends, prepend=0)).all()


@pytest.mark.parametrize("size", [1, 511, 512, 5000])
@pytest.mark.parametrize(
    "units",
    [
        pytest.param(lambda rng, n: rng.standard_t(2, n), id="heavy tail"),
        pytest.param(lambda rng, n: rng.integers(0, 64, n) * 2.0**-35, id="ties"),
        pytest.param(lambda rng, n: np.full(n, 1e-45), id="denormals"),
        pytest.param(lambda rng, n: 2.0 ** rng.integers(-60, 60, n), id="many exponents"),
        pytest.param(lambda rng, n: np.zeros(n), id="zeros"),
    ],
)
def test_chains_of_a_sum_give_the_sequential_float64_sum(units, size):
    rng = np.random.default_rng(size)
    x = np.concatenate([[2.0**18, 2.0**-34], units(rng, size)]).astype(np.float32)[rng.integers(0, 3) :]
    sums = np.cumsum(np.abs(x).astype(np.float64))
    starts = mcgq._starts(x)
    assert mcgq._total(x, starts) == sums[-1]
    assert starts.tolist() == [0, *sums[CHAIN - 1 : -1 : CHAIN]]


def test_shape_and_zeros():
    assert mcgq.counts(np.zeros((2, 3)), 1.0, 0.5).tolist() == [[0, 0, 0], [0, 0, 0]]
    assert mcgq.counts([], 1.0, 0.5).size == 0
    assert mcgq.counts(np.ones((2, 2)), 1.0, 0.5).tolist() == [[1, 1], [1, 1]]


@pytest.mark.parametrize(
    ("n", "amount", "samples"),
    [(25, 0.28, 7), (25, 0.281, 8), (10, 0.1, 1), (10, 0.001, 1), (0, 1.0, 1), (3, 2.5, 8), (7, 3, 21), (100, 0.07, 7)],
)
def test_number_of_samples(n, amount, samples):
    assert mcgq.sample_count(n, amount) == samples


@pytest.mark.parametrize(
    ("g", "amount", "xi", "words"),
    [
        ([1.0], 0.0, 0.0, "above 0"),
        ([1.0], -1.0, 0.0, "above 0"),
        ([1.0], math.nan, 0.0, "above 0"),
        ([1.0], math.inf, 0.0, "above 0"),
        ([1.0], 1e15, 0.0, "2\\^48"),
        ([1.0], 1.0, 1.0, "xi=1"),
        ([1.0], 1.0, -0.1, "xi=-0.1"),
        ([1.0, np.nan], 1.0, 0.0, "value 1 is nan"),
        ([np.inf], 1.0, 0.0, "value 0 is inf"),
        ([FLOAT32_MAX, FLOAT32_MAX], 1.0, 0.0, "beyond float32"),
        (["a"], 1.0, 0.0, "real numbers"),
    ],
)
def test_what_cannot_be_sampled(g, amount, xi, words):
    with pytest.raises(UsageError, match=words):
        mcgq.counts(g, amount, xi)


# Moments


@pytest.mark.parametrize("amount", [0.3, 1.0, 4.0])
def test_moments_are_the_means_over_all_offsets(amount):
    g = np.array([0.5, -3, 0, 1, 0.25, -0.25, 7, 2], np.float32)
    steps = 2**12
    draws = np.array([mcgq.counts(g, amount, (k + 0.5) / steps) for k in range(steps)], np.float64)
    samples = mcgq.sample_count(g.size, amount)
    scale, mean, variance, absolute_error = naive.moments(g, samples)
    decoded = draws * scale
    assert np.abs(draws - mean).max() < 1
    # the offsets at which a count changes fall between the steps
    close = {"atol": 4 / steps * scale * max(1, scale), "rtol": 0}
    np.testing.assert_allclose(decoded.mean(0), g, **close)
    np.testing.assert_allclose(decoded.var(0), variance, **close)
    np.testing.assert_allclose(np.abs(decoded - g).mean(0), absolute_error, **close)
    assert mean.sum() == pytest.approx(samples * (g.sum() / np.abs(g).sum()))


def decoded_errors(spec, g, workers, draws=60):
    c = gtrace.codec(spec)
    state = c.init(g.size)
    for draw in range(draws):
        keys = [Key.derive(3, tensor="g", draw=draw, worker=w) for w in range(workers)]
        yield c.aggregate([c.decode(b"", c.encode(state, g, key), g.size) for key in keys]) - g.astype(np.float64)


@pytest.mark.parametrize("amount", [0.05, 1.0])
@pytest.mark.parametrize("workers", [1, 4])
def test_sampled_error_is_the_expected_one_over_the_number_of_workers(amount, workers):
    g = np.random.default_rng(4).standard_t(3, 3001).astype(np.float32)
    off = np.array(list(decoded_errors(f"mcgq:amount={amount}", g, workers)))
    errors = (off**2).sum(1)
    variance = naive.moments(g, mcgq.sample_count(g.size, amount))[2] / workers
    expected = variance.sum()
    assert abs(errors.mean() - expected) < 4 * errors.std() / math.sqrt(len(errors)) + 1e-6 * expected
    variance /= len(errors)
    known = variance > 1e-3 * variance.max()
    # One offset moves all coordinates, so this mean of squares scatters as one of few numbers would.
    assert (off.mean(0)[known] ** 2 / variance[known]).mean() < 1.5


# Payloads


@pytest.mark.parametrize("case", GOLDEN["bits"], ids=lambda case: case["name"])
def test_golden_payloads(case):
    q, n = case["q"], len(case["q"])
    assert mcgq.payload_bits(q) == case["total"]
    assert mcgq.payload_bits(q, True) == case["total_with_norm"]
    assert measure_runs(np.array(q, np.int64)).value_bits == case["Bg"]
    assert mcgq.encode_counts(q).hex() == case["hex"]
    assert mcgq.encode_counts(q, norm=2.5).hex() == case["hex_with_norm_2_5"]
    for norm in (None, 2.5):
        for with_norm in (None, norm is not None):
            found, sent = mcgq.decode_counts(mcgq.encode_counts(q, norm), n, with_norm)
            assert (found.tolist(), sent) == (q, norm)


@given(
    st.lists(st.one_of(st.just(0), st.integers(-3, 3), st.integers(-(2**40), 2**40), st.just(2**63 - 1)), max_size=50),
    st.none() | st.floats(0, FLOAT32_MAX, width=32),
)
@settings(max_examples=300)
def test_payloads_are_what_the_twin_writes(q, norm):
    text = naive.runlength_bits(q, norm)
    data = mcgq.encode_counts(np.array(q, np.int64), norm)
    assert data == naive.high_first(text)
    assert mcgq.payload_bits(np.array(q, np.int64), norm is not None) == len(text)
    found, sent = mcgq.decode_counts(data, len(q), norm is not None)
    assert (found.tolist(), sent) == (q, norm)


def test_every_small_tensor_comes_back_with_and_without_a_norm():
    for q in naive.small_tensors():
        for norm in (None, 0.0, 1.5):
            found, sent = mcgq.decode_counts(mcgq.encode_counts(q, norm), len(q))
            assert (tuple(found.tolist()), sent) == (q, norm)


def test_the_norm_is_rounded_to_float32():
    assert mcgq.decode_counts(mcgq.encode_counts([1], 0.1), 1)[1] == float(np.float32(0.1)) != 0.1
    for bad in (-1.0, math.nan, math.inf, 1e39):
        with pytest.raises(UsageError, match="norm"):
            mcgq.encode_counts([1], bad)


def test_norms_that_no_encoder_sends_are_refused():
    head, body = bytes.fromhex("0000000200000000"), bytes([0b01_000000])
    for norm in ("ff800000", "7fc00000", "bf800000"):
        with pytest.raises(PayloadError, match="norm of"):
            mcgq.decode_counts(head + bytes.fromhex(norm) + body, 1, with_norm=True)
    with pytest.raises(PayloadError, match="before its norm"):
        mcgq.decode_counts(head + b"\0\0", 1, with_norm=True)
    with pytest.raises(UsageError, match="-1 counts"):
        mcgq.decode_counts(head, -1)


def test_a_payload_that_reads_both_ways_is_never_guessed():
    q = [1, 0, 0, 0, 0, -3, -2, -2, 0, -4, -1, 3, -3, -2, -1, -3, 0, -1, 0]
    data = mcgq.encode_counts(q)
    with pytest.raises(PayloadError, match="with and without a norm"):
        mcgq.decode_counts(data, len(q))
    assert mcgq.decode_counts(data, len(q), with_norm=False)[0].tolist() == q
    assert mcgq.decode_counts(data, len(q), with_norm=True)[0].tolist() != q


def test_an_untrusted_size_takes_no_memory():
    with naive.memory_below(1 << 20):
        for n in (9, 2**26, 2**40, 2**60):
            for with_norm in (None, True, False):
                with pytest.raises(PayloadError):
                    mcgq.decode_counts(bytes.fromhex("0000000300000028" + "5c6c24" * 5), n, with_norm)


# Budget


def budget(g, bits):
    return mcgq._budget(g, mcgq._total(g), bits)


@pytest.mark.parametrize("bits", [2, 3, 4, 8, 16])
def test_a_budget_is_the_most_samples_whose_counts_fit(bits):
    rng = np.random.default_rng(6)
    for law in (rng.normal(size=500), rng.standard_t(2, 500), np.ones(7), [1e-30, 1], [3.0, 1.0, 4.0]):
        g = np.asarray(law, np.float32)
        samples = budget(g, bits)
        limit = 2 ** (bits - 1) - 1
        top = Fraction(float(np.abs(g).max()))
        total = naive.running_sums(g)[-1]
        assert samples * top <= limit * total < (samples + 1) * top
        for key in range(20):
            starts = mcgq._starts(g)
            mcgq._total(g, starts)
            assert np.abs(mcgq._sample(g, float(total), starts, samples, xi_of((key, 1)))).max() <= limit
    assert budget(np.zeros(5, np.float32), bits) == 1


# The codec


@pytest.mark.parametrize("coder", ["runlength", "gamma", "delta", "omega"])
@pytest.mark.parametrize("with_norm", [True, False])
def test_a_payload_holds_the_counts_of_its_key(coder, with_norm):
    g = np.random.default_rng(7).standard_t(3, 999).astype(np.float32)
    c = gtrace.codec("mcgq", amount=0.5, coder=coder, with_norm=with_norm)
    key = Key.derive(0, tensor="w")
    payload = c.encode(c.init(g.size), g, key)
    q = mcgq.counts(g, 0.5, xi_of(key))
    if coder == "runlength":
        bits = mcgq.payload_bits(q, with_norm)
    else:
        text = "".join(naive.elias(coder, naive.zigzag(v)) for v in q.tolist())
        bits = 32 * with_norm + len(text)
    assert len(payload) == ENVELOPE_BYTES + -(-bits // 8)
    scale = float(np.float32(naive.running_sums(g)[-1])) / 500 if with_norm else 1.0
    assert (c.decode(b"", payload, g.size) == (q * scale).astype(np.float32)).all()


def test_the_budget_is_that_of_the_tensor():
    g = np.random.default_rng(8).standard_t(3, 999).astype(np.float32)
    c = gtrace.codec("mcgq:bits=3")
    decoded = c.decode(b"", c.encode(c.init(g.size), g, (1, 2)), g.size)
    unit = float(np.abs(g).sum(dtype=np.float64)) / budget(g, 3)
    assert set(np.rint(np.abs(decoded) / unit).astype(int)) == {0, 1, 2, 3}


@pytest.mark.parametrize("scale", ["gradient", "accumulated"])
def test_accumulation_resets_what_arrived(scale):
    rng = np.random.default_rng(9)
    n, amount = 200, 0.1
    c = gtrace.codec("mcgq", amount=amount, accumulate=True, scale=scale)
    state = c.init(n)
    held = np.zeros(n, np.float32)
    for step in range(12):
        g = rng.normal(size=n).astype(np.float32)
        key = Key.derive(0, tensor="w", step=step)
        decoded = c.decode(b"", c.encode(state, g, key), n)
        held = held + g
        q = mcgq.counts(held, amount, xi_of(key))
        norm = np.abs(g if scale == "gradient" else held).sum(dtype=np.float64)
        np.testing.assert_allclose(decoded, q * float(norm) / 20, rtol=1e-6)
        before = state.arrays["accumulated"].copy()
        after = c.update(state, g, decoded)
        assert (state.arrays["accumulated"] == before).all(), "a state must not be changed in place"
        state = State.from_arrays(after.to_arrays())
        held[q != 0] = 0
        assert (state.arrays["accumulated"] == held).all()
    assert np.count_nonzero(held) > 100


def test_accumulation_stops_at_the_largest_float32():
    c = gtrace.codec("mcgq:accumulate=true")
    state = State(2, {"accumulated": np.array([FLOAT32_MAX, -FLOAT32_MAX], np.float32)})
    g = np.array([FLOAT32_MAX, -FLOAT32_MAX], np.float32)
    after = c.update(state, g, np.zeros(2, np.float32))
    assert after.arrays["accumulated"].tolist() == g.tolist()
    assert np.isfinite(c.decode(b"", c.encode(state, g, (0, 0)), 2)).all()


def test_distance_is_that_of_the_metrics():
    rng = np.random.default_rng(10)
    g = rng.normal(size=777).astype(np.float32)
    q = mcgq.counts(g, 0.2, 0.5)
    assert mcgq.distance(g, q) == pytest.approx(Reference(g).compare(q).w1_mcgq, rel=1e-12)
    assert mcgq.distance([3.0, -1.0], [1, 1]) == pytest.approx((abs(-0.25 - 0.5) + abs(0.75 - 0.5)) / 2)
    assert math.isnan(mcgq.distance([0.0, 0.0], [1, 0]))
    with pytest.raises(UsageError, match="2 quantized values for 1"):
        mcgq.distance([1.0], [1, 2])


def test_dynamic_sampling_telescopes():
    rng = np.random.default_rng(11)
    n, delta = 300, 150.0
    c = gtrace.codec("mcgq", amount=0.5, delta_k=delta)
    state = c.init(n)
    first = None
    moved = set()
    for step in range(6):
        g = rng.standard_t(3, n).astype(np.float32)
        key = Key.derive(0, tensor="w", step=step)
        samples = mcgq.sample_count(n, float(state.arrays["amount"]))
        decoded = c.decode(b"", c.encode(state, g, key), n)
        unit = float(np.abs(g).sum(dtype=np.float64)) / samples
        assert round(float(np.abs(decoded).sum(dtype=np.float64)) / unit) == samples
        state = State.from_arrays(c.update(state, g, decoded).to_arrays())
        now = mcgq.distance(g, decoded)
        first = now if first is None else first
        assert float(state.arrays["amount"]) == pytest.approx(0.5 + delta * (first - now), rel=1e-12)
        moved.add(float(state.arrays["amount"]))
    assert len(moved) > 4


def test_dynamic_sampling_stays_within_its_bounds():
    c = gtrace.codec("mcgq:delta_k=1e9")
    g = np.random.default_rng(12).normal(size=50).astype(np.float32)
    far, near = np.eye(1, 50, dtype=np.float32)[0], g
    state = c.update(c.init(50), g, far)
    assert float(state.arrays["amount"]) == 1.0, "the first distance leaves the amount as it is"
    state = c.update(state, g, near)
    assert float(state.arrays["amount"]) == 32.0
    assert c.update(state, g, np.zeros(50, np.float32)) == state
    state = c.update(state, g, far)
    assert float(state.arrays["amount"]) == 1 / 50


def test_kind_of_an_instance():
    for spec, stateful, unbiased in [
        ("mcgq", False, True),
        ("mcgq:bits=3", False, True),
        ("mcgq:accumulate=true", True, False),
        ("mcgq:delta_k=10", True, True),
        ("mcgq:with_norm=false", False, False),
    ]:
        c = gtrace.codec(spec)
        assert (c.stateful, c.unbiased) == (stateful, unbiased)
    assert (mcgq.Mcgq.stateful, mcgq.Mcgq.unbiased) == (False, True)
    state = State(3)
    assert gtrace.codec("mcgq").update(state, np.ones(3), np.ones(3, np.float32)) is state


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("mcgq:bits=3,delta_k=5", "both set"),
        ("mcgq:scale=accumulated", "needs accumulate=true"),
        ("mcgq:amount=0", "at least"),
        ("mcgq:bits=1", "2 to 24"),
        ("mcgq:delta_k=-1", "at least 0"),
        ("mcgq:coder=huffman", "coder=huffman"),
    ],
)
def test_parameters_that_make_no_codec(spec, words):
    with pytest.raises(UsageError, match=words):
        gtrace.codec(spec)


def test_a_norm_beyond_float32_is_sent_as_the_largest():
    g = np.full(5, FLOAT32_MAX, np.float32)
    c = gtrace.codec("mcgq")
    decoded = c.decode(b"", c.encode(c.init(5), g, (3, 4)), 5)
    np.testing.assert_allclose(decoded, FLOAT32_MAX / 5, rtol=1e-6)
