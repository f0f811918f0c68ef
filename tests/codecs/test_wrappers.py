"""Wrappers around any codec: memory, rotation, and payloads that cost what the codec inside costs."""

import itertools

import numpy as np
import pytest
from helpers_codecs import body, body_bits, fitted_once, gradients, once, played

import gtrace
from gtrace import testing
from gtrace.errors import PayloadError
from gtrace.kernels import elementwise, hadamard
from gtrace.types import Key

DRAWN = np.empty(0, np.float32)


# memory


@pytest.mark.parametrize("prefix", ["ef", "momentum:beta=0.5"])
@pytest.mark.parametrize("inner", ["qsgdinf:bits=3", "signsgd", "int8"])
def test_memory_costs_no_bits_and_a_first_payload_is_the_inner_codecs(prefix, inner):
    c, plain, (g,) = gtrace.codec(f"{prefix}:{inner}"), gtrace.codec(inner), gradients(1)
    payload = c.encode(c.init(g.size), g, (3, 4))
    assert payload == plain.encode(plain.init(g.size), g, (3, 4))
    assert np.array_equal(plain.decode(b"", payload, g.size), c.decode(b"", payload, g.size))


def test_a_vote_passes_through_memory_but_not_through_a_rotation():
    workers = [np.array(v, np.float32) for v in ([2, 1], [1, 1], [-6, 1])]
    assert gtrace.codec("ef:momentum:signsgd").aggregate(workers).tolist() == [3, 1]
    for spec in ("rotate:signsgd", "ef21:signsgd"):
        assert gtrace.codec(spec).aggregate(workers).tolist() == [-1, 1]


@pytest.mark.parametrize("spec", ["ef:qsgdinf:bits=4", "rotate:qsgdinf:bits=4"])
def test_a_fit_through_wrappers_adopts_a_code_that_receivers_get(spec):
    c, (g,) = gtrace.codec(spec), gradients(1, 50_000)
    fitted, _ = testing.fitted(c, g)
    coded = c.encode(fitted, g, (1, 2))
    assert len(coded) < 0.95 * len(c.encode(c.init(g.size), g, (1, 2)))
    assert np.array_equal(fitted_once(c, g), once(c, g))
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


@pytest.mark.parametrize(("size", "block"), [(0, 4), (1, 4), (3, 4), (50, 16), (1000, 256)])
@pytest.mark.parametrize("signs", [DRAWN, np.array([1, -1, -1], np.float32)], ids=["drawn", "table"])
def test_the_rotation_is_signs_and_walsh_matrices(size, block, signs):
    x = np.random.default_rng(size).normal(size=size).astype(np.float32)
    words = np.empty(size, np.uint32)
    elementwise.fill_words(np.uint64(8), np.uint64(9), 0, words)
    signed = x * (np.resize(signs, size) if signs.size else 1.0 - 2.0 * (words >> 31))
    cuts = np.cumsum([0, *pieces(size, block)])
    wanted = np.concatenate([np.empty(0), *(walsh(b - a) @ signed[a:b] for a, b in itertools.pairwise(cuts))])
    out, back = np.empty_like(x), np.empty_like(x)
    hadamard.rotate(x, 0, block, signs, np.uint64(8), np.uint64(9), False, out)
    assert out == pytest.approx(wanted, abs=1e-6)
    hadamard.rotate(out, 0, block, signs, np.uint64(8), np.uint64(9), True, back)
    assert back == pytest.approx(x, abs=1e-6)
    hadamard.rotate(x[block:], block, block, signs, np.uint64(8), np.uint64(9), False, back[block:])
    assert (back[block:] == out[block:]).all()


def test_every_key_rotates_otherwise_and_the_seed_takes_32_bits():
    c, (g,) = gtrace.codec("rotate:signsgd:scale=energy"), gradients(1, 1024)
    bodies = [body(c, g, Key.derive(0, tensor="t", worker=worker)) for worker in range(8)]
    assert len({sent[:4] for sent in bodies}) == 8
    assert {8 * len(sent) for sent in bodies} == {32 + 32 + 1024}
    twice, (g,) = gtrace.codec("rotate:rotate:none"), gradients(1, 256)
    sent = body(twice, g, (5, 6))
    assert sent[:4] != sent[4:8], "two rotations must not undo each other"
    assert once(twice, g, key=(5, 6)) == pytest.approx(g, abs=1e-5)


def test_a_codec_with_memory_is_rotated_alike_at_every_step_and_sends_no_seed():
    c, g = gtrace.codec("rotate:ef:signsgd"), gradients(30, 1024)
    assert body_bits(c.encode(c.init(1024), g[0], (1, 2))) == 32 + 1024
    arrived, state = played(c, g)
    lost = np.sum(g, 0) - np.sum(arrived, 0)
    assert np.linalg.norm(lost) == pytest.approx(np.linalg.norm(state.arrays["inner.residual"]), rel=1e-3)


def test_every_codec_can_be_wrapped():
    """The whole registry inside error feedback, a rotation and momentum."""
    x = dict(testing.tensors())["normal"][:500]
    for name, prefix in itertools.product(gtrace.codec_names(), ("ef", "rotate:block=64", "momentum")):
        c = gtrace.codec(f"{prefix}:{name}")
        testing.check_round_trip(c, "normal", x)
        testing.check_refusals(c, x)
