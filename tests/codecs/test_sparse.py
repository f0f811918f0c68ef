"""Sparsifiers: what they keep, what they send, what they remember."""

import numpy as np
import pytest
from helpers_codecs import body, decode_sealed, encode_sparse, fixed_positions, gradients, once, walk

import gtrace
from gtrace.codecs.sparse import kept, largest, magnitudes
from gtrace.codecs.sparsifiers import AdaComp, Dgc, Dropping, RandomK, TopK
from gtrace.coding.huffman import Floats
from gtrace.coding.sparse import encode_positions
from gtrace.types import Key


def naive_largest(x, count):
    """Positions of the largest magnitudes, of equal ones the first."""
    return sorted(sorted(range(len(x)), key=lambda i: (-abs(float(x[i])), i))[:count])


# what is kept


@pytest.mark.parametrize("size", [0, 1, 2, 17, 300])
def test_the_largest_and_of_equal_ones_the_first(size):
    rng = np.random.default_rng(size)
    for spread in (2, 5, 1000):
        x = rng.integers(-spread, spread + 1, size).astype(np.float32)
        for count in {0, min(1, size), size // 3, size - size // 4, size}:
            assert largest(magnitudes(x), count).tolist() == naive_largest(x, count)


@pytest.mark.parametrize("coder", ["gaps", "fixed"])
@pytest.mark.parametrize("ratio", [0.003, 0.1, 0.5, 1.0])
def test_topk_sends_the_largest_exactly(ratio, coder):
    (x,) = gradients(1)
    chosen = naive_largest(x, kept(ratio, x.size))
    wanted = np.zeros_like(x)
    wanted[chosen] = x[chosen]
    assert np.array_equal(once(TopK(ratio=ratio, coder=coder), x), wanted)


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
    x = np.zeros(20, np.float32)
    x[[3, 9]] = [1, 2]
    c, wanted = TopK(ratio=0.1, coder="fixed"), fixed_positions([3, 9], [1, 2])
    assert body(c, x) == wanted
    assert np.array_equal(decode_sealed(c, wanted, 20), x)


def test_a_random_choice_is_fair_and_without_replacement():
    c, counts = RandomK(ratio=0.2), np.zeros(50)
    for draw in range(400):
        got = once(c, np.ones(50), key=Key.derive(0, tensor="t", draw=draw))
        assert np.count_nonzero(got) == 10
        assert np.unique(got).tolist() == [0, 5]
        counts += got / 5
    # A hypergeometric count has this deviation.
    assert np.abs(counts - 80).max() < 4.5 * np.sqrt(400 * 0.2 * 0.8)


def test_unscaled_random_choice_sends_the_values_and_says_that_it_is_biased():
    (x,), c = gradients(1), RandomK(ratio=0.3, scale=False)
    got = once(c, x)
    assert np.count_nonzero(got) == 120
    assert np.array_equal(got[got != 0], x[got != 0])
    assert (RandomK().unbiased, c.unbiased) == (True, False)
    assert np.array_equal(once(RandomK(ratio=0.3), x), got * np.float32(400 / 120))


# memory


@pytest.mark.parametrize(
    ("own", "wrapped"),
    [
        ("mem-sgd:ratio=0.05", "ef:topk:ratio=0.05"),
        ("mem-sgd:ratio=0.05,coder=fixed", "ef:topk:ratio=0.05,coder=fixed"),
        ("ef-signsgd", "ef:signsgd"),
    ],
)
def test_a_method_with_memory_is_error_feedback_around_one_without(own, wrapped):
    steps = gradients(6)
    for a, b in zip(walk(gtrace.codec(own), steps), walk(gtrace.codec(wrapped), steps), strict=True):
        assert np.array_equal(a[1], b[1])
        assert np.array_equal(a[2].arrays["residual"], b[2].arrays["residual"])
        assert a[2].arrays["residual"].any()


def test_dropping_sends_what_reaches_the_threshold_and_keeps_the_rest():
    e = np.zeros(400, np.float32)
    for g, got, state in walk(Dropping(ratio=0.1), gradients(6)):
        p = g + e
        wanted = np.where(np.abs(p) >= np.sort(np.abs(p))[-40], p, np.float32(0))
        assert np.array_equal(got, wanted)
        e = p - wanted
        assert np.array_equal(state.arrays["residual"], e)
    constant = np.full(100, -2.0, np.float32)
    assert np.array_equal(once(Dropping(ratio=0.1), constant), constant)
    x = np.zeros(100, np.float32)
    x[7] = 1.0
    assert body(Dropping(ratio=0.5), x) == encode_sparse([7], [1.0], 100)
    assert body(Dropping(ratio=0.5), np.zeros(100)) == encode_sparse([], [], 100)


def test_a_sampled_threshold_is_near_the_exact_one():
    x = np.random.default_rng(2).normal(size=100_000).astype(np.float32)
    sent = [np.count_nonzero(once(Dropping(ratio=0.1, sample=0.02), x, key=(k, k))) for k in range(5)]
    assert len(set(sent)) > 1
    # Of 2,000 sampled values about 200 lie above: a deviation of 7%.
    assert all(0.7 * 10_000 < n < 1.3 * 10_000 for n in sent)


def test_dgc_follows_the_papers_loop():
    u, v = np.zeros((2, 400), np.float32)
    for step, (g, got, state) in enumerate(walk(Dgc(ratio=0.05, momentum=0.8, clip=15.0), gradients(8))):
        norm = np.linalg.norm(g.astype(np.float64))
        assert norm > 15, "clipping must have something to do"
        u = np.float32(0.8) * u + g * np.float32(15 / norm)
        v = v + u
        chosen = naive_largest(v, 20)
        assert np.flatnonzero(got).tolist() == chosen, step
        assert np.array_equal(got[chosen], v[chosen]), step
        u[chosen], v[chosen] = 0, 0
        assert np.array_equal(state.arrays["velocity"], u)
        assert np.array_equal(state.arrays["residual"], v)
        assert state.arrays["step"] == step + 1


def test_without_masking_momentum_goes_on_and_all_of_it_is_sent_in_the_end():
    g = np.array([5.0, 1.0], np.float32)
    for masking, wanted in ((True, [0, 1]), (False, [5, 1])):
        ((_, _, state),) = walk(Dgc(ratio=0.5, masking=masking), [g])
        assert state.arrays["velocity"].tolist() == wanted
        assert state.arrays["residual"].tolist() == [0, 1]
    u, wanted, sent = np.zeros((3, 400))
    for g, got, state in walk(Dgc(ratio=0.02, momentum=0.5, masking=False), gradients(20)):
        u = 0.5 * u + g
        wanted += u
        sent += got
        assert sent + state.arrays["residual"] == pytest.approx(wanted, abs=1e-4)


def test_warm_up_sends_a_quarter_and_then_ever_less():
    counts = [np.count_nonzero(got) for _, got, _ in walk(Dgc(ratio=0.01, warmup=8), gradients(10, 1000))]
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
    e, steps, counts = np.zeros(410, np.float32), gradients(6, 410), []
    for g in steps:
        g[100:200] = 0
    for g, got, state in walk(AdaComp(bin_size=size), steps):
        assert np.array_equal(got, naive_adacomp(g + e, e, size))
        counts.append(np.count_nonzero(got))
        e = g + e - got
        assert np.array_equal(state.arrays["residual"], e)
    assert size == 1 or counts[0] < sum(steps[0] != 0) / 2
    # A position and its sign cost one number.
    x = np.zeros(1000, np.float32)
    x[[3, 700]] = [2.0, -2.0]
    assert body(AdaComp(), x) == np.float32(2).tobytes() + encode_positions([6, 1401], 2000)
