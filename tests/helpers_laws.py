"""Traces whose laws are known, and what is measured on them."""

import numpy as np

from gtrace.trace import Trace, create_trace

#: layer -> (law, sigma of ln |g|, elements, fraction of zeros)
LAYERS = {
    "wide": ("lognormal", 3.0, 4000, 0.6),
    "narrow": ("lognormal", 1.0, 2000, 0.0),
    "early": ("half-normal", 1.0, 1500, 0.1),
    "tiny": ("lognormal", 2.0, 20, 0.0),
}
STEPS = (0, 10, 20)


def gradient(name, step):
    """A gradient of a layer, float32; its scale falls by 4 octaves every 10 steps."""
    law, sigma, size, zeros = LAYERS[name]
    rng = np.random.default_rng([step, len(name)])
    x = rng.standard_normal(size)
    g = x if law == "half-normal" else rng.choice([-1, 1], size) * np.exp(sigma * x)
    g[rng.random(size) < zeros] = 0
    return (g * 2.0 ** (-8 - 0.4 * step)).astype(np.float32)


def memory_trace(kind="neural", layers=LAYERS, steps=STEPS):
    """The layers in memory."""
    return Trace.from_arrays({name: {step: gradient(name, step) for step in steps} for name in layers}, kind=kind)


def write_laws(path, kinds=("neural",), steps=STEPS):
    """The layers on disk, the same for each kind."""
    with create_trace(path) as writer:
        for step in steps:
            for kind in kinds:
                for name in LAYERS:
                    writer.append(step, name, gradient(name, step), kind=kind)
                writer.commit(step, kind=kind, loss=1.0)
    return path
