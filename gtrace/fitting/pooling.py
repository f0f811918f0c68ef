"""Sketches of several steps as one, so that levels and codes do not memorize the noise of a single step."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import numpy as np

from gtrace.schedule import WINDOW
from gtrace.sketch import COUNTED, MomentSketch, SketchSet

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from gtrace.types import SummarySpec

__all__ = ["DECAY", "WINDOW", "Pool", "RunningPool", "SetPool", "poolable", "pooled"]

#: weight of a step's sketch relative to the step after it; docs/concepts/fits.md has the measurements
DECAY = 0.8
_UNSEEN_POINTS = 512
S = TypeVar("S", MomentSketch, SketchSet)


class _Pooling(Protocol[S]):
    def add(self, sketch: S, /) -> None: ...

    def mean(self) -> S: ...


class Pool:
    """A decayed mean of the :func:`poolable` sketches of successive steps.

    Each step counts as one tensor of energy 1, so a step with a large norm does not outweigh the others. The mean also
    holds one value of unknown magnitude, spread evenly over 0 to 1: the next step may have values that no step before
    had, and levels and codes must have room for them.
    """

    def __init__(self) -> None:
        self._total: MomentSketch | None = None
        self._weight = 0.0

    def add(self, sketch: MomentSketch) -> None:
        """Add the next step.

        Raises:
            UsageError: its spec differs from that of the steps before.
        """
        own = (1.0, 1.0 / sketch.energy if sketch.energy > 0 else 0.0)
        # Moments of single buckets have no weights, and would grow with the steps: the latest ones count.
        self._total = (
            sketch.scaled(*own)
            if self._total is None
            else self._total.plus(sketch, (DECAY, DECAY), own, sketch.bucket_moments)
        )
        self._weight = DECAY * self._weight + 1.0

    def mean(self) -> MomentSketch:
        """The sketch of a typical step; its counts need not be whole numbers. At least one step was added."""
        assert self._total is not None
        total, share = self._total, 1.0 / self._weight
        if not total.sums.size:
            return total.scaled(share)
        # one value with the mean squared scale of the others
        known = float(total.sums[:, 0].sum()) + total.zeros
        weight = float(total.sums[:, 3].sum()) + total.zero_weight
        even = _even(total.spec)
        one = (1.0 / even.size, weight / known / even.size)
        return total.plus(even, others=one, moments=total.bucket_moments, share=share)

    def to_arrays(self) -> dict[str, Any]:
        """The state, as plain numbers and arrays."""
        total = self._total
        if total is None:
            return {}
        numbers = [self._weight, *(float(getattr(total, name)) for name in COUNTED)]
        found = {"rows": total.rows, "sums": total.sums, "numbers": np.array(numbers), "mantissa": total.mantissa}
        return found if total.bucket_moments is None else {**found, "moments": total.bucket_moments}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, Any], spec: SummarySpec) -> Pool:
        """Undo :meth:`to_arrays` for sketches of ``spec``."""
        pool = cls()
        if arrays:
            pool._weight, *counts = np.asarray(arrays["numbers"], np.float64).tolist()
            pool._total = MomentSketch(
                spec=spec,
                rows=np.asarray(arrays["rows"], np.int32),
                sums=np.asarray(arrays["sums"], np.float64),
                **dict(zip(COUNTED, counts, strict=True)),
                bucket_moments=arrays.get("moments"),
                mantissa=int(arrays["mantissa"]),
            )
        return pool


class SetPool:
    """:class:`Pool` of the sketches of several tensors."""

    def __init__(self) -> None:
        self._total: SketchSet | None = None
        self._weight = 0.0

    def add(self, sketches: SketchSet) -> None:
        """Add the next step."""
        energies, own = sketches.energies, np.ones((len(sketches), 2))
        own[:, 1] = np.divide(1.0, energies, out=np.zeros_like(energies), where=energies > 0)
        total = self._total
        self._total = sketches.scaled(own) if total is None else total.plus(sketches, np.full_like(own, DECAY), own)
        self._weight = DECAY * self._weight + 1.0

    def mean(self) -> SketchSet:
        """The sketches of a typical step, see :meth:`Pool.mean`."""
        assert self._total is not None
        total, even, one = self._total, _even(self._total.spec), np.zeros((len(self._total), 2))
        seen, (known, weight) = np.diff(total.starts) > 0, total.totals
        one[seen] = np.stack([np.full(len(total), 1.0), weight / np.where(seen, known, 1.0)], axis=1)[seen] / even.size
        return total.plus(even, np.ones_like(one), one, 1.0 / self._weight)


class RunningPool(Generic[S]):
    """The pool of a window of steps, which mostly grows by a step; then only that step is added.

    ``kind`` is that of the sketches: :class:`Pool` or :class:`SetPool`.
    """

    def __init__(self, kind: Callable[[], _Pooling[S]]) -> None:
        self._kind = kind
        self._pool = kind()
        self._steps: tuple[int, ...] = ()

    def mean(self, steps: tuple[int, ...], sketches: Sequence[S]) -> S:
        """:func:`pooled` of the sketches; ``steps`` names each. A step's sketch is always the same.

        Raises:
            UsageError: their specs differ.
        """
        held = len(self._steps)
        if steps[:held] != self._steps:
            self._pool, held = self._kind(), 0
        for sketch in sketches[held:]:
            self._pool.add(sketch)
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
        pool.add(sketch)
    return pool.mean()


@lru_cache(maxsize=64)
def _even(spec: SummarySpec) -> MomentSketch:
    """Values on edges of bins, evenly from 0 to 1."""
    found = MomentSketch.of(np.arange(1, _UNSEEN_POINTS + 1) / _UNSEEN_POINTS, norm="linf")
    return replace(found, spec=spec, buckets=0)
