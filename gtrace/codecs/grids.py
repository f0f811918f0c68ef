"""Grids of level codecs: ascending magnitudes in [0, 1], fixed or fitted, and the rule that rounds to them."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from gtrace.codecs.base import parameter
from gtrace.codecs.parts import Grid, Rounding
from gtrace.coding import fixed_size, packed_room
from gtrace.distributions import TruncatedNormalMixture
from gtrace.errors import PayloadError, UsageError
from gtrace.fitting import alq_levels, amq_levels, amq_multiplier, expected_variance, moment_mixture, optimal_levels
from gtrace.kernels import rounding as _rounding
from gtrace.kernels.codes import TALLIES

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from gtrace.sketch import MomentSketch
    from gtrace.types import State

#: up to this many magnitudes, counting random thresholds beats a search
FEW_LEVELS = 32

_KERNELS = {
    "uniform": _rounding.UNIFORM,
    "count": _rounding.COUNT,
    "search": _rounding.SEARCH,
    "powers": _rounding.POWERS,
}
_NO_VALUES, _NO_TALLIES = np.empty(0, np.float32), np.empty((TALLIES, 0), np.int64)


class _Sink(NamedTuple):
    """Where symbols go; the kernel takes every array and fills those of its kind."""

    kind: int
    symbols: NDArray[np.uint16] = np.empty(0, np.uint16)
    width: int = 0
    packed: NDArray[np.uint8] = np.empty(0, np.uint8)
    values: NDArray[np.float32] = _NO_VALUES
    decoded: NDArray[np.float32] = _NO_VALUES
    tallies: NDArray[np.int64] = _NO_TALLIES


def _no_levels() -> NDArray[np.float32]:
    return np.empty(0, np.float32)


@dataclass(frozen=True, slots=True, eq=False)
class Rule:
    """A rule of stochastic rounding; :func:`gtrace.kernels.rounding.quantize` follows it.

    Attributes:
        kind: ``uniform`` computes the cell; ``count`` and ``search`` find it among ``levels``, which differs from
            each other by roundings only; ``powers`` reads it off the bits of the value itself.
        mirrored: there is no zero level, and a value below the first magnitude goes to it or to its opposite.
        steps: of ``uniform``: magnitudes are k / steps, or the odd ones of them where ``mirrored``.
        levels: float32[m], ascending, of ``count`` and ``search``.
    """

    kind: Literal["uniform", "count", "search", "powers"]
    mirrored: bool = False
    steps: int = 0
    levels: NDArray[np.float32] = field(default_factory=_no_levels)

    @classmethod
    def among(cls, levels: NDArray[np.float32], *, mirrored: bool) -> Rule:
        """To the two ascending magnitudes, float32[m], around |v| / scale."""
        return cls("count" if levels.size <= FEW_LEVELS else "search", mirrored, levels=levels)

    def symbols(
        self,
        x: NDArray[np.float32],
        bucket: int,
        scales: NDArray[np.float32],
        key: tuple[int, int],
        start: int = 0,
    ) -> NDArray[np.uint16]:
        """Symbols of finite float32[n] in buckets of ``bucket`` values: uint16[n].

        ``start`` is the place of the first value in its tensor, from which the random numbers are counted.
        """
        out = np.empty(x.size, np.uint16)
        self._quantize(x, bucket, scales, key, start, _Sink(_rounding.SYMBOLS, symbols=out))
        return out

    def packed(
        self,
        x: NDArray[np.float32],
        bucket: int,
        scales: NDArray[np.float32],
        key: tuple[int, int],
        width: int,
        start: int = 0,
    ) -> bytes:
        """The bytes of :meth:`symbols` at ``width`` bits each, 1 to 16, without the symbols in between."""
        out = packed_room(x.size, width)
        self._quantize(x, bucket, scales, key, start, _Sink(_rounding.PACKED, width=width, packed=out))
        return out[: fixed_size(x.size, width)].tobytes()

    def simulate(
        self,
        x: NDArray[np.float32],
        bucket: int,
        scales: NDArray[np.float32],
        key: tuple[int, int],
        values: NDArray[np.float32],
        out: NDArray[np.float32],
        *,
        count: bool,
    ) -> NDArray[np.int64]:
        """What :meth:`symbols` stand for in ``values`` times the scale, into ``out``, float32[n].

        Returns:
            how often each symbol occurs, int64[m]; without ``count`` it is empty.
        """
        tallies = np.zeros((TALLIES, values.size), np.int64) if count else _NO_TALLIES
        sink = _Sink(_rounding.VALUES, values=values, decoded=out, tallies=tallies)
        self._quantize(x, bucket, scales, key, 0, sink)
        found: NDArray[np.int64] = tallies.sum(axis=0)
        return found

    def _quantize(
        self,
        x: NDArray[np.float32],
        bucket: int,
        scales: NDArray[np.float32],
        key: tuple[int, int],
        start: int,
        sink: _Sink,
    ) -> None:
        high, low = np.uint64(key[0]), np.uint64(key[1])
        _rounding.quantize(
            x,
            bucket,
            scales,
            _KERNELS[self.kind],
            self.mirrored,
            self.steps,
            np.require(self.levels, requirements=["W"]),  # read-only ones would be compiled for a second time
            high,
            low,
            start,
            *sink,
        )


@dataclass(frozen=True)
class Stochastic(Rounding):
    """To one of the two magnitudes around a value, so that the mean is right."""

    def symbols(
        self,
        grid: Rule,
        x: NDArray[np.float32],
        scales: NDArray[np.float32],
        bucket: int,
        key: tuple[int, int],
        start: int,
    ) -> NDArray[np.uint16]:
        """Symbols by the grid's rule, uint16[n]."""
        return grid.symbols(x, bucket, scales, key, start)


def with_levels(state: State, levels: NDArray[np.float32]) -> State:
    """The state of a receiver with these levels.

    Raises:
        PayloadError: they are no ascending magnitudes.
    """
    if not (np.isfinite(levels).all() and (np.diff(levels) > 0).all() and levels[0] >= 0):
        raise PayloadError("shared bytes hold levels that are not ascending magnitudes")
    return state.with_arrays(levels=levels)


@dataclass(frozen=True)
class LevelGrid(Grid):
    """Magnitudes in units of the scale; a symbol is a magnitude with its sign."""

    @property
    def has_zero(self) -> bool:
        """Whether 0 is a level."""
        return True

    @property
    def adaptive(self) -> bool:
        """Whether levels are fitted."""
        return False

    @property
    def moments(self) -> bool:
        """Whether a fit wants the mean and sigma of each bucket."""
        return False

    @abstractmethod
    def levels(self, state: State) -> NDArray[np.float32]:
        """Ascending magnitudes, float32[m]; the last is 1, the first is 0 exactly when ``has_zero``."""

    def rule(self, state: State) -> Rule:
        """How |v| / scale goes to one of :meth:`levels`."""
        return Rule.among(self.levels(state), mirrored=not self.has_zero)

    def fit(self, state: State, summary: MomentSketch) -> State:
        """Adapt the levels; a fixed grid leaves them alone."""
        del summary
        return state

    def fitted(self, state: State) -> NDArray[np.float32] | None:
        """What a receiver must know of fitted levels; None for a fixed grid."""
        return state.arrays.get("levels")

    def with_fitted(self, state: State, fitted: NDArray[np.float32]) -> State:
        """The receiver's state with :meth:`fitted`, one number or more.

        Raises:
            PayloadError: numbers that are none of this grid's.
        """
        return with_levels(state, fitted)

    def model_error(self, state: State, sketch: MomentSketch) -> float:
        """The squared error that a parametric law promised; NaN without one."""
        del state, sketch
        return float("nan")


@dataclass(frozen=True)
class EqualSteps(LevelGrid):
    """Equal steps: k / s for k = 0..s, or without 0 the odd multiples of 1 / (2^bits - 1)."""

    bits: int = parameter(4, "2^(bits - 1) magnitudes and a sign", minimum=2, maximum=15)
    zero: bool = parameter(True, "0 is a level; without it the grid is mirrored around 0")
    steps: int | None = parameter(
        None, "intervals of the grid, as many as the bits can tell apart by default; for grids with 0", minimum=1
    )

    def check(self, name: str) -> None:
        """Raise :class:`~gtrace.errors.UsageError` if ``steps`` contradicts the other parameters."""
        if self.steps is not None and not (self.zero and self.steps < 1 << self.bits - 1):
            wanted = f"bits={max(2, self.steps.bit_length() + 1)} or more" if self.zero else "zero=true"
            raise UsageError(f"codec {name}: steps={self.steps} goes with {wanted}")

    @property
    def has_zero(self) -> bool:
        """Whether 0 is a level."""
        return self.zero

    @property
    def intervals(self) -> int:
        """s, or the denominator of the mirrored grid."""
        if self.steps is not None:
            return self.steps
        return (1 << self.bits - 1) - 1 if self.zero else (1 << self.bits) - 1

    def levels(self, state: State) -> NDArray[np.float32]:
        """float32[m]."""
        del state
        first, stride = (0, 1) if self.zero else (1, 2)
        return (np.arange(first, self.intervals + 1, stride) / self.intervals).astype(np.float32)

    def rule(self, state: State) -> Rule:
        """The cell of a uniform grid is computed."""
        del state
        return Rule("uniform", not self.zero, steps=self.intervals)


@dataclass(frozen=True)
class Ternary(LevelGrid):
    """0 and 1."""

    def levels(self, state: State) -> NDArray[np.float32]:
        """0 and 1."""
        del state
        return np.array([0.0, 1.0], np.float32)


@dataclass(frozen=True)
class Powers(LevelGrid):
    """Powers of p: 1, p, p^2, ... and 0; powers that float32 cannot hold are left out."""

    bits: int = parameter(4, "2^(bits - 1) magnitudes and a sign", minimum=2, maximum=8)
    zero: bool = parameter(True, "0 is a level; without it the grid is mirrored around 0")
    p: float = parameter(0.5, "ratio of two neighbouring levels", minimum=0.01, maximum=0.99)

    @property
    def has_zero(self) -> bool:
        """Whether 0 is a level."""
        return self.zero

    def levels(self, state: State) -> NDArray[np.float32]:
        """float32[m]."""
        del state
        return _powers(self.p, self.bits, self.zero)


@lru_cache(maxsize=256)
def _powers(p: float, bits: int, zero: bool) -> NDArray[np.float32]:
    count = 2 ** (bits - 1)
    powers = p ** np.arange(count - (2 if zero else 1), -1, -1, dtype=np.float64)
    powers = powers[powers >= np.finfo(np.float32).tiny]
    levels = np.concatenate([[0.0], powers] if zero else [powers]).astype(np.float32)
    levels.flags.writeable = False
    return levels


_EXPONENTS = np.concatenate([[0.0], 2.0 ** np.arange(-126, 128, dtype=np.float64), [np.finfo(np.float32).max]]).astype(
    np.float32
)


@dataclass(frozen=True)
class Exponents(LevelGrid):
    """0, the normal powers of two of float32, and its largest value: 256 magnitudes."""

    def levels(self, state: State) -> NDArray[np.float32]:
        """float32[256]."""
        del state
        return _EXPONENTS

    def rule(self, state: State) -> Rule:
        """The cell of a power of two is in the value's exponent."""
        del state
        return Rule("powers")


LawName = Literal["empirical", "truncnorm", "truncnorm-mean"]


@dataclass(frozen=True)
class Fitted(LevelGrid):
    """Levels that follow the data; until the first fit they are powers of one half.

    The state holds ``levels`` (float32[m]) and, under a parametric law, ``model`` (float64[1]): the objective that
    the law itself promised, a mean per value of weight 1, for comparison with the true one.
    """

    #: buckets count by their squared norm, which is the error that matters
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
    sampling_seed: int = parameter(0, "of the sampling of buckets", minimum=0)

    @property
    def has_zero(self) -> bool:
        """Whether 0 is a level."""
        return self.zero

    @property
    def adaptive(self) -> bool:
        """They are."""
        return True

    @property
    def moments(self) -> bool:
        """Whether the law is made from each bucket's mean and sigma."""
        return self.law != "empirical"

    @abstractmethod
    def best(self, law: MomentSketch | TruncatedNormalMixture) -> NDArray[np.float64]:
        """The method itself: the best ascending magnitudes for the law of |v| / scale."""

    def levels(self, state: State) -> NDArray[np.float32]:
        """The fitted magnitudes, float32[m]; fewer than 2^(bits - 1) if the data has fewer values."""
        fitted = state.arrays.get("levels")
        if fitted is not None:
            return fitted
        count = 2 ** (self.bits - 1) - int(self.zero)
        powers = 2.0 ** np.arange(max(1 - count, -126), 1)
        return np.concatenate([[0.0], powers] if self.zero else [powers]).astype(np.float32)

    def fit(self, state: State, summary: MomentSketch) -> State:
        """Fit to the summary; one without any weight leaves the levels as they are."""
        if not summary.sums.size:
            return state
        law: MomentSketch | TruncatedNormalMixture = summary
        if self.moments:
            if summary.bucket_moments is None:
                raise UsageError(f"law={self.law}: wants a sketch with bucket moments; build it from the codec's needs")
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

    def narrowed(self, fitted: NDArray[np.float64]) -> NDArray[np.float32]:
        """Fitted magnitudes as they are used: float32, ascending, 0 the first of them or none."""
        grid = np.unique(fitted.astype(np.float32))
        # Powers below the smallest normal float32 would decode to the same few denormals.
        grid = grid[(grid == 0) | (grid >= np.finfo(np.float32).tiny)]
        if self.zero and (grid.size == 0 or grid[0] != 0):
            return np.concatenate([np.zeros(1, np.float32), grid])
        return grid if self.zero else np.asarray(grid[grid > 0])

    def model_error(self, state: State, sketch: MomentSketch) -> float:
        """What the law promised per value, times the weight of all values that are rounded."""
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
        """Coordinate descent."""
        return alq_levels(law, self.bits, self.zero, self.weighted, method=self.method)


@dataclass(frozen=True)
class LeastVarianceByGradient(Fitted):
    """ALQ by the projection-free gradient descent of Eq. 7."""

    def best(self, law: MomentSketch | TruncatedNormalMixture) -> NDArray[np.float64]:
        """Gradient descent."""
        return alq_levels(law, self.bits, self.zero, self.weighted, method="gd")


@dataclass(frozen=True)
class Optimal(Fitted):
    """ZipML: the optimum over all level sets, by dynamic programming on the sketch."""

    def best(self, law: MomentSketch | TruncatedNormalMixture) -> NDArray[np.float64]:
        """The optimum; the best of several local searches where there is no dynamic program."""
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
        """The powers of the best multiplier, after a 0 if zero is a level."""
        p = amq_multiplier(law, self.bits, self.zero, self.weighted, method=self.method)
        return amq_levels(float(np.float32(p)), self.bits, self.zero)

    def fitted(self, state: State) -> NDArray[np.float32] | None:
        """The multiplier, the last level but one; none if 0 and 1 are all levels."""
        levels = super().fitted(state)
        return None if levels is None or (self.zero and self.bits == 2) else levels[-2:-1]

    def with_fitted(self, state: State, fitted: NDArray[np.float32]) -> State:
        """The powers of the multiplier."""
        if not (fitted.size == 1 and 0 < fitted[0] < 1):
            raise PayloadError("shared bytes hold no multiplier between 0 and 1")
        return super().with_fitted(state, self.narrowed(amq_levels(float(fitted[0]), self.bits, self.zero)))
