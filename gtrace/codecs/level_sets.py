"""Many codecs with fixed levels over one sketch: fitted and judged together, in columns."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple, TypeGuard

import numpy as np

from gtrace.buckets import as_levels
from gtrace.codecs.coders import SHARED_HEAD
from gtrace.codecs.engine import LevelCodec, LevelMethod
from gtrace.coding import MAX_LENGTH, width_for
from gtrace.errors import UsageError
from gtrace.kernels import symbols as _symbols
from gtrace.sketch import ROUNDING, MomentSketch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from gtrace.codecs.base import Codec

#: What must be the engine's own for a codec to be one of many.
_ENGINE = (
    *("init", "view", "fit", "fit_levels", "shared", "expect", "model_error", "allocates", "expects", "stateful"),
    *("_symbols", "_tell"),
)


@lru_cache
def _is_engine(kind: type[Codec]) -> bool:
    engine = LevelMethod if issubclass(kind, LevelMethod) else LevelCodec
    return issubclass(kind, LevelCodec) and all(getattr(kind, name) is getattr(engine, name) for name in _ENGINE)


def has_fixed_levels(item: Codec) -> TypeGuard[LevelCodec]:
    """Whether a codec can be one of :class:`LevelSets`: its levels never change, and its coder knows no integers."""
    if not (_is_engine(type(item)) and isinstance(item, LevelCodec)) or item.adaptive:
        return False
    return item.code.coder in ("huffman", "fixed")


class Judged(NamedTuple):
    """What a sketch says about every level set.

    Attributes:
        sketch: itself.
        numbers: float64[sets, kernels.symbols.NUMBERS].
        probabilities: float64, of the signed symbols of all sets, end to end.
        lengths: uint8, of the codes made for them.
    """

    sketch: MomentSketch
    numbers: NDArray[np.float64]
    probabilities: NDArray[np.float64]
    lengths: NDArray[np.uint8]


class Codes(NamedTuple):
    """What the codecs adopted when they were fitted.

    Attributes:
        adopted: bool[sets], which of them send a Huffman code and use it.
        lengths: uint8, of all codes end to end, also those that were not adopted.
        sent: int64[sets], bytes that a receiver has to be told.
    """

    adopted: NDArray[np.bool_]
    lengths: NDArray[np.uint8]
    sent: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Expectations:
    """The columns of :class:`~gtrace.types.Expectation` for many codecs, float64[sets] where they differ."""

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

    Every number is the one that the codec's own ``fit``, ``shared`` and ``expect`` would give.

    Raises:
        UsageError: codecs that want different sketches, or levels that are no magnitudes.
    """

    def __init__(self, codecs: Sequence[LevelCodec]) -> None:
        self.codecs = tuple(codecs)
        self.needs = self.codecs[0].needs
        if any(item.needs != self.needs for item in self.codecs):
            raise UsageError("codecs that are judged together must want the same sketch")
        grids = [as_levels(item.levels(item.init(0)), zero=item.has_zero) for item in self.codecs]
        self.has_zero = np.array([item.has_zero for item in self.codecs])
        #: int64[sets], magnitudes of each
        self.sizes = np.array([grid.size for grid in grids])
        symbols = 2 * self.sizes - self.has_zero
        self._levels = np.concatenate(grids)
        self._starts = np.concatenate([[0], np.cumsum(self.sizes)])
        self._symbol_starts = np.concatenate([[0], np.cumsum(symbols)])
        self._fixed = np.array([float(width_for(count)) for count in symbols.tolist()])
        self._huffman = np.array([item.code.coder == "huffman" for item in self.codecs])

    def judge(self, sketch: MomentSketch) -> Judged:
        """All level sets on one sketch.

        Raises:
            UsageError: the sketch was built otherwise than the codecs want it.
        """
        self._check(sketch)
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
        """float64[sets], as :meth:`~gtrace.codecs.ExpectingCodec.weighted_error` of each.

        Raises:
            UsageError: the sketch was built otherwise than the codecs want it.
        """
        self._check(weighted)
        errors = np.empty(len(self.codecs))
        _symbols.weigh_sets(weighted.bins(), self._levels, self._starts, ~self.has_zero, errors)
        return errors + weighted.clip_error

    def _check(self, sketch: MomentSketch) -> None:
        if sketch.spec[:4] != self.needs[:4]:
            raise UsageError(f"{self.codecs[0]}: wants a sketch of {self.needs}, not of {sketch.spec}")

    def fit(self, judged: Judged, size: int) -> Codes:
        """Adopt the codes that save more than they cost to send, for tensors of ``size`` values."""
        numbers = judged.numbers[:, _symbols.LOWEST + 1 :]
        gain = (self._fixed - numbers[:, _symbols.CODED]) * size
        adopted = self._huffman & (gain > numbers[:, _symbols.SENT]) & (judged.sketch.quantized > 0)
        sent = np.where(adopted, SHARED_HEAD + numbers[:, _symbols.SENT] / 8, 0).astype(np.int64)
        return Codes(adopted, judged.lengths, sent)

    def differ(self, a: Codes, b: Codes) -> NDArray[np.bool_]:
        """bool[sets], whose receivers hold other things with ``a`` than with ``b``."""
        lengths: NDArray[np.bool_] = np.logical_or.reduceat(a.lengths != b.lengths, self._symbol_starts[:-1])
        return np.not_equal(a.adopted, b.adopted) | (a.adopted & lengths)

    def expect(self, judged: Judged, codes: Codes) -> Expectations:
        """What one encoding of the sketched tensor with these codes does on average."""
        sketch, numbers = judged.sketch, judged.numbers
        size = max(1, sketch.size)
        share = sketch.quantized / size
        norms = 32.0 * (sketch.buckets + sketch.exact) / size
        coded = np.empty(len(self.codecs))
        _symbols.mean_lengths(codes.lengths, judged.probabilities, self._symbol_starts, coded)
        zeros = np.where(self.has_zero, numbers[:, _symbols.LOWEST] * sketch.quantized, float(sketch.dead))
        symbols = numbers[:, _symbols.LOWEST + 1 :]
        own = symbols[:, _symbols.CODED] + symbols[:, _symbols.SENT] / max(1, sketch.quantized)
        # As in MomentSketch.expect.
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
