"""Sparsifiers: what they keep, what they send, what they remember."""

import numpy as np
import pytest
from helpers_codecs import body, decode_sealed, encode_sparse, fixed_positions, once

import gtrace
from gtrace import testing
from gtrace.codecs.sparse import kept, largest, magnitudes
from gtrace.codecs.sparsifiers import AdaComp, Dgc, Dropping, MemSgd, RandomK, TopK
from gtrace.coding import Floats
from gtrace.coding.sparse import encode_positions
from gtrace.kernels import elementwise
from gtrace.types import Key


def gradients(steps, size=400, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.standard_t(3, size).astype(np.float32) for _ in range(steps)]


def naive_largest(x, count):
    """Positions of the largest magnitudes, of equal ones the first."""
    return sorted(sorted(range(len(x)), key=lambda i: (-abs(float(x[i])), i))[:count])


def test_a_random_choice_keeps_a_mean_that_is_right():
    testing.check_spike(RandomK(), seed=1)


# what is kept


def test_how_many_are_kept():
    assert [kept(0.25, n) for n in (0, 1, 2, 6, 10, 400)] == [0, 1, 1, 2, 2, 100]
    assert kept(0.0, 50) == 1
    assert kept(1.0, 50) == 50


@pytest.mark.parametrize("size", [0, 1, 2, 17, 300])
def test_the_largest_and_of_equal_ones_the_first(size):
    rng = np.random.default_rng(size)
    for spread in (2, 5, 1000):
        x = rng.integers(-spread, spread + 1, size).astype(np.float32)
        for count in {0, min(1, size), size // 3, size - size // 4, size}:
            assert largest(magnitudes(x), count).tolist() == naive_largest(x, count)


def test_words_of_a_key_fill_any_length_alike():
    short, long = np.empty(10, np.uint32), np.empty(1000, np.uint32)
    elementwise.fill_words(np.uint64(3), np.uint64(4), short)
    elementwise.fill_words(np.uint64(3), np.uint64(4), long)
    assert np.array_equal(short, long[:10])
    assert np.unique(long).size == 1000


@pytest.mark.parametrize("coder", ["gaps", "fixed"])
@pytest.mark.parametrize("ratio", [0.003, 0.1, 0.5, 1.0])
def test_topk_sends_the_largest_exactly(ratio, coder):
    (x,) = gradients(1)
    got = once(TopK(ratio=ratio, coder=coder), x)
    wanted = np.zeros_like(x)
    wanted[naive_largest(x, kept(ratio, x.size))] = x[naive_largest(x, kept(ratio, x.size))]
    assert np.array_equal(got, wanted)


def test_bits_of_positions_and_values():
    x = np.random.default_rng(1).normal(size=1000).astype(np.float32)
    assert 8 * len(body(TopK(ratio=0.04, coder="fixed"), x)) == 40 * (10 + 32)
    assert 8 * len(body(TopK(ratio=0.001, coder="fixed"), x)) == 16 + 32
    assert 8 * len(body(TopK(coder="fixed"), x[:1])) == 32
    places = largest(magnitudes(x), 10)
    assert body(TopK(ratio=0.01), x) == encode_sparse(places, x[places], 1000)
    places = largest(magnitudes(x), 100)
    head = encode_positions(places, 1000)
    assert body(TopK(ratio=0.1), x) == len(head).to_bytes(4, "little") + head + Floats(x[places]).encode()
    assert len(body(TopK(ratio=0.04), x)) < len(body(TopK(ratio=0.04, coder="fixed"), x))
    assert 8 * len(body(RandomK(ratio=0.04, coder="fixed"), x)) == 32 + 40 * 32


def test_a_constant_tensor_has_ties_only():
    x = np.full(100, -2.0, np.float32)
    assert np.flatnonzero(once(TopK(ratio=0.1), x)).tolist() == list(range(10))
    assert np.array_equal(once(Dropping(ratio=0.1), x), x)


# random choice


def test_a_random_choice_is_fair_and_without_replacement():
    c, counts = RandomK(ratio=0.2), np.zeros(50)
    for draw in range(400):
        got = once(c, np.ones(50), key=Key.derive(0, tensor="t", draw=draw))
        assert np.count_nonzero(got) == 10
        assert np.unique(got).tolist() == [0, 5]
        counts += got / 5
    # A hypergeometric count has this deviation; the total is fixed.
    assert np.abs(counts - 80).max() < 4.5 * np.sqrt(400 * 0.2 * 0.8)
    assert counts.sum() == 4000


def test_unscaled_random_choice_sends_the_values_and_says_that_it_is_biased():
    (x,) = gradients(1)
    c = RandomK(ratio=0.3, scale=False)
    got = once(c, x)
    assert np.count_nonzero(got) == 120
    assert np.array_equal(got[got != 0], x[got != 0])
    assert RandomK().unbiased
    assert not c.unbiased
    assert np.array_equal(once(RandomK(ratio=0.3), x), got * np.float32(400 / 120))


# memory


@pytest.mark.parametrize("coder", ["gaps", "fixed"])
def test_mem_sgd_is_error_feedback_around_topk(coder):
    own, wrapped = MemSgd(ratio=0.05, coder=coder), gtrace.codec(f"ef:topk:ratio=0.05,coder={coder}")
    states = [own.init(400), wrapped.init(400)]
    for g in gradients(6):
        got = [once(c, g, s) for c, s in zip((own, wrapped), states, strict=True)]
        assert np.array_equal(*got)
        states = [c.update(s, g, d) for c, s, d in zip((own, wrapped), states, got, strict=True)]
        assert np.array_equal(states[0].arrays["residual"], states[1].arrays["residual"])


def test_dropping_sends_what_reaches_the_threshold_and_keeps_the_rest():
    c = Dropping(ratio=0.1)
    state, e = c.init(400), np.zeros(400, np.float32)
    for g in gradients(6):
        p = g + e
        threshold = np.sort(np.abs(p))[-40]
        wanted = np.where(np.abs(p) >= threshold, p, np.float32(0))
        got = once(c, g, state)
        assert np.array_equal(got, wanted)
        state, e = c.update(state, g, got), p - wanted
        assert np.array_equal(state.arrays["residual"], e)


def test_a_sampled_threshold_is_near_the_exact_one():
    x = np.random.default_rng(2).normal(size=100_000).astype(np.float32)
    sent = [np.count_nonzero(once(Dropping(ratio=0.1, sample=0.02), x, key=(k, k))) for k in range(5)]
    assert len(set(sent)) > 1
    # Of 2,000 sampled values about 200 lie above: a deviation of 7%.
    assert all(0.7 * 10_000 < n < 1.3 * 10_000 for n in sent)


def test_dropping_never_sends_zeros():
    x = np.zeros(100, np.float32)
    x[7] = 1.0
    assert body(Dropping(ratio=0.5), x) == encode_sparse([7], [1.0], 100)
    assert body(Dropping(ratio=0.5), np.zeros(100)) == encode_sparse([], [], 100)


def test_dgc_follows_the_papers_loop():
    c = Dgc(ratio=0.05, momentum=0.8, clip=15.0)
    state = c.init(400)
    u, v = np.zeros((2, 400), np.float32)
    for step, g in enumerate(gradients(8)):
        norm = np.linalg.norm(g.astype(np.float64))
        assert norm > 15, "clipping must have something to do"
        u = np.float32(0.8) * u + g * np.float32(15 / norm)
        v = v + u
        chosen = naive_largest(v, 20)
        got = once(c, g, state)
        assert np.flatnonzero(got).tolist() == chosen, step
        assert np.array_equal(got[chosen], v[chosen]), step
        state = c.update(state, g, got)
        u[chosen] = 0
        v[chosen] = 0
        assert np.array_equal(state.arrays["velocity"], u)
        assert np.array_equal(state.arrays["residual"], v)
        assert state.arrays["step"] == step + 1


def test_without_masking_momentum_goes_on():
    g = np.array([5.0, 1.0], np.float32)
    for masking, wanted in ((True, [0, 1]), (False, [5, 1])):
        c = Dgc(ratio=0.5, masking=masking)
        state = c.init(2)
        state = c.update(state, g, once(c, g, state))
        assert state.arrays["velocity"].tolist() == wanted
        assert state.arrays["residual"].tolist() == [0, 1]


def test_dgc_sends_all_momentum_in_the_end():
    c = Dgc(ratio=0.02, momentum=0.5, masking=False)
    state, u, wanted, sent = c.init(400), np.zeros(400), np.zeros(400), np.zeros(400)
    for g in gradients(20):
        u = 0.5 * u + g
        wanted += u
        got = once(c, g, state)
        sent += got
        state = c.update(state, g, got)
    assert sent + state.arrays["residual"] == pytest.approx(wanted, abs=1e-4)


def test_warm_up_sends_a_quarter_and_then_ever_less():
    c = Dgc(ratio=0.01, warmup=8)
    state, counts = c.init(1000), []
    for g in gradients(10, 1000):
        got = once(c, g, state)
        counts.append(np.count_nonzero(got))
        state = c.update(state, g, got)
    assert counts == [250, 250, 62, 62, 16, 16, 10, 10, 10, 10]


def naive_adacomp(p, e, size):
    """What is sent and the scale, with the same float32 sums."""
    again = np.float32(2) * p - e
    sent, peaks = np.zeros(p.size), []
    for start in range(0, p.size, size):
        peak = max(abs(p[start : start + size]))
        peaks.append(float(peak))
        for i in range(start, min(start + size, p.size)):
            if abs(again[i]) >= peak and p[i] != 0:
                sent[i] = np.sign(p[i])
    return (sent * np.float32(np.sum(peaks) / len(peaks))).astype(np.float32)


@pytest.mark.parametrize("size", [1, 50, 64, 1000])
def test_adacomp_sends_the_signs_of_what_nears_its_bins_largest(size):
    c = AdaComp(bin_size=size)
    state, e = c.init(410), np.zeros(410, np.float32)
    counts = []
    for g in gradients(6, 410):
        g[100:200] = 0
        wanted = naive_adacomp(g + e, e, size)
        got = once(c, g, state)
        assert np.array_equal(got, wanted)
        counts.append(np.count_nonzero(got))
        state, e = c.update(state, g, got), g + e - got
        assert np.array_equal(state.arrays["residual"], e)
    assert size == 1 or counts[0] < sum(g != 0) / 2


def test_a_position_and_its_sign_cost_one_number():
    x = np.zeros(1000, np.float32)
    x[[3, 700]] = [2.0, -2.0]
    assert body(AdaComp(), x) == np.float32(2).tobytes() + encode_positions([6, 1401], 2000)


def test_fixed_positions_are_five_bits_each():
    c, x = TopK(ratio=0.1, coder="fixed"), np.zeros(20, np.float32)
    x[[3, 9]] = [1, 2]
    assert body(c, x) == fixed_positions([3, 9], [1, 2])
    assert np.array_equal(decode_sealed(c, fixed_positions([3, 9], [1, 2]), 20), x)


def test_a_hundred_thousand_bins_of_positions_decode_from_bytes_alone():
    x = np.random.default_rng(8).normal(size=100_000).astype(np.float32)
    for c in (TopK(ratio=0.001), TopK(ratio=0.3, coder="fixed"), Dgc(ratio=0.9), AdaComp(bin_size=3)):
        got = once(c, x)
        assert np.array_equal(np.sign(got[got != 0]), np.sign(x[got != 0]))
