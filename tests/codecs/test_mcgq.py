import math
from fractions import Fraction

import helpers_mcgq as naive
import numpy as np
import pytest
from helpers_codecs import body, gradients, once, walk
from hypothesis import given, settings
from hypothesis import strategies as st

import gtrace
from gtrace.codecs import mcgq
from gtrace.errors import PayloadError, UsageError
from gtrace.kernels import counter
from gtrace.types import Key

GOLDEN = naive.golden()
FLOAT32_MAX = float(np.finfo(np.float32).max)


def xi_of(key):
    drawn = np.empty(1, np.float32)
    counter.fill_uniform(drawn, np.uint64(key[0]), np.uint64(key[1]), 0)
    return float(drawn[0])


def sampled(g, samples, xi):
    """Counts of more samples than an amount can name exactly."""
    return mcgq._sample(g, *mcgq._summed(g), samples, xi)


# Counts


@pytest.mark.parametrize("case", GOLDEN["counts"], ids=lambda case: case["name"])
def test_golden_counts(case):
    q = mcgq.counts(case["g"], case["K"], case["xi"])
    assert q.dtype == np.int64
    assert q.tolist() == case["counts"] != case["loose"]
    assert mcgq.sample_count(len(case["g"]), case["K"]) == case["N"]
    assert mcgq._summed(np.array(case["g"], np.float32))[0] / case["N"] == case["scale"]
    assert mcgq.payload_bits(q) == case["bits"]
    assert mcgq.payload_bits(q, with_norm=True) == case["bits_with_norm"]
    assert mcgq.Runs.of([q]).value_bits == case["max_bits"]


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
    amount = float(rng.choice([0.2, 0.25, 1 / 3, 0.5, 1, 1.5, 2, 3], p=[0.1] * 4 + [0.3] + [0.1] * 3))
    if rng.random() < 1 / 3:
        return g, amount, float(rng.choice([0, 1, 2**22, 2**23, 2**24 - 1, rng.integers(2**24)])) * 2.0**-24
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


UNITS = {
    "heavy tail": lambda rng, n: rng.standard_t(2, n),
    "ties": lambda rng, n: rng.integers(0, 64, n) * 2.0**-35,
    "denormals": lambda rng, n: np.full(n, 1e-45),
    "many exponents": lambda rng, n: 2.0 ** rng.integers(-60, 60, n),
}


@pytest.mark.parametrize("size", [6, 511, 5000])
@pytest.mark.parametrize("units", UNITS)
def test_counts_of_many_samples_follow_the_sequential_float64_sum(units, size):
    """The sum is taken in chains side by side; so many samples show its last bits, and ties of any width."""
    x = np.concatenate([[2.0**18, 2.0**-34], UNITS[units](np.random.default_rng(size), size)]).astype(np.float32)
    sums = np.cumsum(np.abs(x).astype(np.float64))
    assert mcgq._summed(x)[0] == sums[-1]
    for samples, xi in ((2**46 - 1, 1 - 2.0**-24), (2**40, 0.0), (size // 2, 0.5)):
        assert sampled(x, samples, xi).tolist() == naive.exact_counts(x, samples, xi)


def test_numbers_of_samples_and_shapes():
    near = {(25, 0.28): 7, (25, 0.281): 8, (10, 0.1): 1, (10, 0.001): 1, (0, 1): 1, (3, 2.5): 8, (100, 0.07): 7}
    assert {wanted: mcgq.sample_count(*wanted) for wanted in near} == near
    for g in (np.zeros((2, 3)), np.ones((2, 2)), np.empty(0)):
        assert np.array_equal(mcgq.counts(g, 1.0, 0.5), g)


@pytest.mark.parametrize(
    ("g", "amount", "xi", "words"),
    [
        *(([1.0], amount, 0.0, "above 0") for amount in (0.0, math.nan)),
        ([1.0], 1e15, 0.0, "2\\^48"),
        ([1.0], 1.0, 1.0, "xi=1"),
        ([1.0, np.nan], 1.0, 0.0, "value 1 is nan"),
        ([FLOAT32_MAX, FLOAT32_MAX], 1.0, 0.0, "beyond float32"),
        (["a"], 1.0, 0.0, "real numbers"),
    ],
)
def test_what_cannot_be_sampled(g, amount, xi, words):
    with pytest.raises(UsageError, match=words):
        mcgq.counts(g, amount, xi)


# Payloads


@pytest.mark.parametrize("case", GOLDEN["bits"], ids=lambda case: case["name"])
def test_golden_payloads(case):
    q, n = case["q"], len(case["q"])
    assert mcgq.payload_bits(q) == case["total"]
    assert mcgq.payload_bits(q, True) == case["total_with_norm"]
    assert mcgq.Runs.of([np.array(q, np.int64)]).value_bits == case["Bg"]
    for norm, wanted in ((None, case["hex"]), (2.5, case["hex_with_norm_2_5"])):
        data = mcgq.encode_counts(q, norm)
        assert data.hex() == wanted
        for with_norm in (None, norm is not None):
            found, sent = mcgq.decode_counts(data, n, with_norm)
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


def test_norms_are_rounded_to_float32_or_refused():
    assert mcgq.decode_counts(mcgq.encode_counts([1], 0.1), 1)[1] == float(np.float32(0.1)) != 0.1
    for bad in (-1.0, math.nan, math.inf, 1e39):
        with pytest.raises(UsageError, match="norm"):
            mcgq.encode_counts([1], bad)
    for norm in ("ff800000", "7fc00000", "bf800000"):
        with pytest.raises(PayloadError, match="norm of"):
            mcgq.decode_counts(bytes.fromhex("0000000200000000" + norm + "40"), 1, with_norm=True)


def test_a_payload_that_reads_both_ways_is_never_guessed():
    q = [1, 0, 0, 0, 0, -3, -2, -2, 0, -4, -1, 3, -3, -2, -1, -3, 0, -1, 0]
    data = mcgq.encode_counts(q)
    with pytest.raises(PayloadError, match="with and without a norm"):
        mcgq.decode_counts(data, len(q))
    assert mcgq.decode_counts(data, len(q), with_norm=False)[0].tolist() == q
    assert mcgq.decode_counts(data, len(q), with_norm=True)[0].tolist() != q


# The codec


@pytest.mark.parametrize("bits", [2, 4, 16])
def test_a_budget_is_the_most_samples_whose_counts_fit(bits):
    rng = np.random.default_rng(6)
    for law in (rng.normal(size=500), rng.standard_t(2, 500), np.ones(7), [1e-30, 1], [3.0, 1.0, 4.0]):
        g = np.asarray(law, np.float32)
        top, total = Fraction(float(np.abs(g).max())), naive.running_sums(g)[-1]
        c = mcgq.Mcgq(bits=bits)
        samples, limit = c._samples(c.init(g.size), mcgq._summed(g)[0], float(top)), 2 ** (bits - 1) - 1
        assert samples * top <= limit * total < (samples + 1) * top
        assert max(np.abs(sampled(g, samples, xi_of((key, 1)))).max() for key in range(20)) <= limit


@pytest.mark.parametrize("coder", ["runlength", "gamma", "delta", "omega"])
@pytest.mark.parametrize("with_norm", [True, False])
def test_a_payload_holds_the_counts_of_its_key(coder, with_norm):
    (g,), key = gradients(1, 999, seed=7), Key.derive(0, tensor="w")
    c = gtrace.codec("mcgq", amount=0.5, coder=coder, with_norm=with_norm)
    q = mcgq.counts(g, 0.5, xi_of(key))
    if coder == "runlength":
        bits = mcgq.payload_bits(q, with_norm)
    else:
        bits = 32 * with_norm + sum(len(naive.elias(coder, naive.zigzag(v))) for v in q.tolist())
    assert len(body(c, g, key)) == -(-bits // 8)
    scale = float(np.float32(naive.running_sums(g)[-1])) / 500 if with_norm else 1.0
    assert (once(c, g, key=key) == (q * scale).astype(np.float32)).all()


@pytest.mark.parametrize("scale", ["gradient", "accumulated"])
def test_accumulation_resets_what_arrived(scale):
    c, held = gtrace.codec("mcgq", amount=0.1, accumulate=True, scale=scale), np.zeros(200, np.float32)
    before = c.init(200)
    for step, (g, decoded, after) in enumerate(walk(c, gradients(12, 200, seed=9))):
        assert (before.arrays["accumulated"] == held).all(), "a state must not be changed in place"
        held = held + g
        q = mcgq.counts(held, 0.1, xi_of((step, 7)))
        norm = np.abs(g if scale == "gradient" else held).sum(dtype=np.float64)
        np.testing.assert_allclose(decoded, q * float(norm) / 20, rtol=1e-6)
        held[q != 0] = 0
        assert (after.arrays["accumulated"] == held).all()
        before = after
    assert np.count_nonzero(held) > 100


def test_dynamic_sampling_telescopes():
    c, steps = gtrace.codec("mcgq", amount=0.5, delta_k=150.0), gradients(6, 300, seed=11)
    first, moved = None, [0.5]
    for g, decoded, state in walk(c, steps):
        samples = mcgq.sample_count(300, moved[-1])
        unit = float(np.abs(g).sum(dtype=np.float64)) / samples
        assert round(float(np.abs(decoded).sum(dtype=np.float64)) / unit) == samples
        now = mcgq.distance(g, decoded)
        first = now if first is None else first
        moved.append(float(state.arrays["amount"]))
        assert moved[-1] == pytest.approx(0.5 + 150.0 * (first - now), rel=1e-12)
    assert len(set(moved)) > 4
