"""Grids that a fit can start from, and how many levels there are."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from gtrace.errors import UsageError, suggest
from gtrace.kernels import descent as _descent

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from gtrace.fitting.laws import Law

#: grids by name; "global" is the best grid among candidate points, found by dynamic programming
STARTS = ("uniform", "exponential", "companding", "global")


def magnitude_count(bits: int) -> int:
    """How many magnitudes a symbol of so many bits can name beside its sign: 2^(bits - 1).

    Raises:
        UsageError: bits that are not between 2 and 12.
    """
    if not 2 <= bits <= 12:
        raise UsageError(f"bits: {bits} is not between 2 and 12")
    return 1 << (int(bits) - 1)


def uniform_grid(count: int, zero: bool) -> NDArray[np.float64]:
    """Evenly spaced magnitudes up to 1: from 0, or the positive half of an even number of signed levels."""
    if zero:
        return np.linspace(0.0, 1.0, count)
    return np.arange(1, 2 * count, 2) / (2.0 * count - 1.0)


def exponential_grid(count: int, zero: bool, multiplier: float = 0.5) -> NDArray[np.float64]:
    """Powers of ``multiplier`` up to 1, after 0 where that is a level; ``count`` magnitudes in all."""
    powers = multiplier ** np.arange(count - (2 if zero else 1), -1.0, -1.0)
    return np.concatenate(([0.0], powers)) if zero else powers


def named_grid(law: Law, name: str, count: int, mirrored: bool) -> NDArray[np.float64]:
    """One of :data:`STARTS` with ``count`` levels; fewer where the law offers fewer candidates.

    Raises:
        UsageError: unknown name.
    """
    if name in ("uniform", "exponential"):
        make = uniform_grid if name == "uniform" else exponential_grid
        if mirrored:
            return make(count, False)
        low, high = law.support
        half = make(count // 2, False)
        unit = make(count, True) if low >= 0 else 0.5 + 0.5 * np.concatenate((-half[::-1], half))
        return low + (high - low) * unit
    if name == "companding":
        # A mirrored grid without 0 is the positive half of one with twice as many levels.
        ranks = np.arange(count, dtype=np.float64)
        shares = (2.0 * ranks + 1.0) / (2.0 * count - 1.0) if mirrored else ranks / (count - 1.0)
        return law.companding(np.asarray(shares, dtype=np.float64))
    if name == "global":
        points = law.candidates(count)
        areas = law.areas(points)
        if mirrored:
            points, areas = points[points > 0], areas[points > 0]
        chosen = np.empty(min(count, points.size), np.int64)
        _descent.choose(points, areas, mirrored, chosen)
        return points[chosen]
    raise UsageError(f"start: '{name}' is unknown; {suggest(name, STARTS)}")
