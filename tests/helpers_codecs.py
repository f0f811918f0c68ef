"""Shared by the tests of codecs: one encoding and decoding, and bytes that lie."""

import numpy as np

from gtrace.coding import ENVELOPE_BYTES, seal
from gtrace.coding.sparse import encode_positions


def once(c, values, state=None, key=(1, 2)):
    """What arrives of values."""
    values = np.asarray(values, np.float32)
    state = c.init(values.size) if state is None else state
    return c.decode(c.shared(state), c.encode(state, values, key), values.size)


def body(c, values, key=(1, 2)):
    """What is sent of values, without the envelope."""
    values = np.asarray(values, np.float32)
    return c.encode(c.init(values.size), values, key)[ENVELOPE_BYTES:]


def decode_sealed(c, data, size, shared=b"", flags=0):
    """What a codec makes of a body whose checksum is right."""
    return c.decode(shared, seal(data, codec=c.name, size=size, shared=shared, flags=flags), size)


def encode_sparse(positions, values, size):
    """Positions and values as ``topk`` sends few of them."""
    return encode_positions(positions, size) + np.asarray(values, "<f4").tobytes()


def fixed_positions(positions, values, padding=0):
    """What coder=fixed sends of a tensor of 20: five bits a position."""
    bits = sum(p << 5 * i for i, p in enumerate(positions)) | padding << 5 * len(positions)
    return bits.to_bytes(-(-5 * len(positions) // 8), "little") + np.array(values, "<f4").tobytes()
