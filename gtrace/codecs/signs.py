"""Sign methods: one bit a value and one scale a tensor."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, TypeAlias

import numpy as np

from gtrace.codecs.base import Codec, ExpectingCodec, checked_values, parameter
from gtrace.codecs.chunked import Part, PartwiseCodec
from gtrace.codecs.feedback import UNITS, ResidualCodec
from gtrace.codecs.momentum import averaged
from gtrace.codecs.registry import register
from gtrace.coding import open_envelope, seal
from gtrace.errors import PayloadError, UsageError
from gtrace.kernels import elementwise as _elementwise
from gtrace.kernels.norms import power_sum
from gtrace.types import Expectation, State, SummarySpec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import ArrayLike, NDArray

    from gtrace.codecs.chunked import TensorSums
    from gtrace.sketch import MomentSketch

Scale: TypeAlias = Literal["mean", "energy", "none"]
SCALES: tuple[Scale, ...] = ("mean", "energy", "none")

_SCALE = struct.Struct("<f")
_COIN = "one bit has no third value for sign(0): a zero is sent as a fair coin of the key, 0 on average"
_ZEROS = "a tensor of zeros only is an empty payload and decodes to zeros"
_VOTE = "workers' signs are put to the vote, and the result has their mean scale; a tie is 0"
_HELP = "what a sign is multiplied by: the mean magnitude, ||v||_2^2 / ||v||_1 (unbiased under rotations), or 1"


class _SignCodec(Codec):
    """What sign methods share: the payload, scale (float32, unless it is 1) and a bit per value, 1 for negative."""

    def pack(
        self,
        x: NDArray[np.float32],
        scale: Scale,
        key: tuple[int, int],
        start: int = 0,
        magnitude: float | None = None,
    ) -> bytes:
        """The payload of float32[n], whose first value is number ``start`` of a tensor of this ``magnitude``."""
        body = b""
        if magnitude is not None or x.any():
            negative = np.signbit(x)
            _elementwise.toss_zeros(x, np.uint64(key[0]), np.uint64(key[1]), start, negative)
            if magnitude is None and scale != "none":
                magnitude = _scale(scale, _sums(x), x.size)
            head = b"" if scale == "none" else _SCALE.pack(magnitude)
            body = head + np.packbits(negative, bitorder="little").tobytes()
        return seal(body, codec=self.name, size=x.size, shared=b"")

    def unpack(self, payload: bytes, shared: bytes, size: int, scale: Scale) -> NDArray[np.float32]:
        """Undo :meth:`pack`."""
        body, flags = open_envelope(payload, codec=self.name, size=size, shared=shared)
        head = 0 if scale == "none" else _SCALE.size
        if flags or len(body) not in ((0, head + -(-size // 8)) if size else (0,)):
            raise PayloadError(f"payload body of {len(body)} bytes is no signs of {size} values")
        out = np.zeros(size, np.float32)
        if len(body):
            magnitude = _SCALE.unpack_from(body)[0] if head else 1.0
            bits = np.frombuffer(body[head:], np.uint8)
            if not (math.isfinite(magnitude) and magnitude >= 0):
                raise PayloadError(f"payload holds the scale {magnitude}")
            if size % 8 and bits[-1] >> (size % 8):
                raise PayloadError("padding after the last sign is not zero")
            _elementwise.restore(bits, size, np.array([[magnitude, -magnitude]], np.float32), out)
        return out


class _VotingCodec(_SignCodec):
    """A sign method whose workers vote."""

    def aggregate(self, decoded: Sequence[NDArray[np.float32]]) -> NDArray[np.float32]:
        """Majority vote: the sign that most workers sent, times their mean magnitude; 0 on a tie.

        Raises:
            UsageError: there are none.
        """
        if not decoded:
            raise UsageError("aggregate: there are no gradients to aggregate")
        votes = np.zeros(decoded[0].shape, np.int32)
        total = np.zeros(decoded[0].shape, np.float64)
        for values in decoded:
            votes += np.sign(values).astype(np.int32)
            total += np.abs(values)
        return (np.sign(votes) * (total / len(decoded))).astype(np.float32)


@register
@dataclass(frozen=True)
class SignSgd(_VotingCodec, PartwiseCodec, ExpectingCodec):
    """The signs of a gradient, and the majority of the workers' signs."""

    name: ClassVar[str] = "signsgd"
    summary: ClassVar[str] = "signs and one scale; workers vote"
    formula: ClassVar[str] = "Q(v) = s sign(v); M workers: mean(s) sign(sum_m sign(v_m))"
    paper: ClassVar[str] = "Bernstein et al., signSGD: Compressed Optimisation for Non-Convex Problems, 2018"
    corrections: ClassVar[tuple[str, ...]] = (
        "the paper's sign has no scale (scale=none); the mean magnitude, that of least error, is the default",
        _COIN,
        _ZEROS,
        _VOTE,
    )
    unbiased: ClassVar[bool] = False
    deterministic: ClassVar[bool] = True

    scale: Scale = parameter("mean", _HELP, choices=SCALES)

    @property
    def whole_tensor(self) -> bool:
        """The scale is the mean of all magnitudes."""
        return self.scale != "none"

    @property
    def needs(self) -> SummarySpec:
        """The plain magnitudes: their sum and their energy."""
        return SummarySpec("none", None)

    def encode(self, state: State, values: ArrayLike, key: tuple[int, int]) -> bytes:
        """Scale and signs."""
        return self.pack(checked_values(state, values), self.scale, key)

    def prepare(self, state: State, sums: TensorSums) -> State:
        """The scale of the whole tensor as the array ``scale``, unless all of it is zero."""
        if not sums.energy:
            return state
        return state.with_arrays(scale=np.array(_scale(self.scale, (sums.norm1, sums.energy), sums.size)))

    def encode_part(self, state: State, values: ArrayLike, key: tuple[int, int], start: int) -> Part:
        """The part's signs; the scale counts with the first part."""
        x = checked_values(state, values)
        magnitude = state.arrays.get("scale")
        payload = self.pack(x, self.scale, key, start, None if magnitude is None else float(magnitude))
        if magnitude is None:
            return Part(payload, 0)
        return Part(payload, 0 if start or self.scale == "none" else 8 * _SCALE.size, x.size)

    def decode(self, shared: bytes, payload: bytes, size: int) -> NDArray[np.float32]:
        """Undo :meth:`encode`."""
        return self.unpack(payload, shared, size, self.scale)

    def expect(self, state: State, sketch: MomentSketch) -> Expectation:
        """||v||_2^2 - 2 s ||v||_1 + n s^2, of which the zeros' coins are not bias."""
        del state
        if sketch.spec[:3] != self.needs[:3]:
            raise UsageError(f"{self}: wants a sketch of {self.needs}, not of {sketch.spec}")
        n, energy = sketch.size, sketch.energy
        if not energy:
            return Expectation(0.0, sparsity=1.0, bits_fixed=0.0, bits_entropy=0.0, bits_huffman=0.0, bits_payload=0.0)
        magnitude = _norm1(sketch)
        s = _scale(self.scale, (magnitude, energy), n)
        error = max(0.0, energy - 2 * s * magnitude + n * s * s)
        head = 0.0 if self.scale == "none" else 32.0 / n
        return Expectation(
            squared_error=error,
            bias=math.sqrt(max(0.0, error - sketch.zeros * s * s)),
            sparsity=float(s == 0),
            bits_fixed=1 + head,
            bits_entropy=1 + head,
            bits_huffman=1 + head,
            bits_payload=1 + head,
            bits_norms=head,
            probabilities=np.array([0.5, 0.5]),
        )

    def weighted_error(self, state: State, sketch: MomentSketch, weighted: MomentSketch) -> float:
        """sum w v^2 - 2 s sum w |v| + s^2 sum w, with the scale of the values themselves."""
        del state
        s = _scale(self.scale, (_norm1(sketch), sketch.energy), sketch.size) if sketch.energy else 0.0
        weight = float(weighted.sums[:, 3].sum()) + weighted.zero_weight
        return max(0.0, weighted.energy - 2 * s * _norm1(weighted) + weight * s * s)


@register
@dataclass(frozen=True)
class Signum(_VotingCodec):
    """The signs of the momentum. The state holds ``momentum``, float32[n]; the optimizer must have none."""

    name: ClassVar[str] = "signum"
    summary: ClassVar[str] = "signs of the momentum and one scale; workers vote"
    formula: ClassVar[str] = "m <- beta m + (1 - beta) v; Q = s sign(m), s = mean |m|"
    paper: ClassVar[str] = SignSgd.paper
    corrections: ClassVar[tuple[str, ...]] = SignSgd.corrections
    unbiased: ClassVar[bool] = False
    stateful: ClassVar[bool] = True
    deterministic: ClassVar[bool] = True

    beta: float = parameter(0.9, "share of the momentum that stays", minimum=0.0, maximum=1.0)
    scale: Scale = parameter("mean", _HELP, choices=SCALES)

    def init(self, size: int, shape: tuple[int, ...] | None = None) -> State:
        """No momentum yet."""
        return State(int(size), {"momentum": np.zeros(size, np.float32)}, shape)

    def encode(self, state: State, values: ArrayLike, key: tuple[int, int]) -> bytes:
        """Scale and signs of the new momentum."""
        return self.pack(self._moved(state, values), self.scale, key)

    def decode(self, shared: bytes, payload: bytes, size: int) -> NDArray[np.float32]:
        """Undo :meth:`encode`."""
        return self.unpack(payload, shared, size, self.scale)

    def update(self, state: State, values: ArrayLike, decoded: NDArray[np.float32]) -> State:
        """Keep the new momentum."""
        del decoded
        return state.with_arrays(momentum=self._moved(state, values))

    def _moved(self, state: State, values: ArrayLike) -> NDArray[np.float32]:
        return averaged(state.arrays["momentum"], checked_values(state, values), self.beta, self.beta)


@register
@dataclass(frozen=True)
class EfSignSgd(_SignCodec, ResidualCodec):
    """Scaled signs with error feedback."""

    name: ClassVar[str] = "ef-signsgd"
    summary: ClassVar[str] = "signs and the mean magnitude, with error feedback"
    formula: ClassVar[str] = "p = v + e; Q = (||p||_1 / n) sign(p); e <- p - Q"
    paper: ClassVar[str] = (
        "Karimireddy et al., Error Feedback Fixes SignSGD and other Gradient Compression Schemes, 2019"
    )
    corrections: ClassVar[tuple[str, ...]] = (UNITS, _COIN, _ZEROS)
    deterministic: ClassVar[bool] = True

    def send(self, state: State, x: NDArray[np.float32], key: tuple[int, int]) -> bytes:
        """Scale and signs."""
        del state
        return self.pack(x, "mean", key)

    def decode(self, shared: bytes, payload: bytes, size: int) -> NDArray[np.float32]:
        """Undo :meth:`encode`."""
        return self.unpack(payload, shared, size, "mean")


def _sums(x: NDArray[np.float32]) -> tuple[float, float]:
    """||x||_1 and ||x||_2^2 in float64."""
    return float(power_sum(x, 1)), float(power_sum(x, 2))


def _norm1(sketch: MomentSketch) -> float:
    """Sum of the magnitudes; the weighted one of a sketch with weights."""
    return float(np.sum(sketch.sums[:, 3] * sketch.lower + sketch.sums[:, 4]))


def _scale(scale: Scale, sums: tuple[float, float], size: float) -> float:
    """What a sign is multiplied by, rounded to float32; the vector of ``sums`` is not zero."""
    magnitude, energy = sums
    if scale == "none":
        return 1.0
    # Rounding may lead past the largest magnitude there is, and so out of float32.
    value = magnitude / size if scale == "mean" else energy / magnitude
    return float(np.float32(min(value, float(np.finfo(np.float32).max))))
