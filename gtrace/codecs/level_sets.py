"""Many level codecs on one sketch: fitted and judged together, in columns, and their noise."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from gtrace.buckets import as_levels
from gtrace.codecs.base import Codec, check_summary
from gtrace.codecs.coders import SHARED_HEAD, SharedCode
from gtrace.codecs.engine import Composed, level_grid
from gtrace.codecs.grids import Expectations, Fitted, Judged, LeastVariance, LevelGrid, Optimal, Stochastic
from gtrace.coding import width_for
from gtrace.errors import UsageError
from gtrace.fitting import alq_level_sets, optimal_level_sets
from gtrace.kernels import symbols as _symbols
from gtrace.kernels.noise import noise_of_levels
from gtrace.types import Key, State, SummarySpec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from gtrace.codecs.scales import BucketNorm
    from gtrace.sketch import MomentSketch, SketchSet

#: methods that a codec must not override in order to be judged together with others
_ENGINE = ("init", "view", "fit", "shared", "expect", "allocates", "expects", "stateful")


def draws_together(item: Codec) -> bool:
    """Whether a sweep draws a codec with others: levels, stochastic rounding, a shared code, and no memory."""
    if not isinstance(item, Composed) or level_grid(item) is None:
        return False
    if (type(item).simulate, type(item).encode_part) != (Composed.simulate, Composed.encode_part):
        return False
    parts = item.parts
    return type(parts.rounding) is Stochastic and isinstance(parts.coder, SharedCode) and not parts.memory.keeps


def judged_together(item: Codec) -> bool:
    """Whether a codec can be in :class:`LevelSets`: it rounds to levels without a parametric law or an integer code."""
    grid, kind = level_grid(item), type(item)
    if grid is None or grid.moments or any(getattr(kind, name) is not getattr(Composed, name) for name in _ENGINE):
        return False
    return draws_together(item) and item.parameters["coder"] in ("huffman", "fixed")


def noisy_together(item: Codec) -> bool:
    """Whether a codec is one for :meth:`LevelSets.add_noise`: it rounds values as they are, to levels of a norm."""
    grid = level_grid(item)
    if grid is None or not isinstance(item, Composed) or item.fits_itself or not judged_together(item):
        return False
    scale = cast("BucketNorm", item.parts.scale)
    return scale.clip is None and scale.tail == "quantized" and grid.rule(State(0)).kind != "powers"


class Grids(NamedTuple):
    """The level sets of all codecs, end to end: of the first tensor, then of the next one.

    Attributes:
        states: the state's arrays of each: what a fit found, nothing for a fixed grid.
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

    def state(self, place: int, size: int) -> State:
        """The state of a codec for a tensor of ``size`` values."""
        arrays, (first, last) = self.grids.states[place], self.grids.symbol_starts[place : place + 2].tolist()
        return State(size, {**arrays, "lengths": self.lengths[first:last]} if self.adopted[place] else arrays)


class LevelSets:
    """Level codecs that want the same sketch, on any number of tensors; see :func:`judged_together`.

    Every number equals what the codec's own ``fit``, ``shared`` and ``expect`` give. Arrays over sets hold all codecs
    of the first tensor, then those of the next one.

    Attributes:
        codecs: the codecs.
        needs: the sketch.
        adaptive: whether any of them is fitted.

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
        self.adaptive = any(grid.adaptive for grid in self._grids)
        self._huffman = np.array([item.parameters["coder"] == "huffman" for item in self.codecs])
        # Levels before any fit, which fixed grids keep.
        unfitted = [grid.levels(State(0)).astype(np.float64) for grid in self._grids]
        self._levels = [
            levels if grid.adaptive else as_levels(levels, zero=grid.zero)
            for grid, levels in zip(self._grids, unfitted, strict=True)
        ]

    def grids(self, sketches: SketchSet | None) -> Grids:
        """The levels fitted to each sketch, those of fixed grids as they are; None for one tensor without a fit."""
        states: list[dict[str, NDArray[Any]]] = []
        tensors = 1 if sketches is None else len(sketches)
        fitted = {} if sketches is None else _fits(self._grids, sketches)
        for place in range(tensors):
            held = sketches is not None and sketches.starts[place] < sketches.starts[place + 1]
            states += [fitted[k][place] if held and k in fitted else {} for k in range(len(self.codecs))]
        each, known = self._levels * tensors, [-1] * len(states)
        for place, arrays in enumerate(states):
            if arrays:
                grid, state = self._grids[place % len(self.codecs)], State(0, arrays)
                each[place] = grid.levels(state).astype(np.float64)
                fit = grid.fitted(state)
                known[place] = -1 if fit is None else fit.size
        sizes = np.array([levels.size for levels in each])
        symbols = 2 * sizes - np.tile(self.has_zero, tensors)
        return Grids(
            tuple(states),
            np.array(known),
            np.concatenate(each),
            np.concatenate([[0], np.cumsum(sizes)]),
            np.concatenate([[0], np.cumsum(symbols)]),
            np.array([float(width_for(count)) for count in symbols.tolist()]),
        )

    def judge(self, sketches: SketchSet, grids: Grids) -> Judged:
        """All level sets, each on its tensor's sketch; ``grids`` from :meth:`grids` of any sketches.

        Raises:
            UsageError: the sketches were not built as the codecs need them.
        """
        check_summary(self.codecs[0], sketches)
        mirrored = np.tile(~self.has_zero, len(sketches))
        return Judged.of(sketches, grids.levels, grids.starts, mirrored, grids.symbol_starts)

    def weighted_error(self, weighted: SketchSet, grids: Grids) -> NDArray[np.float64]:
        """float64[sets], as :meth:`~gtrace.codecs.Codec.weighted_error` of each.

        Raises:
            UsageError: the sketches were not built as the codecs need them.
        """
        check_summary(self.codecs[0], weighted)
        errors, mirrored = np.empty(grids.known.size), np.tile(~self.has_zero, len(weighted))
        _symbols.weigh_sets(weighted.bins(), grids.levels, grids.starts, mirrored, errors)
        return errors + np.repeat(weighted.counted("clip_error"), len(self.codecs))

    def fit(self, sketches: SketchSet, sizes: NDArray[np.int64]) -> LevelFit:
        """Fit levels, and take the codes that save more than they cost to send, for tensors of ``sizes`` values."""
        grids = self.grids(sketches)
        judged = self.judge(sketches, grids)
        _, coded, lengths = judged.bits
        gain = (grids.fixed - coded) * np.repeat(sizes, len(self.codecs))
        size, exact = sketches.counted("size", "exact").T
        seen = np.repeat(size - exact > 0, len(self.codecs))
        adopted = np.tile(self._huffman, len(sketches)) & (gain > lengths) & seen
        news = adopted | (grids.known >= 0)
        known = SHARED_HEAD + 4 * np.maximum(grids.known, 0) + np.where(adopted, lengths / 8, 0)
        return LevelFit(grids, adopted, judged.lengths, np.where(news, known, 0).astype(np.int64))

    def differ(self, a: LevelFit, b: LevelFit) -> NDArray[np.bool_]:
        """bool[sets], whether receivers hold different bytes with ``a`` than with ``b``."""
        lengths, levels = np.empty((2, a.sent.size), np.bool_)
        _symbols.differ(a.lengths, a.grids.symbol_starts, b.lengths, b.grids.symbol_starts, lengths)
        _symbols.differ(a.grids.levels, a.grids.starts, b.grids.levels, b.grids.starts, levels)
        others: NDArray[np.bool_] = (a.grids.known != b.grids.known) | (a.adopted != b.adopted)
        return levels | others | (a.adopted & lengths)

    def expect(self, judged: Judged, fitted: LevelFit) -> Expectations:
        """The average result of one encoding of the sketched tensors with this fit; ``judged`` with its levels."""
        fixed, coded = fitted.grids.fixed, np.empty(fitted.adopted.size)
        _symbols.mean_lengths(fitted.lengths, judged.probabilities, fitted.grids.symbol_starts, coded)
        sent = np.where(fitted.adopted, np.minimum(fixed, coded), fixed)
        return judged.expect(fixed, sent, np.tile(self.has_zero, len(judged.sketches)))

    def add_noise(
        self,
        sketch: MomentSketch | None,
        values: NDArray[np.float32],
        keys: Sequence[Key],
        near: NDArray[np.float32],
        scale: NDArray[np.float64],
        factor: float,
        variance: NDArray[np.float64],
    ) -> NDArray[np.float64]:
        """Encode a gradient twice with each codec; see :func:`noisy_together`.

        Args:
            sketch: what they are fitted to; None if none of them is.
            values: finite float32[n], the gradient.
            keys: of the two encodings.
            near: float32[n], another gradient of the same weights.
            scale: float64[n], of each element's coordinate.
            factor: of the gradients, outside of ``scale``.
            variance: float64[codecs, n], half the squared difference of a codec's encodings is added to it.

        Returns:
            float64[codecs], the inner product of a codec's mean error and ``near``, without ``factor``.
        """
        grids = self.grids(None if sketch is None else sketch.alone)
        rules = [grid.rule(State(0, arrays)) for grid, arrays in zip(self._grids, grids.states, strict=True)]
        norm = cast("BucketNorm", cast("Composed", self.codecs[0]).parts.scale)
        cut, lost = norm.cut(values, State(values.size)), np.empty(len(rules))
        kinds = np.array([(rule.number, rule.mirrored, rule.steps) for rule in rules])
        levels, words = grids.levels.astype(np.float32), np.array(keys, np.uint64)
        given = cut.x, cut.bucket, cut.scales, kinds, levels, grids.starts, words
        noise_of_levels(*given, near, scale, factor, variance, lost)
        return lost


def _fits(grids: Sequence[LevelGrid], sketches: SketchSet) -> dict[int, list[dict[str, NDArray[Any]]]]:
    """The arrays of adaptive grids fitted to each sketch, by places: levels that differ in their number go together."""
    ahead: defaultdict[Any, list[tuple[int, Fitted]]] = defaultdict(list)
    for k, grid in enumerate(grids):
        if isinstance(grid, Optimal) or (isinstance(grid, LeastVariance) and grid.method == "newton"):
            ahead[isinstance(grid, Optimal) and grid.zero, grid.zero, grid.weighted].append((k, grid))
    found: dict[int, list[dict[str, NDArray[Any]]]] = {}
    for (exact, zero, weighted), own in ahead.items():
        bits = [grid.bits for _, grid in own]
        if exact:
            sets = optimal_level_sets(sketches, [2 ** (each - 1) for each in bits])
        else:
            sets = alq_level_sets(sketches, bits, zero, weighted)
        for (k, grid), (levels, sizes) in zip(own, sets, strict=True):
            found[k] = [{"levels": each} for each in grid.narrowed_each(levels, sizes)]
    for k, grid in enumerate(grids):
        if grid.adaptive and k not in found:
            found[k] = [dict(grid.fit(State(0), sketches[place]).arrays) for place in range(len(sketches))]
    return found


def least_errors(sketches: SketchSet, counts: NDArray[np.int64], *, zero: bool) -> NDArray[np.float64]:
    """The least expected squared error of any ``counts`` magnitudes on each sketch, int64 and float64[tensors, codecs].

    Without 0 as a level it is that of the best of several local searches. NaN for numbers that no bits give, and for
    sketches without values.
    """
    errors, wanted = np.full(counts.shape, np.nan), np.unique(counts.max(axis=0)).tolist()
    known = [count for count in wanted if zero or (count > 1 and not count & (count - 1))]
    if known:
        if zero:
            sets = optimal_level_sets(sketches, known)
        else:
            sets = alq_level_sets(sketches, [count.bit_length() for count in known], zero=False)
        sizes = np.stack([own for _, own in sets], axis=1)
        inside = [np.arange(levels.shape[1]) < own[:, None] for levels, own in sets]
        levels = np.concatenate([levels for levels, _ in sets], axis=1)[np.concatenate(inside, axis=1)]
        starts, least = np.cumsum([0, *sizes.reshape(-1)]), np.empty(sizes.size)
        _symbols.weigh_sets(sketches.bins(), levels, starts, np.full(sizes.size, not zero), least)
        least += np.repeat(sketches.counted("clip_error"), len(known))
        for count, column in zip(known, least.reshape(sizes.shape).T, strict=True):
            errors = np.where(counts == count, column[:, None], errors)
    errors[np.diff(sketches.starts) == 0] = np.nan
    # A tensor of few values has fewer levels than others.
    for place in np.flatnonzero(~np.isin(counts, wanted).all(axis=1)).tolist():
        errors[place] = least_errors(sketches[place].alone, counts[[place]], zero=zero)
    return errors
