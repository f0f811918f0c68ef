"""Many level codecs that share their scales: all of them encode a tensor once, and are compared with it."""

from __future__ import annotations

import itertools
import math
from dataclasses import fields
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np

from gtrace.codecs.base import EncodedPart, checked_values, sized_values
from gtrace.codecs.level_sets import draws_together
from gtrace.coding import MAX_LENGTH, width_for
from gtrace.errors import UsageError
from gtrace.kernels import drawing as _drawing
from gtrace.kernels.compare import LANED, SUMS
from gtrace.kernels.norms import LANES
from gtrace.metrics import Comparison
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
_FIELDS = attrgetter(*(item.name for item in fields(Comparison)))


class DrawnSets(NamedTuple):
    """One encoding by each codec: the fields of :class:`~gtrace.metrics.Comparison` and lengths, arrays[codecs].

    Attributes:
        body: int64, bytes of the payload without its envelope.
        fixed: bits per value as in :class:`~gtrace.codecs.base.CodedBits`, like the next two.
    """

    squared_error: NDArray[np.float64]
    relative_variance: NDArray[np.float64]
    mean_abs_error: NDArray[np.float64]
    mean_relative_error: NDArray[np.float64]
    cosine: NDArray[np.float64]
    snr_db: NDArray[np.float64]
    w1: NDArray[np.float64]
    w1_normalized: NDArray[np.float64]
    w1_mcgq: NDArray[np.float64]
    sparsity: NDArray[np.float64]
    update_error: NDArray[np.float64]
    body: NDArray[np.int64]
    fixed: NDArray[np.float64]
    entropy: NDArray[np.float64]
    huffman: NDArray[np.float64]


class _Sets(NamedTuple):
    """The levels of several codecs, end to end; see :func:`gtrace.kernels.drawing.draw_levels`."""

    rules: NDArray[np.int64]
    levels: NDArray[np.float32]
    places: NDArray[np.int64]
    symbols: list[int]
    rooms: NDArray[np.int64]


class _Kept(NamedTuple):
    """What stays from part to part of a tensor; see :func:`gtrace.kernels.drawing.draw_levels`."""

    addresses: NDArray[np.uint64]
    lanes: NDArray[np.float64]
    sums: NDArray[np.float64]
    tallies: NDArray[np.int64]

    @classmethod
    def of(cls, sets: _Sets, addresses: list[int]) -> _Kept:
        """At the start of a tensor, with the address of each codec's running sum, or 0."""
        lanes, sums = np.zeros((len(addresses), LANED * LANES)), np.zeros((len(addresses), SUMS))
        return cls(np.array(addresses, np.uint64), lanes, sums, np.zeros(2 * sets.levels.size, np.int64))


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
        sets = self._sets(states, v)
        totals = [None] * len(states) if totals is None else totals
        if sets.rooms[-1] > _PAIRS and len(states) > 1:
            return self._halves(states, reference, key, totals)
        kept = _Kept.of(sets, [0 if total is None else total.ctypes.data for total in totals])
        weights = _UNWEIGHTED if reference.weights is None else reference.weights
        bits, counts, ends = self._run(sets, v, x, weights, key, 0, kept)
        ascending = v.scales.size < 2 and not v.tail.size and not sets.rules[:, _drawing.WIDE].any()
        gaps = np.empty((len(states), 2))
        _drawing.finish_levels(
            reference.ordered,
            reference.norm1,
            ascending,
            kept.lanes,
            kept.sums,
            bits,
            counts,
            sets.rooms[:-1],
            ends,
            gaps,
        )
        found = _FIELDS(reference.comparison(kept.sums, *gaps.T))
        columns = (each if isinstance(each, np.ndarray) else np.full(len(states), each) for each in found)
        return DrawnSets(*columns, *self._lengths(sets, states, kept.tallies, self._head(v), x.size))

    def _run(
        self,
        sets: _Sets,
        v: Scaled,
        x: NDArray[np.float32],
        weights: NDArray[np.float64],
        key: tuple[int, int],
        start: int,
        kept: _Kept,
    ) -> tuple[NDArray[np.uint32], NDArray[np.uint32], NDArray[np.int64]]:
        """Draw values from place ``start`` of a tensor on: bits and counts of decoded values, and their ends."""
        bits, counts = np.empty((2, int(sets.rooms[-1])), np.uint32)
        ends = np.empty(sets.places.size - 1, np.int64)
        _drawing.draw_levels(
            x if self._scale.clip is None else np.concatenate([v.x, v.tail]),
            x,
            weights,
            v.bucket,
            v.scales,
            v.x.size,
            np.uint64(key[0]),
            np.uint64(key[1]),
            start,
            sets.rules,
            sets.levels,
            sets.places,
            kept.addresses,
            kept.lanes,
            kept.sums,
            kept.tallies,
            bits,
            counts,
            sets.rooms[:-1],
            ends,
        )
        return bits, counts, ends

    def _head(self, v: Scaled) -> int:
        """Bytes of a payload's body before its symbols."""
        return len(self._scale.pack(v.scales)) + 4 * v.tail.size

    def _lengths(
        self, sets: _Sets, states: Sequence[State], tallies: NDArray[np.int64], head: int, size: int
    ) -> tuple[NDArray[np.float64], ...]:
        """Bytes of each payload's body, and bits per value at fixed width, entropy and with a Huffman code."""
        bits = np.empty((len(states), 3))
        _drawing.code_lengths(tallies, sets.rules, sets.places, MAX_LENGTH, bits)
        body = np.empty(len(states), np.int64)
        for place, (coder, state) in enumerate(zip(self._coders, states, strict=True)):
            first = 2 * sets.places[place]
            sent = coder.bits(state, tallies[first : first + sets.symbols[place]])
            if coder.coder == "huffman":
                sent = min(sent, int(bits[place, _drawing.FIXED]))
            body[place] = head + -(-sent // 8)
        return body, *((8.0 * head + bits) / max(1, size)).T

    def _sets(self, states: Sequence[State], v: Scaled) -> _Sets:
        """The levels of all codecs, end to end."""
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
        return _Sets(np.array(rules), np.concatenate(levels), places, symbols, rooms)

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
        return DrawnSets(*map(np.concatenate, zip(*parts, strict=True)))


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
        self._kept: _Kept | None = None
        self._head, self._size = 0, 0

    def add(self, values: NDArray[np.float32], start: int, weights: NDArray[np.float64] | None) -> None:
        """The next part, from place ``start`` on, as for ``encode_part``; see :class:`RunningComparison` on weights."""
        draws, state = self._draws, State(values.size, self._state.arrays)
        x = checked_values(state, values)
        v = draws._scale.cut(x, state)
        sets = draws._sets([state], v)
        self._kept = self._kept or _Kept.of(sets, [self._total.ctypes.data if self._total.size else 0])
        heavy = _UNWEIGHTED if weights is None else weights
        bits, counts, ends = draws._run(sets, v, x, heavy, self._key, start, self._kept)
        self._compared.add_counted(x, bits[: ends[0]].view(np.float32), counts[: ends[0]], weights)
        if not (start and "scale" in state.arrays):
            self._head += draws._head(v)
        self._size += x.size

    def finish(self) -> tuple[int, CodedBits]:
        """Bytes of the payload's body, and its bits under each coder; the sums go to the comparison."""
        assert self._kept is not None, "a tensor in parts has parts"
        sums, lanes = self._kept.sums[0], self._kept.lanes[0].reshape(LANED, LANES)
        # One by one, as in the kernel.
        sums[:LANED] += np.add.accumulate(lanes, axis=1)[:, -1]
        self._compared.settle(sums)
        grid, coder = self._draws._grids[0], self._draws._coders[0]
        tallies = self._kept.tallies[: grid.alphabet(self._state)]
        whole = EncodedPart(b"", 8 * self._head, coder.bits(self._state, tallies), tallies)
        return self._codec.measured(whole, self._size)
