"""Windows of consecutive steps, over which a sweep adds up what codecs lose.

A codec with memory loses much in one step and sends most of it later. So a sweep also compares the sum of what arrived
with the sum of the gradients, over up to ten consecutive steps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from gtrace.kernels.compare import add_error

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable

    from numpy.typing import NDArray

#: float64 numbers that running sums of codecs without memory hold for a tensor; further codecs are encoded again
_HELD = 1 << 21


class Window(NamedTuple):
    """A window that ends at the step that is gone through.

    Attributes:
        first: index of its first step.
        steps: how many it has.
        energy: ||sum of g||^2.
    """

    first: int
    steps: int
    energy: float


class RunningSums:
    """Sums over the steps of a window, as far as a replay has come.

    Args:
        windows: of :func:`windows_of`.
    """

    def __init__(self, windows: Iterable[tuple[int, int]]) -> None:
        self._first = {index: first for first, last in windows for index in range(first, last + 1)}
        #: key -> index of the step that comes next, the sum
        self._held: dict[Hashable, tuple[int, NDArray[np.float64]]] = {}

    def covers(self, index: int) -> bool:
        """Whether a step is in a window."""
        return index in self._first

    def at(self, key: Hashable, index: int, size: int, *, always: bool = True) -> NDArray[np.float64] | None:
        """Where a step's ``size`` numbers are to be added, float64[size]; None if the sum is not kept.

        Args:
            key: of the sum.
            index: of the step, whose numbers the caller adds at once.
            size: how many numbers the sum has.
            always: whether the sum is kept however many numbers others hold.
        """
        first = self._first.get(index)
        following, total = self._held.pop(key, (None, None))
        if first == index:
            held = sum(other.size for _, other in self._held.values())
            total = np.zeros(size) if always or held + size <= _HELD else None
        elif first is None or following != index or (total is not None and total.size != size):
            total = None
        if total is not None:
            self._held[key] = index + 1, total
        return total

    def add(
        self,
        key: Hashable,
        index: int,
        values: NDArray[np.float32],
        arrived: NDArray[np.float32],
        *,
        always: bool = True,
    ) -> bool:
        """Add a step's error where its sum is kept, see :meth:`at`, and say whether it is."""
        total = self.at(key, index, values.size, always=always)
        if total is None:
            return False
        add_error(values, arrived, total)
        return True

    def take(self, key: Hashable, index: int) -> NDArray[np.float64] | None:
        """The sum up to and with a step, which is forgotten; None if it was not kept or a step is missing."""
        following, total = self._held.pop(key, (None, None))
        return total if following == index + 1 else None
