"""Many level codecs on one sketch: fitted and judged together, in columns."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from gtrace.buckets import as_levels
from gtrace.codecs.base import check_summary
from gtrace.codecs.coders import SHARED_HEAD, SharedCode
from gtrace.codecs.engine import Composed, level_grid
from gtrace.codecs.grids import Fitted, LeastVariance, Optimal, Stochastic
from gtrace.coding import MAX_LENGTH, width_for
from gtrace.errors import UsageError
from gtrace.fitting import alq_level_sets, optimal_level_sets
from gtrace.kernels import symbols as _symbols
from gtrace.sketch import ROUNDING, MomentSketch
from gtrace.types import State

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from gtrace.codecs.base import Codec
    from gtrace.codecs.grids import LevelGrid
    from gtrace.types import SummarySpec

#: methods that a codec must not override in order to be judged together with others
_ENGINE = ("init", "view", "fit", "shared", "expect", "allocates", "expects", "stateful")


def draws_together(item: Codec) -> bool:
    """Whether a sweep draws a codec with others: levels, stochastic rounding, a shared code, and no memory."""
    if not isinstance(item, Composed) or level_grid(item) is None or type(item).simulate is not Composed.simulate:
        return False
    parts = item.parts
    return type(parts.rounding) is Stochastic and isinstance(parts.coder, SharedCode) and not parts.memory.keeps


def judged_together(item: Codec) -> bool:
    """Whether a codec can be in :class:`LevelSets`: it rounds to levels without a parametric law or an integer code."""
    grid, kind = level_grid(item), type(item)
    if grid is None or grid.moments or any(getattr(kind, name) is not getattr(Composed, name) for name in _ENGINE):
        return False
    return draws_together(item) and item.parameters["coder"] in ("huffman", "fixed")


class Grids(NamedTuple):
    """The level sets of all codecs, end to end.

    Attributes:
        states: the state's arrays of each codec: what a fit found, nothing for a fixed grid.
        known: int64[sets], fitted numbers that a receiver must hold, -1 for none.
        levels: float64, the magnitudes.
        starts: int64[sets + 1], where each set begins.
        symbol_starts: int64[sets + 1], where its signed symbols begin.
        fixed: float64[sets], bits of a symbol at fixed width.
    """

    states: tuple[dict[str, NDArray[Any]], ...]
    known: NDArray[np.int64]
    levels: NDArray[np.float64]
    starts: NDArray[np.int64]
    symbol_starts: NDArray[np.int64]
    fixed: NDArray[np.float64]

    @property
    def sizes(self) -> NDArray[np.int64]:
        """int64[sets], magnitudes of each."""
        return np.diff(self.starts)


class Judged(NamedTuple):
    """What a sketch gives for every level set.

    Attributes:
        sketch: the sketch.
        numbers: float64[sets, kernels.symbols.NUMBERS].
        probabilities: float64, of the signed symbols of all sets, concatenated.
        lengths: uint8, of the codes made for them.
    """

    sketch: MomentSketch
    numbers: NDArray[np.float64]
    probabilities: NDArray[np.float64]
    lengths: NDArray[np.uint8]


class LevelFit(NamedTuple):
    """Codecs after a fit.

    Attributes:
        grids: their levels.
        adopted: bool[sets], whether each sends and uses a Huffman code.
        lengths: uint8, of all codes concatenated, including those not adopted.
        sent: int64[sets], bytes that a receiver needs in advance.
    """

    grids: Grids
    adopted: NDArray[np.bool_]
    lengths: NDArray[np.uint8]
    sent: NDArray[np.int64]

    @property
    def changed(self) -> NDArray[np.bool_]:
        """bool[sets], whether the fit changed the state."""
        return self.adopted | np.fromiter(map(bool, self.grids.states), np.bool_, self.adopted.size)

    def states(self, size: int) -> list[State]:
        """The state of each codec for tensors of ``size`` values."""
        ends = self.grids.symbol_starts.tolist()
        return [
            State(size, {**arrays, "lengths": self.lengths[first:last]} if adopted else arrays)
            for arrays, adopted, first, last in zip(
                self.grids.states, self.adopted.tolist(), ends[:-1], ends[1:], strict=True
            )
        ]


@dataclass(frozen=True, slots=True)
class Expectations:
    """The columns of :class:`~gtrace.types.Expectation` for many codecs, float64[sets] if they differ."""

    squared_error: NDArray[np.float64]
    error_bound: NDArray[np.float64]
    sparsity: NDArray[np.float64]
    bits_fixed: NDArray[np.float64]
    bits_entropy: NDArray[np.float64]
    bits_huffman: NDArray[np.float64]
    bits_payload: NDArray[np.float64]
    bits_norms: float
    bias: float


class LevelSets:
    """Level codecs that want the same sketch; see :func:`judged_together`.

    Every number equals what the codec's own ``fit``, ``shared`` and ``expect`` give.

    Attributes:
        codecs: the codecs.
        needs: the sketch.
        unfitted: their levels before any fit.

    Raises:
        UsageError: codecs that need different sketches, or levels that are not magnitudes.
    """

    def __init__(self, codecs: Sequence[Codec]) -> None:
        self.codecs = tuple(codecs)
        self.needs = cast("SummarySpec", self.codecs[0].needs)
        if any(item.needs != self.needs for item in self.codecs):
            raise UsageError("codecs that are judged together must need the same sketch")
        self._grids = [cast("LevelGrid", level_grid(item)) for item in self.codecs]
        self.has_zero = np.array([grid.zero for grid in self._grids])
        self._adaptive = np.array([grid.adaptive for grid in self._grids])
        self._huffman = np.array([item.parameters["coder"] == "huffman" for item in self.codecs])
        self.unfitted = self._laid_out([State(0)] * len(self.codecs))

    def _laid_out(self, states: Sequence[State]) -> Grids:
        each = [grid.levels(state).astype(np.float64) for grid, state in zip(self._grids, states, strict=True)]
        if not self._adaptive.any():
            each = [as_levels(levels, zero=grid.zero) for grid, levels in zip(self._grids, each, strict=True)]
        sizes = np.array([levels.size for levels in each])
        symbols = 2 * sizes - self.has_zero
        told = (grid.fitted(state) for grid, state in zip(self._grids, states, strict=True))
        return Grids(
            tuple(dict(state.arrays) for state in states),
            np.array([-1 if fitted is None else fitted.size for fitted in told]),
            np.concatenate(each),
            np.concatenate([[0], np.cumsum(sizes)]),
            np.concatenate([[0], np.cumsum(symbols)]),
            np.array([float(width_for(count)) for count in symbols.tolist()]),
        )

    def grids(self, sketch: MomentSketch) -> Grids:
        """The levels fitted to a sketch, those of fixed grids as they are."""
        if not (self._adaptive.any() and sketch.sums.size):
            return self.unfitted
        return self._laid_out(_fits(self._grids, sketch))

    def judge(self, sketch: MomentSketch, grids: Grids | None = None) -> Judged:
        """All level sets on one sketch; ``grids`` from :meth:`grids` of any sketch, of this one by default.

        Raises:
            UsageError: the sketch was not built as the codecs need it.
        """
        check_summary(self.codecs[0], sketch)
        grids = self.grids(sketch) if grids is None else grids
        symbols = int(grids.symbol_starts[-1])
        judged = Judged(
            sketch,
            np.empty((len(self.codecs), _symbols.NUMBERS)),
            np.empty(symbols),
            np.empty(symbols, np.uint8),
        )
        _symbols.judge_sets(
            sketch.bins(),
            grids.levels,
            grids.starts,
            ~self.has_zero,
            grids.symbol_starts,
            MAX_LENGTH,
            judged.probabilities,
            judged.lengths,
            judged.numbers,
        )
        return judged

    def weighted_error(self, weighted: MomentSketch, grids: Grids) -> NDArray[np.float64]:
        """float64[sets], as :meth:`~gtrace.codecs.Codec.weighted_error` of each.

        Raises:
            UsageError: the sketch was not built as the codecs need it.
        """
        check_summary(self.codecs[0], weighted)
        errors = np.empty(len(self.codecs))
        _symbols.weigh_sets(weighted.bins(), grids.levels, grids.starts, ~self.has_zero, errors)
        return errors + weighted.clip_error

    def fit(self, sketch: MomentSketch, size: int) -> LevelFit:
        """Fit levels, and take the codes that save more than they cost to send, for tensors of ``size`` values."""
        grids = self.grids(sketch)
        judged = self.judge(sketch, grids)
        numbers = judged.numbers[:, _symbols.LOWEST + 1 :]
        gain = (grids.fixed - numbers[:, _symbols.CODED]) * size
        adopted = self._huffman & (gain > numbers[:, _symbols.SENT]) & (sketch.quantized > 0)
        code = np.where(adopted, numbers[:, _symbols.SENT] / 8, 0)
        told = adopted | (grids.known >= 0)
        sent = np.where(told, SHARED_HEAD + 4 * np.maximum(grids.known, 0) + code, 0).astype(np.int64)
        return LevelFit(grids, adopted, judged.lengths, sent)

    def differ(self, a: LevelFit, b: LevelFit) -> NDArray[np.bool_]:
        """bool[sets], whether receivers hold different bytes with ``a`` than with ``b``."""
        starts, other = a.grids.symbol_starts, b.grids.symbol_starts
        if np.array_equal(starts, other):
            lengths = np.logical_or.reduceat(a.lengths != b.lengths, starts[:-1])
            levels = np.logical_or.reduceat(a.grids.levels != b.grids.levels, a.grids.starts[:-1])
        else:
            # Sets of other sizes have other bytes; the rest is compared one by one.
            spans = list(zip(starts[:-1], starts[1:], other[:-1], other[1:], strict=True))
            lengths = np.array([not np.array_equal(a.lengths[p:q], b.lengths[r:s]) for p, q, r, s in spans])
            pairs = zip(a.grids.states, b.grids.states, strict=True)
            levels = np.array([not np.array_equal(p.get("levels", 0), q.get("levels", 0)) for p, q in pairs])
        fitted: NDArray[np.bool_] = np.not_equal(a.grids.known, b.grids.known) | (levels & self._adaptive)
        return fitted | np.not_equal(a.adopted, b.adopted) | (a.adopted & lengths)

    def expect(self, judged: Judged, fitted: LevelFit) -> Expectations:
        """The average result of one encoding of the sketched tensor with this fit; ``judged`` with its levels."""
        sketch, numbers, fixed = judged.sketch, judged.numbers, fitted.grids.fixed
        size = max(1, sketch.size)
        share = sketch.quantized / size
        norms = 32.0 * (sketch.buckets + sketch.exact) / size
        coded = np.empty(len(self.codecs))
        _symbols.mean_lengths(fitted.lengths, judged.probabilities, fitted.grids.symbol_starts, coded)
        zeros = np.where(self.has_zero, numbers[:, _symbols.LOWEST] * sketch.quantized, float(sketch.dead))
        symbols = numbers[:, _symbols.LOWEST + 1 :]
        own = symbols[:, _symbols.CODED] + symbols[:, _symbols.SENT] / max(1, sketch.quantized)
        # Same formula as MomentSketch.expect.
        error = numbers[:, _symbols.WEIGHTED] + sketch.clip_error
        return Expectations(
            squared_error=error,
            error_bound=numbers[:, _symbols.BOUND] + ROUNDING * error,
            sparsity=(zeros + sketch.exact_zeros) / size,
            bits_fixed=fixed * share + norms,
            bits_entropy=symbols[:, _symbols.ENTROPY] * share + norms,
            bits_huffman=np.minimum(fixed, own) * share + norms,
            bits_payload=np.where(fitted.adopted, np.minimum(fixed, coded), fixed) * share + norms,
            bits_norms=norms,
            bias=float(np.sqrt(sketch.clip_error)),
        )


def _fits(grids: Sequence[LevelGrid], sketch: MomentSketch) -> list[State]:
    """Grids fitted to a sketch: one search finds the levels of all that differ in their number alone."""
    ahead: defaultdict[Any, list[tuple[int, Fitted]]] = defaultdict(list)
    for place, grid in enumerate(grids):
        if isinstance(grid, Optimal) or (isinstance(grid, LeastVariance) and grid.method == "newton"):
            ahead[isinstance(grid, Optimal) and grid.zero, grid.zero, grid.weighted].append((place, grid))
    found: dict[int, State] = {}
    for (exact, zero, weighted), own in ahead.items():
        bits = [grid.bits for _, grid in own]
        if exact:
            levels = optimal_level_sets(sketch, [2 ** (each - 1) for each in bits])
        else:
            levels = alq_level_sets(sketch, bits, zero, weighted)
        found |= {
            place: State(0, {"levels": grid.narrowed(each)}) for (place, grid), each in zip(own, levels, strict=True)
        }
    return [found[k] if k in found else grid.fit(State(0), sketch) for k, grid in enumerate(grids)]


def least_errors(sketch: MomentSketch, counts: Sequence[int], *, zero: bool) -> NDArray[np.float64]:
    """The least expected squared error of any ``counts`` magnitudes on a sketch, float64[counts].

    Without 0 as a level it is that of the best of several local searches, and NaN for numbers that no bits give.
    """
    found = {
        count: count.bit_length() for count in sorted(set(counts)) if zero or (count > 1 and not count & (count - 1))
    }
    if not found:
        return np.full(len(counts), np.nan)
    levels = optimal_level_sets(sketch, found) if zero else alq_level_sets(sketch, found.values(), zero=False)
    errors = np.empty(len(found))
    starts = np.concatenate([[0], np.cumsum([one.size for one in levels])])
    _symbols.weigh_sets(sketch.bins(), np.concatenate(levels), starts, np.full(len(found), not zero), errors)
    known = dict(zip(found, (errors + sketch.clip_error).tolist(), strict=True))
    return np.array([known.get(count, np.nan) for count in counts])
