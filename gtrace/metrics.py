"""Measures of how a decoded gradient differs from the exact one."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from gtrace.buckets import BlockSums, as_values
from gtrace.errors import UsageError
from gtrace.kernels import compare as _compare
from gtrace.kernels import norms as _norms
from gtrace.kernels.compare import adam_weights, weighted_sums

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import ArrayLike, NDArray

_UNWEIGHTED = np.empty(0)
#: a decoding of at most this many distinct values is counted, if each occurs so often on average; others are sorted
_FEW, _OFTEN = 1 << 10, 32


def measured(meaning: str, **default: Any) -> Any:
    """A field of :class:`Comparison`, which is a column of result files; its meaning, with the unit."""
    return field(metadata={"meaning": meaning}, **default)


@dataclass(frozen=True, slots=True)
class Comparison:
    """One decoded tensor Q(g) against the exact one g. NaN if a ratio has denominator 0.

    A new field is a column of its name in result files and in the reference of columns; nothing else must know it.
    """

    squared_error: float = measured("||Q(g) - g||^2, expected or realized")
    relative_variance: float = measured(
        "squared_error / energy, the vNMSE of EDEN, QUIVER and DynamiQ; vnmse is another name of this column"
    )
    mean_abs_error: float = measured("mean |Q(g) - g|")
    mean_relative_error: float = measured("mean |Q(g) - g| / |g| over non-zero g")
    cosine: float = measured("cosine of Q(g) and g")
    snr_db: float = measured("10 log10(energy / squared_error)")
    w1: float = measured(
        "Wasserstein-1 distance of the two value distributions, mean |sort(Q(g)) - sort(g)|; blind to permutations"
    )
    w1_normalized: float = measured("w1 / mean |g|")
    w1_mcgq: float = measured("W1 of g/||g||_1 and Q/||Q||_1, MCGQ's d_t")
    sparsity: float = measured("fraction of zeros after decoding")
    update_error: float = measured(
        "||(Q(g) - g) / sqrt(v)||^2 / ||g / sqrt(v)||^2 with Adam's second moments v", default=math.nan
    )


#: the names of the fields
COMPARED = tuple(item.name for item in fields(Comparison))


class Reference:
    """An exact gradient, prepared once for comparisons with many decoded ones.

    Args:
        values: finite real numbers, any shape, taken as float32.
        weights: float64[n], weight of each squared error in ``update_error``; None for unknown.
    """

    def __init__(self, values: ArrayLike, weights: NDArray[np.float64] | None = None) -> None:
        self.values = as_values(values)
        self.weights = weights
        self.energy = float(_norms.power_sum(self.values, 2))
        self.norm1 = float(_norms.power_sum(self.values, 1))

    @property
    def size(self) -> int:
        """Number of values."""
        return self.values.size

    @property
    def mean_abs(self) -> float:
        """Mean |g|, in gradient units."""
        return self.norm1 / max(1, self.size)

    @cached_property
    def weighted_energy(self) -> float:
        """sum w g^2; NaN without weights."""
        return math.nan if self.weights is None else weighted_sums(self.values, self.values, self.weights)[1]

    @cached_property
    def ordered(self) -> NDArray[np.float32]:
        """The values in ascending order, float32[n]."""
        return _compare.ascending(self.values)

    def compare(self, decoded: ArrayLike) -> Comparison:
        """Measure a decoded tensor.

        Args:
            decoded: as many real numbers.

        Raises:
            UsageError: another number of elements.
        """
        q = as_values(decoded)
        if q.size != self.values.size:
            raise UsageError(f"compare: {q.size} decoded values against {self.values.size} exact ones")
        sums = np.empty(_compare.SUMS)
        _compare.compare(self.values, q, _UNWEIGHTED if self.weights is None else self.weights, sums)
        scales = self.scales(sums)
        values, counts = np.empty((2, min(_FEW, q.size // _OFTEN)), np.uint32)
        found = _compare.distinct(q, values, counts)
        if found >= 0:
            w1, w1_mcgq = _compare.spread(self.ordered, values[:found], counts[:found], *scales)
            return self.comparison(sums, w1, w1_mcgq)
        if (count := q.size - int(sums[_compare.ZEROS])) < q.size / 2:
            room = np.empty(count + 1, np.float32)
            _compare.nonzeros(q, room)
            q = room[:count]
        ordered = _compare.ascending(q)
        w1, w1_mcgq = _compare.distances(self.ordered, ordered, int(ordered.searchsorted(0.0)), *scales)
        return self.comparison(sums, w1, w1_mcgq)

    def scales(self, sums: NDArray[np.float64]) -> tuple[float, float]:
        """1 / ||g||_1 and 1 / ||Q||_1, the factors of ``w1_mcgq``; NaN if one of the norms is 0."""
        return ratio(1.0, self.norm1), ratio(1.0, float(sums[_compare.NORM1]))

    def comparison(self, sums: NDArray[np.float64], w1: float, w1_mcgq: float) -> Comparison:
        """The fields from the sums of :func:`gtrace.kernels.compare.compare` and the two distances."""
        lost = math.nan
        if self.weights is not None:
            lost = relative(float(sums[_compare.WEIGHTED]), self.weighted_energy)
        gap = w1_mcgq if self.size else math.nan
        return _comparison(sums.tolist(), self.size, self.energy, self.norm1, w1, gap, lost)


def comparisons(references: Sequence[Reference], sums: NDArray[np.float64], w1: Any, w1_mcgq: Any) -> Comparison:
    """:meth:`Reference.comparison` of many decodings, equally many of each reference; the fields are float64[m].

    Args:
        references: with weights, or without.
        sums: float64[m, SUMS].
        w1: float64[m].
        w1_mcgq: the same.
    """
    known = [(each.size, each.energy, each.norm1, each.weighted_energy) for each in references]
    size, energy, norm1, weight = np.repeat(known, len(sums) // len(known), axis=0).T
    lost = math.nan if references[0].weights is None else relative(sums.T[_compare.WEIGHTED], weight)
    return _comparison(sums.T, size, energy, norm1, w1, w1_mcgq, lost)


class Histogram:
    """Histogram of a tensor's values, for the Wasserstein distance of tensors that are never held whole.

    Bins are those of the top 18 bits of float32: sign, exponent and ten bits of mantissa. 8 MiB.
    """

    def __init__(self) -> None:
        self._table = np.zeros((2, _compare.BINS, 2))

    def add(self, values: NDArray[np.float32]) -> None:
        """Count finite float32[n]."""
        _compare.tally(values, self._table)

    def add_counted(self, values: NDArray[np.float32], counts: NDArray[np.uint32]) -> None:
        """Count finite float32[m], the first ``counts[0]`` times, and so on."""
        magnitudes, edges = np.abs(values).astype(np.float64), _compare.edges()
        bins = np.searchsorted(edges, magnitudes, "right") - 1
        places = 2 * (np.signbit(values).astype(np.int64) * _compare.BINS + bins)
        table = self._table.reshape(-1)
        np.add.at(table, places, counts)
        np.add.at(table, places + 1, counts * (magnitudes - edges[bins]))

    def bins(self) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
        """Non-empty bins from the most negative one up: lower and upper edges, counts, sums of upper edge - x."""
        edges, ((count, above), (count_left, above_left)) = _compare.edges(), self._table.swapaxes(1, 2)
        right, left = np.flatnonzero(count), np.flatnonzero(count_left)[::-1]
        low = np.concatenate([-edges[left + 1], edges[right]])
        high = np.concatenate([-edges[left], edges[right + 1]])
        below = count[right] * (edges[right + 1] - edges[right]) - above[right]
        counts = np.concatenate([count_left[left], count[right]])
        return low, high, counts, np.concatenate([above_left[left], below])


def histogram_distance(a: Histogram, b: Histogram) -> tuple[float, float]:
    """Wasserstein-1 distance of two tensors of the same size from their histograms, and its largest possible error.

    Counts and sums of a bin give the integral of the difference of the two distribution functions over the bin, so
    the distance is exact unless the difference changes its sign within a bin.
    """
    (low_a, high_a, count_a, below_a), (low_b, high_b, count_b, below_b) = a.bins(), b.bins()
    size = float(count_a.sum())
    if not size:
        return 0.0, 0.0
    low, where = np.unique(np.concatenate([low_a, low_b]), return_inverse=True)
    high = np.empty(low.size)
    high[where] = np.concatenate([high_a, high_b])
    split = low_a.size
    up, down = (np.bincount(part, n, low.size) for part, n in ((where[:split], count_a), (where[split:], count_b)))
    area = np.bincount(where[:split], below_a, low.size) - np.bincount(where[split:], below_b, low.size)
    after = np.cumsum(up - down)
    before = after - (up - down)
    # Between two bins the difference is what it was after the first of them.
    total = float(np.abs(after[:-1]) @ (low[1:] - high[:-1]))
    width = high - low
    area += before * width
    ends = np.abs(before) + np.abs(after)
    crossing = before * after < 0
    line = np.divide(before**2 + after**2, 2 * ends, out=np.zeros(low.size), where=crossing) * width
    found = np.maximum(np.abs(area), line)
    # In between it can be as low as if all of b came first, and as high as if all of a did.
    doubt = 2 * width * np.minimum(np.maximum(before + up, 0.0), np.maximum(down - before, 0.0))
    most = np.abs(area) + doubt
    doubt = np.maximum(most - found, found - np.abs(area))
    return (total + float(found.sum())) / size, float(doubt.sum()) / size


def scaled_distance(a: Histogram, b: Histogram, scale_a: float, scale_b: float) -> float:
    """Wasserstein-1 distance of a scale_a and b scale_b, with values spread evenly over their bins."""
    points, shares = [], []
    for histogram, scale in ((a, scale_a), (b, scale_b)):
        low, high, count, _ = histogram.bins()
        after = np.cumsum(count) / max(1.0, float(count.sum()))
        points.append(np.column_stack([low, high]).reshape(-1) * scale)
        shares.append(np.column_stack([np.append(0.0, after[:-1]), after]).reshape(-1))
    grid = np.union1d(*points)
    left, right = (np.interp(grid, x, y, left=0.0, right=1.0) for x, y in zip(points, shares, strict=True))
    gap = left - right
    before, after = np.abs(gap[:-1]), np.abs(gap[1:])
    crossing = gap[:-1] * gap[1:] < 0
    mean = np.where(crossing, (before**2 + after**2) / np.maximum(2 * (before + after), 1e-300), (before + after) / 2)
    return float(mean @ np.diff(grid))


class RunningComparison:
    """A decoded tensor against the exact one, part by part: sums as :class:`Reference` has them, bit for bit.

    Args:
        exact: histogram of the exact values, of which the same parts are added elsewhere.
        energy: ||g||^2.
        norm1: ||g||_1.
    """

    def __init__(self, exact: Histogram, energy: float, norm1: float) -> None:
        self._exact, self._energy, self._norm1 = exact, energy, norm1
        self._decoded = Histogram()
        self._sums = BlockSums(_compared, _compare.SUMS)
        self._size = 0
        self._weighted: BlockSums | None = None

    def add(
        self, values: NDArray[np.float32], decoded: NDArray[np.float32], weights: NDArray[np.float64] | None = None
    ) -> None:
        """The next part: two float32[n], and with every part or with none its weights, float64[n]."""
        self._weigh(values, decoded, weights)
        self._decoded.add(decoded)
        self._sums.add(values, decoded)

    def add_counted(
        self,
        values: NDArray[np.float32],
        decoded: NDArray[np.float32],
        counts: NDArray[np.uint32],
        weights: NDArray[np.float64] | None,
    ) -> None:
        """The next part instead of :meth:`add`: decoded values and how often each occurs; :meth:`settle` gets sums."""
        self._weigh(values, values, weights)
        self._decoded.add_counted(decoded, counts)

    def _weigh(
        self, values: NDArray[np.float32], decoded: NDArray[np.float32], weights: NDArray[np.float64] | None
    ) -> None:
        self._size += values.size
        if weights is not None:
            self._weighted = self._weighted or BlockSums(weighted_sums, 2)
            self._weighted.add(values, decoded, weights)

    def settle(self, sums: NDArray[np.float64]) -> None:
        """The sums of :func:`gtrace.kernels.compare.compare` over all values."""
        self._sums.totals = sums

    def finish(self) -> tuple[Comparison, float]:
        """The comparison, Wasserstein distances from histograms, and the largest possible error of ``w1``."""
        sums = self._sums.finish()
        w1, doubt = histogram_distance(self._exact, self._decoded)
        # The mean error is a distance of one way to pair values; the least one is no longer.
        most = float(sums[1]) / max(1, self._size)
        w1, doubt = min(w1, most), min(doubt, most)
        w1_mcgq = math.nan
        decoded1 = float(sums[_compare.NORM1])
        if self._norm1 > 0 and decoded1 > 0:
            w1_mcgq = scaled_distance(self._exact, self._decoded, 1 / self._norm1, 1 / decoded1)
        update_error = math.nan
        if self._weighted is not None:
            error, weight = self._weighted.finish().tolist()
            # Of decoded values that only their counts are known of, the error is among the sums.
            update_error = relative(error or float(sums[_compare.WEIGHTED]), weight)
        return _comparison(sums.tolist(), self._size, self._energy, self._norm1, w1, w1_mcgq, update_error), doubt


def _compared(g: NDArray[np.float32], q: NDArray[np.float32]) -> NDArray[np.float64]:
    sums = np.empty(_compare.SUMS)
    _compare.compare(g, q, _UNWEIGHTED, sums)
    return sums


def _comparison(sums: Any, size: Any, energy: Any, norm1: Any, w1: Any, w1_mcgq: Any, update_error: Any) -> Comparison:
    """Of numbers, or of arrays."""
    error, absolute, relative, inner, decoded_energy, _, _, zeros, alive = sums
    n = np.maximum(1, size)
    return Comparison(
        squared_error=error,
        relative_variance=ratio(error, energy),
        mean_abs_error=absolute / n,
        mean_relative_error=ratio(relative, alive),
        cosine=ratio(inner, np.sqrt(energy) * np.sqrt(decoded_energy)),
        snr_db=snr_db(energy, error),
        w1=w1,
        w1_normalized=ratio(w1, norm1 / n),
        w1_mcgq=w1_mcgq,
        sparsity=zeros / n,
        update_error=update_error,
    )


def update_weights(
    values: NDArray[np.float32], moments: NDArray[np.float32], decay: float, eps: float, done: float
) -> NDArray[np.float64]:
    """Weight of each element's squared error in Adam's step: 1 / d^2.

    Adam (Kingma and Ba 2015, algorithm 1) moves element i by the learning rate times m_i / d_i, where
    d = sqrt(v / (1 - decay^t)) + eps and v already holds the step's own gradient. It is formed here:
    v = decay moments + (1 - decay) values^2, so an element whose gradient was zero so far is divided by its own size.

    Args:
        values: float32[n], finite, the gradient.
        moments: float32[n], running mean of squared gradients as the step finds it.
        decay: of that mean, Adam's second beta.
        eps: added to the root.
        done: steps before this one; NaN (or less than none) where unknown, for no correction of the mean's start at 0.

    Returns:
        float64[n]; 0 where d is zero.
    """
    correction = 1.0 - decay ** (done + 1.0) if 0.0 <= done < math.inf and decay < 1.0 else 1.0
    out = np.empty(values.size)
    adam_weights(values, moments, decay, correction, eps, out)
    return out


def ratio(numerator: Any, denominator: Any) -> Any:
    """numerator / denominator, of numbers or arrays; NaN if the denominator is zero."""
    if isinstance(denominator, np.ndarray):
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(denominator == 0, math.nan, numerator / denominator)
    return numerator / denominator if denominator else numerator * math.nan


def relative(part: Any, whole: Any) -> Any:
    """A part of a whole, of numbers or arrays; no error at all is 0 even of a zero gradient."""
    if isinstance(part, np.ndarray):
        return np.where(part == 0, 0.0, ratio(part, whole))
    return 0.0 if part == 0 else ratio(part, whole)


def snr_db(energy: Any, error: Any) -> Any:
    """Signal-to-noise ratio in decibels, of numbers or arrays; infinite without error, NaN without a signal."""
    if isinstance(error, np.ndarray):
        return np.array(list(map(snr_db, np.broadcast_to(energy, error.shape).tolist(), error.tolist())))
    if energy <= 0:
        return math.nan
    return 10 * math.log10(energy / error) if error > 0 else math.inf
