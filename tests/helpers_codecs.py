"""Shared by the tests of codecs: encodings, steps in order, and bytes that lie."""

import numpy as np

from gtrace.coding import ENVELOPE_BYTES, seal
from gtrace.coding.sparse import encode_positions
from gtrace.sketch import MomentSketch
from gtrace.testing import fitted


def gradients(steps, size=400, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.standard_t(3, size).astype(np.float32) for _ in range(steps)]


def largest(x, count):
    """Positions of the largest magnitudes, of equal ones the first."""
    return sorted(sorted(range(len(x)), key=lambda i: (-abs(float(x[i])), i))[:count])


def once(c, values, state=None, key=(1, 2)):
    """What arrives of values."""
    values = np.asarray(values, np.float32)
    state = c.init(values.size) if state is None else state
    return c.decode(c.shared(state), c.encode(state, values, key), values.size)


def fitted_once(c, values, key=(1, 2)):
    """What arrives of values that the codec was fitted to."""
    return once(c, values, fitted(c, values)[0], key)


def walk(c, gradients, state=None):
    """Step by step: the gradient, what arrives of it, and the state after it."""
    state = c.init(gradients[0].size) if state is None else state
    for step, g in enumerate(gradients):
        if c.needs is not None:
            state = c.fit(state, MomentSketch.from_spec(c.view(state, g), c.needs), step)
        # What a receiver keeps, the sender keeps, too.
        got, _ = c.receive(state, c.shared(state), c.encode(state, g, (step, 7)))
        state = c.update(state, g, got)
        yield g, got, state


def played(c, gradients):
    """What arrived at each step, and the last state."""
    steps = list(walk(c, gradients))
    return [got for _, got, _ in steps], steps[-1][2]


def body(c, values, key=(1, 2), state=None):
    """What is sent of values, without the envelope."""
    values = np.asarray(values, np.float32)
    state = c.init(values.size) if state is None else state
    return c.encode(state, values, key)[ENVELOPE_BYTES:]


def body_bits(payload):
    return 8 * (len(payload) - ENVELOPE_BYTES)


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
