"""What rounding to a scaled float format does to a sketched tensor.

Numbers of a format times a power of two, and the midpoints between them, lie on edges of the sketch's bins, so a bin
falls into one rounding cell as a whole and sums come out exactly. Only ties within a bin that also holds
other values are unknown to a sketch; they are counted as rounded up.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from gtrace.fitting.formats import LARGEST_SCALE, LEAST_SCALE
from gtrace.kernels.floats import rounding_error

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from gtrace.fitting.floats import FloatFormat
    from gtrace.sketch import MomentSketch

    _Sums = tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]
    _Found = tuple[float, float, NDArray[np.float64]]


class Rounded(NamedTuple):
    """Sums over the non-zero values of a tensor.

    Attributes:
        squared_error: expected sum of (Q(x) - x)^2.
        squared_bias: sum of (E Q(x) - x)^2.
        counts: float64[codes], expected number of values at each magnitude; non-zero ones alone.
        saturated: how many lie above the largest magnitude.
    """

    squared_error: float
    squared_bias: float
    counts: NDArray[np.float64]
    saturated: float


def expected_rounding(form: FloatFormat, scale: float, sketch: MomentSketch, *, stochastic: bool) -> Rounded:
    """Expectations of rounding to ``form`` times ``scale`` (a power of two), from a sketch with norm ``none``."""
    grid = form.exact_levels * scale
    decoded = form.decode_blocks(np.arange(grid.size, dtype=np.uint16), grid.size, np.array([scale])).astype(np.float64)
    low = sketch.lower
    count, first, second = sketch.sums[:, 0], sketch.sums[:, 1], sketch.sums[:, 2]
    on_edge = first == 0
    above = (low >= grid[-1]) & ~((low == grid[-1]) & on_edge)
    found = _stochastic if stochastic else _nearest
    error, bias, counts = found(grid, decoded, low, (count, first, second), on_edge)
    return Rounded(error, bias, counts, float(count[above].sum()))


class Placement(NamedTuple):
    """Where a scale puts the values of a tensor in a format.

    Attributes:
        squared_error: expected sum of (Q(x) - x)^2.
        exponent: the k of the 2^k by which values are multiplied.
    """

    squared_error: float
    exponent: int


def best_placement(
    form: FloatFormat, sketch: MomentSketch, *, stochastic: bool, exponent: int | None = None
) -> Placement:
    """The power of two with the least expected squared error, exact over all of them.

    Args:
        form: the format.
        sketch: of the values, with norm ``none`` and at least one non-zero value.
        stochastic: the error is that of stochastic rounding.
        exponent: the only k to look at.
    """
    found: Placement = sketch.remember(
        ("placement", form, stochastic, exponent), lambda: _best_placement(form, sketch, stochastic, exponent)
    )
    return found


def _best_placement(form: FloatFormat, sketch: MomentSketch, stochastic: bool, exponent: int | None) -> Placement:
    levels, largest = form.exact_levels, float(np.finfo(np.float32).max)

    def errors(k: int) -> tuple[float, float]:
        found: tuple[float, float] = rounding_error(sketch.lower, sketch.sums, levels, 2.0**-k, largest, stochastic)
        return found

    if exponent is not None:
        return Placement(errors(exponent)[0], exponent)
    # The numbers at k - 1 are among those at k, but for the largest ones. So nothing is lost by starting where the
    # largest value just fits; and from there on only clipping grows, so that it ends the search.
    top, most = math.frexp(form.max), math.frexp(sketch.largest)
    k = min(max(top[1] - most[1] - (most[0] > top[0]), LEAST_SCALE), LARGEST_SCALE)
    best = Placement(errors(k)[0], k)
    clipped = 0.0
    while clipped < best.squared_error and k < LARGEST_SCALE:
        k += 1
        error, clipped = errors(k)
        best = min(best, Placement(error, k))
    return best


def _nearest(
    grid: NDArray[np.float64],
    decoded: NDArray[np.float64],
    low: NDArray[np.float64],
    sums: _Sums,
    on_edge: NDArray[np.bool_],
) -> _Found:
    count, first, second = sums
    middle = (grid[:-1] + grid[1:]) / 2
    code = np.searchsorted(middle, low, side="right")
    # A bin whose values all sit on its lower edge is a tie where that edge is a midpoint: to the even code.
    tie = on_edge & (code > 0)
    tie[tie] = middle[code[tie] - 1] == low[tie]
    code -= tie & (code % 2 == 1)
    off = low - decoded[code]
    error = float(np.sum(off * off * count + 2 * off * first + second))
    return error, error, np.bincount(code, count, grid.size).astype(np.float64)


def _stochastic(
    grid: NDArray[np.float64],
    decoded: NDArray[np.float64],
    low: NDArray[np.float64],
    sums: _Sums,
    on_edge: NDArray[np.bool_],
) -> _Found:
    del on_edge
    count, first, second = sums
    code = np.searchsorted(grid, low, side="right") - 1
    top = grid.size - 1
    inside = code < top
    over = low[~inside] - decoded[top]
    clipped = float(np.sum(over * over * count[~inside] + 2 * over * first[~inside] + second[~inside]))
    code, low, count, first, second = code[inside], low[inside], count[inside], first[inside], second[inside]
    below, above = low - grid[code], grid[code + 1] - low
    error = float(np.sum(below * above * count + (above - below) * first - second))
    up = (below * count + first) / (grid[code + 1] - grid[code])
    counts: NDArray[np.float64] = np.bincount(code, count - up, grid.size).astype(np.float64)
    counts += np.bincount(code + 1, up, grid.size)
    counts[top] += float(sums[0].sum() - count.sum())
    return error + clipped, clipped, counts
