"""Level sets over one sketch, all in one call: expected errors, symbol probabilities and their codes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from gtrace.kernels._jit import inline, jit
from gtrace.kernels.bits import entropy, huffman_depths, package_merge
from gtrace.kernels.sketching import expect_levels

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from gtrace.kernels import Bytes, Flags, Floats, Ints

#: Numbers about the symbols of a level set: their entropy, the mean length of their code, and the bits that sending
#: its lengths takes.
ENTROPY, CODED, SENT = range(3)
SYMBOL_NUMBERS = 3
#: Numbers about its levels, ahead of those: the weighted error, the plain one, the bound on the first, and the
#: probability of the lowest level.
WEIGHTED, PLAIN, BOUND, LOWEST = range(4)
NUMBERS = 4 + SYMBOL_NUMBERS
#: A symbol that is expected less often than this among all values has no length of its own.
SELDOM = 0.5
#: Least weight of such a symbol, as a share of all values: codes of at most 24 bits have room for it.
LEAST = 2.0**-20
#: Weights that are put in order one by one before runs are merged.
RUN = 8


class SketchBins(NamedTuple):
    """The numbers of a sketch that the kernels below need; see :func:`expect_levels`.

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

    lower: Floats
    upper: Floats
    sums: Floats
    blocks: Floats
    large: Floats
    zeros: float
    zero_weight: float
    count: float  # hides tuple.count, which nobody needs here


class BinSets(NamedTuple):
    """The :class:`SketchBins` of several sketches, end to end.

    Attributes:
        lower, upper, sums, blocks, large: as there.
        starts: int64[sketches + 1, 3], where the bins, the blocks and the large blocks of each begin.
        numbers: float64[sketches, 3], zeros, zero_weight and count of each.
    """

    lower: Floats
    upper: Floats
    sums: Floats
    blocks: Floats
    large: Floats
    starts: Ints
    numbers: Floats


@inline
def _ascending(weights: Floats) -> Ints:
    """The indices of the weights in ascending order, equal ones in their original order.

    Same result as numpy's stable argsort, which takes three times as long to compile and would be compiled per kernel.
    """
    order, other = np.arange(weights.size), np.empty(weights.size, np.int64)
    for start in range(0, weights.size, RUN):
        for k in range(start + 1, min(start + RUN, weights.size)):
            at, place = k, order[k]
            while at > start and weights[order[at - 1]] > weights[place]:
                order[at] = order[at - 1]
                at -= 1
            order[at] = place
    width = RUN
    while width < weights.size:
        for start in range(0, weights.size, 2 * width):
            middle, end = min(start + width, weights.size), min(start + 2 * width, weights.size)
            left, right = start, middle
            for k in range(start, end):
                if left < middle and (right >= end or weights[order[left]] <= weights[order[right]]):
                    other[k] = order[left]
                    left += 1
                else:
                    other[k] = order[right]
                    right += 1
        order, other = other, order
        width *= 2
    return order


@jit
def limited_lengths(weights: Floats, longest: int, lengths: Bytes) -> None:
    """Lengths of the best prefix code of at most ``longest`` bits, 0 for symbols of weight 0.

    At most 2^longest symbols may have a weight.
    """
    order = _ascending(weights)
    first = 0
    while first < order.size and not weights[order[first]] > 0.0:
        lengths[order[first]] = 0
        first += 1
    live = order.size - first
    if live == 1:
        lengths[order[first]] = 1
    if live < 2:
        return
    ordered, depths = np.empty(live), np.empty(live, np.int64)
    for k in range(live):
        ordered[k] = weights[order[first + k]]
    huffman_depths(ordered, depths)
    if depths[0] > longest:
        package_merge(ordered, longest, depths)
    for k in range(live):
        lengths[order[first + k]] = depths[k]


@jit
def mean_length(lengths: Bytes, probabilities: Floats) -> float:
    """Mean bits per symbol; infinite if a symbol without a code can occur."""
    total = 0.0
    for k in range(lengths.size):
        if lengths[k] == 0 and probabilities[k] > 0.0:
            return np.inf
        total += probabilities[k] * lengths[k]
    return total


@jit
def escape_lengths(probabilities: Floats, count: float, longest: int, lengths: Bytes) -> None:
    """Lengths of a code for all symbols, in which those that are rare among ``count`` values share one length.

    Their codes are an escape code followed by a number. Together they have the weight of one value in ``count``, or
    their expected weight, equal for each of them.
    """
    least = SELDOM / max(1, count)
    seldom, mass = 0, 0.0
    for k in range(probabilities.size):
        if probabilities[k] < least:
            seldom += 1
            mass += probabilities[k]
    each = max(max(mass, 1.0 / max(1, count)) / max(1, seldom), LEAST)
    weights = probabilities.copy()
    for k in range(weights.size):
        if weights[k] < least:
            weights[k] = each
    limited_lengths(weights, longest, lengths)
    escape = 0
    for k in range(weights.size):
        if probabilities[k] < least:
            escape = max(escape, np.int64(lengths[k]))
    for k in range(weights.size):
        if probabilities[k] < least:
            lengths[k] = escape


@jit
def packed_bits(lengths: Bytes, outside: int) -> int:
    """Bits that code lengths take when they are sent: 48, and five for ``outside`` and each of the span of others."""
    first, last = lengths.size, -1
    for k in range(lengths.size):
        if lengths[k] != outside:
            first = min(first, k)
            last = k
    return 8 * (6 + (5 + 5 * max(0, last - first + 1) + 7) // 8)


@jit
def tell_symbols(
    mass: Floats, mirrored: bool, count: float, longest: int, probabilities: Floats, lengths: Bytes, numbers: Floats
) -> None:
    """Signed symbols and their code from the probabilities ``mass`` of m magnitudes; both signs get the same share.

    Args:
        mass: float64[m].
        mirrored: 0 is not a level, so every magnitude has two signs.
        count: values that are rounded.
        longest: bits of a code at most.
        probabilities: float64[2 m] or, with a zero level, [2 m - 1]: overwritten, the most negative symbol first.
        lengths: uint8, as many, overwritten: see :func:`escape_lengths`.
        numbers: float64[SYMBOL_NUMBERS], overwritten.
    """
    m = mass.size
    for k in range(m):
        half = mass[k] / 2.0
        probabilities[m - 1 - k] = half
        probabilities[probabilities.size - m + k] = half
    if not mirrored:
        probabilities[m - 1] = mass[0]
    escape_lengths(probabilities, count, longest, lengths)
    numbers[ENTROPY] = entropy(probabilities)
    numbers[CODED] = mean_length(lengths, probabilities)
    numbers[SENT] = packed_bits(lengths, np.int64(lengths[lengths.size - 1]))


@jit
def judge_levels(bins: SketchBins, levels: Floats, mirrored: bool, mass: Floats) -> tuple[float, float, float]:
    """As :func:`expect_levels`, with the exact zeros, and ``mass`` as probabilities."""
    weighted, plain, bound = expect_levels(
        bins.lower, bins.upper, bins.sums, bins.blocks, bins.large, levels, mirrored, mass
    )
    if mirrored:
        weighted += bins.zero_weight * levels[0] ** 2
        plain += bins.zeros * levels[0] ** 2
    mass[0] += bins.zeros
    if bins.count > 0:
        below = 0.0
        for k in range(mass.size):
            below += min(mass[k], 0.0)
        # Several levels in one bin can leave less than nothing for one of them; the others have that much too much.
        whole = bins.count - below
        for k in range(mass.size):
            mass[k] = max(mass[k], 0.0) / whole
    return max(weighted, 0.0), max(plain, 0.0), bound


@jit
def spaced_entropy(bins: SketchBins, step: float, exponent: float, most: int) -> float:
    """Entropy of signed symbols, bits a value, with the levels of :func:`gtrace.fitting.entropy.spaced_levels`.

    Both signs have the same share, as a sketch has none.
    """
    levels, count = np.ones(most), 0
    for k in range(min(most - 1, int(np.ceil(1 / step - 1e-9)))):
        if k * step < 1 - step / 4:
            levels[count] = (k * step) ** exponent
            count += 1
    mass, found = np.empty(count + 1), 0.0
    judge_levels(bins, levels[: count + 1], False, mass)
    for k in range(mass.size):
        if mass[k] > 0.0:
            found -= mass[k] * (np.log2(mass[k]) - (k > 0))
    return found


@inline
def _bins_at(many: BinSets, place: int) -> SketchBins:
    """The bins of one of several sketches."""
    first, last, numbers = many.starts[place], many.starts[place + 1], many.numbers[place]
    return SketchBins(
        many.lower[first[0] : last[0]],
        many.upper[first[0] : last[0]],
        many.sums[first[0] : last[0]],
        many.blocks[first[1] : last[1]],
        many.large[first[2] : last[2]],
        numbers[0],
        numbers[1],
        numbers[2],
    )


@jit
def judge_sets(
    many: BinSets,
    levels: Floats,
    starts: Ints,
    mirrored: Flags,
    symbol_starts: Ints,
    longest: int,
    probabilities: Floats,
    lengths: Bytes,
    numbers: Floats,
) -> None:
    """Everything about many level sets, which lie end to end: equally many of each sketch.

    Args:
        many: of the sketches.
        levels: float64, of all sets.
        starts: int64[sets + 1], where each begins.
        mirrored: bool[sets], whether 0 is not a level.
        symbol_starts: int64[sets + 1], where the signed symbols of each begin.
        longest: bits of a code at most.
        probabilities: float64, overwritten: of all symbols.
        lengths: uint8, overwritten: of their codes.
        numbers: float64[sets, NUMBERS], overwritten.
    """
    mass, each = np.empty(levels.size), (starts.size - 1) // many.numbers.shape[0]
    for g in range(starts.size - 1):
        bins, grid = _bins_at(many, g // each), levels[starts[g] : starts[g + 1]]
        first, last = symbol_starts[g], symbol_starts[g + 1]
        weighted, plain, bound = judge_levels(bins, grid, mirrored[g], mass[: grid.size])
        numbers[g, WEIGHTED], numbers[g, PLAIN], numbers[g, BOUND] = weighted, plain, bound
        numbers[g, LOWEST] = mass[0]
        tell_symbols(
            mass[: grid.size],
            mirrored[g],
            bins.count,
            longest,
            probabilities[first:last],
            lengths[first:last],
            numbers[g, LOWEST + 1 :],
        )


@jit
def weigh_sets(many: BinSets, levels: Floats, starts: Ints, mirrored: Flags, errors: Floats) -> None:
    """The weighted errors alone of what :func:`judge_sets` judges, into ``errors``, float64[sets]."""
    mass, each = np.empty(levels.size), errors.size // many.numbers.shape[0]
    for g in range(errors.size):
        grid = levels[starts[g] : starts[g + 1]]
        errors[g] = judge_levels(_bins_at(many, g // each), grid, mirrored[g], mass[: grid.size])[0]


@jit
def differ(a: NDArray[Any], starts_a: Ints, b: NDArray[Any], starts_b: Ints, out: Flags) -> None:
    """Whether arrays that lie end to end differ, into ``out``, bool[arrays]."""
    for g in range(out.size):
        own, other = a[starts_a[g] : starts_a[g + 1]], b[starts_b[g] : starts_b[g + 1]]
        out[g] = own.size != other.size
        for k in range(min(own.size, other.size)):
            out[g] |= own[k] != other[k]


@jit
def mean_lengths(lengths: Bytes, probabilities: Floats, starts: Ints, out: Floats) -> None:
    """:func:`mean_length` of codes that lie end to end."""
    for g in range(out.size):
        out[g] = mean_length(lengths[starts[g] : starts[g + 1]], probabilities[starts[g] : starts[g + 1]])
