"""Pruning to a wanted fraction of zeros: stochastic and unbiased, or of the smallest magnitudes."""

from __future__ import annotations

import math
import struct
from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from gtrace.buckets import MANTISSA
from gtrace.codecs.base import CodedBits, EncodedPart, check_summary, checked_values, parameter
from gtrace.codecs.engine import Composed
from gtrace.codecs.spec import register
from gtrace.coding.fixed import finite
from gtrace.coding.huffman import CodedBlock, Floats, decode_block, decode_floats, expected_floats, tally
from gtrace.coding.sparse import PrefixCode
from gtrace.errors import PayloadError, UsageError
from gtrace.fitting.sparsity import RULES, EmpiricalMagnitudes, Rule, allocate_sparsity, threshold
from gtrace.kernels import codes as _codes
from gtrace.kernels import elementwise as _elementwise
from gtrace.types import Expectation, State, SummarySpec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import ArrayLike, NDArray

    from gtrace.codecs.parts import Values
    from gtrace.sketch import MomentSketch

_ALPHA_BYTES = 4
_LENGTH = struct.Struct("<I")
#: flags: symbols and values are separate instead of in the prefix code; the symbols' block is coded; the values' is
_APART, _CODED, _FLOATS = 1, 2, 4
#: symbols of :func:`gtrace.kernels.codes.part_pruned`, one of which are exact values
_SYMBOLS = 4
_EXACT = 1
#: At or below it only zeros can be pruned: the threshold of a codec that was not fitted, or that prunes nothing.
_NOTHING = np.finfo(np.float32).smallest_subnormal
_DROPPED = np.uint32((1 << (23 - MANTISSA)) - 1)
_LARGEST = np.float32((2.0 - 2.0**-MANTISSA) * 2.0**127)
#: a share above this would need a threshold beyond every float
_MOST = 1.0 - 1e-9
_SENT = "The threshold alpha in float32, then the prefix code"
_SHORTER = "If that is shorter, symbols and exact values separately, each with a Huffman code (coder=huffman)."


@dataclass(frozen=True)
class _PruningCodec(Composed):
    """A threshold, and a prefix code of what is left.

    The state holds ``alpha`` (float32, after the first fit) and ``target`` (float64, if an engine set this tensor's
    share of a heterogeneous allocation). Thresholds are rounded to 10 bits of mantissa, edges of the sketch's bins:
    this makes every expectation exact, for the tensor that the threshold was fitted to and any other.
    """

    # The threshold is fitted to all plain magnitudes; then values are pruned one by one.
    whole_tensor = True
    needs = SummarySpec("none", None)
    part_multiple = 1

    sparsity: float = parameter(0.8, "wanted fraction of zeros, below 1; existing zeros count", minimum=0.0)
    coder: Literal["huffman", "prefix"] = parameter(
        "huffman",
        "codes sent with the values, for symbols and exponents, if they are shorter; or the paper's code",
        choices=("huffman", "prefix"),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sparsity >= 1.0:
            raise UsageError(f"codec {self.name}: sparsity={self.sparsity:g} is out of range; it must be below 1")

    @abstractmethod
    def fit_alpha(self, sparsity: float, summary: MomentSketch) -> float:
        """The threshold of a sparsity in [0, 1), float64, before rounding to nearest; 0 prunes nothing."""

    @abstractmethod
    def prune(self, x: Values, alpha: np.float32, key: tuple[int, int], start: int) -> Values:
        """float32[n] with zeros, plus or minus alpha and exact values."""

    def fit(self, state: State, summary: MomentSketch, step: int) -> State:
        """A new threshold; a summary of zeros keeps the old one."""
        if not summary.sums.size:
            return state
        target = state.arrays.get("target")
        share = self.sparsity if target is None else min(float(target), _MOST)
        return state.with_arrays(alpha=np.asarray(_on_edge(self.fit_alpha(share, summary))))

    def write(self, state: State, x: Values, key: tuple[int, int]) -> tuple[bytes, int]:
        """Alpha (float32), then the prefix code of the pruned values, or symbols and exact values separately."""
        alpha = _alpha(state)
        pruned, head, prefix = self.prune(x, alpha, key, 0), alpha.astype("<f4").tobytes(), PrefixCode(float(alpha))
        symbols, exact, tallies = _tallies(alpha, pruned)
        block, _, apart = _apart(tallies)
        if self.coder == "prefix" or apart >= -(-prefix.bits(pruned) // 8):
            return head + prefix.encode(pruned), 0
        coded = block.encode(symbols)
        flags = _APART | (0 if block.lengths is None else _CODED) | (_FLOATS if exact.coded else 0)
        return head + _LENGTH.pack(len(coded)) + coded + exact.encode(), flags

    def measured(self, whole: EncodedPart, size: int) -> tuple[int, CodedBits]:
        """One code for all parts, or the prefix code if it is shorter; that is their fixed width."""
        body = -(-whole.coded // 8)
        if self.coder != "prefix":
            body = min(body, _apart(whole.tallies)[2])
        return whole.head // 8 + body, _rates(whole.tallies, whole.coded, size)

    def encode_part(self, state: State, values: ArrayLike, key: tuple[int, int], start: int) -> EncodedPart:
        """Prune the part with the tensor's threshold, which counts with the first part."""
        alpha = _alpha(state)
        pruned = self.prune(checked_values(state, values), alpha, key, start)
        coded, tallies = PrefixCode(float(alpha)).bits(pruned), _tallies(alpha, pruned)[2]
        return EncodedPart(pruned, 0 if start else 8 * _ALPHA_BYTES, coded, tallies)

    def read(self, shared: bytes, body: memoryview, flags: int, size: int) -> Values:
        if (flags and not flags & _APART) or flags > 7 or len(body) < _ALPHA_BYTES:
            raise PayloadError("payload has unknown flags, or no threshold")
        alpha = float(np.frombuffer(body[:_ALPHA_BYTES], "<f4")[0])
        if not 0.0 < alpha < math.inf:
            raise PayloadError(f"payload holds the threshold {alpha}; it must be positive and finite")
        if flags:
            return _joined(np.float32(alpha), body[_ALPHA_BYTES:], size, flags)
        return finite(PrefixCode(alpha).decode(body[_ALPHA_BYTES:], size))

    def _expectation(
        self, sketch: MomentSketch, alpha: float, error: float, bias: float, zeros: float, at_alpha: float
    ) -> Expectation:
        head = 8.0 * _ALPHA_BYTES / max(1, sketch.size)
        exact = max(0.0, 1.0 - zeros - at_alpha) * sketch.size
        kept = sketch.lower >= alpha
        counts = sketch.sums[kept, 0].copy()
        if counts.size:
            # Values on the threshold itself are in the first bin.
            counts[0] = max(0.0, counts[0] - (counts.sum() - exact))
        symbols = np.array([zeros, exact / max(1, sketch.size), at_alpha / 2, at_alpha / 2]) * sketch.size
        tallies = np.concatenate([symbols, expected_floats(sketch.lower[kept], counts)])
        prefix = PrefixCode.expected_bits(zeros, at_alpha) * sketch.size
        bits = _rates(tallies, prefix, sketch.size)
        return Expectation(
            squared_error=error,
            bias=bias,
            sparsity=zeros,
            **bits.columns,
            bits_payload=bits.fixed if self.coder == "prefix" else bits.huffman,
            bits_norms=head,
        )

    def _magnitudes(self, sketch: MomentSketch) -> EmpiricalMagnitudes:
        check_summary(self, sketch)
        return EmpiricalMagnitudes(sketch)


@register
@dataclass(frozen=True)
class Prune(_PruningCodec):
    """Stochastic pruning: unbiased, at a wanted sparsity."""

    name = "prune"
    summary = "small values become a threshold or zero at random, for a wanted sparsity"
    formula = """Q(v) = v where |v| > alpha, else alpha sign(v) with probability |v| / alpha, else 0; mean (1 - |v| /
    alpha)^+ = sparsity"""
    paper = "Chmiel et al., Neural Gradients are Near-Lognormal, 2021, Eq. 5-8"
    corrections = (
        "the paper solves for alpha under a lognormal law (threshold=lognormal); on the data itself is the default",
        "existing zeros count as pruned: laws are fitted to the other values, for the rest of the sparsity",
        "Eq. 8 loses all digits for large sigma; it is evaluated by scaled complementary error functions",
        "allocation=heterogeneous maximizes the mean cosine of the data, which for finite tensors the law overstates",
    )
    about = """For neural gradients: small values become a threshold or zero at random, so the tensor is sparse and the
    mean is right. The threshold is solved for the wanted sparsity, on each tensor itself."""
    sends = f"""{_SENT}: 0 for zero, 10 and a sign for alpha, 11 and a float32 for what is larger. {_SHORTER}"""
    behavior = """Unbiased at any sparsity; variance rises steeply beyond 0.9. Large values cost some 26 bits each, 34
    in the prefix code."""
    related = ("topk-prune", "randomk")

    threshold: Rule = parameter(
        "exact",
        "how alpha is found: on the data, under a lognormal or normal law, or as the quantile of |v|",
        choices=RULES,
    )
    allocation: Literal["homogeneous", "heterogeneous"] = parameter(
        "homogeneous",
        "the same sparsity for every tensor, or with the same mean the sparsities of the largest mean cosine",
        choices=("homogeneous", "heterogeneous"),
    )

    @property
    def fits_itself(self) -> bool:
        """An exact threshold belongs to the tensor; rules by a law follow the schedule, as in the paper."""
        return self.threshold == "exact"

    @property
    def allocates(self) -> bool:
        return self.allocation == "heterogeneous"

    def allocate(self, sketches: Sequence[MomentSketch]) -> Sequence[float]:
        """The sparsity of each tensor; see :func:`~gtrace.fitting.allocate_sparsity`."""
        return [float(s) for s in allocate_sparsity(sketches, self.sparsity)]

    def fit_alpha(self, sparsity: float, summary: MomentSketch) -> float:
        """The threshold by the rule. A quantile goes to the edge above, so that the value at it is pruned too."""
        alpha = threshold(self.threshold, sparsity, summary)
        return alpha * (1.0 + 2.0**-MANTISSA) if self.threshold == "topk" else alpha

    def prune(self, x: Values, alpha: np.float32, key: tuple[int, int], start: int) -> Values:
        """At random, by the key and the element's index."""
        out = np.empty_like(x)
        _elementwise.prune(x, alpha, np.uint64(key[0]), np.uint64(key[1]), start, out)
        return out

    def expect(self, state: State, sketch: MomentSketch) -> Expectation:
        found, alpha = self._magnitudes(sketch), float(_alpha(state))
        zeros, at_alpha = found.sparsity(alpha), found.at_threshold(alpha)
        return self._expectation(sketch, alpha, found.squared_error(alpha), 0.0, zeros, at_alpha)

    def weighted_error(self, state: State, sketch: MomentSketch, weighted: MomentSketch) -> float:
        """The variance of values that become the threshold or zero."""
        return self._magnitudes(weighted).squared_error(float(_alpha(state)))


@register
@dataclass(frozen=True)
class TopKPrune(_PruningCodec):
    """Deterministic pruning of the smallest magnitudes, by a threshold."""

    name = "topk-prune"
    summary = "the smallest magnitudes become zero, for a wanted sparsity"
    formula = "Q(v) = v where |v| >= alpha, else 0; alpha = the quantile of |v| at the sparsity"
    paper = "Sun et al., meProp, 2017; Raihan and Aamodt, Sparse Weight Activation Training, 2020 (see Chmiel et al.)"
    corrections = ("the threshold is fitted like prune's, to 0.1%, and cuts at most as many values as asked for there",)
    about = "The deterministic counterpart of prune: everything below a threshold is dropped."
    sends = f"{_SENT} of prune: 0 for zero, 11 and a float32 for a value. {_SHORTER}"
    behavior = """Less error than prune at the same sparsity, all of it bias, which averaging over workers does not
    shrink."""
    related = ("prune", "topk")
    unbiased = False
    deterministic = True
    fits_itself = True

    def fit_alpha(self, sparsity: float, summary: MomentSketch) -> float:
        """The lower edge of the first bin that would prune too much."""
        found = self._magnitudes(summary)
        k = int(np.searchsorted(found.mass[1:], sparsity * found.size - found.zeros + 1e-9, side="right"))
        return float(summary.lower[min(k, found.points.size - 1)])

    def prune(self, x: Values, alpha: np.float32, key: tuple[int, int], start: int) -> Values:
        out = np.empty_like(x)
        _elementwise.keep_large(x, alpha, out)
        return out

    def expect(self, state: State, sketch: MomentSketch) -> Expectation:
        """Exact sums over the bins below the threshold; all of the error is bias."""
        found, alpha = self._magnitudes(sketch), float(_alpha(state))
        k = int(np.searchsorted(sketch.lower, alpha))
        error = self.weighted_error(state, sketch, sketch)
        zeros = (found.zeros + float(found.mass[k])) / found.size if found.size else 1.0
        on_edge = k < sketch.lower.size and sketch.lower[k] == alpha and sketch.sums[k, 1] == 0.0
        at_alpha = float(found.mass[k + 1] - found.mass[k]) / found.size if on_edge else 0.0
        return self._expectation(sketch, alpha, error, math.sqrt(error), zeros, at_alpha)

    def weighted_error(self, state: State, sketch: MomentSketch, weighted: MomentSketch) -> float:
        """The energy of what becomes zero."""
        k = int(np.searchsorted(weighted.lower, float(_alpha(state))))
        return float(self._magnitudes(weighted).second[k])


def _tallies(alpha: np.float32, pruned: Values) -> tuple[NDArray[np.uint16], Floats, NDArray[np.int64]]:
    """Symbols (uint16[n]), exact values, and the counts of each symbol and of each sign and exponent."""
    symbols, room = np.empty(pruned.size, np.uint16), np.empty(pruned.size, np.uint32)
    count = _codes.part_pruned(pruned.view(np.uint32), alpha.view(np.uint32), symbols, room)
    exact = Floats(room[:count].view(np.float32))
    return symbols, exact, np.concatenate([tally(symbols, _SYMBOLS), exact.tallies])


def _apart(tallies: NDArray[np.int64] | NDArray[np.float64]) -> tuple[CodedBlock, CodedBlock, int]:
    """The blocks of symbols and of exact values' exponents, and the bytes of both with those values."""
    symbols, floats = CodedBlock.signed(tallies[:_SYMBOLS]), CodedBlock.signed(tallies[_SYMBOLS:])
    return symbols, floats, _LENGTH.size + symbols.size + Floats.size(int(tallies[_EXACT]), floats)


def _rates(tallies: NDArray[np.int64] | NDArray[np.float64], prefix: float, size: float) -> CodedBits:
    """Bits per value; the prefix code takes ``prefix`` bits in all."""
    symbols, floats, apart = _apart(tallies)
    raw = 23.0 * float(tallies[_EXACT])
    bits = (prefix, symbols.entropy + floats.entropy + raw, min(prefix, 8 * apart))
    return CodedBits(*((8 * _ALPHA_BYTES + each) / max(1, size) for each in bits))


def _joined(alpha: np.float32, body: memoryview, size: int, flags: int) -> Values:
    """The values from symbols and exact values that were sent separately.

    Raises:
        PayloadError: bytes that encoders never write.
    """
    if len(body) < _LENGTH.size:
        raise PayloadError("payload ends before its symbols")
    end = _LENGTH.size + int(_LENGTH.unpack_from(body)[0])
    symbols = decode_block(body[_LENGTH.size : end], size, _SYMBOLS, coded=bool(flags & _CODED))
    at = np.flatnonzero(symbols == _EXACT)
    exact = decode_floats(body[end:], at.size, coded=bool(flags & _FLOATS))
    if ((exact == 0) | (np.abs(exact) == alpha)).any():
        raise PayloadError("payload holds a zero or the threshold as an exact value")
    out = np.array([0, 0, alpha, -alpha], np.float32)[symbols]
    out[at] = exact
    return out


def _on_edge(alpha: float) -> np.float32:
    """The nearest edge of the sketch's bins, positive and finite in float32."""
    x = np.float32(min(max(alpha, float(_NOTHING)), float(_LARGEST)))
    pattern = x.reshape(1).view(np.uint32)
    if pattern[0] >> np.uint32(23):
        half = (_DROPPED + np.uint32(1)) >> np.uint32(1)
        pattern = (pattern + half) & ~_DROPPED
        return min(pattern.view(np.float32)[0], _LARGEST)
    # Denormals have fewer digits; those with at most MANTISSA + 1 of them are all edges.
    step = 1 << max(0, int(pattern[0]).bit_length() - (MANTISSA + 1))
    return np.float32(np.array([round(int(pattern[0]) / step) * step], np.uint32).view(np.float32)[0])


def _alpha(state: State) -> np.float32:
    return np.float32(state.arrays.get("alpha", _NOTHING))
