"""What rounding to a scaled float format does to a sketched tensor.

Numbers of a format times a power of two, and the midpoints between them, lie on edges of the sketch's bins, so a bin
falls into one rounding cell as a whole and sums come out exactly. Only ties within a bin that also holds
other values are unknown to a sketch; they are counted as rounded up.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

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
