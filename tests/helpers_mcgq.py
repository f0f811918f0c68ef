"""Slow, plain versions of MCGQ and of the integer codes, and what their tests share."""

import itertools
import json
import tracemalloc
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path

import numpy as np


def golden():
    return json.loads((Path(__file__).parent / "golden" / "mcgq.json").read_text(encoding="utf-8"))


def running_sums(g):
    """Sequential float64 sums of |g|, as exact numbers."""
    sums, total = [], 0.0
    for value in np.abs(np.asarray(g, np.float32)).tolist():
        total += value
        sums.append(Fraction(total))
    return sums


def literal_counts(g, samples, xi):
    """The loop over samples in exact arithmetic: each hits the first coordinate whose CDF is strictly greater."""
    sums = running_sums(g)
    hits = [0] * len(sums)
    if sums and sums[-1]:
        for i in range(samples):
            x = (i + Fraction(xi)) / samples
            hits[next(k for k, s in enumerate(sums) if s / sums[-1] > x)] += 1
    return [-h if value < 0 else h for h, value in zip(hits, np.asarray(g, np.float32).tolist(), strict=True)]


def exact_counts(g, samples, xi):
    """ceil(N S_k / T - xi) in exact arithmetic, for more samples than a loop can take."""
    sums = running_sums(g)
    ends = [-((Fraction(xi) - samples * s / sums[-1]) // 1) for s in sums]
    return [
        int(end - before) * (-1 if value < 0 else 1)
        for end, before, value in zip(ends, [0, *ends], np.asarray(g, np.float32).tolist(), strict=False)
    ]


def runlength_bits(q, norm=None):
    """The payload as text of zeros and ones."""
    pieces = [(value, len(list(group))) for value, group in itertools.groupby(q)]
    wide = 1 + max((abs(v) for v, _ in pieces), default=0).bit_length()
    long = max((n for v, n in pieces if v == 0), default=0).bit_length()
    text = f"{wide:032b}{long:032b}"
    if norm is not None:
        text += f"{np.float32(norm).view(np.uint32):032b}"
    for value, count in pieces:
        if value == 0:
            text += "0" * wide + f"{count:0{long}b}"
        else:
            text += f"{value % (1 << wide):0{wide}b}" * count
    return text


def high_first(text):
    """Bits as bytes, the first bit highest."""
    text += "0" * (-len(text) % 8)
    return bytes(int(text[i : i + 8], 2) for i in range(0, len(text), 8))


def low_first(text):
    """Bits as bytes, the first bit lowest."""
    text += "0" * (-len(text) % 8)
    return bytes(int(text[i : i + 8][::-1], 2) for i in range(0, len(text), 8))


def group(z):
    """Binary digits with the leading one first and the others from the lowest up."""
    digits = f"{z:b}"
    return digits[0] + digits[:0:-1]


def elias(kind, z):
    """The code of a positive integer as text, first bit first."""
    length = z.bit_length()
    if kind == "gamma":
        return "0" * (length - 1) + group(z)
    if kind == "delta":
        return elias("gamma", length) + group(z)[1:]
    text = "0"
    while z > 1:
        text = group(z) + text
        z = z.bit_length() - 1
    return text


def zigzag(value):
    """0, -1, 1, -2, 2, ... as 1, 2, 3, 4, 5, ..."""
    return -2 * value if value < 0 else 2 * value + 1


@contextmanager
def memory_below(limit):
    """Fails when the block takes more memory than ``limit`` bytes at a time."""
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < limit, f"took {peak} bytes"
