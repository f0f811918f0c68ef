"""Small training sets and single gradients of linear models, and their plain twin."""

import math

import naive
import numpy as np

from gtrace.types import Key
from gtrace_experiments.linear import TASKS, Prox, column_levels, kernels, place


def keyed(seed=0):
    """Streams of one epoch, and the keys they are made of."""
    keys = [Key.derive(seed, tensor=name) for name in ("samples", "model", "gradient", "signs")]
    high, low = (np.array(words, np.uint64) for words in zip(*keys, strict=True))
    return kernels.Streams(high, low), keys


def quantized(a, b, bits, levels="uniform", *, nearest=False):
    """A training set on the levels of its columns, or on given ones."""
    a = np.asarray(a, np.float32)
    found = place(a, column_levels(a, bits, levels) if isinstance(levels, str) else levels, nearest=nearest)
    return kernels.Samples(a, np.asarray(b, np.float64), found.index, found.part, found.levels, found.reach)


def gradient(samples, precision, x, chosen, task="linear", step=0, seed=0):
    """Mean gradient of some samples, and the counts of refetched and flipped ones."""
    rule = precision.rule(TASKS[task], Prox())
    out, counts = np.empty(len(x)), np.zeros(2, np.int64)
    chosen = np.asarray(chosen, np.int64)
    kernels.batch_gradient(samples, rule, keyed(seed)[0], chosen, step, np.array(x, np.float64), out, counts)
    return out, counts


def gradients(a, b, precision, x, draws, levels, task="linear"):
    """Single gradients of ``draws`` copies of one sample, one a row; each copy draws its own quantizations."""
    samples = quantized(np.tile(a, (draws, 1)), np.full(draws, b), precision.bits, levels)
    rule, streams, counts = precision.rule(TASKS[task], Prox()), keyed()[0], np.zeros(2, np.int64)
    out = np.empty((draws, len(x)))
    for k in range(draws):
        kernels.batch_gradient(samples, rule, streams, np.array([k]), k, x, out[k], counts)
    return out


def uniforms(key, row, count):
    """The stream of one row of a key."""
    return np.array(naive.uniforms(*key, row << 32, count))


def drawn(samples, k, draw, draws, keys):
    """One quantization of sample k, as the kernels draw it."""
    index, part = samples.index[k].astype(int), samples.part[k]
    up = uniforms(keys[0], k * draws + draw, len(part)) < part
    return samples.levels[np.arange(len(part)), index + up]


def rounded(v, steps, key, row):
    """A vector on multiples of its norm over ``steps``."""
    norm = math.sqrt(float(sum(v * v)))
    if norm == 0:
        return v
    r = np.abs(v) / norm * steps
    level = np.floor(r) + (uniforms(key, row, len(v)) < r - np.floor(r))
    return np.sign(v) * level * norm / steps


def uniform_variance(a, levels):
    """Variance of one quantization of each value: (upper - a)(a - lower), levels one row a column."""
    found = []
    for value, own in zip(a, levels, strict=True):
        upper = own[np.searchsorted(own, value).clip(1, len(own) - 1)]
        lower = own[(np.searchsorted(own, value) - 1).clip(0, len(own) - 2)]
        found.append((upper - value) * (value - lower))
    return np.array(found)
