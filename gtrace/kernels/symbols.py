"""Level sets over one sketch, all in one call: expected errors, symbol probabilities and their codes."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from gtrace.kernels._jit import jit
from gtrace.kernels.bits import entropy, huffman_lengths
from gtrace.kernels.sketching import expect_levels

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: Numbers about the symbols of a level set: their entropy, the mean length of the tight and of the complete code, and
#: the bits that sending the lengths of the complete one takes.
ENTROPY, TIGHT, COMPLETE, SENT = range(4)
SYMBOL_NUMBERS = 4
#: Numbers about its levels, ahead of those: the weighted error, the plain one, the bound on the first, and the
#: probability of the lowest level.
WEIGHTED, PLAIN, BOUND, LOWEST = range(4)
NUMBERS = 4 + SYMBOL_NUMBERS


class Bins(NamedTuple):
    """The arguments of :func:`judge_levels` that are about a sketch, in their order; see :func:`expect_levels`.

    Attributes:
        lower: float64[k], lower edges.
        upper: float64[k], upper edges.
        sums: float64[k, 6].
        blocks: of every ``BLOCK_BINS`` of them.
        large: of every ``LARGE_BINS``.
        zeros: values that are exactly zero.
        zero_weight: their summed squared bucket scale.
        count: values that are rounded, zeros included.
    """

    lower: NDArray[np.float64]
    upper: NDArray[np.float64]
    sums: NDArray[np.float64]
    blocks: NDArray[np.float64]
    large: NDArray[np.float64]
    zeros: float
    zero_weight: float
    count: float  # hides tuple.count, which nobody needs here


@jit
def limited_lengths(weights: NDArray[np.float64], longest: int, lengths: NDArray[np.uint8]) -> None:
    """Lengths of a Huffman code of at most ``longest`` bits, 0 for symbols of weight 0."""
    if huffman_lengths(weights, lengths) <= longest:
        return
    raised = weights.copy()
    while huffman_lengths(raised, lengths) > longest:
        # A weight below 2^-longest of the whole is what makes codes so long: raise it to that.
        least = raised.sum() * 2.0 ** (1 - longest)
        for k in range(raised.size):
            if raised[k] > 0.0:
                raised[k] = max(raised[k], least)


@jit
def mean_length(lengths: NDArray[np.uint8], probabilities: NDArray[np.float64]) -> float:
    """Mean bits per symbol; infinite when a symbol without a code has a chance."""
    total = 0.0
    for k in range(lengths.size):
        if lengths[k] == 0 and probabilities[k] > 0.0:
            return np.inf
        total += probabilities[k] * lengths[k]
    return total


@jit
def complete(
    probabilities: NDArray[np.float64], count: float, longest: int, tight: NDArray[np.uint8], out: NDArray[np.uint8]
) -> None:
    """Lengths of a code that has one for every symbol, where that lengthens the mean by less than a hundredth.

    ``tight`` are the Huffman lengths of these ``probabilities``, and what comes out elsewhere; a symbol without a
    chance among ``count`` values counts as one of a quarter of a value.
    """
    out[:] = tight
    if (tight > 0).all():
        return
    full = np.empty(tight.size, np.uint8)
    limited_lengths(np.maximum(probabilities, 0.25 / max(1, count)), longest, full)
    if mean_length(full, probabilities) <= 1.01 * mean_length(tight, probabilities):
        out[:] = full


@jit
def packed_bits(lengths: NDArray[np.uint8]) -> int:
    """Bits that code lengths take when they are sent: 48 and five for each symbol of the span that is in use."""
    first, last = lengths.size, -1
    for k in range(lengths.size):
        if lengths[k] != 0:
            first = min(first, k)
            last = k
    return 8 * (6 + (5 * max(0, last - first + 1) + 7) // 8)


@jit
def tell_symbols(
    mass: NDArray[np.float64],
    mirrored: bool,
    count: float,
    longest: int,
    probabilities: NDArray[np.float64],
    tight: NDArray[np.uint8],
    kept: NDArray[np.uint8],
    numbers: NDArray[np.float64],
) -> None:
    """Signed symbols and their codes from the probabilities ``mass`` of m magnitudes; signs share alike.

    Args:
        mass: float64[m].
        mirrored: 0 is no level, so every magnitude has two signs.
        count: values that are rounded.
        longest: bits of a code at most.
        probabilities: float64[2 m] or, with a zero level, [2 m - 1]: overwritten, the most negative symbol first.
        tight: uint8, as many: the Huffman lengths.
        kept: uint8, as many: those of the complete code.
        numbers: float64[SYMBOL_NUMBERS], overwritten.
    """
    m = mass.size
    for k in range(m):
        half = mass[k] / 2.0
        probabilities[m - 1 - k] = half
        probabilities[probabilities.size - m + k] = half
    if not mirrored:
        probabilities[m - 1] = mass[0]
    limited_lengths(probabilities, longest, tight)
    complete(probabilities, count, longest, tight, kept)
    numbers[ENTROPY] = entropy(probabilities)
    numbers[TIGHT] = mean_length(tight, probabilities)
    numbers[COMPLETE] = mean_length(kept, probabilities)
    numbers[SENT] = packed_bits(kept)


@jit
def judge_levels(
    lower: NDArray[np.float64],
    upper: NDArray[np.float64],
    sums: NDArray[np.float64],
    blocks: NDArray[np.float64],
    large: NDArray[np.float64],
    zeros: float,
    zero_weight: float,
    count: float,
    levels: NDArray[np.float64],
    mirrored: bool,
    mass: NDArray[np.float64],
) -> tuple[float, float, float]:
    """As :func:`expect_levels`, with the exact zeros, and ``mass`` as probabilities."""
    weighted, plain, bound = expect_levels(lower, upper, sums, blocks, large, levels, mirrored, mass)
    if mirrored:
        weighted += zero_weight * levels[0] ** 2
        plain += zeros * levels[0] ** 2
    mass[0] += zeros
    if count > 0:
        for k in range(mass.size):
            mass[k] = max(mass[k], 0.0) / count
    return max(weighted, 0.0), max(plain, 0.0), bound


@jit
def judge_sets(
    lower: NDArray[np.float64],
    upper: NDArray[np.float64],
    sums: NDArray[np.float64],
    blocks: NDArray[np.float64],
    large: NDArray[np.float64],
    zeros: float,
    zero_weight: float,
    count: float,
    levels: NDArray[np.float64],
    starts: NDArray[np.int64],
    mirrored: NDArray[np.bool_],
    symbol_starts: NDArray[np.int64],
    longest: int,
    probabilities: NDArray[np.float64],
    kept: NDArray[np.uint8],
    numbers: NDArray[np.float64],
) -> None:
    """Everything about many level sets, which lie end to end.

    Args:
        lower: see :class:`Bins` for this and the next seven.
        upper: see there.
        sums: see there.
        blocks: see there.
        large: see there.
        zeros: see there.
        zero_weight: see there.
        count: see there.
        levels: float64, of all sets.
        starts: int64[sets + 1], where each begins.
        mirrored: bool[sets], whether 0 is no level.
        symbol_starts: int64[sets + 1], where the signed symbols of each begin.
        longest: bits of a code at most.
        probabilities: float64, overwritten: of all symbols.
        kept: uint8, overwritten: lengths of their complete codes.
        numbers: float64[sets, NUMBERS], overwritten.
    """
    widest = np.diff(symbol_starts).max()
    mass, tight = np.empty(widest), np.empty(widest, np.uint8)
    for g in range(starts.size - 1):
        grid = levels[starts[g] : starts[g + 1]]
        first, last = symbol_starts[g], symbol_starts[g + 1]
        numbers[g, :LOWEST] = judge_levels(
            lower, upper, sums, blocks, large, zeros, zero_weight, count, grid, mirrored[g], mass[: grid.size]
        )
        numbers[g, LOWEST] = mass[0]
        tell_symbols(
            mass[: grid.size],
            mirrored[g],
            count,
            longest,
            probabilities[first:last],
            tight[: last - first],
            kept[first:last],
            numbers[g, LOWEST + 1 :],
        )


@jit
def mean_lengths(
    lengths: NDArray[np.uint8],
    probabilities: NDArray[np.float64],
    starts: NDArray[np.int64],
    out: NDArray[np.float64],
) -> None:
    """:func:`mean_length` of codes that lie end to end."""
    for g in range(out.size):
        out[g] = mean_length(lengths[starts[g] : starts[g + 1]], probabilities[starts[g] : starts[g + 1]])
