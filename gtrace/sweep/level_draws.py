"""Many level codecs that share their scales: all of them encode a tensor once, and are compared with it."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from gtrace.codecs.base import EncodedPart, checked_values, sized_values
from gtrace.codecs.level_sets import draws_together
from gtrace.coding import MAX_LENGTH, width_for
from gtrace.errors import UsageError
from gtrace.kernels import drawing as _drawing
from gtrace.kernels.compare import LANED, SUMS
from gtrace.kernels.norms import LANES
from gtrace.metrics import COMPARED, Comparison
from gtrace.types import State

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from gtrace.codecs.base import Codec, CodedBits
    from gtrace.codecs.coders import SharedCode
    from gtrace.codecs.engine import Composed
    from gtrace.codecs.grids import LevelGrid
    from gtrace.codecs.parts import Scaled
    from gtrace.codecs.scales import BucketNorm
    from gtrace.metrics import Reference, RunningComparison


#: up to this many pairs of a value and its count are held at a time, 8 bytes each
_PAIRS = 1 << 22
#: a bucket's symbols are counted if there are this many values for each symbol
_FEW = 4
_UNWEIGHTED = np.empty(0)


class DrawnSets(NamedTuple):
    """One encoding by each codec, arrays[codecs].

    Attributes:
        compared: what arrived against what was sent; its fields are arrays.
        body: int64, bytes of the payload without its envelope.
        fixed: bits per value as in :class:`~gtrace.codecs.base.CodedBits`, like the next two.
    """

    compared: Comparison
    body: NDArray[np.int64]
    fixed: NDArray[np.float64]
    entropy: NDArray[np.float64]
    huffman: NDArray[np.float64]


class _Sets(NamedTuple):
    """The levels of several codecs, end to end, and room for what becomes of them.

    Attributes:
        rules, levels, places: see :func:`gtrace.kernels.drawing.draw_levels`.
        rooms: int64[codecs + 1], the places where the pairs of each codec begin, and where the last ones end.
        symbols: of each codec.
    """

    rules: NDArray[np.int64]
    levels: NDArray[np.float32]
    places: NDArray[np.int64]
    rooms: NDArray[np.int64]
    symbols: list[int]


class _Added(NamedTuple):
    """What is added up from part to part of a tensor; see :func:`gtrace.kernels.drawing.draw_levels`."""

    addresses: NDArray[np.uint64]
    lanes: NDArray[np.float64]
    sums: NDArray[np.float64]
    tallies: NDArray[np.int64]


class LevelDraws:
    """Level codecs with stochastic rounding and without memory that share one scale; see :func:`draws_together`.

    Raises:
        UsageError: codecs with other parts, or with different scales.
    """

    def __init__(self, codecs: Sequence[Codec]) -> None:
        self.codecs = tuple(codecs)
        if not all(map(draws_together, self.codecs)):
            raise UsageError("codecs that draw together must be level codecs without memory")
        parts = [cast("Composed", item).parts for item in self.codecs]
        self._scale = cast("BucketNorm", parts[0].scale)
        if any(each.scale != self._scale for each in parts):
            raise UsageError("codecs that draw together must have the same scale")
        self._grids = [cast("LevelGrid", each.grid) for each in parts]
        self._coders = [cast("SharedCode", each.coder) for each in parts]
        self._huffman = np.array([each.coder == "huffman" for each in self._coders])

    def draw(
        self,
        states: Sequence[State],
        reference: Reference,
        key: tuple[int, int],
        totals: Sequence[NDArray[np.float64] | None] | NDArray[np.float64] | None = None,
    ) -> DrawnSets:
        """One encoding of a tensor by each codec with its state; the same as ``simulate`` and ``compare`` of each.

        Args:
            states: one for each codec.
            reference: the exact values.
            key: as for ``encode``, the same for all codecs.
            totals: for each codec float64[n] to which its errors are added, or None.

        Raises:
            UsageError: wrong size or non-finite values.
        """
        # The squares of float32 have no finite sum with a value among them that is not finite.
        x = (sized_values if math.isfinite(reference.energy) else checked_values)(states[0], reference.values)
        v = self._scale.cut(x, states[0])
        totals = [None] * len(states) if totals is None else totals
        sets, sums = self._laid_out(states, v, [0 if total is None else total.ctypes.data for total in totals])
        if sets.rooms[-1] > _PAIRS and len(states) > 1:
            return self._halves(states, reference, key, totals)
        weights = _UNWEIGHTED if reference.weights is None else reference.weights
        sent = x if self._scale.clip is None else np.concatenate([v.x, v.tail])
        where = v.bucket, v.scales, v.x.size, np.uint64(key[0]), np.uint64(key[1]), 0
        bits, counts = np.empty((2, int(sets.rooms[-1])), np.uint32)
        pairs = bits, counts, sets.rooms[:-1], np.empty(len(states), np.int64)
        arrays: tuple[Any, ...] = *sets[:3], *sums, *pairs
        _drawing.draw_levels(sent, x, weights, *where, *arrays)
        ascending = v.scales.size < 2 and not v.tail.size and not sets.rules[:, _drawing.WIDE].any()
        gaps, lengths = np.empty((len(states), 2)), np.empty((len(states), 3))
        _drawing.finish_levels(reference.ordered, reference.norm1, ascending, sums.lanes, sums.sums, *pairs, gaps)
        _drawing.code_lengths(sums.tallies, sets.rules, sets.places, MAX_LENGTH, lengths)
        coded = np.array(
            [
                coder.bits(state, sums.tallies[2 * first : 2 * first + symbols])
                for coder, state, first, symbols in zip(self._coders, states, sets.places, sets.symbols, strict=False)
            ]
        )
        coded = np.where(self._huffman, np.minimum(coded, lengths[:, _drawing.FIXED].astype(np.int64)), coded)
        head = len(self._scale.pack(v.scales)) + 4 * v.tail.size
        compared = reference.comparison(sums.sums, *gaps.T)
        return DrawnSets(compared, head + -(-coded // 8), *((8.0 * head + lengths) / max(1, x.size)).T)

    def _laid_out(self, states: Sequence[State], v: Scaled, addresses: list[int]) -> tuple[_Sets, _Added]:
        """The levels of all codecs, end to end, and their sums before the first value.

        ``addresses``: of the array to which a codec's errors are added, or 0.
        """
        levels = [grid.levels(state) for grid, state in zip(self._grids, states, strict=True)]
        symbols = [2 * own.size - grid.zero for grid, own in zip(self._grids, levels, strict=True)]
        most = min(v.bucket, v.x.size) // _FEW
        rules = []
        for grid, state, count in zip(self._grids, states, symbols, strict=True):
            rule = grid.rule(state)
            rules.append((rule.number, rule.mirrored, rule.steps, count > most, width_for(count)))
        places = np.array([0, *itertools.accumulate(own.size for own in levels)])
        pairs = [v.tail.size + (v.x.size if count > most else v.scales.size * count) for count in symbols]
        rooms = np.array([0, *itertools.accumulate(pairs)])
        sums = _Added(
            np.array(addresses, np.uint64),
            np.zeros((len(states), LANED * LANES)),
            np.zeros((len(states), SUMS)),
            np.zeros(2 * int(places[-1]), np.int64),
        )
        return _Sets(np.array(rules), np.concatenate(levels), places, rooms, symbols), sums

    def _halves(
        self,
        states: Sequence[State],
        reference: Reference,
        key: tuple[int, int],
        totals: Sequence[NDArray[np.float64] | None] | NDArray[np.float64],
    ) -> DrawnSets:
        """Half of the codecs after the other, where their pairs would take too much memory."""
        half = len(states) // 2
        parts = [
            LevelDraws(self.codecs[span]).draw(states[span], reference, key, totals[span])
            for span in (slice(half), slice(half, None))
        ]
        columns: list[Any] = [
            np.concatenate([np.broadcast_to(getattr(part.compared, name), part.body.size) for part in parts])
            for name in COMPARED
        ]
        rest = map(np.concatenate, zip(*(part[1:] for part in parts), strict=True))
        return DrawnSets(Comparison(*columns), *rest)


def draws_in_parts(item: Codec, state: State, size: int) -> bool:
    """Whether :class:`PartDraws` can draw for a codec, with few symbols for the values of a bucket."""
    if not draws_together(item):
        return False
    parts = cast("Composed", item).parts
    return bool(_FEW * parts.grid.alphabet(state) <= min(parts.scale.over(size), size))


class PartDraws:
    """One encoding by a level codec of a tensor that arrives in parts.

    Args:
        codec: the codec, see :func:`draws_together`.
        state: the result of its ``prepare``.
        key: as for ``encode``.
        compared: gets the decoded values.
        total: float64[most values of a part], to which errors are added; or empty.
    """

    def __init__(
        self,
        codec: Codec,
        state: State,
        key: tuple[int, int],
        compared: RunningComparison,
        total: NDArray[np.float64] = _UNWEIGHTED,
    ) -> None:
        self._codec, self._state, self._key, self._compared = codec, state, key, compared
        self._total = total
        self._draws = LevelDraws([codec])
        self._sums: _Added | None = None
        self._head, self._size = 0, 0

    def add(self, values: NDArray[np.float32], start: int, weights: NDArray[np.float64] | None) -> None:
        """The next part, from place ``start`` on, as for ``encode_part``; see :class:`RunningComparison` on weights."""
        draws, state = self._draws, State(values.size, self._state.arrays)
        x = checked_values(state, values)
        v = draws._scale.cut(x, state)
        sets, sums = draws._laid_out([state], v, [self._total.ctypes.data if self._total.size else 0])
        self._sums = self._sums or sums
        heavy = _UNWEIGHTED if weights is None else weights
        where = v.bucket, v.scales, v.x.size, np.uint64(self._key[0]), np.uint64(self._key[1]), start
        bits, counts = np.empty((2, int(sets.rooms[-1])), np.uint32)
        ends = np.empty(1, np.int64)
        arrays: tuple[Any, ...] = *sets[:3], *self._sums, bits, counts, sets.rooms[:-1], ends
        # Parts are never clipped.
        _drawing.draw_levels(x, x, heavy, *where, *arrays)
        self._compared.add_counted(x, bits[: ends[0]].view(np.float32), counts[: ends[0]], weights)
        if not (start and "scale" in state.arrays):
            self._head += len(draws._scale.pack(v.scales)) + 4 * v.tail.size
        self._size += x.size

    def finish(self) -> tuple[int, CodedBits]:
        """Bytes of the payload's body, and its bits under each coder; the sums go to the comparison."""
        assert self._sums is not None, "a tensor in parts has parts"
        sums, lanes = self._sums.sums[0], self._sums.lanes[0].reshape(LANED, LANES)
        # One by one, as in the kernel.
        sums[:LANED] += np.add.accumulate(lanes, axis=1)[:, -1]
        self._compared.settle(sums)
        grid, coder = self._draws._grids[0], self._draws._coders[0]
        tallies = self._sums.tallies[: grid.alphabet(self._state)]
        whole = EncodedPart(b"", 8 * self._head, coder.bits(self._state, tallies), tallies)
        return self._codec.measured(whole, self._size)
