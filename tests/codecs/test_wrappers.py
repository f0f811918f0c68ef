"""Wrappers around any codec: specs, memory, rotation, and payloads that cost what the codec inside costs."""

import dataclasses
import itertools

import numpy as np
import pytest

import gtrace
from gtrace import testing
from gtrace.codecs.base import Codec, parameter_fields
from gtrace.codecs.levels import QsgdInf
from gtrace.codecs.rotation import Rotate
from gtrace.codecs.signs import SignSgd
from gtrace.codecs.spec import codec_class, parse_spec, register_wrapper, split_specs, wrapper_names
from gtrace.codecs.wrappers import Ef21, ErrorFeedback, Momentum
from gtrace.coding import ENVELOPE_BYTES, seal
from gtrace.errors import PayloadError, UsageError
from gtrace.kernels import elementwise, hadamard
from gtrace.sketch import MomentSketch
from gtrace.types import Key, State

SPECS = [
    *("ef:qsgdinf:bits=3", "ef:none", "ef:int8", "ef:momentum:terngrad", "ef:powersgd", "ef:rotate:signsgd"),
    *("momentum:signsgd", "momentum:beta=0.5,dampening=0.5:ef:qsgd:bits=3", "ef21:momentum=0.5:ef:topk:ratio=0.1"),
    *("rotate:none", "rotate:qsgdinf:bits=3", "rotate:block=2:qsgd:bits=4", "rotate:signsgd:scale=energy"),
    *("rotate:rotate:qsgd:bits=3", "rotate:ef:signsgd", "rotate:onebit"),
    "rotate:terngrad:bucket_size=1000,tail=exact,clip=2.5",
]


DRAWN = np.empty(0, np.float32)


def gradients(steps, size=600, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.standard_t(3, size).astype(np.float32) for _ in range(steps)]


def played(c, gradients, start=0, state=None):
    """Decoded gradients and the last state of steps in order."""
    state = c.init(gradients[0].size) if state is None else state
    arrived = []
    for step, g in enumerate(gradients, start):
        if c.needs is not None:
            state = c.fit(state, MomentSketch.from_spec(c.view(state, g), c.needs), step)
        payload = c.encode(state, g, Key.derive(0, tensor="t", step=step))
        # What a receiver keeps, the sender keeps, too.
        arrived.append(c.receive(state, c.shared(state), payload)[0])
        state = c.update(state, g, arrived[-1])
    return arrived, state


def test_a_rotation_keeps_a_mean_that_is_right():
    testing.check_spike(gtrace.codec("rotate:qsgdinf:bits=3"))


@pytest.mark.parametrize("spec", SPECS)
def test_state_survives_as_plain_arrays_between_steps(spec):
    c, g = gtrace.codec(spec), gradients(6)
    whole, _ = played(c, g)
    first, state = played(c, g[:3])
    stored = {name: np.array(array) for name, array in state.to_arrays().items()}
    second, _ = played(c, g[3:], 3, State.from_arrays(stored))
    assert all(map(np.array_equal, whole, first + second))


def test_specs_are_taken_apart_and_put_together():
    assert parse_spec(" ef : rotate:block=256: qsgdinf:bits=3") == (
        (("ef", {}), ("rotate", {"block": "256"})),
        "qsgdinf",
        {"bits": "3"},
    )
    assert gtrace.codec("ef:rotate:block=256:qsgdinf:bits=3") == ErrorFeedback(Rotate(QsgdInf(bits=3), block=256))
    assert gtrace.codec("ef:qsgdinf", bits=3) == gtrace.codec("ef:qsgdinf:bits=3")
    assert str(ErrorFeedback(Rotate(QsgdInf(bits=3), block=1024))) == "ef:rotate:qsgdinf:bits=3"
    assert hash(gtrace.codec("ef:qsgd")) == hash(gtrace.codec("ef:qsgd:bits=4"))
    assert gtrace.codec("ef:qsgd") != gtrace.codec("qsgd")
    assert dataclasses.replace(gtrace.codec("rotate:qsgd"), block=8).name == "rotate:qsgd"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("ef", "ef goes before a codec; write ef:NAME"),
        ("ef:", "ef goes before a codec"),
        ("rotate:block=8", "rotate goes before a codec"),
        ("rotate:block=8:", "rotate goes before a codec"),
        ("ef:qsgdnif", r"no codec 'qsgdnif'; did you mean qsgdinf"),
        ("ff:qsgd", "no codec 'ff'"),
        ("ef:qsgd:bits", "'bits' is not key=value"),
        ("ef:decoy=1:qsgd", "codec ef: no parameter 'decoy'; did you mean decay?"),
        ("rotate:blok=8:qsgd", "codec rotate: no parameter 'blok'; did you mean block"),
        ("rotate:block=8,block=8:qsgd", "block is given twice"),
        ("rotate:block=12:qsgd", "block=12 is not a power of two; try 16"),
        ("rotate:block=1:qsgd", "out of range"),
        ("momentum:beta=2:qsgd", "out of range"),
        ("rotate:ef:ef21:topk", "rotate: cannot go around ef21:; put ef21: first"),
        ("rotate:qsgd:block=8", "codec qsgd: no parameter 'block'"),
    ],
)
def test_a_wrong_spec_is_one_line(spec, message):
    with pytest.raises(UsageError, match=message) as caught:
        gtrace.codec(spec)
    assert "\n" not in str(caught.value)


def test_lists_of_specs():
    assert split_specs(
        "ef:qsgd,bits=3,bucket_size=64,rotate:block=8:qsgd:bits=2,momentum:beta=0.5,dampening=0.1:none"
    ) == ["ef:qsgd:bits=3,bucket_size=64", "rotate:block=8:qsgd:bits=2", "momentum:beta=0.5,dampening=0.1:none"]
    assert split_specs("qsgd:,bits=3") == ["qsgd:bits=3"]
    with pytest.raises(UsageError, match="belongs to no codec"):
        split_specs("bits=3:qsgd")


def test_wrappers_are_registered_apart_from_codecs():
    assert set(wrapper_names()) >= {"ef", "momentum", "rotate"}
    assert not set(wrapper_names()) & set(gtrace.codec_names())
    for name in wrapper_names():
        cls = codec_class(name)
        assert cls.summary
        assert cls.formula
        assert cls.paper
        assert "inner" not in {item.name for item in parameter_fields(cls)}
    with pytest.raises(ValueError, match="taken"):
        register_wrapper(Rotate)


def test_facts_come_from_inside():
    def facts(spec):
        c = gtrace.codec(spec)
        return c.name, c.unbiased, c.stateful

    assert facts("ef:qsgd") == ("ef:qsgd", False, True)
    assert facts("rotate:qsgd") == ("rotate:qsgd", True, False)
    assert facts("rotate:signsgd") == ("rotate:signsgd", False, False)
    assert facts("rotate:ef:qsgd") == ("rotate:ef:qsgd", False, True)
    assert facts("momentum:qsgd") == ("momentum:qsgd", False, True)
    linear = [gtrace.codec(f"{prefix}:powersgd").linear for prefix in ("ef", "ef21", "momentum:ef21")]
    assert linear == [True, False, False]
    assert not Rotate.stateful
    assert gtrace.codec("rotate:block=8:qsgd:bits=3").parameters["bits"] == 3
    assert gtrace.codec("rotate:block=8:qsgd:bits=3").parameters["rotate.block"] == 8


@pytest.mark.parametrize("inner", ["qsgdinf:bits=3", "signsgd", "int8", "onebit", "powersgd"])
def test_feedback_loses_nothing_over_steps(inner):
    c, g = gtrace.codec(f"ef:{inner}"), gradients(8)
    arrived, state = played(c, g)
    assert np.sum(arrived, 0) + state.arrays["residual"] == pytest.approx(np.sum(g, 0), abs=1e-4)
    if not gtrace.codec(inner).stateful:
        without, _ = played(gtrace.codec(inner), g)
        lost, lost_without = (np.linalg.norm(np.sum(sent, 0) - np.sum(g, 0)) for sent in (arrived, without))
        assert lost < 0.7 * lost_without


@pytest.mark.parametrize("prefix", ["ef", "momentum:beta=0.5"])
@pytest.mark.parametrize("inner", ["qsgdinf:bits=3", "signsgd", "int8"])
def test_memory_costs_no_bits_and_a_first_payload_is_the_inner_codecs(prefix, inner):
    c, plain, (g,) = gtrace.codec(f"{prefix}:{inner}"), gtrace.codec(inner), gradients(1)
    payload = c.encode(c.init(g.size), g, (3, 4))
    assert payload == plain.encode(plain.init(g.size), g, (3, 4))
    assert np.array_equal(plain.decode(b"", payload, g.size), c.decode(b"", payload, g.size))


def test_momentum_is_what_is_sent():
    for beta, dampening in ((0.9, 0.0), (0.5, 0.5)):
        m = np.zeros(600)
        arrived, state = played(Momentum(gtrace.codec("none"), beta, dampening), gradients(5))
        for g, got in zip(gradients(5), arrived, strict=True):
            m = beta * m + (1 - dampening) * g
            assert got == pytest.approx(m, rel=1e-5, abs=1e-6)
        assert np.array_equal(state.arrays["momentum"], arrived[-1])


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_both_ends_follow_the_gradient(momentum):
    """EF21 and EF21-SGDM step by step; what is sent is the change alone."""
    steps, inner = gradients(6), gtrace.codec("topk:ratio=0.1")
    arrived, state = played(Ef21(inner, momentum), steps)
    estimate, m = np.zeros(600, np.float32), steps[0]
    for g, got in zip(steps, arrived, strict=True):
        m = momentum * m + (1 - momentum) * g
        change = (m - estimate).astype(np.float32)
        estimate = estimate + inner.decode(b"", inner.encode(inner.init(600), change, (1, 2)), 600)
        assert got == pytest.approx(estimate, abs=1e-5)
    assert np.array_equal(state.arrays["estimate"], arrived[-1])
    # A gradient that stays is known in the end, although a tenth is sent at a time.
    arrived, _ = played(Ef21(inner, momentum), steps[:1] * 12)
    assert arrived[-1] == pytest.approx(steps[0], abs=1e-6)


def test_a_memory_inside_a_memory_moves_too():
    g = gradients(4)
    for spec, name in (("ef:momentum:none", "momentum"), ("momentum:ef:signsgd", "residual")):
        c = gtrace.codec(spec)
        _, first = played(c, g[:1])
        _, second = played(c, g)
        assert first.arrays[f"inner.{name}"].any()
        assert not np.array_equal(first.arrays[f"inner.{name}"], second.arrays[f"inner.{name}"])
    # What is left of exact momentum is nothing, so the momentum goes on as without feedback.
    fed, plain = played(gtrace.codec("ef:momentum:none"), g)[0], played(gtrace.codec("momentum:none"), g)[0]
    assert np.array_equal(fed[0], plain[0])
    nested = {"momentum", "inner.residual", "inner.inner.momentum", "inner.inner.inner.momentum"}
    assert gtrace.codec("momentum:ef:momentum:signum").init(3).arrays.keys() == nested


def test_a_vote_passes_through_memory_but_not_through_a_rotation():
    workers = [np.array(v, np.float32) for v in ([2, 1], [1, 1], [-6, 1])]
    assert gtrace.codec("ef:momentum:signsgd").aggregate(workers).tolist() == [3, 1]
    for spec in ("rotate:signsgd", "ef21:signsgd"):
        assert gtrace.codec(spec).aggregate(workers).tolist() == [-1, 1]


def test_memory_of_huge_values_stays_finite():
    huge = np.full(8, np.finfo(np.float32).max, np.float32)
    for spec in ("ef:signsgd", "momentum:signsgd", "ef:onebit", "rotate:qsgd", "signum", "ef:rotate:int8"):
        arrived, state = played(gtrace.codec(spec), [huge, huge, -huge, huge])
        assert all(np.isfinite(a).all() for a in arrived), spec
        assert all(np.isfinite(a).all() for a in state.arrays.values()), spec


def test_fitting_sees_what_will_be_encoded():
    seen = []

    class Watching(QsgdInf):
        name = "watching"

        def encode(self, state, values, key):
            seen.append(np.array(values))
            return super().encode(state, values, key)

    g = gradients(3)
    inner = Watching(bits=2)
    for c in (ErrorFeedback(inner), Momentum(inner), ErrorFeedback(Momentum(inner, 0.5))):
        _, state = played(c, g[:2])
        seen.clear()
        c.encode(state, g[2], (1, 1))
        assert np.array_equal(c.view(state, g[2]), seen[0])
        assert not np.array_equal(seen[0], g[2])
    # Every rotation is another one, but what it does to outliers is the same.
    spiked = np.zeros(1024, np.float32)
    spiked[5] = 1.0
    assert np.abs(Rotate(inner).view(State(1024), spiked)) == pytest.approx(1 / 32, rel=1e-6)


def test_a_fit_through_wrappers_adopts_a_code_that_receivers_get():
    (g,) = gradients(1, 50_000)
    for spec in ("ef:qsgdinf:bits=4", "rotate:qsgdinf:bits=4"):
        c = gtrace.codec(spec)
        state = c.init(g.size)
        fixed = len(c.encode(state, g, (1, 2)))
        fitted = c.fit(state, MomentSketch.from_spec(c.view(state, g), c.needs), 0)
        assert c.shared(fitted)
        coded = c.encode(fitted, g, (1, 2))
        assert len(coded) < 0.95 * fixed
        plain = c.decode(b"", c.encode(state, g, (1, 2)), g.size)
        assert np.array_equal(c.decode(c.shared(fitted), coded, g.size), plain)
        with pytest.raises(PayloadError):
            c.decode(b"", coded, g.size)


# rotation


def walsh(size):
    h = np.ones((1, 1))
    while h.shape[0] < size:
        h = np.block([[h, h], [h, -h]])
    return h / np.sqrt(size)


def pieces(size, block):
    while size:
        while block > size:
            block //= 2
        yield block
        size -= block


@pytest.mark.parametrize(("size", "block"), [(0, 4), (1, 4), (2, 2), (3, 4), (16, 16), (50, 16), (64, 8), (1000, 256)])
@pytest.mark.parametrize("signs", [DRAWN, np.array([1, -1, -1], np.float32)], ids=["drawn", "table"])
def test_the_rotation_is_signs_and_walsh_matrices(size, block, signs):
    x = np.random.default_rng(size).normal(size=size).astype(np.float32)
    words = np.empty(size, np.uint32)
    elementwise.fill_words(np.uint64(8), np.uint64(9), words)
    signed = x * (np.resize(signs, size) if signs.size else 1.0 - 2.0 * (words >> 31))
    cuts = np.cumsum([0, *pieces(size, block)])
    wanted = np.concatenate([np.empty(0), *(walsh(b - a) @ signed[a:b] for a, b in itertools.pairwise(cuts))])
    out, back = np.empty_like(x), np.empty_like(x)
    hadamard.rotate(x, block, signs, np.uint64(8), np.uint64(9), False, out)
    assert out == pytest.approx(wanted, abs=1e-6)
    hadamard.rotate(out, block, signs, np.uint64(8), np.uint64(9), True, back)
    assert back == pytest.approx(x, abs=1e-6)


@pytest.mark.parametrize("block", [2, 64, 1024, 65536])
def test_the_rotation_is_orthogonal_to_a_millionth(block):
    rng = np.random.default_rng(block)
    x = (rng.standard_t(2, 100_003) * 10.0 ** rng.uniform(-3, 3, 100_003)).astype(np.float32)
    y = rng.normal(size=x.size).astype(np.float32)
    rx, ry = (np.empty_like(x) for _ in range(2))
    for source, target in ((x, rx), (y, ry)):
        hadamard.rotate(source, block, DRAWN, np.uint64(1), np.uint64(2), False, target)
    norms = np.linalg.norm(x.astype(float)), np.linalg.norm(y.astype(float))
    assert np.linalg.norm(rx.astype(float)) == pytest.approx(norms[0], rel=1e-6)
    assert rx.astype(float) @ ry == pytest.approx(x.astype(float) @ y, abs=1e-6 * norms[0] * norms[1])
    again = gtrace.codec(f"rotate:block={block}:none")
    got = again.decode(b"", again.encode(again.init(x.size), x, (7, 8)), x.size)
    assert np.linalg.norm(got.astype(float) - x) <= 1e-6 * norms[0]


def test_every_key_rotates_otherwise_and_the_seed_takes_32_bits():
    c, (g,) = gtrace.codec("rotate:signsgd:scale=energy"), gradients(1, 1024)
    payloads = [c.encode(c.init(g.size), g, Key.derive(0, tensor="t", worker=w)) for w in range(8)]
    assert len({p[ENVELOPE_BYTES : ENVELOPE_BYTES + 4] for p in payloads}) == 8
    assert all(8 * (len(p) - ENVELOPE_BYTES) == 32 + 32 + 1024 for p in payloads)
    decoded = [c.decode(b"", p, g.size) for p in payloads]
    errors = [np.linalg.norm(d - g) for d in decoded]
    # Errors of independent rotations average out.
    assert np.linalg.norm(np.mean(decoded, 0) - g) < 0.6 * np.mean(errors)


def test_a_codec_with_memory_is_rotated_alike_at_every_step_and_sends_no_seed():
    c, g = gtrace.codec("rotate:ef:signsgd"), gradients(30, 1024)
    assert 8 * (len(c.encode(c.init(1024), g[0], (1, 2))) - ENVELOPE_BYTES) == 32 + 1024
    close = gtrace.codec("rotate:ef:int8")
    assert close.decode(b"", close.encode(close.init(1024), g[0], (1, 2)), 1024) == pytest.approx(g[0], abs=0.1)
    arrived, state = played(c, g)
    lost = np.sum(g, 0) - np.sum(arrived, 0)
    assert np.linalg.norm(lost) == pytest.approx(np.linalg.norm(state.arrays["inner.residual"]), rel=1e-3)
    outside, state = played(gtrace.codec("ef:rotate:signsgd"), g)
    assert np.sum(g, 0) - np.sum(outside, 0) == pytest.approx(state.arrays["residual"], abs=1e-3)


def test_two_rotations_do_not_undo_each_other():
    (g,) = gradients(1, 256)
    c = gtrace.codec("rotate:rotate:none")
    payload = c.encode(c.init(256), g, (5, 6))
    assert payload[ENVELOPE_BYTES : ENVELOPE_BYTES + 4] != payload[ENVELOPE_BYTES + 4 : ENVELOPE_BYTES + 8]
    assert c.decode(b"", payload, 256) == pytest.approx(g, abs=1e-5)


def test_energy_scaled_signs_are_right_on_average_under_rotations():
    """What the rotated sign scheme promises: with ||v||_2^2 / ||v||_1 as the scale, nothing shrinks."""
    (g,) = gradients(1, 4096)
    energy = float(g.astype(float) @ g)
    for scale, shrinks in (("energy", False), ("mean", True)):
        c = gtrace.codec(f"rotate:block=4096:signsgd:scale={scale}")
        payloads = [c.encode(c.init(g.size), g, Key.derive(d, tensor="t")) for d in range(40)]
        shares = [float(g.astype(float) @ c.decode(b"", payload, g.size)) / energy for payload in payloads]
        assert (np.mean(shares) < 0.7) == shrinks
        assert shrinks or np.mean(shares) == pytest.approx(1, abs=1e-5)


def test_a_rotated_payload_is_refused_by_the_codec_inside_and_the_other_way_round():
    inner = SignSgd()
    c, (g,) = Rotate(inner), gradients(1)
    with pytest.raises(PayloadError, match="another codec"):
        inner.decode(b"", c.encode(c.init(g.size), g, (1, 2)), g.size)
    with pytest.raises(PayloadError, match="another codec"):
        c.decode(b"", inner.encode(inner.init(g.size), g, (1, 2)), g.size)
    with pytest.raises(PayloadError, match="number of its coordinates"):
        c.decode(b"", seal(b"\0\0\0", codec=c.name, size=5, shared=b""), 5)
    with pytest.raises(PayloadError):
        c.decode(b"", seal(b"\0\0\0\0\0", codec=c.name, size=5, shared=b""), 5)


def test_every_codec_can_be_wrapped():
    """The whole registry inside error feedback and inside a rotation."""
    x = dict(testing.tensors())["normal"][:500]
    for name, prefix in itertools.product(gtrace.codec_names(), ("ef", "rotate:block=64", "momentum")):
        c = gtrace.codec(f"{prefix}:{name}")
        assert isinstance(c, Codec)
        testing.check_round_trip(c, "normal", x)
        testing.check_refusals(c, x)
