"""How random the kernels' numbers are: lags, sums over matrices, streams of related keys, marginals.

Run with ``python benchmarks/randomness.py [KEYS]``, 64 keys unless given (3 minutes). Each z is in standard errors of
independent draws. Of a million independent lags, 0.6 exceed 5.
"""

import math
import sys
import time

import numpy as np
import scipy.fft

from gtrace.kernels import counter
from gtrace.types import Key

LAGS = 1 << 20
#: an indicator u < p each; None: the uniform itself
CHANCES = (None, 0.5, 0.25, 0.1, 0.03)
SHAPES = ((1024, 1024), (768, 3072), (4096, 256))
#: what differs between the keys of two streams
FIELDS = {
    "seed": lambda k: Key.derive(k, tensor="fc.weight"),
    "draw": lambda k: Key.derive(0, tensor="fc.weight", draw=k),
    "worker": lambda k: Key.derive(0, tensor="fc.weight", worker=k),
    "step": lambda k: Key.derive(0, tensor="fc.weight", step=k),
    "tensor": lambda k: Key.derive(0, tensor=f"blocks.{k}.fc.weight"),
    "role": lambda k: Key.derive(k // 3, tensor="fc.weight", role=("up", "down", "sample")[k % 3]),
}


def uniforms(key, size):
    out = np.empty(size, np.float32)
    counter.fill_uniform(out, np.uint64(key.high), np.uint64(key.low), 0)
    return out


def standard(u, chance):
    """Mean 0, variance 1: of the uniforms, or of the coins u < chance."""
    if chance is None:
        return (u - np.float32(0.5)) * np.float32(math.sqrt(12))
    return ((u < chance) - np.float32(chance)) / np.float32(math.sqrt(chance * (1 - chance)))


def lag_scores(x, y):
    """z of the correlation of x[i] with y[i + d], d = 0 to half the length; every d has half the length of terms."""
    half = x.size // 2
    padded = np.zeros_like(x)
    padded[:half] = x[:half]
    product = scipy.fft.rfft(y) * np.conj(scipy.fft.rfft(padded))
    return scipy.fft.irfft(product, x.size)[: half + 1] / math.sqrt(half)


def lags(keys, chances=CHANCES, count=LAGS):
    """chance -> (z of the mean over keys, z of the mean square over keys), one each for lags 1 to ``count``."""
    total, squares = ({c: np.zeros(count) for c in chances} for _ in range(2))
    for key in keys:
        u = uniforms(key, 2 * count)
        for chance in chances:
            x = standard(u, chance)
            z = lag_scores(x, x)[1:]
            total[chance] += z
            squares[chance] += z.astype(np.float64) ** 2
    return {c: (total[c] / math.sqrt(len(keys)), of_chi2(squares[c], len(keys))) for c in chances}


def of_chi2(value, freedom):
    """z of a chi-squared sum (Wilson and Hilferty)."""
    spread = 2 / (9 * freedom)
    return (np.cbrt(value / freedom) - (1 - spread)) / math.sqrt(spread)


def sums(keys, shape, chance=0.5):
    """z of the variance of column sums and of row sums over that of independent draws, and both ratios."""
    found = [standard(uniforms(key, shape[0] * shape[1]), chance).reshape(shape) for key in keys]
    ratios, scores = [], []
    for axis in (0, 1):
        squared = np.concatenate([m.sum(axis, dtype=np.float64) ** 2 for m in found]) / shape[axis]
        ratios.append(squared.mean())
        scores.append((squared.mean() - 1) / math.sqrt(2 / squared.size))
    return scores, ratios


def streams(derive, count, size=LAGS, chance=0.5):
    """Streams of keys that differ in one field.

    Returns:
        z of the variance of the sum over streams; the largest |z| of neighboring streams over lags up to half the size.
    """
    total, worst, last = np.zeros(size), 0.0, None
    for k in range(count):
        x = standard(uniforms(derive(k), size), chance)
        if last is not None:
            worst = max(worst, np.abs(lag_scores(last, x)).max(), np.abs(lag_scores(x, last)).max())
        total += x
        last = x
    return (np.mean(total**2) / count - 1) * math.sqrt(size / 2), worst


def marginals(keys, size=1_000_000):
    """z of: how many u lie below 1e-6; the frequencies of each of the three bytes; the most frequent 24 bits."""
    rare, tally = 0, np.zeros((3, 256))
    for key in keys:
        u = uniforms(key, size)
        rare += int((u < np.float32(1e-6)).sum())
        word = (u * np.float32(2**24)).astype(np.uint32)
        for byte in range(3):
            tally[byte] += np.bincount((word >> (8 * byte)) & 255, minlength=256)
    # Uniforms are multiples of 2^-24, so 17 of them are below 1e-6.
    expected = len(keys) * size * 17 / 2**24
    even = len(keys) * size / 256
    return (rare - expected) / math.sqrt(expected), of_chi2(((tally - even) ** 2 / even).sum(1), 255)


def main():
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 64
    start = time.process_time()
    keys = [Key.derive(seed, tensor="fc.weight") for seed in range(count)]
    print(f"{count} keys, lags 1 to {LAGS}\n")
    print("| p of u < p | largest abs. z of the mean | lags above 5 | largest z of the mean square | lags above 5 |")
    print("|---|---|---|---|---|")
    for chance, (mean, square) in lags(keys).items():
        worst, most = np.abs(mean), square.max()
        name = "u itself" if chance is None else chance
        print(
            f"| {name} | {worst.max():.2f} at {worst.argmax() + 1} | {(worst > 5).sum()} "
            f"| {most:.2f} at {square.argmax() + 1} | {(square > 5).sum()} |"
        )
    print("\n| shape | p | variance of column sums / independent | z | of row sums / independent | z |")
    print("|---|---|---|---|---|---|")
    for shape in SHAPES:
        for chance in (0.5, 0.1):
            (column, row), (columns, rows) = sums(keys, shape, chance)
            print(f"| {shape[0]} x {shape[1]} | {chance} | {columns:.4f} | {column:.1f} | {rows:.4f} | {row:.1f} |")
    # Of 66 million independent scores, the largest is 5.8.
    print("\n| keys differ in | z of the variance of the sum | largest abs. z of neighbors, lags to 524288 |")
    print("|---|---|---|")
    for name, derive in FIELDS.items():
        summed, worst = streams(derive, count)
        print(f"| {name} | {summed:.1f} | {worst:.2f} |")
    rare, even = marginals(keys)
    print(f"\nu < 1e-6 among {count} million: z {rare:.1f}; bytes of the 24 bits, low to high: z", *np.round(even, 1))
    print(f"{time.process_time() - start:.0f} s of CPU time")


if __name__ == "__main__":
    main()
