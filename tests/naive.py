"""Slow, plain versions of what the kernels do."""

import math

import numpy as np

FLOAT32_MAX = float(np.finfo(np.float32).max)


def norm_of(v, norm):
    v = np.asarray(v, np.float32).astype(np.float64)
    if norm == "none":
        return np.float32(1)
    if norm == "linf":
        value = float(np.max(np.abs(v), initial=0.0))
    elif norm == "l1":
        value = float(np.sum(np.abs(v)))
    else:
        value = math.sqrt(float(np.sum(v * v)))
    return np.float32(min(value, FLOAT32_MAX))


def buckets(v, size):
    v = np.asarray(v, np.float32)
    size = size or max(1, v.size)
    return [v[p : p + size] for p in range(0, v.size, size)]


def normalized(v, norm, size):
    """(r, weight) of every value in float64, by the float32 norms."""
    r, w = [], []
    for b in buckets(v, size):
        scale = float(norm_of(b, norm))
        r.append(np.abs(b.astype(np.float64)) / (scale or 1.0))
        w.append(np.full(b.size, scale * scale))
    return (np.concatenate(r), np.concatenate(w)) if r else (np.empty(0), np.empty(0))


def cells(r, levels, zero):
    """The grid of magnitudes, and the number of each value's cell in it."""
    grid = np.asarray(levels if zero else [-levels[0], *levels], np.float64)
    return grid, np.clip(np.searchsorted(grid, r, side="right") - 1, 0, grid.size - 2)


def rounding_error(v, norm, size, levels, *, zero=True):
    """Exact E ||Q(v) - v||^2 of stochastic rounding to magnitudes."""
    r, w = normalized(v, norm, size)
    grid, k = cells(r, levels, zero)
    return float(np.sum(w * (grid[k + 1] - r) * (r - grid[k])))


def symbol_mass(v, norm, size, levels, *, zero=True):
    """Expected frequency of each magnitude."""
    r, _ = normalized(v, norm, size)
    full, k = cells(r, levels, zero)
    up = (r - full[k]) / (full[k + 1] - full[k])
    mass = np.zeros(full.size)
    np.add.at(mass, k, 1 - up)
    np.add.at(mass, k + 1, up)
    if not zero:
        mass = np.concatenate([[mass[0] + mass[1]], mass[2:]])
    return mass / max(1, r.size)


MASK = 0xFFFFFFFF


def mix(counter, add, flip, last):
    x = (counter + add) & MASK
    x ^= x >> 17
    x = (x * 0xED5AD4BB) & MASK
    x ^= flip
    x ^= x >> 11
    x = (x * 0xAC4C1B51) & MASK
    x = (x + last) & MASK
    x ^= x >> 15
    x = (x * 0x31848BAB) & MASK
    return x ^ (x >> 14)


def hashes(high, low, start, count):
    """The keyed 32-bit hashes of elements start.. in plain integers."""
    start = int(start)
    block = start >> 32
    a, b, c, d = high & MASK, high >> 32, low & MASK, low >> 32
    add = mix(block, a, d, c)
    flip = mix(block, b, c, d)
    last = mix(block, (a + d) & MASK, b, (c + b) & MASK)
    base = start & MASK
    return [mix(base + i, add, flip, last) for i in range(count)]


def uniforms(high, low, start, count):
    """The keyed uniforms of elements start.. in plain integers."""
    return [(word >> 8) / 2**24 for word in hashes(high, low, start, count)]


def round_symbols(v, norm, size, levels, key, *, zero=True):
    """Symbols of stochastic rounding, element by element, in float32 as the kernels compute."""
    f, out = np.float32, []
    grid, m = [f(x) for x in levels], len(levels)
    scales = [norm_of(b, norm) or f(1) for b in buckets(v, size) for _ in b]
    for x, scale, u in zip(v, scales, map(f, uniforms(*key, 0, len(v))), strict=True):
        r = f(x) / scale
        code = sum(bool(abs(r) > grid[k] + u * (grid[k + 1] - grid[k])) for k in range(m - 1))
        positive = r > (f(0) if zero else grid[0]) * (f(2) * u - f(1))
        out.append((m - 1 if zero else m) + code if positive else m - 1 - code)
    return np.array(out, np.uint16)


def minmax(values, bits):
    """MQGrad's quantizer, value by value: codes, and what they decode to in float64."""
    low, high, steps = float(min(values)), float(max(values)), 2**bits - 1
    if low == high:
        return [0] * len(values), [low] * len(values)
    codes = [math.floor((float(v) - low) * steps / (high - low) + 0.5) for v in values]
    return codes, [low + q * (high - low) / steps for q in codes]


def pack(symbols, width):
    bits = [(int(s) >> k) & 1 for s in symbols for k in range(width)]
    bits += [0] * (-len(bits) % 8)
    return bytes(sum(bits[p + k] << k for k in range(8)) for p in range(0, len(bits), 8))


def huffman_cost(weights):
    """Total weight of all merges: the cost of any optimal prefix code."""
    heap, cost = sorted(w for w in weights if w > 0), 0.0
    while len(heap) > 1:
        merged = heap[0] + heap[1]
        cost += merged
        heap = sorted([*heap[2:], merged])
    return cost
