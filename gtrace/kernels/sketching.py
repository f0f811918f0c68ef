"""The moment sketch: one pass over the data, and closed forms over its bins."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from gtrace.kernels._jit import inline, jit, jit_slp
from gtrace.kernels.bits import FLOATS, touch
from gtrace.kernels.norms import bucket_scales, power_sum

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from gtrace.kernels import Floats, Ints, Singles

#: bits of a float64 below the ten leading ones of its mantissa
SHIFT = 42
#: columns of a bin: count, sum d, sum d^2, and the same weighted by the squared scale; d = r - lower edge
COLUMNS = 6
_CHUNK = 256
#: values between those that are added and those that are fetched
_AHEAD = 16 * _CHUNK
#: bins of a block and of a large block: without a level inside, a block counts as one bin
BLOCK_BINS = 8
LARGE_BINS = 64
#: columns of what is counted besides the bins
ZEROS, ZERO_WEIGHT, SIZE, BUCKETS, DEAD, EXACT, EXACT_ENERGY, EXACT_ZEROS = range(8)


@jit_slp
def accumulate(
    x: Singles, start: int, stop: int, bucket: int, scales: Singles, base: int, weights: Floats, table: Floats
) -> tuple[int, int]:
    """Add the elements start..stop of ``x`` to the bins of ``table``; returns the lowest and highest row touched.

    ``weights``, one for each element or none at all, multiply the squared scales. Row 0 takes zeros, row k > 0 the
    values whose float64 pattern, cut after ten bits of mantissa, is base + k; smaller values go to row 1. Loops are
    split in two: the first, without branches, is vectorized, the second scatters.
    """
    r = np.empty(_CHUNK)
    edge = np.empty(_CHUNK)
    row = np.empty(_CHUNK, np.int64)
    own = weights.size > 0
    r_bits = r.view(np.int64)
    edge_bits = edge.view(np.int64)
    low, high = table.shape[0], -1
    first_edge = base + 1
    p = start
    while p < stop:
        b = p // bucket
        end = min(stop, (b + 1) * bucket)
        scale = np.float64(scales[b])
        weight = scale * scale
        divisor = scale if scale > 0.0 else 1.0
        while p < end:
            q = min(p + _CHUNK, end)
            m = q - p
            xb = x[p:q]
            for i in range(0, m, FLOATS):
                touch(x, p + _AHEAD + i)
            for i in range(m):
                r[i] = abs(np.float64(xb[i])) / divisor
            for i in range(m):
                key = r_bits[i] >> SHIFT
                inside = key >= first_edge
                edge_bits[i] = (key << SHIFT) * np.int64(inside)
                row[i] = max(key - base, np.int64(r_bits[i] > 0))
            for i in range(m):
                edge[i] = r[i] - edge[i]
                low = min(low, row[i])
                high = max(high, row[i])
            for i in range(m):
                d, cell, w = edge[i], table[np.uintp(row[i])], weight * weights[p + i] if own else weight
                cell[0] += 1.0
                cell[1] += d
                cell[2] += d * d
                cell[3] += w
                cell[4] += w * d
                cell[5] += w * d * d
            p = q
    return low, high


@jit
def fold(table: Floats, low: int, high: int, total: Floats) -> None:
    """Add the rows low..high of ``table`` to ``total`` and clear them."""
    for k in range(low, high + 1):
        if table[k, 0] != 0.0:
            for j in range(COLUMNS):
                total[k, j] += table[k, j]
                table[k, j] = 0.0


@jit
def compact(table: Floats, low: int, high: int, rows: NDArray[np.int32], sums: Floats) -> int:
    """Move the non-empty rows low..high out of ``table``, which is left clear; returns how many there are."""
    count = 0
    for k in range(low, high + 1):
        if table[k, 0] != 0.0:
            rows[count] = k
            for j in range(COLUMNS):
                sums[count, j] = table[k, j]
                table[k, j] = 0.0
            count += 1
    return count


@inline
def _lower_edges(rows: NDArray[np.int32], base: int) -> Floats:
    leading = np.empty(rows.size, np.int64)
    for k in range(rows.size):
        leading[k] = (np.int64(rows[k]) + base) << SHIFT if rows[k] != 1 else 0
    return leading.view(np.float64)


@jit
def sum_squares(rows: NDArray[np.int32], base: int, sums: Floats, out: Floats) -> None:
    """The weighted sum of r^2 over each bin."""
    lower = _lower_edges(rows, base)
    for k in range(rows.size):
        low, w, w1, w2 = lower[k], sums[k, 3], sums[k, 4], sums[k, 5]
        out[k] = w * low * low + 2.0 * low * w1 + w2


@inline
def _sum_blocks(lower: Floats, sums: Floats, bins: int, out: Floats) -> None:
    """Add the sums of every ``bins`` bins, about the lower edge of the first, to a row of ``out`` each."""
    for b in range((lower.size + bins - 1) // bins):
        first = b * bins
        for k in range(first, min(first + bins, lower.size)):
            moved = lower[k] - lower[first]
            for j in (0, 3):
                n, d1, d2 = sums[k, j], sums[k, j + 1], sums[k, j + 2]
                out[b, j] += n
                out[b, j + 1] += d1 + moved * n
                out[b, j + 2] += d2 + moved * (2.0 * d1 + moved * n)


@jit
def describe_bins(
    rows: NDArray[np.int32], base: int, width: int, sums: Floats, starts: Ints, places: Ints
) -> tuple[Floats, Floats, Floats, Floats]:
    """Lower and upper edges of bins, and the sums over blocks of ``BLOCK_BINS`` and of ``LARGE_BINS`` of them.

    Args:
        rows: int32[k], ascending within a sketch; one sketch after the other.
        base: what the leading bits of row 0 are.
        width: how many of these leading bits a bin spans; row 1 always spans one.
        sums: float64[k, 6].
        starts: int64[sketches + 1], where the bins of each begin.
        places: int64[sketches + 1, 3], overwritten: where its bins, its blocks and its large blocks begin.
    """
    lower, above = _lower_edges(rows, base), np.empty(rows.size, np.int64)
    for k in range(rows.size):
        above[k] = (np.int64(rows[k]) + base + (1 if rows[k] == 1 else width)) << SHIFT
    places[0] = 0
    for t in range(starts.size - 1):
        count = starts[t + 1] - starts[t]
        places[t + 1, 0] = starts[t + 1]
        places[t + 1, 1] = places[t, 1] + (count + BLOCK_BINS - 1) // BLOCK_BINS
        places[t + 1, 2] = places[t, 2] + (count + LARGE_BINS - 1) // LARGE_BINS
    blocks, large = np.zeros((places[-1, 1], COLUMNS)), np.zeros((places[-1, 2], COLUMNS))
    for t in range(starts.size - 1):
        own = slice(starts[t], starts[t + 1])
        _sum_blocks(lower[own], sums[own], BLOCK_BINS, blocks[places[t, 1] :])
        _sum_blocks(lower[own], sums[own], LARGE_BINS, large[places[t, 2] :])
    return lower, above.view(np.float64), blocks, large


@jit
def are_levels(levels: Floats) -> bool:
    """Whether there are any, all finite, ascending, and the first is not negative."""
    if levels.size == 0 or not (levels[0] >= 0.0 and levels[-1] < np.inf):
        return False
    for j in range(1, levels.size):  # noqa: SIM110 - compiled
        if not levels[j] > levels[j - 1]:
            return False
    return True


@inline
def hinge(t: float, low: float, width: float, n: float, d1: float, d2: float) -> tuple[float, float]:
    """Estimate sum (t - r)_+ over a bin from its moments, and bound the estimate's error.

    The estimate integrates the quadratic density that has the bin's three moments. The bounds are sharp for
    a law of known mean and variance on an interval: Jensen's from below, the chord and Scarf's from above.
    """
    if n <= 0.0:
        return 0.0, 0.0
    u = (t - low) / width
    m1 = d1 / (n * width)
    m2 = d2 / (n * width * width)
    c1 = 2.0 * m1 - 1.0
    c2 = 0.5 * (3.0 * (4.0 * m2 - 4.0 * m1 + 1.0) - 1.0)
    u2 = u * u
    u3 = u2 * u
    value = 0.5 * u2 + c1 * (u3 - 1.5 * u2) + 5.0 * c2 * (0.5 * u2 * u2 - u3 + 0.5 * u2)
    gap = u - m1
    least = max(0.0, gap)
    variance = max(0.0, m2 - m1 * m1)
    most = max(least, min(u * (1.0 - m1), 0.5 * (np.sqrt(variance + gap * gap) + gap)))
    value = min(max(value, least), most)
    scale = n * width
    return value * scale, max(most - value, value - least) * scale


@inline
def _merged_size(rows_a: NDArray[np.int32], rows_b: NDArray[np.int32]) -> int:
    i, j, k = 0, 0, 0
    while i < rows_a.size and j < rows_b.size:
        a, b = rows_a[i], rows_b[j]
        i += a <= b
        j += b <= a
        k += 1
    return k + rows_a.size - i + rows_b.size - j


@inline
def _merge(
    rows_a: NDArray[np.int32],
    sums_a: Floats,
    mass_a: float,
    energy_a: float,
    rows_b: NDArray[np.int32],
    sums_b: Floats,
    mass_b: float,
    energy_b: float,
    share: float,
    rows: NDArray[np.int32],
    sums: Floats,
) -> None:
    i, j = 0, 0
    for k in range(rows.size):
        take_a = j == rows_b.size or (i < rows_a.size and rows_a[i] <= rows_b[j])
        take_b = i == rows_a.size or (j < rows_b.size and rows_b[j] <= rows_a[i])
        rows[k] = rows_a[i] if take_a else rows_b[j]
        if take_a and take_b:
            for c in range(3):
                sums[k, c] = (sums_a[i, c] * mass_a + sums_b[j, c] * mass_b) * share
                sums[k, c + 3] = (sums_a[i, c + 3] * energy_a + sums_b[j, c + 3] * energy_b) * share
        elif take_a:
            for c in range(3):
                sums[k, c] = sums_a[i, c] * mass_a * share
                sums[k, c + 3] = sums_a[i, c + 3] * energy_a * share
        else:
            for c in range(3):
                sums[k, c] = sums_b[j, c] * mass_b * share
                sums[k, c + 3] = sums_b[j, c + 3] * energy_b * share
        i += take_a
        j += take_b


@jit
def merge_bins(
    rows_a: NDArray[np.int32],
    sums_a: Floats,
    spans_a: Ints,
    weights_a: Floats,
    rows_b: NDArray[np.int32],
    sums_b: Floats,
    spans_b: Ints,
    weights_b: Floats,
    share: float,
) -> tuple[NDArray[np.int32], Floats, Ints]:
    """Pairs of sketches as one each: ascending numbers of bins, added sums times ``share``, and where each begins.

    Before they are added, each sketch's plain sums are multiplied by its mass and its weighted ones by its energy, its
    two ``weights``. The bins of a sketch are those of its span; those of a second one with weights 0 do not count.
    """
    count, starts = spans_a.shape[0], np.zeros(spans_a.shape[0] + 1, np.int64)
    spans = spans_b.copy()
    for t in range(count):
        if weights_b[t, 0] == 0.0 and weights_b[t, 1] == 0.0:
            spans[t, 1] = spans[t, 0]
        own, other = rows_a[spans_a[t, 0] : spans_a[t, 1]], rows_b[spans[t, 0] : spans[t, 1]]
        starts[t + 1] = starts[t] + _merged_size(own, other)
    rows, sums = np.empty(starts[count], np.int32), np.empty((starts[count], COLUMNS))
    for t in range(count):
        own, other, both = (
            slice(spans_a[t, 0], spans_a[t, 1]),
            slice(spans[t, 0], spans[t, 1]),
            slice(starts[t], starts[t + 1]),
        )
        _merge(
            rows_a[own],
            sums_a[own],
            weights_a[t, 0],
            weights_a[t, 1],
            rows_b[other],
            sums_b[other],
            weights_b[t, 0],
            weights_b[t, 1],
            share,
            rows[both],
            sums[both],
        )
    return rows, sums, starts


@jit
def sketch_values(
    x: Singles,
    bounds: Ints,
    bucket: int,
    norm: int,
    exact: bool,
    base: int,
    table: Floats,
    rows: NDArray[np.int32],
    sums: Floats,
    starts: Ints,
    counts: Floats,
) -> None:
    """Sketch tensors that lie end to end.

    Args:
        x: float32[n], finite.
        bounds: int64[tensors + 1], where each begins.
        bucket: values that share a scale; 0 for all of a tensor.
        norm: of a bucket, see :mod:`gtrace.kernels.norms`.
        exact: a short last bucket is sent exactly.
        base: see :func:`accumulate`.
        table: cleared, and left so.
        rows: int32[n], overwritten: the bins of each tensor.
        sums: float64[n, 6], overwritten: their sums.
        starts: int64[tensors + 1], overwritten: where the bins of each begin.
        counts: float64[tensors, 8], overwritten, see ZEROS.
    """
    starts[0] = 0
    for t in range(counts.shape[0]):
        own = x[bounds[t] : bounds[t + 1]]
        each = bucket or max(1, own.size)
        size = own.size - own.size % each if exact and bucket else own.size
        scales = np.empty((size + each - 1) // each, np.float32)
        bucket_scales(own[:size], each, norm, scales)
        low, high = accumulate(own, 0, size, each, scales, base, np.empty(0), table)
        counts[t, ZEROS], counts[t, ZERO_WEIGHT], counts[t, DEAD] = 0.0, 0.0, 0.0
        if high >= 0:
            counts[t, ZEROS], counts[t, ZERO_WEIGHT] = table[0, 0], table[0, 3]
            table[0] = 0.0
        at = starts[t]
        starts[t + 1] = at + compact(table, max(low, 1), high, rows[at:], sums[at:])
        for b in range(scales.size):
            if scales[b] == 0:
                counts[t, DEAD] += min((b + 1) * each, size) - b * each
        tail = own[size:]
        counts[t, SIZE], counts[t, BUCKETS], counts[t, EXACT] = own.size, scales.size, tail.size
        counts[t, EXACT_ENERGY], counts[t, EXACT_ZEROS] = power_sum(tail, 2), 0.0
        for i in range(tail.size):
            counts[t, EXACT_ZEROS] += tail[i] == 0.0


@jit
def expect_levels(
    lower: Floats,
    upper: Floats,
    sums: Floats,
    blocks: Floats,
    large: Floats,
    levels: Floats,
    mirrored: bool,
    mass: Floats,
) -> tuple[float, float, float]:
    """Expected squared error of stochastic rounding of the sketched values to ``levels``.

    Args:
        lower: float64[k], ascending lower edges of the bins.
        upper: float64[k], their upper edges.
        sums: float64[k, 6].
        blocks: what :func:`sum_blocks` made of every ``BLOCK_BINS`` of them.
        large: and of every ``LARGE_BINS``.
        levels: float64[m], ascending magnitudes.
        mirrored: values below the first level are rounded to plus or minus that level (no zero level).
        mass: float64[m], overwritten with the expected number of values at each level.

    Returns:
        the weighted error, the unweighted one, and how far the weighted one can be off.

    Error and level masses are piecewise quadratic and linear in r with kinks at the levels. Over a bin, the
    piece of its left end needs only the bin's moments, and each kink inside adds a multiple of
    sum (r - level)_+.
    """
    m = levels.size
    for j in range(m):
        mass[j] = 0.0
    weighted, plain, bound = 0.0, 0.0, 0.0
    c = -1
    k = 0
    while k < lower.size:
        low = lower[k]
        while c + 1 < m and levels[c + 1] <= low:
            c += 1
        free = np.inf if c == m - 1 else levels[c + 1]
        bins = 1
        if k % LARGE_BINS == 0 and upper[min(k + LARGE_BINS, lower.size) - 1] <= free:
            bins = LARGE_BINS
            row = k // LARGE_BINS
            n, d1, d2 = large[row, 0], large[row, 1], large[row, 2]
            w, w1, w2 = large[row, 3], large[row, 4], large[row, 5]
        elif k % BLOCK_BINS == 0 and upper[min(k + BLOCK_BINS, lower.size) - 1] <= free:
            bins = BLOCK_BINS
            row = k // BLOCK_BINS
            n, d1, d2 = blocks[row, 0], blocks[row, 1], blocks[row, 2]
            w, w1, w2 = blocks[row, 3], blocks[row, 4], blocks[row, 5]
        else:
            n, d1, d2 = sums[k, 0], sums[k, 1], sums[k, 2]
            w, w1, w2 = sums[k, 3], sums[k, 4], sums[k, 5]
        k = min(k + bins, lower.size)
        high = upper[k - 1]
        if c == m - 1:
            over = low - levels[m - 1]
            plain += n * over * over + 2.0 * over * d1 + d2
            weighted += w * over * over + 2.0 * over * w1 + w2
            mass[m - 1] += n
            continue
        b = levels[c + 1]
        a = levels[c] if c >= 0 else (-b if mirrored else 0.0)
        # (b - r)(r - a) about the lower edge: no cancellation however narrow the cell is
        both = (b - low) * (low - a)
        tilt = (b - low) - (low - a)
        plain += n * both + tilt * d1 - d2
        weighted += w * both + tilt * w1 - w2
        if c >= 0:
            up = (n * (low - a) + d1) / (b - a)
            mass[c] += n - up
            mass[c + 1] += up
        else:
            mass[0] += n
        j = c + 1
        while j < m and levels[j] < high:
            t = levels[j]
            below = levels[j - 1] if j > 0 else (-t if mirrored else 0.0)
            last = j == m - 1
            above = t if last else levels[j + 1]
            under, _ = hinge(t, low, high - low, n, d1, d2)
            over_n = under + (n * (low - t) + d1)
            plain += (above - below) * over_n
            under_w, slack_w = hinge(t, low, high - low, w, w1, w2)
            weighted += (above - below) * (under_w + (w * (low - t) + w1))
            bound += (above - below) * slack_w
            if j > 0:
                # the tents of t's two neighbours bend here
                mass[j - 1] += over_n / (t - below)
                mass[j] -= over_n / (t - below)
            if not last:
                mass[j] -= over_n / (above - t)
                mass[j + 1] += over_n / (above - t)
            else:
                bound += 2.0 * w * (high - t) * (high - t)
            j += 1
    return weighted, plain, bound
