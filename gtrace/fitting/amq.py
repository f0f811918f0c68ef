"""The multiplier of exponentially spaced levels that minimizes the expected variance under a law (AMQ)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np

from gtrace.errors import UsageError, suggest
from gtrace.fitting.laws import as_law
from gtrace.fitting.starts import exponential_grid, magnitude_count

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from gtrace.fitting.laws import Law, LawLike

AmqMethod: TypeAlias = Literal["search", "gd"]
METHODS: tuple[AmqMethod, ...] = ("search", "gd")

#: the multiplier where nothing tells one from another
DEFAULT = 0.5
# Where to look: log(p / (1 - p)) from -14 (p = 8e-7) to 9 (p = 0.99988).
_LOGITS = np.linspace(-14.0, 9.0, 300)
_CLOSER = 8
_INSIDE = np.arange(1, 10) / 10.0
_BEST = 4
_STEPS = 100
_CLOSE = 1e-15


def amq_multiplier(
    law: LawLike,
    bits: int,
    zero: bool = True,
    weighted: bool = True,
    method: AmqMethod = "search",
    *,
    start: float = DEFAULT,
    rate: float = 0.1,
    steps: int = 200,
) -> float:
    """Fit p of the 2^(bits - 1) magnitudes 1, p, p^2, ... to a law of r; the last of them is 0 with ``zero``.

    The objective is :func:`~gtrace.fitting.expected_variance` of :func:`amq_levels`. It has several minima.
    ``search`` looks over the whole range of p, then finds the best few to the last digits by the root of the
    derivative. ``gd`` is the paper's descent from ``start`` along half the derivative (App. B.3.3), which may
    end far from the minimum.

    Args:
        law: a sketch of the values, or a mixture.
        bits: 2 to 12, the sign included.
        zero: whether 0 is a level; then there is one power less.
        weighted: weigh the values of a sketch by the squared norms of their buckets.
        method: "search" or "gd".
        start: p that ``gd`` starts from.
        rate: its learning rate.
        steps: how many steps it takes.

    Returns:
        p, between 0 and 1. Where the levels do not depend on it (2 bits with 0) or the law has nothing but
        zeros, ``start``.

    Raises:
        UsageError: a law, bits or method that is none of these, or a start outside (0, 1).
    """
    if method not in METHODS:
        raise UsageError(f"method: '{method}' is unknown; {suggest(str(method), METHODS)}")
    if not 0.0 < start < 1.0:
        raise UsageError(f"start: {start} is not between 0 and 1")
    count = magnitude_count(bits)
    prepared = as_law(law, weighted=weighted)
    if prepared is None or count - (1 if zero else 0) < 2:
        return float(start)
    objective = _Powers(prepared, count, zero)
    if method == "gd":
        return _descend(objective, float(start), rate, steps)
    return _search(objective, float(start))


def amq_levels(multiplier: float, bits: int, zero: bool = True) -> NDArray[np.float64]:
    """The magnitudes of a multiplier, float64, ascending, without powers too small for float32.

    >>> [float(level) for level in amq_levels(0.5, 3)]
    [0.0, 0.25, 0.5, 1.0]
    """
    grid = exponential_grid(magnitude_count(bits), zero, multiplier)
    keep = grid >= np.finfo(np.float32).tiny
    keep[0] |= zero
    return grid[keep]


class _Powers:
    """The objective as a function of p alone."""

    def __init__(self, law: Law, count: int, zero: bool) -> None:
        self._law, self._count, self._zero = law, count, zero
        self._powers = np.arange(count - (2 if zero else 1), 0, -1.0)
        self._exponents = np.append(self._powers, 0.0)
        self._lower = self._powers - 1.0
        #: below, the smallest level would leave the range of float64
        self.least = max(1e-9, float(1e-300 ** (1.0 / self._powers[0])))

    def errors(self, multipliers: NDArray[np.float64]) -> NDArray[np.float64]:
        """The objective at each p."""
        grids = np.zeros((multipliers.size, self._count))
        grids[:, (1 if self._zero else 0) : -1] = multipliers[:, None] ** self._powers
        grids[:, -1] = 1.0
        return self._law.objectives(grids, not self._zero)

    def slope(self, p: float) -> float:
        """Its derivative, through the levels."""
        grid = np.zeros(self._count)
        grid[1 if self._zero else 0 :] = p**self._exponents
        return float(self._law.slopes(grid, not self._zero) @ (self._powers * p**self._lower))


def _search(objective: _Powers, start: float) -> float:
    tried = 1.0 / (1.0 + np.exp(-_LOGITS))
    tried = tried[tried > objective.least]
    errors = objective.errors(tried)
    # Narrow dips ride on the broad ones: look closer on both sides of the best places.
    best = np.argsort(errors, kind="stable")[:_CLOSER]
    left = np.unique(np.concatenate([np.maximum(best - 1, 0), np.minimum(best, tried.size - 2)]))
    between = tried[left, None] + np.diff(tried)[left, None] * _INSIDE
    tried, order = np.unique(np.concatenate([tried, between.reshape(-1)]), return_index=True)
    errors = np.concatenate([errors, objective.errors(between.reshape(-1))])[order]
    padded = np.pad(errors, 1, constant_values=np.inf)
    dips = np.flatnonzero((errors <= padded[:-2]) & (errors <= padded[2:]))
    dips = dips[np.argsort(errors[dips], kind="stable")[:_BEST]]
    low, high = tried[np.maximum(dips - 1, 0)], tried[np.minimum(dips + 1, tried.size - 1)]
    found = [_root(objective, *bracket) for bracket in zip(low, tried[dips], high, strict=True)]
    candidates = np.asarray([start, *found, *tried[dips]], dtype=np.float64)
    return float(candidates[int(np.argmin(objective.errors(candidates)))])


def _root(objective: _Powers, low: float, p: float, high: float) -> float:
    """A minimum between low and high: secants of the derivative, halving the bracket where they leave it."""
    at = objective.slope(p)
    old, at_old = low, objective.slope(low)
    for step in range(_STEPS):
        if at == 0.0:
            break
        if at < 0.0:
            low = p
        else:
            high = p
        secant = p - at * (p - old) / (at - at_old) if at != at_old else low
        following = secant if low < secant < high and step % 4 < 3 else 0.5 * (low + high)
        if abs(following - p) <= _CLOSE * p or not low < following < high:
            break
        old, at_old, p = p, at, following
        at = objective.slope(p)
    return p


def _descend(objective: _Powers, p: float, rate: float, steps: int) -> float:
    for _ in range(steps):
        p = min(max(p - rate * 0.5 * objective.slope(p), objective.least), 1.0 - 1e-9)
    return p
