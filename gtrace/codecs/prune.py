"""Pruning to a wanted fraction of zeros: stochastic and unbiased, or of the smallest magnitudes."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np

from gtrace.buckets import MANTISSA
from gtrace.codecs.base import ExpectingCodec, checked_values, parameter
from gtrace.codecs.parts import Part, PartwiseCodec
from gtrace.codecs.registry import register
from gtrace.coding import open_envelope, seal
from gtrace.coding.prefix import PrefixCode
from gtrace.errors import PayloadError, UsageError
from gtrace.fitting.allocation import allocate_sparsity
from gtrace.fitting.empirical import EmpiricalMagnitudes
from gtrace.fitting.sparsity import RULES, Rule, threshold
from gtrace.kernels import pruning as _pruning
from gtrace.types import Expectation, SummarySpec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import ArrayLike, NDArray

    from gtrace.sketch import MomentSketch
    from gtrace.types import State

_ALPHA_BYTES = 4
#: Below or at it, nothing but a zero can be pruned: the threshold of a codec that was not fitted, or prunes nothing.
_NOTHING = np.finfo(np.float32).smallest_subnormal
_DROPPED = np.uint32((1 << (23 - MANTISSA)) - 1)
_LARGEST = np.float32((2.0 - 2.0**-MANTISSA) * 2.0**127)
#: a share above it asks for a threshold beyond every float
_MOST = 1.0 - 1e-9


@dataclass(frozen=True)
class _PruningCodec(PartwiseCodec, ExpectingCodec):
    """A threshold, and a prefix code of what is left.

    The state holds ``alpha`` (float32, after the first fit) and ``target`` (float64, where an engine set this tensor's
    share of a heterogeneous allocation). Thresholds are rounded to 10 bits of mantissa, edges of the sketch's bins:
    then all that is expected of an encoding is exact, for the tensor that the threshold was fitted to and any other.
    """

    sparsity: float = parameter(0.8, "wanted fraction of zeros, below 1; those that are there count", minimum=0.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sparsity >= 1.0:
            raise UsageError(f"codec {self.name}: sparsity={self.sparsity:g} is out of range; it must be below 1")

    @property
    def whole_tensor(self) -> bool:
        """The threshold is fitted to all magnitudes."""
        return True

    @property
    def needs(self) -> SummarySpec:
        """The plain magnitudes of the whole tensor."""
        return SummarySpec("none", None)

    @abstractmethod
    def fit_alpha(self, sparsity: float, summary: MomentSketch) -> float:
        """The threshold of a sparsity in [0, 1), float64; 0 prunes nothing. It is rounded to nearest afterwards."""

    @abstractmethod
    def prune(self, x: NDArray[np.float32], alpha: np.float32, key: tuple[int, int], start: int) -> NDArray[np.float32]:
        """float32[n] with zeros, plus or minus alpha and exact values."""

    def fit(self, state: State, summary: MomentSketch, step: int) -> State:
        """A new threshold; a summary of nothing but zeros leaves the old one."""
        del step
        if not summary.sums.size:
            return state
        target = state.arrays.get("target")
        share = self.sparsity if target is None else min(float(target), _MOST)
        return state.with_arrays(alpha=np.asarray(_on_edge(self.fit_alpha(share, summary))))

    def encode(self, state: State, values: ArrayLike, key: tuple[int, int]) -> bytes:
        """Alpha (float32), then the prefix code of the pruned values."""
        alpha, pruned = self._pruned(state, values, key, 0)
        return self._sealed(alpha, pruned)

    def encode_part(self, state: State, values: ArrayLike, key: tuple[int, int], start: int) -> Part:
        """The part with the tensor's threshold, which counts with the first part."""
        alpha, pruned = self._pruned(state, values, key, start)
        coded = PrefixCode(float(alpha)).bits(pruned)
        return Part(self._sealed(alpha, pruned), 0 if start else 8 * _ALPHA_BYTES, coded)

    def _pruned(
        self, state: State, values: ArrayLike, key: tuple[int, int], start: int
    ) -> tuple[np.float32, NDArray[np.float32]]:
        alpha = _alpha(state)
        return alpha, self.prune(checked_values(state, values), alpha, key, start)

    def _sealed(self, alpha: np.float32, pruned: NDArray[np.float32]) -> bytes:
        body = alpha.astype("<f4").tobytes() + PrefixCode(float(alpha)).encode(pruned)
        return seal(body, codec=self.name, size=pruned.size, shared=b"")

    def decode(self, shared: bytes, payload: bytes, size: int) -> NDArray[np.float32]:
        """Undo :meth:`encode`."""
        body, flags = open_envelope(payload, codec=self.name, size=size, shared=shared)
        if flags or len(body) < _ALPHA_BYTES:
            raise PayloadError("payload has unknown flags, or no threshold")
        alpha = float(np.frombuffer(body[:_ALPHA_BYTES], "<f4")[0])
        if not 0.0 < alpha < math.inf:
            raise PayloadError(f"payload holds the threshold {alpha}; it must be positive and finite")
        out = PrefixCode(alpha).decode(body[_ALPHA_BYTES:], size)
        if not np.isfinite(out).all():
            raise PayloadError("payload holds values that are not finite")
        return out

    def _expectation(
        self, sketch: MomentSketch, error: float, bias: float, zeros: float, at_alpha: float
    ) -> Expectation:
        head = 8.0 * _ALPHA_BYTES / max(1, sketch.size)
        coded = PrefixCode.expected_bits(zeros, at_alpha) if sketch.size else 0.0
        return Expectation(squared_error=error, bias=bias, sparsity=zeros, bits_payload=coded + head, bits_norms=head)

    def _magnitudes(self, sketch: MomentSketch) -> EmpiricalMagnitudes:
        if sketch.spec[:5] != self.needs[:5]:
            raise UsageError(f"{self}: wants a sketch of {self.needs}, not of {sketch.spec}")
        return EmpiricalMagnitudes(sketch)


@register
@dataclass(frozen=True)
class Prune(_PruningCodec):
    """Stochastic pruning: unbiased, at a wanted sparsity."""

    name: ClassVar[str] = "prune"
    summary: ClassVar[str] = "small values become a threshold or zero at random, for a wanted sparsity"
    formula: ClassVar[str] = (
        "Q(v) = v where |v| > alpha, else alpha sign(v) with probability |v| / alpha, else 0; "
        "mean (1 - |v| / alpha)^+ = sparsity"
    )
    paper: ClassVar[str] = "Chmiel et al., Neural Gradients are Near-Lognormal, 2021, Eq. 5-8"
    corrections: ClassVar[tuple[str, ...]] = (
        "the paper solves for alpha under a lognormal law (threshold=lognormal); on the data itself is the default",
        "zeros that are there already count as pruned: laws are fitted to the others, for the rest of the sparsity",
        "Eq. 8 loses all digits for large sigma; it is evaluated by scaled complementary error functions",
        "allocation=heterogeneous maximizes the mean cosine of the data, which for finite tensors the law overstates",
    )

    threshold: Rule = parameter(
        "exact",
        "how alpha is found: on the data, under a lognormal or normal law, or as the quantile of |v|",
        choices=RULES,
    )
    allocation: Literal["homogeneous", "heterogeneous"] = parameter(
        "homogeneous",
        "the same sparsity for every tensor, or at the same mean those of the largest mean cosine",
        choices=("homogeneous", "heterogeneous"),
    )

    @property
    def allocates(self) -> bool:
        """Whether tensors share one sparsity out among them."""
        return self.allocation == "heterogeneous"

    def allocate(self, sketches: Sequence[MomentSketch]) -> Sequence[float]:
        """The sparsity of each tensor; see :func:`~gtrace.fitting.allocate_sparsity`."""
        return [float(s) for s in allocate_sparsity(sketches, self.sparsity)]

    def fit_alpha(self, sparsity: float, summary: MomentSketch) -> float:
        """By the rule. The quantile goes to the edge above, so that the value at it is pruned as well."""
        alpha = threshold(self.threshold, sparsity, summary)
        return alpha * (1.0 + 2.0**-MANTISSA) if self.threshold == "topk" else alpha

    def prune(self, x: NDArray[np.float32], alpha: np.float32, key: tuple[int, int], start: int) -> NDArray[np.float32]:
        """At random, by the key and the element's index."""
        out = np.empty_like(x)
        _pruning.prune(x, alpha, np.uint64(key[0]), np.uint64(key[1]), start, out)
        return out

    def expect(self, state: State, sketch: MomentSketch) -> Expectation:
        """Exact sums over the bins below the threshold."""
        found, alpha = self._magnitudes(sketch), float(_alpha(state))
        zeros, at_alpha = found.sparsity(alpha), found.at_threshold(alpha)
        return self._expectation(sketch, found.squared_error(alpha), 0.0, zeros, at_alpha)


@register
@dataclass(frozen=True)
class TopKPrune(_PruningCodec):
    """Deterministic pruning of the smallest magnitudes, by a threshold."""

    name: ClassVar[str] = "topk-prune"
    summary: ClassVar[str] = "the smallest magnitudes become zero, for a wanted sparsity"
    formula: ClassVar[str] = "Q(v) = v where |v| >= alpha, else 0; alpha = the quantile of |v| at the sparsity"
    paper: ClassVar[str] = (
        "Sun et al., meProp, 2017; Raihan and Aamodt, Sparse Weight Activation Training, 2020 (as in Chmiel et al.)"
    )
    corrections: ClassVar[tuple[str, ...]] = (
        "the threshold is fitted like that of prune, to 0.1%, and cuts at most as many values as asked for there",
    )
    unbiased: ClassVar[bool] = False
    deterministic: ClassVar[bool] = True

    def fit_alpha(self, sparsity: float, summary: MomentSketch) -> float:
        """The lower edge of the first bin that would be too much."""
        found = self._magnitudes(summary)
        k = int(np.searchsorted(found.mass[1:], sparsity * found.size - found.zeros + 1e-9, side="right"))
        return float(summary.lower[min(k, found.points.size - 1)])

    def prune(self, x: NDArray[np.float32], alpha: np.float32, key: tuple[int, int], start: int) -> NDArray[np.float32]:
        """By the threshold alone."""
        del key, start
        out = np.empty_like(x)
        _pruning.cut(x, alpha, out)
        return out

    def expect(self, state: State, sketch: MomentSketch) -> Expectation:
        """Exact sums over the bins below the threshold; all of the error is bias."""
        found, alpha = self._magnitudes(sketch), float(_alpha(state))
        k = int(np.searchsorted(sketch.lower, alpha))
        error = float(found.second[k])
        zeros = (found.zeros + float(found.mass[k])) / found.size if found.size else 1.0
        on_edge = k < sketch.lower.size and sketch.lower[k] == alpha and sketch.sums[k, 1] == 0.0
        at_alpha = float(found.mass[k + 1] - found.mass[k]) / found.size if on_edge else 0.0
        return self._expectation(sketch, error, math.sqrt(error), zeros, at_alpha)


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
    found = state.arrays.get("alpha")
    return _NOTHING if found is None else np.float32(found)
