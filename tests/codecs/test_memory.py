"""What workers remember from step to step: each memory against its paper's loop, written out plainly."""

import numpy as np
import pytest
from helpers_codecs import body, encode_sparse, gradients, largest, once, played, walk

import gtrace
from gtrace.codecs.memory import saturating
from gtrace.coding.sparse import encode_positions
from gtrace.errors import UsageError


def only(x, chosen):
    """The chosen values, the rest zero."""
    return np.where(np.isin(np.arange(x.size), chosen), x, np.float32(0))


def feedback(choose):
    """Error feedback around ``choose``, a function of the gradient with the residual, and of the residual."""

    def step(g, m):
        p = g + m["residual"]
        sent = choose(p, m["residual"])
        m["residual"] = p - sent
        return sent

    return step


def onebit(bucket):
    def choose(p, _):
        out = np.empty_like(p)
        for start in range(0, p.size, bucket):
            b = p[start : start + bucket]
            for side in (b >= 0, b < 0):
                if side.any():
                    out[start : start + bucket][side] = np.float32(b[side].astype(np.float64).mean())
        return out

    return feedback(choose)


def adacomp(size):
    def choose(p, e):
        again, sent, peaks = np.float32(2) * p - e, np.zeros(p.size), []
        for start in range(0, p.size, size):
            peaks.append(float(max(abs(p[start : start + size]))))
            for i in range(start, min(start + size, p.size)):
                if abs(again[i]) >= peaks[-1] and p[i] != 0:
                    sent[i] = np.sign(p[i])
        return (sent * np.float32(np.sum(peaks) / len(peaks))).astype(np.float32)

    return feedback(choose)


def dgc(g, m):
    norm = np.linalg.norm(g.astype(np.float64))
    assert norm > 15, "clipping must have something to do"
    m["velocity"] = np.float32(0.8) * m["velocity"] + g * np.float32(15 / norm)
    m["residual"] = m["residual"] + m["velocity"]
    chosen = largest(m["residual"], 20)
    sent = only(m["residual"], chosen)
    m["velocity"][chosen], m["residual"][chosen] = 0, 0
    return sent


def signum(g, m):
    m["momentum"] = 0.8 * m["momentum"] + 0.2 * g
    return np.sign(m["momentum"]) * np.abs(m["momentum"]).mean()


def momentum(g, m):
    m["momentum"] = 0.9 * m["momentum"] + 0.5 * g
    return m["momentum"]


def accumulated(g, m):
    m["accumulated"] = m["accumulated"] + g
    sent = once(gtrace.codec("intn:bits=3"), m["accumulated"])
    # Cleared, although the values are not sent exactly.
    m["accumulated"][sent != 0] = 0
    return sent


#: spec -> its paper's loop, and how far the two may be apart
LOOPS = {
    "mem-sgd:ratio=0.05": (feedback(lambda p, _: only(p, largest(p, 20))), 0),
    "ef:topk:ratio=0.05,coder=fixed": (feedback(lambda p, _: only(p, largest(p, 20))), 0),
    "ef-signsgd": (feedback(lambda p, _: np.sign(p) * np.float32(np.abs(p.astype(np.float64)).mean())), 0),
    "ef:signsgd": (feedback(lambda p, _: np.sign(p) * np.float32(np.abs(p.astype(np.float64)).mean())), 0),
    "dropping:ratio=0.1": (feedback(lambda p, _: np.where(np.abs(p) >= np.sort(np.abs(p))[-40], p, np.float32(0))), 0),
    "dgc:ratio=0.05,momentum=0.8,clip=15": (dgc, 0),
    "accumulate:intn:bits=3": (accumulated, 0),
    "signum:beta=0.8": (signum, 1e-6),
    "momentum:dampening=0.5:none": (momentum, 1e-6),
    **{f"onebit:bucket_size={bucket}": (onebit(bucket), 1e-6) for bucket in (1, 10, 64, 1000)},
    **{f"adacomp:bin_size={size}": (adacomp(size), 0) for size in (1, 50, 64, 1000)},
}


@pytest.mark.parametrize("spec", LOOPS)
def test_a_memory_follows_its_papers_loop(spec, monkeypatch):
    # Bins of a large tensor are searched block by block.
    monkeypatch.setattr("gtrace.codecs.sparse.BLOCK", 128)
    (loop, apart), c, steps = LOOPS[spec], gtrace.codec(spec), gradients(8)
    if spec.startswith("adacomp"):
        for g in steps:
            g[100:200] = 0
    m = {name: np.zeros(400, np.float32) for name in c.init(400).arrays if name != "step"}
    for g, got, state in walk(c, steps):
        np.testing.assert_allclose(got, loop(g, m), rtol=apart, atol=apart)
        for name, kept in m.items():
            np.testing.assert_allclose(state.arrays[name], kept, rtol=apart, atol=apart)


@pytest.mark.parametrize("spec", [*LOOPS, "ef:memory_bits=4,reset=3:intn", "ef21:momentum=0.5:topk"])
def test_an_empty_memory_takes_none(spec):
    """A tensor in pieces has one for the whole, which nobody looks into."""
    assert gtrace.codec(spec).init(1 << 52).size == 1 << 52


def test_both_ends_follow_the_gradient():
    """EF21-SGDM step by step; what is sent is the change alone."""
    share, steps, c = 0.9, gradients(6), gtrace.codec("ef21:momentum=0.9:topk:ratio=0.1")
    estimate, m = np.zeros(400, np.float32), steps[0]
    for g, got, state in walk(c, steps):
        m = share * m + (1 - share) * g
        estimate = estimate + once(c.inner, m - estimate)
        assert got == pytest.approx(estimate, abs=1e-5)
        assert np.array_equal(state.arrays["estimate"], got)
    # A gradient that stays is known in the end, although a tenth is sent at a time.
    assert played(c, steps[:1] * 12)[0][-1] == pytest.approx(steps[0], abs=1e-6)


def test_what_memories_send():
    one, pair = np.zeros(100, np.float32), np.zeros(1000, np.float32)
    one[7], pair[[3, 700]] = 1.0, [2.0, -2.0]
    assert body(gtrace.codec("dropping:ratio=0.5"), one) == encode_sparse([7], [1.0], 100)
    # A position and its sign cost one number.
    assert body(gtrace.codec("adacomp"), pair) == np.float32(2).tobytes() + encode_positions([6, 1401], 2000)


def test_sums_are_rounded_like_numpy_and_stop_at_the_largest_number():
    rng, most = np.random.default_rng(4), np.finfo(np.float32).max
    x, y = (rng.standard_normal(1000) * 10.0 ** rng.integers(-44, 39, 1000) for _ in range(2))
    x, y = x.astype(np.float32), y.astype(np.float32)
    with np.errstate(over="ignore"):
        wanted = np.clip(x * np.float32(0.7) - y * np.float32(9.0), -most, most)
    assert (abs(wanted) == most).any()
    assert saturating(x, y, 0.7, -9.0).tolist() == wanted.tolist()
    with pytest.raises(UsageError, match="1000 values, and what is remembered of it 999"):
        saturating(x, y[1:])
