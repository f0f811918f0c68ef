"""The moment sketch: one mergeable summary of a tensor that every level codec can be judged from.

For coordinate-wise rounding of r = |v| / scale, expected error, symbol probabilities, sparsity and the best
levels depend on the data only through the law of r, and inside one cell of a grid only through the count, the sum
of r and the sum of r^2. The sketch is a histogram of r keyed by the exponent and ten bits of mantissa, each
bin holding those three sums, plain and weighted by the squared scale of the value's bucket.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from gtrace.buckets import (
    BASE_FREE,
    BASE_UNIT,
    MANTISSA,
    NORM_CODES,
    BinTable,
    BlockSums,
    TensorSums,
    as_levels,
    as_values,
    as_weights,
    bucket_moments,
    clip_limit,
    clipped,
    free_table,
)
from gtrace.errors import UsageError, suggest
from gtrace.kernels import norms as _norms
from gtrace.kernels import sketching as _sketching
from gtrace.kernels import symbols as _symbols
from gtrace.kernels.compare import weighted_sums
from gtrace.types import NORMS, Norm, SummarySpec

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence

    from numpy.typing import ArrayLike, NDArray

K = TypeVar("K", bound="Hashable")

#: what rounding may add to a bound, as a share of the error
ROUNDING = 1e-12
#: attributes that merging adds up, besides the bins: 0 for numbers of values or buckets, 1 for sums in squared gradient
#: units
COUNTED = dict.fromkeys(("zeros", "nonfinite", "size", "buckets", "dead", "clipped", "exact", "exact_zeros"), 0)
COUNTED |= dict.fromkeys(("zero_weight", "clip_error", "exact_energy"), 1)
_COLUMNS = {name: place for place, name in enumerate(COUNTED)}
#: those that kernels.sketching counts, in its order
_MEASURED = ("zeros", "zero_weight", "size", "buckets", "dead", "exact", "exact_energy", "exact_zeros")
#: results that a sketch remembers
_MOST_KNOWN = 2048


class LogMoments(NamedTuple):
    """The law of log2|x| over the non-zero values: how many, mean and population standard deviation."""

    count: int  # type: ignore[assignment]  # hides tuple.count, which nobody needs here
    mu: float
    sigma: float


class _Remembering:
    """What keeps results in ``_known``, which is never handed on to a changed copy."""

    __slots__ = ()
    _known: dict[Any, Any]

    def remember(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """What ``make`` returned for this key, called once: for what follows from the sketches and the key alone."""
        found = self._known.get(key)
        if found is None:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            found = self._known[key] = make()
        return found

    def remember_each(self, keys: Sequence[K], make: Callable[[list[K]], Iterable[Any]]) -> list[Any]:
        """As :meth:`remember` for several keys; one call of ``make`` for all that are missing, if any."""
        found = {key: self._known.get(key) for key in keys}
        missing = [key for key, known in found.items() if known is None]
        if missing:
            found.update(zip(missing, make(missing), strict=True))
        for key in missing:
            self.remember(key, partial(found.get, key))
        # Remembering one may forget others.
        return [found[key] for key in keys]


@dataclass(frozen=True, slots=True)
class MomentSketch(_Remembering):
    """Summary of one tensor, or of several merged ones. Build it with :meth:`of`; add sketches with ``+``.

    Numbers of values and buckets are whole, unless the sketch was :meth:`scaled`.

    Attributes:
        spec: norm, bucket size and the other choices that two sketches must share to be merged.
        rows: int32[k], ascending numbers of the non-empty bins.
        sums: float64[k, 6], per bin the count, sum d and sum d^2, then the same weighted by the squared
            bucket scale, where d = r - lower edge: moments about the edge keep the digits that raw
            moments of a narrow bin would lose.
        zeros: how many values are exactly zero.
        zero_weight: their summed squared bucket scale.
        nonfinite: how many values were NaN or infinite; they were taken as absent.
        size: number of values summarized, exact tail and zeros included, non-finite ones not.
        buckets: number of bucket norms that an encoder sends.
        exact: values of short last buckets that are sent in full precision (tail="exact").
        exact_energy: their summed squares.
        exact_zeros: how many of them are zero.
        clipped: values that clipping changed.
        clip_error: the squared error that clipping alone costs.
        dead: values in buckets with norm zero; they decode to zero with any levels.
        bucket_moments: float64[buckets, 3], mean and standard deviation (n - 1) of each bucket's signed values
            divided by its norm, and the norm; None if the spec does not ask for them.
        mantissa: bits that distinguish bins within an octave; fewer after :meth:`coarsen`.
    """

    spec: SummarySpec
    rows: NDArray[np.int32]
    sums: NDArray[np.float64]
    zeros: float = 0
    zero_weight: float = 0.0
    nonfinite: float = 0
    size: float = 0
    buckets: float = 0
    exact: float = 0
    exact_energy: float = 0.0
    exact_zeros: float = 0
    clipped: float = 0
    clip_error: float = 0.0
    dead: float = 0
    bucket_moments: NDArray[np.float64] | None = None
    mantissa: int = MANTISSA
    _known: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def of(
        cls,
        values: ArrayLike,
        norm: Norm = "l2",
        bucket_size: int | None = None,
        *,
        tail: str = "quantized",
        clip: float | None = None,
        weights: ArrayLike | None = None,
    ) -> MomentSketch:
        """Sketch a tensor in one pass.

        Args:
            values: any shape; taken as float32 in C order.
            norm: what a bucket is divided by: "l2", "linf", "l1", or "none".
            bucket_size: consecutive values that share a scale; None for all of them.
            tail: "quantized", or "exact" when a short last bucket is sent in full precision.
            clip: clip at this many standard deviations of the tensor before norms are taken.
            weights: weight of each value's squared error; None for equal weights. ``energy`` and
                ``expected_error`` are then weighted sums, and levels fitted to the sketch those of least
                weighted error; counts, probabilities and bits stay those of the values (with norm "none", whose
                codecs ask for the plain sums, all sums are weighted).

        Raises:
            UsageError: unknown norm, a bucket size below 1, values that are not real numbers, or weights that are
                not one finite number from 0 up for each.

        >>> sketch = MomentSketch.of([3.0, -4.0, 0.0, 0.0], norm="l2")
        >>> round(sketch.energy, 9), sketch.zeros
        (25.0, 2)
        """
        if tail not in ("quantized", "exact"):
            raise UsageError(f"tail: '{tail}' is unknown; choose quantized or exact")
        return cls.from_spec(values, SummarySpec(norm, bucket_size, tail, clip), weights=weights)  # type: ignore[arg-type]

    @classmethod
    def from_spec(cls, values: ArrayLike, spec: SummarySpec, weights: ArrayLike | None = None) -> MomentSketch:
        """Sketch a tensor as ``spec`` (a codec's ``needs``) says; see :meth:`of`."""
        if spec.norm not in NORMS:
            raise UsageError(f"norm: '{spec.norm}' is unknown; {suggest(str(spec.norm), NORMS)}")
        if spec.bucket_size is not None and spec.bucket_size < 1:
            raise UsageError(f"bucket size: {spec.bucket_size} is below 1; give a positive number or none")
        x = as_values(values)
        heavy = None if weights is None else as_weights(weights, x.size)
        bad = int(_norms.count_nonfinite(x))
        if bad:
            x = np.where(np.isfinite(x), x, np.float32(0))
        sketch = PartialSketch(spec, limit=clip_limit([x], spec.clip), workspace=True)
        sketch.add(x, heavy)
        return sketch.finish(bad)

    @classmethod
    def from_parts(cls, spec: SummarySpec, parts: Callable[[], Iterator[NDArray[np.float32]]]) -> MomentSketch:
        """The sketch of finite values that arrive in parts, as often as they are asked for."""
        sketch = PartialSketch.each([spec], parts)[spec]
        for values in parts():
            sketch.add(values)
        return sketch.finish()

    @classmethod
    def of_bins(
        cls, spec: SummarySpec, bins: BinTable, bad: int = 0, *, weighted: bool = False, **rest: Any
    ) -> MomentSketch:
        """The sketch of what was counted, ``bad`` values that are not finite as zeros; ``rest``: other attributes."""
        rows, sums, zeros, zero_weight = bins.take()
        if weighted and spec.norm == "none":
            sums[:, :3] = sums[:, 3:]
        return cls(
            spec=spec,
            rows=rows,
            sums=sums,
            zeros=zeros - min(zeros, bad),
            zero_weight=zero_weight,
            nonfinite=bad,
            size=bins.size + rest.get("exact", 0) - bad,
            buckets=0 if spec.norm == "none" else bins.buckets,
            dead=bins.dead,
            **rest,
        )

    def coarsen(self, mantissa: int) -> MomentSketch:
        """The same summary with wider bins: 2^mantissa of them in an octave.

        Sums over bins are kept exactly, so norms, counts and moments do not change; what a level inside a bin
        costs is known less well, see :meth:`error_bound`.

        Args:
            mantissa: 0 to the sketch's own.

        Raises:
            UsageError: out of that range.
        """
        if not 0 <= mantissa <= self.mantissa:
            raise UsageError(f"mantissa bits: {mantissa} is not between 0 and the sketch's own {self.mantissa}")
        if mantissa == self.mantissa:
            return self
        base, _ = self.alone.first
        low = self.rows.astype(np.int64) + base
        # The catch-all below the first octave stays by itself: it begins at zero, not at an edge of its size.
        wide = np.where(self.rows == 1, low, low >> (MANTISSA - mantissa) << (MANTISSA - mantissa))
        keys, where = np.unique(wide, return_inverse=True)
        rows = (keys - base).astype(np.int32)
        edges = np.where(rows == 1, 0.0, (keys << _sketching.SHIFT).view(np.float64))
        moved = self.lower - edges[where]
        n, d1, d2, w, w1, w2 = self.sums.T
        columns = (
            n,
            d1 + moved * n,
            d2 + moved * (2 * d1 + moved * n),
            w,
            w1 + moved * w,
            w2 + moved * (2 * w1 + moved * w),
        )
        sums = np.empty((rows.size, _sketching.COLUMNS))
        for k, column in enumerate(columns):
            sums[:, k] = np.bincount(where, column, rows.size)
        return replace(self, rows=rows, sums=sums, mantissa=mantissa)

    def merge(self, other: MomentSketch) -> MomentSketch:
        """The sketch of both inputs together, with the wider bins of the two.

        Raises:
            UsageError: the two were built with different specs.
        """
        moments = None
        if self.bucket_moments is not None and other.bucket_moments is not None:
            moments = np.concatenate([self.bucket_moments, other.bucket_moments])
        return self.plus(other, moments=moments)

    __add__ = merge

    def plus(
        self,
        other: MomentSketch,
        own: tuple[float, float] = (1, 1),
        others: tuple[float, float] = (1, 1),
        moments: NDArray[np.float64] | None = None,
    ) -> MomentSketch:
        """The sum of two sketches, each with the weights of :meth:`scaled`.

        Args:
            other: built with the same spec.
            own: mass and energy that multiply this sketch.
            others: those that multiply the other one.
            moments: ``bucket_moments`` of the sum.

        Raises:
            UsageError: the two were built with different specs.
        """
        found = self.alone.plus(other.alone, np.array([own], float), np.array([others], float))[0]
        return found if found.bucket_moments is moments else replace(found, bucket_moments=moments)

    def scaled(self, mass: float, energy: float | None = None) -> MomentSketch:
        """The same law with another weight.

        Args:
            mass: factor of all numbers of values and buckets.
            energy: factor of all sums in squared gradient units; ``mass`` by default.
        """
        return self.alone.scaled(np.array([[mass, mass if energy is None else energy]], float))[0]

    @property
    def norm(self) -> Norm:
        """What a bucket was divided by."""
        return self.spec.norm

    @property
    def bucket_size(self) -> int | None:
        """Values per bucket; None for the whole tensor."""
        return self.spec.bucket_size

    @property
    def lower(self) -> NDArray[np.float64]:
        """float64[k], lower edges of the bins in units of r."""
        return self.bins().lower

    @property
    def upper(self) -> NDArray[np.float64]:
        """float64[k], upper edges of the bins in units of r."""
        return self.bins().upper

    @property
    def energy(self) -> float:
        """Sum of the squared values (of the clipped ones where clipping is on), in squared gradient units."""
        return float(self.alone.energies[0])

    @property
    def quantized(self) -> float:
        """How many values a level codec rounds: all but the exact tail."""
        return self.size - self.exact

    @property
    def largest(self) -> float:
        """The largest r; up to a bin's width above it where several values share the last bin; 0 without any."""
        if not self.rows.size:
            return 0.0
        # No distance from the edge exceeds the root of their summed squares, each counted at least once.
        square = self.sums[-1, 2] / min(1.0, self.sums[-1, 0])
        return float(min(self.lower[-1] + np.sqrt(square), self.upper[-1]))

    def log2_moments(self) -> LogMoments:
        """Mean and population standard deviation of log2|x| over the non-zero values.

        Within a bin the logarithm is expanded to second order about the bin's mean, which leaves about 1e-10.

        Returns:
            count, mu, sigma; with no non-zero value the count is 0 and the others are NaN.

        Raises:
            UsageError: the sketch is of values divided by a norm.

        >>> MomentSketch.of([0.25, -1.0, 0.0], norm="none").log2_moments()
        LogMoments(count=2, mu=-1.0, sigma=1.0)
        """
        if self.norm != "none":
            raise UsageError(f"log2 moments: the sketch is of values divided by their {self.norm} norm; use norm=none")
        count = self.sums[:, 0]
        total = float(count.sum())
        if not total:
            return LogMoments(0, float("nan"), float("nan"))
        offset = self.sums[:, 1] / count
        mean = self.lower + offset
        spread = np.maximum(self.sums[:, 2] / count - offset * offset, 0.0) / (mean * mean)
        logs = np.log2(mean) - spread / (2.0 * np.log(2.0))
        mu = float(count @ logs) / total
        variance = float(count @ ((logs - mu) ** 2 + spread / np.log(2.0) ** 2)) / total
        return LogMoments(round(total), mu, float(np.sqrt(variance)))

    def expected_error(self, levels: ArrayLike, zero: bool = True) -> float:
        """E ||Q(v) - v||^2 of stochastic rounding to ``levels``, summed, in squared gradient units.

        Args:
            levels: ascending magnitudes in units of r; the last is 1 (any value for norm "none").
            zero: whether 0 is a level (then it is the first one); without, the grid is mirrored.

        Returns:
            the exact value to about 1e-12 when every level lies on a bin edge; else within
            :meth:`error_bound` of it. What clipping costs is included.

        Raises:
            UsageError: levels that are not ascending magnitudes, or do not fit ``zero``.
        """
        return self.expect(levels, zero=zero)[0]

    def error_bound(self, levels: ArrayLike, zero: bool = True) -> float:
        """A proven bound on |expected_error - truth|: what the values inside split bins could do at worst."""
        return self.expect(levels, zero=zero)[2]

    def probabilities(self, levels: ArrayLike, zero: bool = True) -> NDArray[np.float64]:
        """Expected frequency of each magnitude in ``levels`` among the quantized values; they add up to 1."""
        return self.expect(levels, zero=zero)[3]

    def expect(self, levels: ArrayLike, *, zero: bool = True) -> tuple[float, float, float, NDArray[np.float64]]:
        """Everything about one level set in one pass over the bins.

        Returns:
            expected squared error (gradient units squared), the same with every weight 1 (units of r squared),
            the bound on the first, and the probabilities of the magnitudes (float64[m], read-only).
        """
        grid = as_levels(levels, zero=zero)
        # A codec is fitted to a sketch and then judged by it, or fitted for the next step: the same levels again.
        found: tuple[float, float, float, NDArray[np.float64]]
        found = self.remember((grid.tobytes(), zero), lambda: self._expect(grid, zero))
        return found

    def _expect(self, grid: NDArray[np.float64], zero: bool) -> tuple[float, float, float, NDArray[np.float64]]:
        mass = np.empty(grid.size)
        weighted, plain, bound = _symbols.judge_levels(self.bins(), grid, not zero, mass)
        mass.flags.writeable = False
        weighted += self.clip_error
        return weighted, plain, bound + ROUNDING * weighted, mass

    @property
    def alone(self) -> SketchSet:
        """The set of this sketch alone."""
        found: SketchSet = self.remember("alone", lambda: SketchSet.of([self]))
        return found

    def bins(self) -> _symbols.SketchBins:
        """What kernels need to know of the values that a level codec rounds."""
        found: _symbols.SketchBins = self.remember("bins", lambda: self.alone.bins_at(0))
        return found


@dataclass(frozen=True, slots=True)
class SketchSet(_Remembering):
    """Sketches of several tensors with one spec, end to end.

    Attributes:
        spec: theirs.
        rows: int32[k], the bins of all of them.
        sums: float64[k, 6].
        starts: int64[tensors + 1], where the bins of each begin.
        counts: float64[tensors, 11], the attributes in :data:`COUNTED` of each.
        mantissa: theirs.
        moments: ``bucket_moments`` of each, or nothing.
    """

    spec: SummarySpec
    rows: NDArray[np.int32]
    sums: NDArray[np.float64]
    starts: NDArray[np.int64]
    counts: NDArray[np.float64]
    mantissa: int = MANTISSA
    moments: Sequence[NDArray[np.float64] | None] = ()
    _known: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def of(cls, sketches: Sequence[MomentSketch]) -> SketchSet:
        """These sketches; at least one, all of one spec and one width of bins."""
        rows, sums = [each.rows for each in sketches], [each.sums for each in sketches]
        starts = np.cumsum([0, *map(len, rows)])
        counts = np.array([[getattr(each, name) for name in COUNTED] for each in sketches], float)
        whole = (rows[0], sums[0]) if len(sketches) == 1 else (np.concatenate(rows), np.concatenate(sums))
        moments = [each.bucket_moments for each in sketches] if sketches[0].spec.bucket_moments else ()
        return cls(sketches[0].spec, *whole, starts, counts, sketches[0].mantissa, moments)

    @classmethod
    def of_values(cls, values: NDArray[np.float32], bounds: NDArray[np.int64], spec: SummarySpec) -> SketchSet:
        """Sketch tensors that lie end to end.

        Args:
            values: finite float32[n].
            bounds: int64[tensors + 1], where each begins; none has more than 2^20 values.
            spec: of the sketches.
        """
        if spec.clip is not None or spec.bucket_moments:
            parts = np.split(values, bounds[1:-1])
            return cls.of([MomentSketch.from_spec(part, spec) for part in parts])
        free, tensors = spec.norm == "none", len(bounds) - 1
        rows, sums = np.empty(values.size, np.int32), np.empty((values.size, _sketching.COLUMNS))
        starts, found = np.empty(tensors + 1, np.int64), np.empty((tensors, 8))
        how = spec.bucket_size or 0, NORM_CODES[spec.norm], spec.tail == "exact", BASE_FREE if free else BASE_UNIT
        _sketching.sketch_values(values, bounds, *how, free_table(free=free), rows, sums, starts, found)
        if free:
            found[:, _sketching.BUCKETS] = 0
        counts = np.zeros((tensors, len(COUNTED)))
        counts[:, [_COLUMNS[name] for name in _MEASURED]] = found
        return cls(spec, rows[: starts[-1]].copy(), sums[: starts[-1]].copy(), starts, counts)

    def __len__(self) -> int:
        return len(self.counts)

    def __getitem__(self, place: int) -> MomentSketch:
        """The sketch of one tensor; a change to its arrays changes these."""
        # Apart from results, which are forgotten when there are many.
        singles: dict[int, MomentSketch] = self.remember("singles", dict)
        if place not in singles:
            own = slice(*self.starts[place : place + 2])
            counted = dict(zip(COUNTED, self.counts[place].tolist(), strict=True))
            whole = {name: int(value) for name, value in counted.items() if not COUNTED[name] and value.is_integer()}
            moments = self.moments[place] if self.moments else None
            sketch = MomentSketch(
                self.spec,
                self.rows[own],
                self.sums[own],
                **counted | whole,
                bucket_moments=moments,
                mantissa=self.mantissa,
            )
            # Not the set itself: a circle is freed late, with all its arrays.
            sketch._known["bins"] = self.bins_at(place)
            fits = {key: [each[[place]] for each in known] for key, known in self._known.items() if type(key) is tuple}
            if fits:
                sketch.alone._known.update(fits)
            singles[place] = sketch
        return singles[place]

    def counted(self, *names: str) -> NDArray[np.float64]:
        """float64[tensors, names], some of the attributes in :data:`COUNTED`."""
        return self.counts[:, [_COLUMNS[name] for name in names]]

    @property
    def energies(self) -> NDArray[np.float64]:
        """float64[tensors], see :attr:`MomentSketch.energy`."""
        found: NDArray[np.float64] = self.remember("energies", self._energies)
        return found

    def _energies(self) -> NDArray[np.float64]:
        squares = np.empty(len(self.rows))
        _sketching.sum_squares(self.rows, self.first[0], self.sums, squares)
        return self._sums(squares) + self.counted("exact_energy")[:, 0]

    def _sums(self, column: NDArray[np.float64]) -> NDArray[np.float64]:
        """The sum over the bins of each sketch, added as numpy does."""
        return np.array([float(np.sum(column[a:b])) for a, b in pairwise(self.starts.tolist())])

    @property
    def totals(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """float64[tensors] each: how many values they hold, exact tails aside, and the weight of these."""
        zeros = self.counted("zeros", "zero_weight").T
        return self._sums(self.sums[:, 0]) + zeros[0], self._sums(self.sums[:, 3]) + zeros[1]

    def plus(
        self, other: SketchSet, own: NDArray[np.float64], others: NDArray[np.float64], share: float = 1.0
    ) -> SketchSet:
        """See :meth:`MomentSketch.plus`, with weights float64[tensors, 2]; then times ``share``.

        One sketch is added to each; those of the other set with weights 0 are left out. The moments of single buckets,
        which have no weights, are those of this set.

        Raises:
            UsageError: the two were built with different specs.
        """
        if self.spec != other.spec:
            raise UsageError(
                f"sketches of {self.spec} and {other.spec} cannot be merged; build both with the same spec"
            )
        if self.mantissa != other.mantissa:
            mantissa = min(self.mantissa, other.mantissa)
            return self._coarsened(mantissa).plus(other._coarsened(mantissa), own, others, share)
        spans = np.broadcast_to(_spans(other.starts), (len(self), 2)).copy()
        mine = self.rows, self.sums, _spans(self.starts), own
        rows, sums, starts = _sketching.merge_bins(*mine, other.rows, other.sums, spans, others, float(share))
        kinds = [*COUNTED.values()]
        counts = (self.counts * own[:, kinds] + other.counts * others[:, kinds]) * share
        return SketchSet(self.spec, rows, sums, starts, counts, self.mantissa, self.moments)

    def _coarsened(self, mantissa: int) -> SketchSet:
        return SketchSet.of([self[place].coarsen(mantissa) for place in range(len(self))])

    def scaled(self, own: NDArray[np.float64]) -> SketchSet:
        """See :meth:`MomentSketch.scaled`, with weights float64[tensors, 2]."""
        weights = np.repeat(np.repeat(own, np.diff(self.starts), axis=0), _sketching.COLUMNS // 2, axis=1)
        counts = self.counts * own[:, [*COUNTED.values()]]
        return replace(self, sums=self.sums * weights, counts=counts)

    def bare(self) -> SketchSet:
        """The same sketches without cached results, but for their energies."""
        found = replace(self)
        found._known["energies"] = self.energies
        return found

    @property
    def first(self) -> tuple[int, int]:
        """What to add to the number of a bin for the leading bits of its lower edge, and how many of those it spans."""
        return BASE_FREE if self.spec.norm == "none" else BASE_UNIT, 1 << (MANTISSA - self.mantissa)

    def bins(self) -> _symbols.BinSets:
        """The bins of all sketches for kernels."""
        found: _symbols.BinSets = self.remember("bins", self._bins)
        return found

    def _bins(self) -> _symbols.BinSets:
        places = np.empty((len(self) + 1, 3), np.int64)
        edges = _sketching.describe_bins(self.rows, *self.first, self.sums, self.starts, places)
        zeros, weights, size, exact = self.counted("zeros", "zero_weight", "size", "exact").T
        numbers = np.stack([zeros, weights, size - exact], axis=1)
        return _symbols.BinSets(*edges[:2], self.sums, *edges[2:], places, numbers)

    def bins_at(self, place: int) -> _symbols.SketchBins:
        """The bins of one of the sketches."""
        many = self.bins()
        bins, blocks, large = map(slice, *many.starts[place : place + 2].tolist())
        edges = many.lower[bins], many.upper[bins], many.sums[bins]
        return _symbols.SketchBins(*edges, many.blocks[blocks], many.large[large], *many.numbers[place].tolist())


class PartialSketch:
    """Sketches a finite tensor that arrives in parts, bit for bit as if it came whole.

    Args:
        spec: of the sketch; with moments of buckets the whole is the only part. Each part but the last is a multiple of
            its bucket size.
        scale: float32[1], the norm of all values if the tensor is one bucket in several parts.
        limit: of all values, see :func:`~gtrace.buckets.clip_limit`.
        workspace: see :class:`~gtrace.buckets.BinTable`.
    """

    def __init__(
        self,
        spec: SummarySpec,
        scale: NDArray[np.float32] | None = None,
        limit: np.float32 | None = None,
        *,
        workspace: bool = False,
    ) -> None:
        self._spec, self._limit = spec, limit
        self._bins = BinTable(spec.norm, spec.bucket_size, scale, workspace=workspace)
        self._cost, self._clipped = BlockSums(weighted_sums, 2), 0
        self._rounded = self._exact = np.empty(0, np.float32)
        self._weights: NDArray[np.float64] | None = None

    @classmethod
    def each(
        cls, specs: Iterable[SummarySpec], parts: Callable[[], Iterator[NDArray[np.float32]]]
    ) -> dict[SummarySpec, PartialSketch]:
        """Those of a tensor; deviations for clipping, and norms of the whole, take a pass over its parts each."""
        limits = {clip: clip_limit(parts(), clip) for clip in {spec.clip: None for spec in specs}}
        whole = [spec for spec in specs if spec.bucket_size is None and spec.norm != "none"]
        sums = {
            clip: TensorSums.of(clipped(x, limits[clip]) for x in parts())
            for clip in {spec.clip: None for spec in whole}
        }
        scales = {spec: sums[spec.clip].norm(spec.norm) for spec in whole}
        return {spec: cls(spec, scales.get(spec), limits[spec.clip]) for spec in specs}

    def add(self, values: NDArray[np.float32], weights: NDArray[np.float64] | None = None) -> None:
        """Add the next part, finite float32[n]; ``weights``, float64[n], come with every part or with none."""
        x = clipped(values, self._limit)
        if self._limit is not None:
            self._clipped += int(np.count_nonzero(x != values))
            self._cost.add(values, x, np.ones(x.size) if weights is None else weights)
        split = x.size - (x.size % (self._spec.bucket_size or 1) if self._spec.tail == "exact" else 0)
        self._bins.add(x[:split], None if weights is None else weights[:split])
        self._rounded, self._exact = x[:split], x[split:].copy()
        self._weights = None if weights is None else weights[split:].copy()

    def finish(self, bad: int = 0) -> MomentSketch:
        """The sketch; ``bad`` of the zeros are values that are not finite."""
        spec, exact, weights, moments = self._spec, self._exact, self._weights, None
        if spec.bucket_moments:
            moments = bucket_moments(self._rounded, spec.bucket_size or max(1, self._rounded.size), self._bins.scales)
        return MomentSketch.of_bins(
            spec,
            self._bins,
            bad,
            exact=exact.size,
            exact_energy=float(_norms.power_sum(exact, 2))
            if weights is None
            else weighted_sums(exact, exact, weights)[1],
            exact_zeros=exact.size - int(np.count_nonzero(exact)),
            clipped=self._clipped,
            clip_error=float(self._cost.finish()[0]),
            bucket_moments=moments,
            weighted=weights is not None,
        )


def _spans(starts: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.stack([starts[:-1], starts[1:]], axis=1)
