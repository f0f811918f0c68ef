"""Many level codecs that share their scales: all of them encode tensors once, and are compared with them."""

from __future__ import annotations

import math
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np

from gtrace.codecs.base import Codec, CodedBits, EncodedPart, checked_values
from gtrace.codecs.level_sets import Grids, LevelFit, draws_together, judged_together
from gtrace.coding import MAX_LENGTH, width_for
from gtrace.errors import UsageError
from gtrace.kernels import drawing as _drawing
from gtrace.kernels.compare import LANED, SUMS
from gtrace.kernels.norms import LANES
from gtrace.metrics import Comparison, Reference, RunningComparison, comparisons
from gtrace.types import State

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from gtrace.codecs.coders import SharedCode
    from gtrace.codecs.engine import Composed
    from gtrace.codecs.grids import LevelGrid
    from gtrace.codecs.parts import Scaled
    from gtrace.codecs.scales import BucketNorm


#: up to this many pairs of a value and its count are held at a time, 8 bytes each
_PAIRS = 1 << 22
#: a bucket's symbols are counted if there are this many values for each symbol
_FEW = 4
_UNWEIGHTED = np.empty(0)


class DrawnSets(NamedTuple):
    """One encoding of each tensor by each codec, arrays over the sets of :class:`~gtrace.codecs.level_sets.LevelSets`.

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


class LevelDraws:
    """Level codecs of a group that share one scale; see :func:`~gtrace.codecs.level_sets.judged_together`.

    Raises:
        UsageError: other codecs, or different scales.
    """

    def __init__(self, codecs: Sequence[Codec]) -> None:
        if not all(map(judged_together, codecs)):
            raise UsageError("codecs that draw together must be level codecs without memory")
        parts = [cast("Composed", item).parts for item in codecs]
        self._scale = cast("BucketNorm", parts[0].scale)
        if any(each.scale != self._scale for each in parts):
            raise UsageError("codecs that draw together must have the same scale")
        self._grids = [cast("LevelGrid", each.grid) for each in parts]
        #: (codec, number of levels) -> its rule, with the bits of a symbol at fixed width
        self._rules: dict[tuple[int, int], tuple[int, bool, int, int]] = {}

    def draw(
        self,
        fitted: LevelFit,
        references: Sequence[Reference],
        keys: Sequence[tuple[int, int]],
        totals: Sequence[NDArray[np.float64] | None],
    ) -> DrawnSets:
        """One encoding of each tensor by each codec; the same as ``simulate`` and ``compare`` of each.

        Args:
            fitted: the codecs, fitted for these tensors.
            references: the exact values of each tensor.
            keys: as for ``encode``, one for each tensor.
            totals: for each codec float64[values of all tensors] to which its errors are added, or None.

        Raises:
            UsageError: non-finite values.
        """
        states = [State(reference.size) for reference in references]
        for state, reference in zip(states, references, strict=True):
            # The squares of float32 have no finite sum with a value among them that is not finite.
            if not math.isfinite(reference.energy):
                checked_values(state, reference.values)
        cuts = [self._scale.cut(each.values, state) for each, state in zip(references, states, strict=True)]
        codecs, join = len(self._grids), itemgetter(0) if len(references) == 1 else np.concatenate
        sizes, grids = np.array([reference.size for reference in references]), fitted.grids
        bounds, scale_bounds = np.cumsum([0, *sizes]), np.cumsum([0, *(cut.scales.size for cut in cuts)])
        rules = self._ruled(grids, cuts)
        addresses = np.array([0 if total is None else total.ctypes.data for total in totals], np.uint64)
        addresses = np.where(addresses, addresses + 8 * bounds[:-1, None].astype(np.uint64), addresses).reshape(-1)
        values = join([reference.values for reference in references])
        heavy = [reference.weights for reference in references if reference.weights is not None]
        given = (
            values if self._scale.clip is None else np.concatenate([cut.all for cut in cuts]),
            values,
            join(heavy) if len(heavy) == len(references) else _UNWEIGHTED,
            join([reference.ordered for reference in references]),
            np.array([reference.norm1 for reference in references]),
            bounds,
            np.array([(cut.bucket, cut.x.size) for cut in cuts]),
            join([cut.scales for cut in cuts]),
            scale_bounds,
            np.array(keys, np.uint64).reshape(-1, 2),
        )
        levels, sets = grids.levels.astype(np.float32), rules.shape[0]
        tallies, sums = np.zeros(2 * levels.size, np.int64), np.zeros((sets, SUMS))
        gaps, lengths = np.empty((sets, 2)), np.empty((sets, 4))
        pairs = np.where(rules[:, _drawing.WIDE], sizes.max(), (2 * grids.sizes) * cuts[0].scales.size)
        # Some codecs after the others, where the pairs of a tensor would take too much memory.
        turns = [(0, sets)]
        if len(references) == 1 and pairs.sum() > _PAIRS:
            each = max(1, int(_PAIRS // pairs.max()))
            turns = [(first, min(sets, first + each)) for first in range(0, codecs, each)]
        for first, last in turns:
            start, stop = grids.starts[first], grids.starts[last]
            _drawing.draw_sets(
                *given,
                rules[first:last],
                levels[start:stop],
                grids.starts[first : last + 1] - start,
                addresses[first:last],
                sums[first:last],
                tallies[2 * start : 2 * stop],
                gaps[first:last],
            )
        own = fitted.lengths, grids.symbol_starts, fitted.adopted
        _drawing.code_lengths(tallies, rules, grids.starts, *own, MAX_LENGTH, lengths)
        coded = np.minimum(lengths[:, _drawing.CODED], lengths[:, _drawing.FIXED]).astype(np.int64)
        head = np.array([len(self._scale.pack(cut.scales)) + 4 * cut.tail.size for cut in cuts])
        head, whole = np.repeat(head, codecs), np.repeat(np.maximum(1, sizes), codecs)
        bits = (8.0 * head + lengths.T[: _drawing.CODED]) / whole
        return DrawnSets(comparisons(references, sums, *gaps.T), head + -(-coded // 8), *bits)

    def _ruled(self, grids: Grids, cuts: Sequence[Scaled]) -> NDArray[np.int64]:
        """The rule of each set, see :func:`gtrace.kernels.drawing.draw_levels`."""
        found = []
        for place, size in enumerate(grids.sizes.tolist()):
            codec = place % len(self._grids)
            if (codec, size) not in self._rules:
                grid, state = self._grids[codec], State(0, grids.states[place])
                rule = grid.rule(state)
                self._rules[codec, size] = rule.number, rule.mirrored, rule.steps, width_for(grid.alphabet(state))
            found.append(self._rules[codec, size])
        number, mirrored, steps, width = np.array(found).T
        most = np.repeat([min(cut.bucket, cut.x.size) // _FEW for cut in cuts], len(self._grids))
        return np.stack([number, mirrored, steps, np.diff(grids.symbol_starts) > most, width], axis=1)


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
        parts = cast("Composed", codec).parts
        self._scale = cast("BucketNorm", parts.scale)
        self._coder, grid = cast("SharedCode", parts.coder), cast("LevelGrid", parts.grid)
        rule, self._levels, self._symbols = grid.rule(state), grid.levels(state), grid.alphabet(state)
        self._rules = np.array([(rule.number, rule.mirrored, rule.steps, 0, width_for(self._symbols))])
        self._lanes, self._sums = np.zeros((1, LANED * LANES)), np.zeros((1, SUMS))
        self._tallies = np.zeros(2 * self._levels.size, np.int64)
        self._head, self._size = 0, 0

    def add(self, values: NDArray[np.float32], start: int, weights: NDArray[np.float64] | None) -> None:
        """The next part, from place ``start`` on, as for ``encode_part``; see :class:`RunningComparison` on weights."""
        state = State(values.size, self._state.arrays)
        x = checked_values(state, values)
        v = self._scale.cut(x, state)
        bits, counts = np.empty((2, v.tail.size + v.scales.size * self._symbols), np.uint32)
        ends = np.empty(1, np.int64)
        _drawing.draw_levels(
            x if self._scale.clip is None else v.all,
            x,
            _UNWEIGHTED if weights is None else weights,
            v.bucket,
            v.scales,
            v.x.size,
            np.uint64(self._key[0]),
            np.uint64(self._key[1]),
            start,
            self._rules,
            self._levels,
            np.array([0, self._levels.size]),
            np.array([self._total.ctypes.data if self._total.size else 0], np.uint64),
            self._lanes,
            self._sums,
            self._tallies,
            bits,
            counts,
            np.zeros(1, np.int64),
            ends,
        )
        self._compared.add_counted(x, bits[: ends[0]].view(np.float32), counts[: ends[0]], weights)
        if not (start and "scale" in state.arrays):
            self._head += len(self._scale.pack(v.scales)) + 4 * v.tail.size
        self._size += x.size

    def finish(self) -> tuple[int, CodedBits]:
        """Bytes of the payload's body, and its bits under each coder; the sums go to the comparison."""
        assert self._size, "a tensor in parts has parts"
        sums, lanes = self._sums[0], self._lanes[0].reshape(LANED, LANES)
        # One by one, as in the kernel.
        sums[:LANED] += np.add.accumulate(lanes, axis=1)[:, -1]
        self._compared.settle(sums)
        tallies = self._tallies[: self._symbols]
        whole = EncodedPart(head=8 * self._head, coded=self._coder.bits(self._state, tallies), tallies=tallies)
        return self._codec.measured(whole, self._size)
