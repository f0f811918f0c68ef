"""Randomized Hadamard rotation of blocks: random signs, then a fast Walsh-Hadamard transform."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from gtrace.kernels._jit import inline, jit
from gtrace.kernels.counter import MASK32, mix, words
from gtrace.kernels.norms import FLOAT32_MAX

if TYPE_CHECKING:
    from gtrace.kernels import Floats, Singles

_S31 = np.uint64(31)


@inline
def transform(buffer: Floats) -> None:
    """Unnormalized transform in place; a power of two of elements."""
    size = buffer.size
    if size >= 4:
        # Two stages at once: slices of one and two elements would cost more than the sums.
        for i in range(0, size, 4):
            a, b, c, d = buffer[i], buffer[i + 1], buffer[i + 2], buffer[i + 3]
            buffer[i] = (a + b) + (c + d)
            buffer[i + 1] = (a - b) + (c - d)
            buffer[i + 2] = (a + b) - (c + d)
            buffer[i + 3] = (a - b) - (c - d)
    elif size == 2:
        a, b = buffer[0], buffer[1]
        buffer[0], buffer[1] = a + b, a - b
    half = 4
    # Two stages at once also further on: half as often through a buffer that is larger than the nearest cache.
    while 2 * half < size:
        for i in range(0, size, 4 * half):
            first, second = buffer[i : i + half], buffer[i + half : i + 2 * half]
            third, fourth = buffer[i + 2 * half : i + 3 * half], buffer[i + 3 * half : i + 4 * half]
            for j in range(half):
                a, b, c, d = first[j], second[j], third[j], fourth[j]
                first[j] = (a + b) + (c + d)
                second[j] = (a - b) + (c - d)
                third[j] = (a + b) - (c + d)
                fourth[j] = (a - b) - (c - d)
        half *= 4
    if half < size:
        low, high = buffer[:half], buffer[half:]
        for j in range(half):
            a, b = low[j], high[j]
            low[j] = a + b
            high[j] = a - b


@inline
def flip_signs(buffer: Floats, start: int, signs: Singles, add: np.uint64, flip: np.uint64, last: np.uint64) -> None:
    """Negate elements by a table, or else as the key's coins fall; ``start`` is the number of the first one."""
    if signs.size:
        at = start % signs.size
        for i in range(buffer.size):
            buffer[i] *= signs[at]
            at = at + 1 if at + 1 < signs.size else 0
        return
    base = np.uint64(start) & MASK32
    for i in range(buffer.size):
        coin = mix((base + np.uint64(i)) & MASK32, add, flip, last) >> _S31
        buffer[i] *= np.float64(1 - 2 * np.int32(coin))


@jit
def rotate(
    x: Singles, first: int, block: int, signs: Singles, high: np.uint64, low: np.uint64, back: bool, out: Singles
) -> None:
    """Rotate float32[n], from value ``first`` of its tensor on, block by block, or rotate it back.

    Signs are those of a table, repeated, or without one (float32[0]) drawn by the key. A rest shorter than ``block``
    (a power of two) is cut into smaller powers of two, so nothing is padded. Sums are float64; what leaves float32's
    range is kept at its largest number.
    """
    add, flip, last = words(high, low, 0)
    room = np.empty(block, np.float64)
    start = 0
    while start < x.size:
        while block > x.size - start:
            block //= 2
        buffer = room[:block]
        source = x[start : start + block]
        target = out[start : start + block]
        norm = 1.0 / math.sqrt(block)
        for i in range(block):
            buffer[i] = np.float64(source[i]) * norm
        if not back:
            flip_signs(buffer, first + start, signs, add, flip, last)
        transform(buffer)
        if back:
            flip_signs(buffer, first + start, signs, add, flip, last)
        for i in range(block):
            target[i] = min(max(buffer[i], -FLOAT32_MAX), FLOAT32_MAX)
        start += block
