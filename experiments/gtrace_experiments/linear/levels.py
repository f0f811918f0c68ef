"""Levels of every column of a training set, and where each value lies between them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np

from gtrace.fitting import optimal_levels

if TYPE_CHECKING:
    from numpy.typing import NDArray

LevelRule: TypeAlias = Literal["uniform", "optimal"]


@dataclass(frozen=True, slots=True)
class Columns:
    """A matrix on the levels of its columns.

    Attributes:
        index: uint16[K, n], the level at or below each value.
        part: float32[K, n], probability of the level above it.
        levels: float64[n, L], ascending, padded with the last one.
        reach: float64[n, L], distance to the farther neighbour: how far a value can be from the level it got.
        count: levels that are sent, all columns together.
        variance: mean over all values of the squared error of one quantization.
    """

    index: NDArray[np.uint16]
    part: NDArray[np.float32]
    levels: NDArray[np.float64]
    reach: NDArray[np.float64]
    count: int
    variance: float


def level_count(bits: int) -> int:
    """Levels of ``bits`` bits: zero and 2^(bits - 1) - 1 on either side.

    >>> level_count(5)
    31
    """
    return (1 << bits) - 1


def column_levels(values: NDArray[np.float32], bits: int, rule: LevelRule) -> list[NDArray[np.float64]]:
    """The levels of each column.

    Args:
        values: float32[K, n], finite.
        bits: of one quantization; both rules take the same number of levels.
        rule: ``uniform`` spaces them over plus and minus the largest magnitude, ``optimal`` makes the expected
            squared error of stochastic rounding as small as it can be (ZipML, section 3).
    """
    count = level_count(bits)
    if rule == "optimal":
        return [optimal_levels(column, count) for column in values.T]
    steps = count // 2
    scales = np.abs(values).max(axis=0).astype(np.float64)
    return [scale * np.arange(-steps, steps + 1) / steps if scale else np.zeros(1) for scale in scales]


def place(values: NDArray[np.float32], levels: list[NDArray[np.float64]], *, nearest: bool = False) -> Columns:
    """Where every value lies between the levels of its column.

    Args:
        values: float32[K, n].
        levels: ascending, one array a column, spanning its values.
        nearest: round to the nearest level instead of drawing one.
    """
    rows, columns = values.shape
    width = max(len(own) for own in levels)
    index = np.empty((rows, columns), np.uint16)
    part = np.zeros((rows, columns), np.float32)
    table, reach = np.empty((columns, width)), np.zeros((columns, width))
    error = 0.0
    for i, own in enumerate(levels):
        table[i, : len(own)], table[i, len(own) :] = own, own[-1]
        gaps = np.diff(own)
        reach[i, : len(gaps)] = gaps
        reach[i, 1 : len(own)] = np.maximum(reach[i, 1 : len(own)], gaps)
        if nearest:
            reach[i] /= 2
        below = np.clip(np.searchsorted(own, values[:, i], side="right") - 1, 0, max(len(gaps) - 1, 0))
        index[:, i] = below
        if len(gaps):
            above = (values[:, i] - own[below]) / gaps[below]
            above = np.round(above) if nearest else above
            part[:, i] = above
            step = values[:, i] - own[below]
            error += float(np.sum((above * gaps[below] - step) ** 2 + above * (1 - above) * gaps[below] ** 2))
    return Columns(index, part, table, reach, sum(len(own) for own in levels), error / values.size)


def bits_per_value(bits: int, draws: int) -> int:
    """Bits that several quantizations of one value take together.

    The receiver needs the level below and how many of the draws went up. All draws at the level above are none of
    them in the next interval, so there are (levels - 1) draws + 1 messages: log2(draws) extra bits, and one for
    two draws.

    >>> [bits_per_value(5, draws) for draws in (1, 2, 16)]
    [5, 6, 9]
    """
    return ((level_count(bits) - 1) * draws).bit_length()
