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


def rounding_error(v, norm, size, levels, *, zero=True):
    """Exact E ||Q(v) - v||^2 of stochastic rounding to magnitudes."""
    r, w = normalized(v, norm, size)
    grid = np.asarray(levels, np.float64)
    grid = grid if zero else np.concatenate([[-grid[0]], grid])
    k = np.clip(np.searchsorted(grid, r, side="right") - 1, 0, grid.size - 2)
    return float(np.sum(w * (grid[k + 1] - r) * (r - grid[k])))


def symbol_mass(v, norm, size, levels, *, zero=True):
    """Expected frequency of each magnitude."""
    r, _ = normalized(v, norm, size)
    grid = np.asarray(levels, np.float64)
    full = grid if zero else np.concatenate([[-grid[0]], grid])
    k = np.clip(np.searchsorted(full, r, side="right") - 1, 0, full.size - 2)
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
    f = np.float32
    grid = [f(x) for x in levels]
    m = len(grid)
    out = []
    u = [f(x) for x in uniforms(*key, 0, len(v))]
    i = 0
    for b in buckets(v, size):
        scale = norm_of(b, norm)
        for x in b:
            r = f(x) / (scale if scale > 0 else f(1))
            a = abs(r)
            code = sum(bool(a > grid[k] + u[i] * (grid[k + 1] - grid[k])) for k in range(m - 1))
            first = f(0) if zero else grid[0]
            positive = r > first * (f(2) * u[i] - f(1))
            upper = m - 1 if zero else m
            out.append(upper + code if positive else m - 1 - code)
            i += 1
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
    heap = sorted(w for w in weights if w > 0)
    cost = 0.0
    while len(heap) > 1:
        a, b = heap.pop(0), heap.pop(0)
        cost += a + b
        heap.append(a + b)
        heap.sort()
    return cost
