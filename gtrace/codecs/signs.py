"""Methods of one bit per value: signs times a scale, or two means per bucket."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import numpy as np

from gtrace.codecs.base import CodedBits
from gtrace.codecs.coders import Bit
from gtrace.codecs.engine import Composed, method
from gtrace.codecs.memory import UNITS, MomentumAverage, Residual
from gtrace.codecs.parts import Grid, Nearest, Parts, Rounding
from gtrace.codecs.scales import Magnitude, TwoMeans
from gtrace.errors import PayloadError
from gtrace.kernels import elementwise as _elementwise
from gtrace.types import Expectation, State, SummarySpec

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from gtrace.codecs.parts import Scaled, Values
    from gtrace.sketch import MomentSketch

_SIGNSGD = "Bernstein et al., signSGD: Compressed Optimisation for Non-Convex Problems, 2018"
_SENDS = "The scale in float32 (none with scale=none), then a bit a value, 1 for negative. Zeros only: an empty body."
_COIN = "one bit has no third value for sign(0): a zero is sent as a fair coin of the key, 0 on average"
_ZEROS = "a tensor of zeros only is an empty payload and decodes to zeros"
_VOTE = "workers vote on the signs, and the result has their mean scale; a tie is 0"
_CORRECTIONS = (
    "the paper's sign has no scale (scale=none); the mean magnitude, that of least error, is the default",
    _COIN,
    _ZEROS,
    _VOTE,
)


@dataclass(frozen=True)
class Sign(Grid):
    """Plus or minus the scale, or the two values of a bucket, packed eight to a byte."""

    unbiased = False

    def nearest(self, state: State, v: Scaled, key: tuple[int, int]) -> NDArray[np.uint8]:
        return np.packbits(v.x < 0, bitorder="little")

    def values(self, symbols: NDArray[np.uint8], scales: Values, bucket: int, size: int) -> Values:
        if size and not symbols.size and scales.size:
            raise PayloadError(f"payload holds a scale and no signs of {size} values")
        out = np.zeros(size, np.float32)
        if not symbols.size:
            return out
        if scales.ndim < 2:
            magnitude = scales[0] if scales.size else np.float32(1)
            scales = np.array([[magnitude, -magnitude]], np.float32)
        _elementwise.restore(np.unpackbits(symbols, count=size, bitorder="little"), bucket, scales, out)
        return out

    def needs(self, parts: Parts) -> SummarySpec | None:
        known = isinstance(parts.scale, Magnitude) and not parts.memory.keeps
        return SummarySpec("none", None) if known else None

    def expect(self, parts: Parts, state: State, sketch: MomentSketch) -> Expectation:
        """||v||_2^2 - 2 s ||v||_1 + n s^2, of which the zeros' coins are not bias."""
        n, energy = sketch.size, sketch.energy
        if not energy:
            return Expectation(0.0, sparsity=1.0, bits_fixed=0.0, bits_entropy=0.0, bits_huffman=0.0, bits_payload=0.0)
        magnitude, scale = _norm1(sketch), cast("Magnitude", parts.scale)
        s = scale.magnitude(magnitude, energy, n)
        error = max(0.0, energy - 2 * s * magnitude + n * s * s)
        head = 0.0 if scale.scale == "none" else 32.0 / n
        return Expectation(
            squared_error=error,
            bias=math.sqrt(max(0.0, error - sketch.zeros * s * s)),
            sparsity=float(s == 0),
            **CodedBits(1 + head, 1 + head, 1 + head).columns,
            bits_payload=1 + head,
            bits_norms=head,
            probabilities=np.array([0.5, 0.5]),
        )

    def weighted_error(self, parts: Parts, state: State, sketch: MomentSketch, weighted: MomentSketch) -> float:
        """sum w v^2 - 2 s sum w |v| + s^2 sum w, with the scale of the values themselves."""
        scale = cast("Magnitude", parts.scale)
        s = scale.magnitude(_norm1(sketch), sketch.energy, sketch.size) if sketch.energy else 0.0
        weight = float(weighted.sums[:, 3].sum()) + weighted.zero_weight
        return max(0.0, weighted.energy - 2 * s * _norm1(weighted) + weight * s * s)


def _norm1(sketch: MomentSketch) -> float:
    """Sum of the magnitudes; weighted if the sketch has weights."""
    return float(np.sum(sketch.sums[:, 3] * sketch.lower + sketch.sums[:, 4]))


@dataclass(frozen=True)
class Coin(Rounding):
    """Round to the sign; a zero has none and gets a fair coin."""

    def symbols(self, grid: Sign, state: State, v: Scaled, key: tuple[int, int], start: int = 0) -> NDArray[np.uint8]:
        """The packed bits, 1 for negative; none for a tensor of zeros, which has no scale."""
        if not v.scales.size:
            return np.empty(0, np.uint8)
        negative = np.signbit(v.x)
        _elementwise.toss_zeros(v.x, np.uint64(key[0]), np.uint64(key[1]), start, negative)
        return np.packbits(negative, bitorder="little")


@method
class SignSgd(Composed):
    """The signs of a gradient, and the majority of the workers' signs."""

    name = "signsgd"
    parts = Parts(scale=Magnitude(), grid=Sign(), rounding=Coin(), coder=Bit())
    summary = "signs and one scale; workers vote"
    formula = "Q(v) = s sign(v); M workers: mean(s) sign(sum_m sign(v_m))"
    paper = _SIGNSGD
    corrections = _CORRECTIONS
    about = "One bit a value. Workers vote, so the server sends one bit back as well."
    sends = _SENDS
    behavior = """Relative error 1 - ||v||_1^2 / (n ||v||^2): 0.36 for a normal law, near 1 for a heavy tail. Biased, so
    many workers do not help as they do unbiased codecs."""
    related = ("signum", "ef-signsgd", "rotate")
    votes = True


@method
class Signum(Composed):
    """The signs of the momentum. The state holds ``momentum``, float32[n]; the optimizer must have none."""

    name = "signum"
    parts = Parts(memory=MomentumAverage(), scale=Magnitude(), grid=Sign(), rounding=Coin(), coder=Bit())
    summary = "signs of the momentum and one scale; workers vote"
    formula = "m <- beta m + (1 - beta) v; Q = s sign(m), s = mean |m|"
    paper = _SIGNSGD
    corrections = _CORRECTIONS
    about = """signsgd on the momentum, which smooths the signs over steps. The optimizer behind it must have no
    momentum."""
    sends = _SENDS
    behavior = "It encodes the momentum, so its error against one gradient means little; compare it by training."
    related = ("signsgd", "momentum")
    votes = True


@method
class EfSignSgd(Composed):
    """Scaled signs with error feedback."""

    name = "ef-signsgd"
    parts = Parts(memory=Residual(), scale=Magnitude(), grid=Sign(), rounding=Coin(), coder=Bit())
    summary = "signs and the mean magnitude, with error feedback"
    formula = "p = v + e; Q = (||p||_1 / n) sign(p); e <- p - Q"
    paper = "Karimireddy et al., Error Feedback Fixes SignSGD and other Gradient Compression Schemes, 2019"
    corrections = (UNITS, _COIN, _ZEROS)
    about = "signsgd with the memory that makes it converge."
    sends = _SENDS
    behavior = "The error of one step is signsgd's or worse; over steps what was lost is sent."
    related = ("signsgd", "ef", "onebit")


@method
class OneBit(Composed):
    """Two reconstruction values a bucket, one bit a value, error feedback."""

    name = "onebit"
    parts = Parts(memory=Residual(), scale=TwoMeans(), grid=Sign(), rounding=Nearest(), coder=Bit())
    summary = "one bit a value, two means a bucket, with error feedback"
    formula = "p = v + e; Q(p_i) = mean of the bucket's p_j >= 0, or of its p_j < 0; e <- p - Q"
    paper = """Seide et al., 1-Bit Stochastic Gradient Descent and its Application to Data-Parallel Distributed Training
    of Speech DNNs, 2014"""
    corrections = (
        "the paper's two values belong to a column of a weight matrix; a flat gradient has buckets instead",
        UNITS,
    )
    about = """The first gradient quantizer in speech recognition: a bit a value, two means a bucket, and error feedback
    without which it does not converge."""
    sends = "Two float32 a bucket, the upper mean and the lower, then a bit a value, 1 for the lower."
    behavior = "A little more than one bit; a constant bucket arrives exactly."
    related = ("ef-signsgd", "signsgd")
