"""Grids of level codecs: ascending magnitudes in [0, 1], fixed or fitted, and the rules that round to them."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, cast

import numpy as np

from gtrace.buckets import as_levels
from gtrace.codecs.base import EncodedPart, check_finite, parameter
from gtrace.codecs.parts import Grid, Rounding
from gtrace.coding.fixed import check_symbol, checked_fixed, fixed_size, packed_room, width_for
from gtrace.coding.huffman import MAX_LENGTH
from gtrace.distributions import TruncatedNormalMixture
from gtrace.errors import PayloadError, UsageError
from gtrace.fitting import alq_levels, amq_levels, amq_multiplier, expected_variance, moment_mixture, optimal_levels
from gtrace.fitting.entropy import MOST, entropy_levels, spaced_levels
from gtrace.kernels import rounding as _rounding
from gtrace.kernels import symbols as _symbols
from gtrace.kernels.codes import TALLIES
from gtrace.sketch import ROUNDING
from gtrace.types import Expectation, State, SummarySpec

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from gtrace.codecs.parts import Opened, Parts, Scaled, Values
    from gtrace.codecs.scales import BucketNorm
    from gtrace.sketch import MomentSketch, SketchSet

#: up to this many magnitudes, counting random thresholds beats a search
FEW_LEVELS = 32

_KERNELS = {
    "uniform": _rounding.UNIFORM,
    "count": _rounding.COUNT,
    "search": _rounding.SEARCH,
    "powers": _rounding.POWERS,
}
#: the smallest normal float32
_TINY = float(np.finfo(np.float32).tiny)
_NO_VALUES, _NO_TALLIES = np.empty(0, np.float32), np.empty((TALLIES, 0), np.int64)


class SymbolSink(NamedTuple):
    """Output arrays for symbols; the kernel takes all of them and fills those of its kind."""

    kind: int
    symbols: NDArray[np.uint16] = np.empty(0, np.uint16)
    width: int = 0
    packed: NDArray[np.uint8] = np.empty(0, np.uint8)
    values: Values = _NO_VALUES
    decoded: Values = _NO_VALUES
    tallies: NDArray[np.int64] = _NO_TALLIES


@dataclass(frozen=True, slots=True, eq=False)
class Rule:
    """A rule of stochastic rounding; :func:`gtrace.kernels.rounding.quantize` follows it.

    Attributes:
        kind: ``uniform`` computes the cell; ``count`` and ``search`` find it among ``levels`` (the results differ
            only by rounding errors); ``powers`` reads it from the bits of the value itself.
        mirrored: there is no zero level, and a value below the first magnitude goes to it or to its opposite.
        steps: for ``uniform``: magnitudes are k / steps, or the odd ones of them if ``mirrored``.
        levels: float32[m], ascending, for ``count`` and ``search``.
    """

    kind: Literal["uniform", "count", "search", "powers"]
    mirrored: bool = False
    steps: int = 0
    levels: Values = field(default_factory=lambda: np.empty(0, np.float32))

    @classmethod
    def among(cls, levels: Values, *, mirrored: bool) -> Rule:
        """Round to the two ascending magnitudes, float32[m], around |v| / scale."""
        return cls("count" if levels.size <= FEW_LEVELS else "search", mirrored, levels=levels)

    @property
    def number(self) -> int:
        return _KERNELS[self.kind]

    def quantize(self, v: Scaled, key: tuple[int, int], start: int, sink: SymbolSink) -> None:
        """Round values in buckets, whose norms are taken on the way unless they are given.

        Args:
            v: the values; the first is value ``start`` of the tensor.
            key: two 64-bit words.
            start: see ``v``.
            sink: where symbols go.

        Raises:
            UsageError: values that are not finite.
        """
        high, low = np.uint64(key[0]), np.uint64(key[1])
        # A copy, because a read-only array would compile the kernel once more.
        rule = self.number, self.mirrored, self.steps, self.levels.copy(), high, low, start
        if not _rounding.quantize(v.x, v.bucket, v.norm, v.scales, *(*rule, *sink)):
            check_finite(v.x)

    def symbols(self, v: Scaled, key: tuple[int, int], start: int = 0) -> NDArray[np.uint16]:
        """The symbols, uint16[n]."""
        out = np.empty(v.x.size, np.uint16)
        self.quantize(v, key, start, SymbolSink(_rounding.SYMBOLS, symbols=out))
        return out

    def packed(self, v: Scaled, key: tuple[int, int], width: int) -> bytes:
        """The bytes of :meth:`symbols` at ``width`` bits each, 1 to 16, in one pass."""
        out = packed_room(v.x.size, width)
        self.quantize(v, key, 0, SymbolSink(_rounding.PACKED, width=width, packed=out))
        return out[: fixed_size(v.x.size, width)].tobytes()

    def simulate(
        self, v: Scaled, key: tuple[int, int], values: Values, out: Values, start: int = 0
    ) -> NDArray[np.int64]:
        """Decode :meth:`symbols` to ``values`` times the scale, into ``out``, float32[n].

        Returns:
            count of each symbol, int64[m].
        """
        tallies = np.zeros((TALLIES, values.size), np.int64)
        self.quantize(v, key, start, SymbolSink(_rounding.VALUES, values=values, decoded=out, tallies=tallies))
        return tallies.sum(axis=0)


@dataclass(frozen=True)
class Stochastic(Rounding):
    """Round to one of the two magnitudes around a value, with the right mean.

    The kernel packs symbols, or decodes and counts them, while it makes them, unless they are needed elsewhere.
    """

    deterministic: ClassVar[bool] = False

    def symbols(
        self, grid: LevelGrid, state: State, v: Scaled, key: tuple[int, int], start: int = 0
    ) -> NDArray[np.uint16]:
        return grid.rule(state).symbols(v, key, start)

    def write(self, parts: Parts, state: State, v: Scaled, key: tuple[int, int]) -> tuple[bytes, int]:
        """At fixed width the kernel packs symbols as it makes them."""
        grid, coder = _of(parts)
        width = width_for(grid.alphabet(state))
        if not width or not coder.fixed_here(state):
            return super().write(parts, state, v, key)
        return grid.rule(state).packed(v, key, width), coder.fixed_flag

    def read(self, parts: Parts, found: Opened, flags: int) -> Values:
        """At fixed width the kernel looks symbols up as it unpacks them."""
        grid, coder = _of(parts)
        values = grid.signed_values(found.state)
        width = width_for(values.size)
        packed = bool(width) and coder.is_fixed(flags)
        # Both see that the bytes hold all symbols, before memory is taken for them.
        if packed:
            symbols: NDArray[Any] = checked_fixed(found.coded, found.size, width)
        else:
            symbols = coder.read(found.coded, flags, found.size, grid, found.state)
        out = np.empty(found.size + found.tail.size, np.float32)
        out[found.size :] = found.tail
        rounded = out[: found.size]
        if not packed:
            _rounding.restore(symbols, found.bucket, found.scales, values, rounded)
        elif not _rounding.restore_packed(symbols, width, found.bucket, found.scales, values, rounded):
            check_symbol(values.size, values.size)
        return out

    def simulate(self, parts: Parts, state: State, v: Scaled, key: tuple[int, int], start: int = 0) -> EncodedPart:
        """The kernel decodes and counts symbols while it makes them."""
        grid, coder = _of(parts)
        values = grid.signed_values(state)
        out = np.empty(v.x.size + v.tail.size, np.float32)
        out[v.x.size :] = v.tail
        rounded = out[: v.x.size]
        tallies = grid.rule(state).simulate(v, key, values, rounded, start)
        return EncodedPart(out, coded=coder.bits(state, tallies), tallies=tallies)


def _of(parts: Parts) -> tuple[LevelGrid, Any]:
    """Grid and coder of a method of levels."""
    return cast("LevelGrid", parts.grid), parts.coder


@dataclass(frozen=True)
class LevelGrid(Grid):
    """Magnitudes in units of the scale; a symbol is a magnitude with its sign."""

    fits = True
    #: whether levels are fitted
    adaptive: ClassVar[bool] = False
    #: whether 0 is a level; a parameter of most grids
    zero = True

    @abstractmethod
    def levels(self, state: State) -> Values:
        """Ascending magnitudes, float32[m]; the last is 1, the first is 0 exactly with ``zero``."""

    def rule(self, state: State) -> Rule:
        """How |v| / scale is rounded to one of :meth:`levels`."""
        return Rule.among(self.levels(state), mirrored=not self.zero)

    def alphabet(self, state: State) -> int:
        return 2 * self.levels(state).size - int(self.zero)

    def signed_values(self, state: State) -> Values:
        """The value of each symbol in units of the scale: float32, ascending."""
        levels = self.levels(state)
        return np.concatenate([-levels[::-1], levels[1:] if self.zero else levels])

    def fitted(self, state: State) -> Values | None:
        """What a receiver must know about fitted levels; None for a fixed grid."""
        return state.arrays.get("levels")

    def with_fitted(self, state: State, fitted: Values) -> State:
        """The receiver's state with :meth:`fitted`, one number or more.

        Raises:
            PayloadError: the numbers do not fit this grid.
        """
        if not (np.isfinite(fitted).all() and (np.diff(fitted) > 0).all() and fitted[0] >= 0):
            raise PayloadError("shared bytes hold levels that are not ascending magnitudes")
        return state.with_arrays(levels=fitted)

    @property
    def moments(self) -> bool:
        """Whether a fit uses the mean and sigma of each bucket."""
        return False

    def model_error(self, state: State, sketch: MomentSketch) -> float:
        """The squared error that a parametric law promised; NaN without one."""
        return float("nan")

    def needs(self, parts: Parts) -> SummarySpec | None:
        """The sketch of r = |v| / scale under these buckets."""
        scale, scope = cast("BucketNorm", parts.scale), _of(parts)[1].scope
        return SummarySpec(scale.norm, scale.bucket_size, scale.tail, scale.clip, scope, self.moments)

    def expect(self, parts: Parts, state: State, sketch: MomentSketch) -> Expectation:
        judged = judged_alone(self.levels(state), self.zero, sketch)
        coded = np.array([_of(parts)[1].expected_bits(state, judged.probabilities)])
        found = judged.expect(np.array([float(width_for(judged.lengths.size))]), coded, np.array([self.zero]))
        return Expectation(
            **{name: float(getattr(found, name)[0]) for name in Expectations.__slots__},
            probabilities=judged.probabilities,
            model_error=self.model_error(state, sketch),
        )

    def weighted_error(self, parts: Parts, state: State, sketch: MomentSketch, weighted: MomentSketch) -> float:
        """The weighted sums; symbols and bits do not depend on weights."""
        return weighted.expected_error(self.levels(state), self.zero)


@dataclass(frozen=True, slots=True)
class Expectations:
    """The columns of :class:`~gtrace.types.Expectation` for many codecs and tensors, float64[sets]."""

    squared_error: NDArray[np.float64]
    error_bound: NDArray[np.float64]
    sparsity: NDArray[np.float64]
    bits_fixed: NDArray[np.float64]
    bits_entropy: NDArray[np.float64]
    bits_huffman: NDArray[np.float64]
    bits_payload: NDArray[np.float64]
    bits_norms: NDArray[np.float64]
    bias: NDArray[np.float64]


class Judged(NamedTuple):
    """What sketches give for level sets, equally many for each sketch.

    Attributes:
        sketches: of the tensors.
        numbers: float64[sets, kernels.symbols.NUMBERS].
        probabilities: float64, of the signed symbols of all sets, concatenated.
        lengths: uint8, of the codes made for them; rare symbols share one, see
            :func:`gtrace.kernels.symbols.escape_lengths`.
    """

    sketches: SketchSet
    numbers: NDArray[np.float64]
    probabilities: NDArray[np.float64]
    lengths: NDArray[np.uint8]

    @classmethod
    def of(
        cls,
        sketches: SketchSet,
        levels: NDArray[np.float64],
        starts: NDArray[np.int64],
        mirrored: NDArray[np.bool_],
        symbol_starts: NDArray[np.int64],
    ) -> Judged:
        """Judge level sets that lie end to end; for ``starts`` see :class:`~gtrace.codecs.level_sets.Grids`."""
        symbols = int(symbol_starts[-1])
        found = cls(
            sketches, np.empty((mirrored.size, _symbols.NUMBERS)), np.empty(symbols), np.empty(symbols, np.uint8)
        )
        places = starts, mirrored, symbol_starts, MAX_LENGTH
        _symbols.judge_sets(sketches.bins(), levels, *places, found.probabilities, found.lengths, found.numbers)
        return found

    @property
    def bits(self) -> NDArray[np.float64]:
        """float64[kernels.symbols.SYMBOL_NUMBERS, sets], of a symbol: its entropy, its code, and the code sent."""
        return self.numbers[:, _symbols.LOWEST + 1 :].T

    def expect(
        self, fixed: NDArray[np.float64], coded: NDArray[np.float64], has_zero: NDArray[np.bool_]
    ) -> Expectations:
        """The average result of one encoding with symbols of ``fixed`` bits at fixed width and ``coded`` as sent."""
        counts = self.sketches.counted("size", "buckets", "exact", "dead", "exact_zeros", "clip_error")
        each = np.repeat(counts, len(self.numbers) // len(self.sketches), axis=0)
        whole, buckets, exact, dead, exact_zeros, clip_error = each.T
        size, quantized = np.maximum(1, whole), whole - exact
        share = quantized / size
        norms = 32.0 * (buckets + exact) / size
        zeros = np.where(has_zero, self.numbers[:, _symbols.LOWEST] * quantized, dead)
        entropy, own, sent = self.bits
        # Same formula as MomentSketch.expect.
        error = self.numbers[:, _symbols.WEIGHTED] + clip_error
        return Expectations(
            squared_error=error,
            error_bound=self.numbers[:, _symbols.BOUND] + ROUNDING * error,
            sparsity=(zeros + exact_zeros) / size,
            bits_fixed=fixed * share + norms,
            bits_entropy=entropy * share + norms,
            bits_huffman=np.minimum(fixed, own + sent / np.maximum(1, quantized)) * share + norms,
            bits_payload=coded * share + norms,
            bits_norms=norms,
            bias=np.sqrt(clip_error),
        )


def judged_alone(levels: Values, zero: bool, sketch: MomentSketch) -> Judged:
    """One level set on one sketch."""

    def find() -> Judged:
        magnitudes = as_levels(levels, zero=zero)
        ends = np.array([0, magnitudes.size]), np.array([not zero]), np.array([0, 2 * magnitudes.size - int(zero)])
        return Judged.of(sketch.alone, magnitudes, *ends)

    # A sweep judges a codec on a step's sketch and fits it to the same sketch for the next step.
    found: Judged = sketch.remember((levels.tobytes(), zero, "judged"), find)
    return found


@dataclass(frozen=True)
class EqualSteps(LevelGrid):
    """Equal steps: k / s for k = 0..s, or without 0 the odd multiples of 1 / (2^bits - 1)."""

    bits: int = parameter(4, "2^(bits - 1) magnitudes and a sign", minimum=2, maximum=15)
    zero: bool = parameter(True, "0 is a level; without it the grid is mirrored around 0")
    steps: int | None = parameter(
        None, "intervals of the grid, by default as many as the bits allow; for grids with 0", minimum=1
    )

    def check(self, name: str) -> None:
        if self.steps is not None and not (self.zero and self.steps < 1 << self.bits - 1):
            wanted = f"bits={max(2, self.steps.bit_length() + 1)} or more" if self.zero else "zero=true"
            raise UsageError(f"codec {name}: steps={self.steps} needs {wanted}")

    @property
    def intervals(self) -> int:
        """s, or the denominator of the mirrored grid."""
        if self.steps is not None:
            return self.steps
        return (1 << self.bits - 1) - 1 if self.zero else (1 << self.bits) - 1

    @property
    def integers(self) -> NDArray[np.int64]:
        return np.arange(self.alphabet(State(0)))

    def levels(self, state: State) -> Values:
        return _equal_steps(self.intervals, self.zero)

    def rule(self, state: State) -> Rule:
        """The cell of a uniform grid is computed."""
        return Rule("uniform", not self.zero, steps=self.intervals)


@lru_cache(maxsize=256)
def _equal_steps(intervals: int, zero: bool) -> Values:
    first, stride = (0, 1) if zero else (1, 2)
    levels = (np.arange(first, intervals + 1, stride) / intervals).astype(np.float32)
    levels.flags.writeable = False
    return levels


@dataclass(frozen=True)
class Ternary(LevelGrid):
    """0 and 1."""

    def levels(self, state: State) -> Values:
        return _equal_steps(1, True)


@dataclass(frozen=True)
class Powers(LevelGrid):
    """Powers of p: 1, p, p^2, ... and 0; powers that float32 cannot hold are left out."""

    bits: int = parameter(4, "2^(bits - 1) magnitudes and a sign", minimum=2, maximum=8)
    zero: bool = parameter(True, "0 is a level; without it the grid is mirrored around 0")
    p: float = parameter(0.5, "ratio of two neighbouring levels", minimum=0.01, maximum=0.99)

    def levels(self, state: State) -> Values:
        return _powers(self.p, self.bits, self.zero)


@dataclass(frozen=True)
class PowersOfHalf(Powers):
    """0 and powers of 1/2."""

    zero: bool = True
    p: float = 0.5


@lru_cache(maxsize=256)
def _powers(p: float, bits: int, zero: bool) -> Values:
    levels: Values = amq_levels(p, bits, zero).astype(np.float32)
    levels.flags.writeable = False
    return levels


_EXPONENTS = np.concatenate([[0.0], 2.0 ** np.arange(-126, 128, dtype=np.float64), [np.finfo(np.float32).max]]).astype(
    np.float32
)


@dataclass(frozen=True)
class Exponents(LevelGrid):
    """0, the normal powers of two of float32, and its largest value: 256 magnitudes."""

    def levels(self, state: State) -> Values:
        return _EXPONENTS

    def rule(self, state: State) -> Rule:
        """The cell of a power of two is in the value's exponent."""
        return Rule("powers")


LawName = Literal["empirical", "truncnorm", "truncnorm-mean"]


@dataclass(frozen=True)
class Fitted(LevelGrid):
    """Levels that follow the data; until the first fit they are powers of one half.

    The state holds ``levels`` (float32[m]) and, under a parametric law, ``model`` (float64[1]): the objective under
    the law itself, a mean per value of weight 1, to compare with the true one.
    """

    adaptive: ClassVar[bool] = True
    #: whether buckets are weighted by their squared norm, like the error
    weighted: bool = True

    bits: int = parameter(4, "2^(bits - 1) magnitudes and a sign", minimum=2, maximum=8)
    zero: bool = parameter(True, "0 is a level; without it the grid is mirrored around 0")
    law: LawName = parameter(
        "empirical",
        "fit to the data itself, to the papers' mixture of truncated normals, or to one of averaged moments",
        choices=("empirical", "truncnorm", "truncnorm-mean"),
    )
    components: int | None = parameter(
        20, "buckets sampled for the mixture; none for all of them", minimum=1, optional=True
    )
    sampling_seed: int = parameter(0, "seed for sampling buckets", minimum=0)

    @property
    def moments(self) -> bool:
        return self.law != "empirical"

    @abstractmethod
    def best(self, law: MomentSketch | TruncatedNormalMixture) -> NDArray[np.float64]:
        """The method itself: the best ascending magnitudes for the law of |v| / scale."""

    def levels(self, state: State) -> Values:
        """The fitted magnitudes, float32[m]; fewer than 2^(bits - 1) if the data has fewer values."""
        fitted = state.arrays.get("levels")
        return _powers(0.5, self.bits, self.zero) if fitted is None else fitted

    def fit(self, state: State, summary: MomentSketch) -> State:
        """Fit to the summary; if it has no weight, the levels stay."""
        if not summary.sums.size:
            return state
        law: MomentSketch | TruncatedNormalMixture = summary
        if self.moments:
            if summary.bucket_moments is None:
                raise UsageError(f"law={self.law}: needs a sketch with bucket moments; build it from the codec's needs")
            law = moment_mixture(
                summary.bucket_moments,
                components=self.components,
                seed=self.sampling_seed,
                weighted=self.weighted,
                mean_only=self.law == "truncnorm-mean",
            )
        grid = self.narrowed(self.best(law))
        state = state.with_arrays(levels=grid)
        if self.moments:
            model = expected_variance(law, grid.astype(np.float64), self.zero, self.weighted)
            state = state.with_arrays(model=np.array([model]))
        return state

    def narrowed(self, fitted: NDArray[np.float64]) -> Values:
        """Fitted magnitudes in the form that is used: float32, ascending, 0 only as the first."""
        grid = fitted.astype(np.float32)
        first = grid[int(self.zero)] if grid.size > 1 else 0.0
        if first >= _TINY and (grid[0] == 0) == self.zero and (grid[1:] > grid[:-1]).all():
            return grid
        grid = np.unique(grid)
        # Powers below the smallest normal float32 would decode to the same few denormals.
        grid = grid[(grid == 0) | (grid >= _TINY)]
        if self.zero and (grid.size == 0 or grid[0] != 0):
            return np.concatenate([np.zeros(1, np.float32), grid])
        return grid if self.zero else np.asarray(grid[grid > 0])

    def narrowed_each(self, fitted: NDArray[np.float64], sizes: NDArray[np.int64]) -> list[Values]:
        """:meth:`narrowed` of the first ``sizes`` magnitudes, int64[tensors], of each row."""
        rows, inside = fitted.astype(np.float32), np.arange(fitted.shape[1]) < sizes[:, None]
        plain = ((rows[:, 1:] > rows[:, :-1]) | ~inside[:, 1:]).all(axis=1) & ((rows[:, 0] == 0) == self.zero)
        plain &= (sizes > 1) & (rows[:, min(int(self.zero), rows.shape[1] - 1)] >= _TINY)
        return [
            rows[place, :size] if plain[place] else self.narrowed(fitted[place, :size])
            for place, size in enumerate(sizes.tolist())
        ]

    def model_error(self, state: State, sketch: MomentSketch) -> float:
        # The law's objective per value, times the weight of all rounded values.
        model = state.arrays.get("model")
        weight = float(sketch.sums[:, 3].sum()) + sketch.zero_weight
        return float("nan") if model is None else float(model[0]) * weight


@dataclass(frozen=True)
class LeastVariance(Fitted):
    """ALQ: the levels of least expected variance, by coordinate descent from several starts."""

    method: Literal["newton", "cd"] = parameter(
        "newton", "coordinate descent finished by Newton steps, or the paper's alone", choices=("newton", "cd")
    )

    def best(self, law: MomentSketch | TruncatedNormalMixture) -> NDArray[np.float64]:
        return alq_levels(law, self.bits, self.zero, self.weighted, method=self.method)


@dataclass(frozen=True)
class LeastVarianceByGradient(Fitted):
    """ALQ by the projection-free gradient descent of Eq. 7."""

    def best(self, law: MomentSketch | TruncatedNormalMixture) -> NDArray[np.float64]:
        return alq_levels(law, self.bits, self.zero, self.weighted, method="gd")


@dataclass(frozen=True)
class Optimal(Fitted):
    """ZipML: the optimum over all level sets, by dynamic programming on the sketch."""

    def best(self, law: MomentSketch | TruncatedNormalMixture) -> NDArray[np.float64]:
        """The optimum; without a dynamic program, the best of several local searches."""
        if self.zero and not isinstance(law, TruncatedNormalMixture):
            return optimal_levels(law, 2 ** (self.bits - 1), method="sketch")
        return alq_levels(law, self.bits, self.zero, self.weighted, method="newton")


@dataclass(frozen=True)
class FittedPowers(Fitted):
    """AMQ: powers of a fitted multiplier, the only number that a receiver must know."""

    method: Literal["search", "gd"] = parameter(
        "search", "search for the least minimum, or the paper's gradient steps", choices=("search", "gd")
    )

    def best(self, law: MomentSketch | TruncatedNormalMixture) -> NDArray[np.float64]:
        p = amq_multiplier(law, self.bits, self.zero, self.weighted, method=self.method)
        return amq_levels(float(np.float32(p)), self.bits, self.zero)

    def fitted(self, state: State) -> Values | None:
        """The multiplier, the last level but one; empty if 0 and 1 are all levels."""
        levels = super().fitted(state)
        return None if levels is None or (self.zero and self.bits == 2) else levels[-2:-1]

    def with_fitted(self, state: State, fitted: Values) -> State:
        if not (fitted.size == 1 and 0 < fitted[0] < 1):
            raise PayloadError("shared bytes do not hold a multiplier between 0 and 1")
        return super().with_fitted(state, self.narrowed(amq_levels(float(fitted[0]), self.bits, self.zero)))


@dataclass(frozen=True)
class EntropySpaced(LevelGrid):
    """Spaced levels of least error whose symbols have a given entropy; until the first fit equal steps of 1/4.

    The state holds ``levels`` (float32[m]) and ``spacing`` (float32[2], step and exponent).
    """

    adaptive: ClassVar[bool] = True

    bits: float = parameter(3.0, "entropy of the symbols, a value", minimum=0.5, maximum=8)

    def levels(self, state: State) -> Values:
        fitted = state.arrays.get("levels")
        return _equal_steps(4, zero=True) if fitted is None else fitted

    def fit(self, state: State, summary: MomentSketch) -> State:
        """Fit to the summary; if it has no weight, the levels stay."""
        if not summary.sums.size:
            return state
        spacing: Values = summary.remember(
            (self.bits, "spacing"), lambda: np.array(entropy_levels(summary, self.bits), np.float32)
        )
        return self._spaced(state, spacing)

    def fitted(self, state: State) -> Values | None:
        """Step and exponent; None before the first fit."""
        return state.arrays.get("spacing")

    def with_fitted(self, state: State, fitted: Values) -> State:
        good = fitted.size == 2 and np.isfinite(fitted).all() and 0 < fitted[0] < 1 and fitted[1] > 0
        if not good or fitted[0] * MOST < 1:
            raise PayloadError("shared bytes do not hold a step and an exponent")
        return self._spaced(state, fitted)

    def _spaced(self, state: State, spacing: Values) -> State:
        step, exponent = spacing.astype(np.float64).tolist()
        levels = np.unique(spaced_levels(step, exponent).astype(np.float32))
        return state.with_arrays(levels=levels[(levels == 0) | (levels >= _TINY)], spacing=spacing)
