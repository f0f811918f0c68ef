"""Many codecs with fixed levels on one sketch: fitted and judged together, in columns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np

from gtrace.buckets import as_levels
from gtrace.codecs.base import check_summary
from gtrace.codecs.coders import SHARED_HEAD
from gtrace.codecs.engine import Composed, level_grid
from gtrace.coding import MAX_LENGTH, width_for
from gtrace.errors import UsageError
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


def has_fixed_levels(item: Codec) -> bool:
    """Whether a codec can be in :class:`LevelSets`: its levels are fixed, and its coder is not an integer code."""
    grid, kind = level_grid(item), type(item)
    if grid is None or grid.adaptive or any(getattr(kind, name) is not getattr(Composed, name) for name in _ENGINE):
        return False
    return item.parameters["coder"] in ("huffman", "fixed")


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


class Codes(NamedTuple):
    """The codes that the codecs took when they were fitted.

    Attributes:
        adopted: bool[sets], whether each sends and uses a Huffman code.
        lengths: uint8, of all codes concatenated, including those not adopted.
        sent: int64[sets], bytes that a receiver needs in advance.
    """

    adopted: NDArray[np.bool_]
    lengths: NDArray[np.uint8]
    sent: NDArray[np.int64]


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
    """Codecs with fixed levels that want the same sketch; see :func:`has_fixed_levels`.

    Every number equals what the codec's own ``fit``, ``shared`` and ``expect`` give.

    Raises:
        UsageError: codecs that need different sketches, or levels that are not magnitudes.
    """

    def __init__(self, codecs: Sequence[Codec]) -> None:
        self.codecs = tuple(codecs)
        self.needs = cast("SummarySpec", self.codecs[0].needs)
        if any(item.needs != self.needs for item in self.codecs):
            raise UsageError("codecs that are judged together must need the same sketch")
        found = [cast("LevelGrid", level_grid(item)) for item in self.codecs]
        grids = [as_levels(grid.levels(State(0)), zero=grid.zero) for grid in found]
        self.has_zero = np.array([grid.zero for grid in found])
        #: int64[sets], number of magnitudes of each
        self.sizes = np.array([grid.size for grid in grids])
        symbols = 2 * self.sizes - self.has_zero
        self._levels = np.concatenate(grids)
        self._starts = np.concatenate([[0], np.cumsum(self.sizes)])
        self._symbol_starts = np.concatenate([[0], np.cumsum(symbols)])
        self._fixed = np.array([float(width_for(count)) for count in symbols.tolist()])
        self._huffman = np.array([item.parameters["coder"] == "huffman" for item in self.codecs])

    def judge(self, sketch: MomentSketch) -> Judged:
        """All level sets on one sketch.

        Raises:
            UsageError: the sketch was not built as the codecs need it.
        """
        check_summary(self.codecs[0], sketch)
        judged = Judged(
            sketch,
            np.empty((len(self.codecs), _symbols.NUMBERS)),
            np.empty(int(self._symbol_starts[-1])),
            np.empty(int(self._symbol_starts[-1]), np.uint8),
        )
        _symbols.judge_sets(
            sketch.bins(),
            self._levels,
            self._starts,
            ~self.has_zero,
            self._symbol_starts,
            MAX_LENGTH,
            judged.probabilities,
            judged.lengths,
            judged.numbers,
        )
        return judged

    def weighted_error(self, weighted: MomentSketch) -> NDArray[np.float64]:
        """float64[sets], as :meth:`~gtrace.codecs.Codec.weighted_error` of each.

        Raises:
            UsageError: the sketch was not built as the codecs need it.
        """
        check_summary(self.codecs[0], weighted)
        errors = np.empty(len(self.codecs))
        _symbols.weigh_sets(weighted.bins(), self._levels, self._starts, ~self.has_zero, errors)
        return errors + weighted.clip_error

    def fit(self, judged: Judged, size: int) -> Codes:
        """Take the codes that save more than they cost to send, for tensors of ``size`` values."""
        numbers = judged.numbers[:, _symbols.LOWEST + 1 :]
        gain = (self._fixed - numbers[:, _symbols.CODED]) * size
        adopted = self._huffman & (gain > numbers[:, _symbols.SENT]) & (judged.sketch.quantized > 0)
        sent = np.where(adopted, SHARED_HEAD + numbers[:, _symbols.SENT] / 8, 0).astype(np.int64)
        return Codes(adopted, judged.lengths, sent)

    def differ(self, a: Codes, b: Codes) -> NDArray[np.bool_]:
        """bool[sets], whether receivers hold different bytes with ``a`` than with ``b``."""
        lengths: NDArray[np.bool_] = np.logical_or.reduceat(a.lengths != b.lengths, self._symbol_starts[:-1])
        return np.not_equal(a.adopted, b.adopted) | (a.adopted & lengths)

    def expect(self, judged: Judged, codes: Codes) -> Expectations:
        """The average result of one encoding of the sketched tensor with these codes."""
        sketch, numbers = judged.sketch, judged.numbers
        size = max(1, sketch.size)
        share = sketch.quantized / size
        norms = 32.0 * (sketch.buckets + sketch.exact) / size
        coded = np.empty(len(self.codecs))
        _symbols.mean_lengths(codes.lengths, judged.probabilities, self._symbol_starts, coded)
        zeros = np.where(self.has_zero, numbers[:, _symbols.LOWEST] * sketch.quantized, float(sketch.dead))
        symbols = numbers[:, _symbols.LOWEST + 1 :]
        own = symbols[:, _symbols.CODED] + symbols[:, _symbols.SENT] / max(1, sketch.quantized)
        # Same formula as MomentSketch.expect.
        error = numbers[:, _symbols.WEIGHTED] + sketch.clip_error
        return Expectations(
            squared_error=error,
            error_bound=numbers[:, _symbols.BOUND] + ROUNDING * error,
            sparsity=(zeros + sketch.exact_zeros) / size,
            bits_fixed=self._fixed * share + norms,
            bits_entropy=symbols[:, _symbols.ENTROPY] * share + norms,
            bits_huffman=np.minimum(self._fixed, own) * share + norms,
            bits_payload=np.where(codes.adopted, np.minimum(self._fixed, coded), self._fixed) * share + norms,
            bits_norms=norms,
            bias=float(np.sqrt(sketch.clip_error)),
        )
