"""Bodies that no encoder made, in envelopes that are right, are refused."""

import numpy as np
import pytest
from helpers_codecs import decode_sealed, encode_sparse, fixed_positions

import gtrace
from gtrace.coding import open_envelope
from gtrace.coding.sparse import encode_positions
from gtrace.errors import PayloadError
from gtrace.testing import fitted

NAN, INF = np.nan, np.inf


def floats(*numbers):
    return np.array(numbers, "<f4").tobytes()


#: spec -> elements, and bodies
FORGED = {
    "fp16": (2, [np.array([1, INF], np.float16).tobytes(), np.array([1, NAN], np.float16).tobytes(), b"\0\0\0"]),
    "bf16": (2, [b"\x80\x7f\0\0", b"\xff\xff\0\0", b"\0\0\0\0\0"]),
    "int8": (2, [b"", floats(1) + b"\1", floats(1) + b"\xff\0", *(floats(x) + b"\1\0" for x in (-1, NAN, INF))]),
    "signsgd": (
        12,
        [*(floats(x) + b"\1\1" for x in (NAN, INF, -1)), *(floats(1) + bits for bits in (b"", b"\1\x11", b"\1\1\1"))],
    ),
    "signsgd:scale=none": (12, [b"\1", b"\1\x10"]),
    "rotate:signsgd": (5, [b"\0\0\0", b"\0\0\0\0\0"]),
    "onebit": (
        12,
        [
            *(floats(*means) + b"\1\1" for means in ([1, 1], [-1, -1], [1, NAN])),
            *(b"", floats(1, -1) + b"\1", floats(1, -1) + b"\1\xf1"),
        ],
    ),
    "topk": (
        20,
        [
            *(b"", encode_sparse([3, 9], [1, NAN], 20), encode_sparse([3, 9], [1, 2], 20)[:-1]),
            encode_sparse([3, 300], [1, 2], 301),
        ],
    ),
    "topk:coder=fixed": (
        20,
        [
            *(b"\1\2", fixed_positions([3, 9], [1, INF]), fixed_positions([9, 3], [1, 2])),
            *(fixed_positions([25], [1]), fixed_positions([3, 9], [1, 2], padding=32)),
        ],
    ),
    "randomk:ratio=0.1": (20, [b"", b"\0\0\0\0" + floats(1), b"\0\0\0\0" + floats(1, NAN)]),
    "adacomp": (
        20,
        [
            *(b"", floats(NAN) + encode_positions([1], 40), floats(-1) + encode_positions([1], 40)),
            *(floats(1) + encode_positions([2, 3], 40), floats(1) + encode_positions([2], 40) + b"\0"),
        ],
    ),
    "powersgd:rank=2": (1000, [b"", bytes(4 * 128 + 4), bytes(4 * 127), floats(*[NAN] * 128)]),
    "fp:e3m2": (10, [floats(3) + bytes(8), floats(-2) + bytes(8), floats(2) + bytes(7)]),
    "fp:e4m3fn": (10, [floats(2) + b"\x7f" * 10]),
    "fp:mxfp4": (10, [b"\xff" + bytes(5)]),
    "fp:nvfp4": (10, [floats(NAN) + bytes(6), floats(1) + b"\x80" + bytes(5)]),
    "prune": (1, [b"\0\0", *(floats(alpha) + b"\0" for alpha in (0, -1, NAN))]),
    "minmax:bits=2": (
        3,
        [floats(0, 1) + b"\0\0", floats(0, 1) + b"\xff", *(floats(*x) + b"\0" for x in ([1, 0], [0, INF], [NAN, 1]))],
    ),
}
#: flags beside the bodies of a codec, where they are not 0
FLAGS = {"minmax:bits=2": 2}


@pytest.mark.parametrize("spec", FORGED)
def test_a_sealed_body_that_says_nonsense_is_refused(spec):
    c, (size, bodies) = gtrace.codec(spec), FORGED[spec]
    shared = c.shared(c.init(size))
    for data in bodies:
        with pytest.raises(PayloadError):
            decode_sealed(c, data, size, shared, FLAGS.get(spec, 0))


_CODED = "prune topk-prune fp fp:e4m3 fp:mxfp4 fp:nvfp4 fp:e5m4 minmax minmax:bits=10 int8 topk:ratio=0.1"


@pytest.mark.parametrize("spec", [*_CODED.split(), "randomk:ratio=0.25", "qsgd:bits=4", "fp16", "bf16", "onebit"])
def test_coded_payloads_that_are_wrong_are_refused(spec):
    c, x = gtrace.codec(spec), (np.random.default_rng(7).standard_t(4, 10_000) * 1e-3).astype(np.float32)
    state, _ = fitted(c, x)
    shared = c.shared(state)
    sent, flags = open_envelope(c.encode(state, x, (1, 2)), codec=c.name, size=x.size, shared=shared)
    sent = bytes(sent)
    assert decode_sealed(c, sent, x.size, shared, flags).size == x.size
    wrong = [(data, flags) for data in (sent[:-1], sent + b"\0", sent[: len(sent) // 2], sent[:3], b"")]
    for data, said in (*wrong, (sent, flags ^ 1), (sent, flags ^ 0x100), (sent, flags | 0x8000)):
        with pytest.raises(PayloadError):
            decode_sealed(c, data, x.size, shared, said)


@pytest.mark.parametrize(
    ("spec", "size", "data", "words"),
    [
        ("fp:bits=6", 10, floats(2) + bytes(8), (b"", b"\0", b"\x08", b"\x03\x03")),
        ("fp:e3m2", 10, floats(2) + bytes(8), (b"\x03",)),
        ("powersgd:rank=2", 1000, bytes(4 * 128), (b"\0", bytes(4), b"\1\0\0\0\0", b"\xff\xff\xff\xff")),
        *(("amq:bits=3", 1, bytes(5), (b"\1\0\0\0" + floats(p),)) for p in (0, 1, -0.5, NAN, INF)),
        ("amq:bits=3", 1, bytes(5), (b"\2\0\0\0" + floats(0.1, 0.5),)),
    ],
)
def test_shared_bytes_that_say_nonsense_are_refused(spec, size, data, words):
    message = {"fp:bits=6": "invalid format", "fp:e3m2": "format is named", "amq:bits=3": "multiplier"}.get(spec)
    for shared in words:
        with pytest.raises(PayloadError, match=message):
            decode_sealed(gtrace.codec(spec), data, size, shared)
