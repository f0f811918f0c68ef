"""Values and levels as arrays, checked; buckets of values, their scales, and the bins of normalized values."""

from __future__ import annotations

import math
import threading
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from gtrace.errors import UsageError
from gtrace.kernels import norms as _norms
from gtrace.kernels import sketching as _sketching

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from numpy.typing import ArrayLike, NDArray

#: mantissa bits that distinguish bins within an octave
MANTISSA = 10
#: The smallest normalized value with bins of its own is 2^-OCTAVES; all below share one bin. Rows that nothing
#: falls into cost address space and no memory, so the range covers every level that float32 can hold.
OCTAVES = 149
# Row k of a table starts at the float64 whose leading bits are base + k; row 0 is for zeros, row 1 the catch-all.
BASE_UNIT = ((1023 - OCTAVES) << MANTISSA) - 2
ROWS_UNIT = (OCTAVES << MANTISSA) + 3
BASE_FREE = ((1023 - 149) << MANTISSA) - 2
ROWS_FREE = ((149 + 128) << MANTISSA) + 2
_UNWEIGHTED = np.empty(0)

#: the kernels' numbers of norms
NORM_CODES: dict[str, int] = {
    "l2": _norms.L2,
    "linf": _norms.LINF,
    "l1": _norms.L1,
    "none": _norms.NONE,
}


def as_values(values: ArrayLike) -> NDArray[np.float32]:
    """Any array of real numbers as contiguous 1-D float32; no copy when it is that already.

    What float32 cannot hold becomes infinite.

    Raises:
        UsageError: complex or non-numeric values.
    """
    array = np.asarray(values)
    if array.dtype.kind not in "fiub":
        raise UsageError(f"values of dtype {array.dtype} cannot be compressed; pass real numbers")
    with np.errstate(over="ignore"):
        return np.ascontiguousarray(array, dtype=np.float32).reshape(-1)


def as_levels(levels: ArrayLike, *, zero: bool) -> NDArray[np.float64]:
    """Check a set of magnitudes: finite, ascending, not negative, 0 first exactly when ``zero``.

    Raises:
        UsageError: they are not.
    """
    grid = np.ascontiguousarray(levels, dtype=np.float64).reshape(-1)
    if _sketching.are_levels(grid) and (grid[0] == 0) == zero:
        return grid
    if grid.size == 0 or not np.isfinite(grid).all():
        raise UsageError("levels: give at least one finite magnitude")
    if (np.diff(grid) <= 0).any() or grid[0] < 0:
        raise UsageError("levels: magnitudes must be ascending, distinct and not negative")
    if zero and grid[0] != 0:
        raise UsageError(f"levels: with zero=True the first level must be 0, not {grid[0]:g}")
    if not zero and grid[0] == 0:
        raise UsageError("levels: with zero=False 0 must not be a level; drop it or pass zero=True")
    return grid


def as_weights(weights: ArrayLike, size: int) -> NDArray[np.float64]:
    """One finite weight for each of ``size`` values, none of them negative, as contiguous float64[size].

    Raises:
        UsageError: they are not.
    """
    array = np.ascontiguousarray(weights, dtype=np.float64).reshape(-1)
    if array.size != size:
        raise UsageError(f"weights: {array.size} of them for {size} values")
    if size and not 0.0 <= float(array.min()) <= float(array.max()) < math.inf:
        raise UsageError("weights: must be finite and not negative")
    return array


def bucket_scales(x: NDArray[np.float32], norm: str, bucket_size: int | None) -> NDArray[np.float32]:
    """float32 norms of the buckets of a finite float32[n]; none for n = 0, and one for bucket_size None."""
    bucket = bucket_size or max(1, x.size)
    scales = np.empty(-(-x.size // bucket), np.float32)
    _norms.bucket_scales(x, bucket, NORM_CODES[norm], scales)
    return scales


def bucket_moments(x: NDArray[np.float32], bucket: int, scales: NDArray[np.float32]) -> NDArray[np.float64]:
    """float64[buckets, 3]: mean and standard deviation of each bucket's values over its norm, and the norm."""
    out = np.empty((scales.size, 3))
    _norms.bucket_moments(x, bucket, scales, out)
    return out


class Blocks:
    """Cuts arrays that arrive together in parts into blocks of a ``length``, whatever the parts' lengths.

    By default they are the fixed blocks of float sums.
    """

    def __init__(self, length: int | None = None) -> None:
        self._length = length or _norms.BLOCK
        self._held: list[NDArray[Any]] = []
        self._filled = 0

    @classmethod
    def of(
        cls, parts: Iterable[tuple[NDArray[Any], ...]], length: int | None = None
    ) -> Iterator[tuple[NDArray[Any], ...]]:
        """All blocks of arrays that arrive together in parts; each holds until the next one."""
        blocks = cls(length)
        for part in parts:
            yield from blocks.add(*part)
        yield from blocks.rest()

    def add(self, *arrays: NDArray[Any]) -> Iterator[tuple[NDArray[Any], ...]]:
        """The blocks that these values complete; they hold until the next call."""
        at, size = 0, arrays[0].size
        while at < size:
            take = min(self._length - self._filled, size - at)
            if take == self._length:
                yield tuple(array[at : at + take] for array in arrays)
            else:
                if not self._held:
                    self._held = [np.empty(self._length, array.dtype) for array in arrays]
                for held, array in zip(self._held, arrays, strict=True):
                    held[self._filled : self._filled + take] = array[at : at + take]
                self._filled += take
                if self._filled == self._length:
                    self._filled = 0
                    yield tuple(self._held)
            at += take

    def rest(self) -> Iterator[tuple[NDArray[Any], ...]]:
        """The last block, which is shorter, if there is one."""
        if self._filled:
            yield tuple(held[: self._filled] for held in self._held)
            self._filled = 0


class BlockSums:
    """Sums over arrays that arrive together in parts, to the last bit the same whatever the parts' lengths.

    Args:
        function: one block of :class:`Blocks` of each array -> its ``number`` sums.
        number: of sums.

    Attributes:
        totals: float64[number], of the blocks so far.
    """

    def __init__(self, function: Callable[..., Any], number: int) -> None:
        self._function, self._blocks = function, Blocks()
        self.totals = np.zeros(number)

    def add(self, *arrays: NDArray[Any]) -> None:
        """Add the next part of each array."""
        for block in self._blocks.add(*arrays):
            self.totals += self._function(*block)

    def finish(self) -> NDArray[np.float64]:
        """The sums."""
        for block in self._blocks.rest():
            self.totals += self._function(*block)
        return self.totals


def spread(parts: Iterable[NDArray[np.float32]]) -> tuple[int, float, float]:
    """The number of finite values, their mean, and the sum of their squared distances from it, whatever the parts.

    Distances are taken from the mean of each block first, so nothing cancels where the mean is large.
    """
    one = np.ones(1, np.float32)
    found = [(block.size, *bucket_moments(block, block.size, one)[0]) for (block,) in Blocks.of(zip(parts))]
    sizes, means, sigmas, _ = np.array(found).reshape(-1, 4).T
    size = int(sizes.sum())
    mean = float((sizes * means).sum()) / max(1, size)
    return size, mean, float(((sizes - 1) * sigmas**2 + sizes * (means - mean) ** 2).sum())


def clip_limit(parts: Iterable[NDArray[np.float32]], sigmas: float | None) -> np.float32 | None:
    """The magnitude at which finite values in parts are clipped: ``sigmas`` standard deviations; None for no clipping.

    Values are clipped about 0, and the deviation is about their mean.
    """
    if sigmas is None:
        return None
    size, _, square = spread(parts)
    return np.float32(min(sigmas * math.sqrt(square / max(1, size)), _norms.FLOAT32_MAX))


def clipped(x: NDArray[np.float32], limit: np.float32 | None) -> NDArray[np.float32]:
    """float32[n] within ``limit`` of 0; the values themselves for None."""
    return x if limit is None else np.clip(x, -limit, limit)


class TensorSums(NamedTuple):
    """Sums from one pass over a tensor, for methods in which all parts share a scale.

    Attributes:
        size: number of values.
        norm1: sum of |v|.
        energy: sum of v^2.
        least, greatest: of the values; 0 without any.
    """

    size: int
    norm1: float
    energy: float
    least: float
    greatest: float

    def norm(self, norm: str) -> NDArray[np.float32]:
        """float32[1], the norm of one bucket that holds the whole tensor; equals :func:`bucket_scales`."""
        largest = max(-self.least, self.greatest)
        value = {"l2": math.sqrt(self.energy), "linf": largest, "l1": self.norm1, "none": 1.0}[norm]
        return np.array([min(value, _norms.FLOAT32_MAX)], np.float32)

    @classmethod
    def of(cls, parts: Iterable[NDArray[np.float32]]) -> TensorSums:
        """Of finite values in parts, float32[n] each."""
        running = RunningTensorSums()
        for values in parts:
            running.add(values)
        return running.finish()


class RunningTensorSums:
    """Sums over values that arrive in parts, equal to those over all of them at once."""

    def __init__(self) -> None:
        self._powers = BlockSums(lambda block: (_norms.power_sum(block, 1), _norms.power_sum(block, 2)), 2)
        self._size, self._least, self._greatest = 0, math.inf, -math.inf

    def add(self, values: NDArray[np.float32]) -> None:
        """Add the next part, finite float32[n]."""
        self._size += values.size
        self._powers.add(values)
        self._least = float(values.min(initial=self._least))
        self._greatest = float(values.max(initial=self._greatest))

    def finish(self) -> TensorSums:
        """The sums."""
        norm1, energy = self._powers.finish().tolist()
        ends = (self._least, self._greatest) if self._size else (0.0, 0.0)
        return TensorSums(self._size, norm1, energy, *ends)


class _Workspace(threading.local):
    """Dense tables, one pair per thread: fresh memory would cost more in page faults than the pass itself."""

    def __init__(self) -> None:
        self.tables = cache(_tables)


def _tables(rows: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    shape = (rows, _sketching.COLUMNS)
    return np.zeros(shape), np.zeros(shape)


_workspace = _Workspace()


def free_table(*, free: bool) -> NDArray[np.float64]:
    """This thread's table, which is clear and must be left so; for values without a norm or with one."""
    return _workspace.tables(ROWS_FREE if free else ROWS_UNIT)[0]


class BinTable:
    """The dense histogram that a sketch is taken from, filled part by part.

    Sums run over fixed blocks of 2^20 values in index order, so they are the same whatever the parts.

    Args:
        norm: norm of a bucket, its divisor.
        bucket_size: values per bucket; each part but the last is a multiple of it. None: all parts are one bucket.
        scale: float32[1], the norm of all values if ``bucket_size`` is None and there are several parts.
        workspace: use this thread's tables, which must be free again, by :meth:`take`, before the next sketch.

    Attributes:
        size: values so far.
        buckets: buckets so far.
        dead: values so far in buckets whose norm is zero.
        scales: float32[b], the norms of the last part's buckets.
    """

    def __init__(
        self, norm: str, bucket_size: int | None, scale: NDArray[np.float32] | None = None, *, workspace: bool = False
    ) -> None:
        self._norm, self._bucket, self._scale = norm, bucket_size, scale
        rows = ROWS_FREE if norm == "none" else ROWS_UNIT
        self._base = BASE_FREE if norm == "none" else BASE_UNIT
        self._table, self._total = _workspace.tables(rows) if workspace else _tables(rows)
        self._low, self._high = rows, -1
        self._block = rows, -1
        self._folded = False
        self.size, self.buckets, self.dead = 0, 0, 0
        self.scales = np.empty(0, np.float32)

    def add(self, x: NDArray[np.float32], weights: NDArray[np.float64] | None = None) -> None:
        """Count a part, finite float32[n]; ``weights``, float64[n], multiply the squared scales."""
        heavy = _UNWEIGHTED if weights is None else weights
        bucket = self._bucket or max(1, x.size)
        self.scales = bucket_scales(x, self._norm, self._bucket) if self._scale is None else self._scale
        start = 0
        while start < x.size:
            stop = min(x.size, start + _norms.BLOCK - self.size % _norms.BLOCK)
            low, high = _sketching.accumulate(x, start, stop, bucket, self.scales, self._base, heavy, self._table)
            self._block = min(self._block[0], low), max(self._block[1], high)
            self.size += stop - start
            start = stop
            if self.size % _norms.BLOCK == 0:
                self._fold()
        zero = bucket * np.flatnonzero(self.scales == 0)
        self.dead += int(np.sum(np.minimum(zero + bucket, x.size) - zero))
        self.buckets = self.scales.size if self._bucket is None else self.buckets + self.scales.size

    def _fold(self) -> None:
        low, high = self._block
        _sketching.fold(self._table, low, high, self._total)
        self._low, self._high = min(self._low, low), max(self._high, high)
        self._block = self._table.shape[0], -1
        self._folded = True

    def take(self) -> tuple[NDArray[np.int32], NDArray[np.float64], int, float]:
        """Non-empty rows, int32[k], their sums, float64[k, 6], and how many zeros of what weight; then clear."""
        if self._folded:
            self._fold()
            table, low, high = self._total, self._low, self._high
        else:
            table, (low, high) = self._table, self._block
        zeros, zero_weight = 0, 0.0
        if high >= 0:
            zeros, zero_weight = int(table[0, 0]), float(table[0, 3])
            table[0] = 0.0
        span = max(0, high - max(low, 1) + 1)
        rows, sums = np.empty(span, np.int32), np.empty((span, _sketching.COLUMNS))
        count = _sketching.compact(table, max(low, 1), high, rows, sums)
        return rows[:count].copy(), sums[:count].copy(), zeros, zero_weight
