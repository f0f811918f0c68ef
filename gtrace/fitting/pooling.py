"""Sketches of several steps as one, so that levels and codes do not memorize the noise of a single step."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from gtrace.schedule import WINDOW
from gtrace.sketch import MomentSketch, SketchSet

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from gtrace.types import SummarySpec

__all__ = ["DECAY", "WINDOW", "Pool", "RunningPool", "poolable", "pooled"]

#: weight of a step's sketch relative to the step after it; docs/concepts/fits.md has the measurements
DECAY = 0.8
_UNSEEN_POINTS = 512


class Pool:
    """Decayed means of the :func:`poolable` sketches of several tensors at successive steps.

    Each step counts as one tensor of energy 1, so a step with a large norm does not outweigh the others. The mean also
    holds one value of unknown magnitude, spread evenly over 0 to 1: the next step may have values that no step before
    had, and levels and codes must have room for them.
    """

    def __init__(self) -> None:
        self.total: SketchSet | None = None
        self.weight = 0.0

    def add(self, sketches: SketchSet) -> None:
        """Add the next step.

        Raises:
            UsageError: its spec differs from that of the steps before.
        """
        energies, own = sketches.energies, np.ones((len(sketches), 2))
        own[:, 1] = np.divide(1.0, energies, out=np.zeros_like(energies), where=energies > 0)
        total = sketches.scaled(own) if self.total is None else self.total.plus(sketches, np.full_like(own, DECAY), own)
        # Moments of single buckets have no weights, and would grow with the steps: the latest ones count.
        self.total = replace(total, moments=sketches.moments) if sketches.moments else total
        self.weight = DECAY * self.weight + 1.0

    def mean(self) -> SketchSet:
        """The sketches of a typical step; their counts need not be whole numbers. At least one step was added."""
        assert self.total is not None
        total, even, one = self.total, _even(self.total.spec), np.zeros((len(self.total), 2))
        seen, (known, weight) = np.diff(total.starts) > 0, total.totals
        # one value with the mean squared scale of the others
        one[seen] = np.stack([np.ones_like(known), weight / np.where(seen, known, 1.0)], axis=1)[seen] / even.size
        return total.plus(even.alone, np.ones_like(one), one, 1.0 / self.weight)

    def to_arrays(self) -> dict[str, Any]:
        """The state of a pool of one tensor, as plain numbers and arrays."""
        total = self.total
        if total is None:
            return {}
        numbers = np.array([self.weight, *total.counts[0]])
        found = {"rows": total.rows, "sums": total.sums, "numbers": numbers, "mantissa": total.mantissa}
        return {**found, "moments": total.moments[0]} if total.moments else found

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, Any], spec: SummarySpec) -> Pool:
        """Undo :meth:`to_arrays` for sketches of ``spec``."""
        pool = cls()
        if arrays:
            rows, sums = np.asarray(arrays["rows"], np.int32), np.asarray(arrays["sums"], np.float64)
            numbers = np.asarray(arrays["numbers"], np.float64)
            starts, moments = np.array([0, len(rows)]), [arrays["moments"]] if "moments" in arrays else ()
            pool.total = SketchSet(spec, rows, sums, starts, numbers[None, 1:], int(arrays["mantissa"]), moments)
            pool.weight = float(numbers[0])
        return pool


class RunningPool:
    """The pools of a window of steps, which mostly grows by a step; then only that step is added."""

    def __init__(self) -> None:
        self._pool = Pool()
        self._steps: tuple[int, ...] = ()

    def mean(self, steps: tuple[int, ...], sketches: Sequence[SketchSet]) -> SketchSet:
        """:func:`pooled` of each tensor's sketches; ``steps`` names each. A step's sketches are always the same.

        Raises:
            UsageError: their specs differ.
        """
        held = len(self._steps)
        if steps[:held] != self._steps:
            self._pool, held = Pool(), 0
        for each in sketches[held:]:
            self._pool.add(each)
        self._steps = steps
        return self._pool.mean()


def poolable(spec: SummarySpec | None) -> bool:
    """Whether several steps give more than the latest one: true for values that are divided by a norm.

    Magnitudes without a norm give a scale or a threshold. One number does not memorize a step, and those of older
    steps belong to gradients of another size.
    """
    return spec is not None and spec.norm != "none"


def pooled(sketches: Iterable[MomentSketch]) -> MomentSketch:
    """The decayed mean of the sketches of successive steps, the latest one last; at least one.

    Raises:
        UsageError: their specs differ.
    """
    pool = Pool()
    for sketch in sketches:
        pool.add(sketch.alone)
    return pool.mean()[0]


@lru_cache(maxsize=64)
def _even(spec: SummarySpec) -> MomentSketch:
    """Values on edges of bins, evenly from 0 to 1."""
    found = MomentSketch.of(np.arange(1, _UNSEEN_POINTS + 1) / _UNSEEN_POINTS, norm="linf")
    return replace(found, spec=spec, buckets=0)
