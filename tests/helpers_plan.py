"""Curves and traces of laws whose layers differ in scale by orders of magnitude."""

import numpy as np

from gtrace.noise import NoiseCosts
from gtrace.planning.curves import Curves

#: name -> (elements, scale)
LAYERS = {"conv.weight": (4096, 1.0), "conv.bias": (16, 30.0), "fc.weight": (20000, 1e-3), "head.weight": (600, 5.0)}


def curves_of_laws(steps=3, options=12, layers=LAYERS, seed=0):
    """Curves of about 6 dB a bit, a little off at every step, and the exact codec."""
    rng = np.random.default_rng(seed)
    bits = np.linspace(1.5, 8, options)
    sizes = np.array([size for size, _ in layers.values()])
    scales = np.array([scale for _, scale in layers.values()])
    energy = (sizes * scales**2)[:, None] * rng.uniform(0.5, 2, (len(layers), steps))
    noise = rng.uniform(0.95, 1.05, (2, len(layers), steps, options))
    cost = sizes[:, None, None] * bits * noise[0]
    error = energy[:, :, None] * 2 * 4.0**-bits * noise[1]
    exact = np.zeros((len(layers), steps, 1))
    names = tuple(layers)
    specs = tuple(f"qsgdinf:bits={max(2, n.bit_length() + 1)},steps={n}" for n in range(2, options + 2))
    return Curves(
        names,
        tuple((name,) for name in names),
        (*specs, "none"),
        tuple(range(steps)),
        sizes,
        np.concatenate([cost, exact + 32.0 * sizes[:, None, None]], axis=2),
        np.concatenate([error, exact], axis=2),
        energy,
    )


def costs_of(curves, flat=(), **about):
    """Costs of these curves' codecs: errors along the directions of the gradient's noise, but for the flat tensors."""
    samples = np.random.default_rng(1).standard_normal((6, 2))
    noise = samples @ samples.T
    variance = np.nanmean(curves.error, axis=1).T[:-1]
    shape = variance.shape
    along = np.where([name in flat for name in curves.tensors], 1e-9, 1.0) * variance
    costs = {"codecs": curves.codecs[:-1], "tensors": curves.tensors, "noise": noise, "variance": variance}
    costs |= {"gram": along[:, :, None, None] * noise, "lost": np.zeros(shape), "signal": np.ones(shape[1])}
    costs |= {"growth": np.full(shape[0], np.nan), "unbiased": (True,) * shape[0], "source": "consecutive steps"}
    training = {"kind": "SGD", "momentum": 0.0, "planned_steps": 300}
    return NoiseCosts(**costs | {"batch": 64.0, "optimizer": training, "lr": 0.01, "last": 99} | about)


def trace_of_laws(path, steps=4, layers=LAYERS, seed=0):
    """A trace of normal gradients of these scales."""
    import gtrace

    rng = np.random.default_rng(seed)
    with gtrace.create_trace(path) as writer:
        for step in range(steps):
            for name, (size, scale) in layers.items():
                writer.append(step, name, (scale * rng.standard_normal(size)).astype(np.float32))
            writer.commit(step, loss=1.0)
    return path
