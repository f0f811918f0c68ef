"""Methods without randomness and levels: shorter floats, and codes from the least value to the greatest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from gtrace.codecs.base import parameter
from gtrace.codecs.coders import OwnCode, Plain
from gtrace.codecs.engine import Composed, method
from gtrace.codecs.parts import Grid, Nearest, Parts, Rounding
from gtrace.codecs.scales import Range
from gtrace.coding.fixed import finite
from gtrace.kernels import elementwise as _elementwise
from gtrace.kernels import rounding as _rounding
from gtrace.types import Expectation, State, SummarySpec

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from gtrace.codecs.parts import Scaled, Values
    from gtrace.sketch import MomentSketch

_SATURATES = "values beyond the format's range become its largest finite number, not infinity"


@dataclass(frozen=True)
class Float32(Grid):
    """Every float32."""

    def needs(self, parts: Parts) -> SummarySpec:
        """Any sketch; only zeros are read from it."""
        return SummarySpec("none", None)

    def expect(self, parts: Parts, state: State, sketch: MomentSketch) -> Expectation:
        sparsity = sketch.zeros / max(1, sketch.size)
        return Expectation(0.0, 0.0, sparsity, bits_fixed=32.0, bits_entropy=32.0, bits_huffman=32.0, bits_payload=32.0)

    def nearest(self, state: State, v: Scaled, key: tuple[int, int]) -> Values:
        return v.x

    def values(self, symbols: Values, scales: Values, bucket: int, size: int) -> Values:
        return finite(symbols).copy()


@dataclass(frozen=True)
class Float16(Grid):
    """float16: 5 bits of exponent, 10 of mantissa, subnormals kept, saturating."""

    unbiased = False

    def nearest(self, state: State, v: Scaled, key: tuple[int, int]) -> NDArray[np.uint16]:
        """The bits of the nearest float16, ties to even."""
        largest = np.float32(np.finfo(np.float16).max)
        return np.clip(v.x, -largest, largest).astype(np.float16).view(np.uint16)

    def values(self, symbols: NDArray[np.uint16], scales: Values, bucket: int, size: int) -> Values:
        return finite(symbols.view(np.float16).astype(np.float32))


@dataclass(frozen=True)
class BFloat16(Grid):
    """bfloat16: the upper halves of float32, saturating."""

    def nearest(self, state: State, v: Scaled, key: tuple[int, int]) -> NDArray[np.uint16]:
        """The upper halves of the nearest bfloat16, ties to even."""
        out = np.empty(v.x.size, np.uint16)
        _elementwise.to_bfloat16(v.x.view(np.uint32), out)
        return out

    def values(self, symbols: NDArray[np.uint16], scales: Values, bucket: int, size: int) -> Values:
        return finite((symbols.astype(np.uint32) << np.uint32(16)).view(np.float32))


@dataclass(frozen=True)
class Halves(Rounding):
    """Round float32 to upper halves."""

    rounding: Literal["nearest", "stochastic"] = parameter(
        "nearest", "nearest even, or at random without bias", choices=("nearest", "stochastic")
    )

    @property
    def unbiased(self) -> bool:
        return self.rounding == "stochastic"

    @property
    def deterministic(self) -> bool:
        return self.rounding == "nearest"

    def symbols(
        self, grid: BFloat16, state: State, v: Scaled, key: tuple[int, int], start: int = 0
    ) -> NDArray[np.uint16]:
        if self.deterministic:
            return grid.nearest(state, v, key)
        out = np.empty(v.x.size, np.uint16)
        _elementwise.to_bfloat16_at_random(v.x.view(np.uint32), np.uint64(key[0]), np.uint64(key[1]), start, out)
        return out


@dataclass(frozen=True)
class Affine(Grid):
    """2^bits equal steps from the least value to the greatest, both ends on a code."""

    unbiased = False

    bits: int = parameter(8, "of a code", minimum=1, maximum=16)

    @property
    def mark(self) -> int:
        return self.bits

    def alphabet(self, state: State) -> int:
        return 1 << self.bits

    def nearest(self, state: State, v: Scaled, key: tuple[int, int]) -> NDArray[np.uint16]:
        """The nearest code, halves upwards; 0 for a constant tensor."""
        low, high = v.scales.tolist()
        codes = np.zeros(v.x.size, np.uint16)
        if high > low:
            _elementwise.round_affine(v.x, low, high - low, (1 << self.bits) - 1, codes)
        return codes

    def values(self, symbols: NDArray[np.uint16], scales: Values, bucket: int, size: int) -> Values:
        low, high = scales.tolist()
        steps = (1 << self.bits) - 1
        levels = (low + np.arange(steps + 1) * (high - low) / steps).astype(np.float32)
        out = np.empty(size, np.float32)
        _rounding.restore(symbols, bucket, np.ones(min(1, size), np.float32), levels, out)
        return out


@method
class Identity(Composed):
    """float32 as it is."""

    name = "none"
    parts = Parts(grid=Float32(), rounding=Nearest(), coder=Plain("<f4"))
    summary = "float32, uncompressed"
    formula = "Q(v) = v"
    paper = "-"
    about = "The reference of every comparison: what a training without compression sends."
    sends = "Four bytes a value, little-endian."
    behavior = "No error, 32 bits."
    related = ("bf16", "fp16")


@method
class Fp16(Composed):
    """IEEE 754 half precision: 5 bits of exponent, 10 of mantissa, subnormals kept."""

    name = "fp16"
    parts = Parts(grid=Float16(), rounding=Nearest(), coder=Plain())
    summary = "float16, rounded to nearest even"
    formula = "Q(v) = the nearest of the float16 numbers, up to 65504 in magnitude"
    paper = "IEEE 754-2008, binary16"
    corrections = (_SATURATES,)
    about = "What mixed-precision training sends: half the bits of float32."
    sends = "Two bytes a value, little-endian."
    behavior = """Relative error up to 2^-11 a value; values below 3e-8 become zero, which loss scaling is meant to
    prevent."""
    related = ("bf16", "fp", "int8")


@method
class Bf16(Composed):
    """bfloat16: float32 with 7 bits of mantissa."""

    name = "bf16"
    parts = Parts(grid=BFloat16(), rounding=Halves(), coder=Plain())
    summary = "bfloat16, rounded to nearest even or at random"
    formula = "Q(v) = the nearest of the float32 numbers with 7 bits of mantissa, or one of the two around v at random"
    paper = "Kalamkar et al., A Study of BFLOAT16 for Deep Learning Training, 2019"
    corrections = (_SATURATES,)
    about = """Half the bits of float32 at its whole range: nothing becomes zero, with three bits less of mantissa than
    float16."""
    sends = "Two bytes a value, little-endian."
    behavior = "Relative error up to 2^-8 a value (twice that at random), whatever the gradient's scale."
    related = ("fp16", "fp")


@method
class MinMax(Composed):
    """2^bits codes from the tensor's least value to its greatest, rounded to nearest.

    A constant tensor decodes to itself. Zero is a level only by chance.
    """

    name = "minmax"
    parts = Parts(scale=Range(), grid=Affine(), rounding=Nearest(), coder=OwnCode(flag=0x100))
    summary = "uniform codes from a tensor's least value to its greatest, rounded to nearest"
    formula = "q = floor((v - min) (2^bits - 1) / (max - min) + 1/2), Q(v) = min + q (max - min) / (2^bits - 1)"
    paper = "Cui et al., MQGrad: Reinforcement Learning of Gradient Quantization in Parameter Server, 2018"
    corrections = (
        "the paper names TensorFlow's quantizer alone; these are its codes with both ends of the range on a code",
    )
    about = """Equally spaced codes between the least and the greatest value, as used by TensorFlow's quantizer and
    MQGrad."""
    sends = """The least and the greatest value in float32, then the codes, by the coder; the envelope's flags name the
    bits."""
    behavior = """Error at most half a step anywhere. Few values far out make the step coarse, and zero is a level only
    by chance."""
    related = ("int8", "qsgdinf")
