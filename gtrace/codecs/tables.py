"""Methods of short integers and tables: a block over its largest magnitude, rounded to the nearest entry."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from gtrace.buckets import Blocks, TensorSums, spread
from gtrace.codecs.base import parameter
from gtrace.codecs.coders import OwnCode
from gtrace.codecs.engine import Composed, method
from gtrace.codecs.parts import FLOAT32_MAX, Grid, Nearest, Parts, Scale, Scaled
from gtrace.codecs.scales import BlockMax
from gtrace.errors import PayloadError
from gtrace.kernels import elementwise as _elementwise
from gtrace.kernels import rounding as _rounding
from gtrace.kernels.compare import ascending

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from gtrace.codecs.parts import Arrays, Values
    from gtrace.types import State

_DETTMERS = "Dettmers et al., 8-bit Optimizers via Block-wise Quantization, 2022"
_BLOCKS = "A float32 scale for each block, then the codes, by the coder."
#: codes of hivemind's formats, and standard deviations that the uniform ones span
_CODES, _SPAN = 256, 6
#: values of which hivemind takes quantiles at once
_PORTION = 100_000


@dataclass(frozen=True)
class Entries(Grid):
    """Ascending values in units of the block's largest magnitude."""

    unbiased = False

    @property
    @abstractmethod
    def entries(self) -> Values:
        """The values, float32[m]."""

    def alphabet(self, state: State) -> int:
        return self.entries.size

    def values(self, symbols: NDArray[np.uint16], scales: Values, bucket: int, size: int) -> Values:
        out = np.empty(size, np.float32)
        _rounding.restore(symbols, bucket, scales, self.entries, out)
        return out

    def nearest(self, state: State, v: Scaled, key: tuple[int, int]) -> NDArray[np.uint16]:
        """The number of the nearest entry; halfway between two, of the lower one."""
        codes = np.empty(v.x.size, np.uint16)
        middles = (self.entries[1:] + self.entries[:-1]) / np.float32(2)
        _elementwise.round_to_table(v.x, v.bucket, v.scales, middles, codes)
        return codes


@dataclass(frozen=True)
class SignedIntegers(Entries):
    """k / 127 for k = -127..127, ties to even: 255 of the codes of eight bits."""

    @property
    def span(self) -> tuple[int, int]:
        """Steps from zero to the block's largest magnitude, and the largest integer; the least is minus the steps."""
        return 127, 127

    @property
    def entries(self) -> Values:
        return _integers(*self.span)

    def nearest(self, state: State, v: Scaled, key: tuple[int, int]) -> NDArray[np.uint16]:
        codes, (steps, _) = np.empty(v.x.size, np.uint16), self.span
        _elementwise.round_to_integers(v.x, v.bucket, v.scales, steps, -steps, self.entries.size, codes)
        return codes


@dataclass(frozen=True)
class TwosComplement(SignedIntegers):
    """k / 2^(bits - 1) for k = -2^(bits - 1) .. 2^(bits - 1) - 1; what lies above the largest is cut off."""

    bits: int = parameter(4, "of an integer", minimum=2, maximum=15)

    @property
    def mark(self) -> int:
        return self.bits

    @property
    def span(self) -> tuple[int, int]:
        """Half as many steps as there are integers."""
        return 1 << self.bits - 1, (1 << self.bits - 1) - 1


@cache
def _integers(steps: int, top: int) -> Values:
    return (np.arange(-steps, top + 1) / steps).astype(np.float32)


@dataclass(frozen=True)
class Published(Entries):
    """A published table."""

    table: Callable[[], Values]

    @property
    def entries(self) -> Values:
        return self.table()


@cache
def _normal_float() -> Values:
    """NF4 (QLoRA, appendix E): about the quantiles of a normal law, 7 below zero and 8 above, as published."""
    below = [1.0, 0.6961928009986877, 0.5250730514526367, 0.39491748809814453, 0.28444138169288635, 0.18477343022823334]
    above = [0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224, 0.44070982933044434]
    ends = [-0.09105003625154495, 0.0], [0.5626170039176941, 0.7229568362236023, 1.0]
    return np.array([*(-v for v in below), *ends[0], *above, *ends[1]], np.float32)


@cache
def _float4() -> Values:
    """FP4 of bitsandbytes: 0, a subnormal 1/16, then 2, 3, 4, 6, 8, 12 of 12, with both signs."""
    magnitudes = np.array([0.0625, 2, 3, 4, 6, 8, 12], np.float32) / np.float32(12)
    return np.concatenate([-magnitudes[::-1], [np.float32(0)], magnitudes])


@cache
def _dynamic8() -> Values:
    """The signed dynamic tree type: seven decades, the upper ones with more bits for the fraction."""
    found = [0.0, 1.0]
    first, last = np.float32(0.1), np.float32(1.0)
    for decade in range(7):
        k, count = np.arange((1 << decade) + 1), 1 << decade
        step = np.float64((last - first) / np.float32(count))
        # Equal steps in float32 as torch makes them: from both ends, each with one rounding.
        ends = np.where(2 * k < count, first + step * k, last - step * (count - k)).astype(np.float32)
        values = (ends[:-1] + ends[1:]) / np.float32(2) * np.float32(10.0 ** (decade - 6))
        found += [*values.tolist(), *(-values).tolist()]
    return np.sort(np.array(found, np.float32))


@dataclass(frozen=True)
class GroupMax(Scale):
    """The largest magnitude of each group, in float32."""

    per = "group"
    width = 4

    group: int | None = parameter(
        256, "consecutive values that share a scale; none for the whole tensor", minimum=1, optional=True
    )

    measure = BlockMax.measure


@dataclass(frozen=True)
class CodeMeans(Scale):
    """The mean of the values with each of 256 codes, in float32; 0 for a code that no value has."""

    whole_tensor = True

    #: values in parts, and their number -> the greatest values of all codes but the last, float32[255], ascending
    ends: Callable[[Iterator[Values], int], Values]

    def whole(self, size: int, parts: Callable[[], Iterator[Values]], sums: Callable[[], TensorSums]) -> Arrays:
        """The means, and the ``ends`` of codes."""
        ends = self.ends(parts(), size)
        totals, counts = np.zeros(_CODES), np.zeros(_CODES, np.int64)
        for x in parts():
            _elementwise.add_by_code(x, _coded(x, ends), totals, counts)
        return {"scale": (totals / np.maximum(counts, 1)).astype(np.float32), "ends": ends}

    def cut(self, x: Values, state: State, *, late: bool = False) -> Scaled:
        """The values with 256 means, and the codes that gave them."""
        known = state.arrays
        if "ends" not in known:
            known = self.whole(x.size, lambda: iter([x]), lambda: TensorSums.of([x]))
        return Scaled(x, known["scale"], self.over(x.size), codes=_coded(x, known["ends"]))

    def head(self, body: memoryview, size: int) -> int:
        return 4 * _CODES

    def read(self, data: memoryview) -> Values:
        """The means; they may be negative."""
        means = np.frombuffer(data, "<f4").astype(np.float32)
        if not np.isfinite(means).all():
            raise PayloadError("payload holds a mean that is not finite")
        return means


def _coded(x: Values, ends: Values) -> NDArray[np.uint16]:
    codes = np.empty(x.size, np.uint16)
    _elementwise.round_to_table(x, max(1, x.size), np.ones(1, np.float32), ends, codes)
    return codes


def _equal_steps(parts: Iterator[Values], size: int) -> Values:
    """Code c for 256 (x - mean) / (6 sigma) within a half of c - 128; the first and the last code take the rest."""
    _, mean, square = spread(parts)
    step = _SPAN / _CODES * math.sqrt(square / max(1, size - 1))
    ends = np.clip(mean + step * (np.arange(_CODES - 1) - (_CODES - 1) / 2), -FLOAT32_MAX, FLOAT32_MAX)
    # What float32 has below an end is what float64 has below it.
    short = ends.astype(np.float32)
    return np.where(short > ends, np.nextafter(short, -FLOAT32_MAX), short)


def _quantiles(parts: Iterator[Values], size: int) -> Values:
    """The quantiles k / 256; of a large tensor, quantiles of its portions' quantiles."""
    if not size:
        return np.zeros(_CODES - 1, np.float32)
    at = np.linspace(0.0, 1.0, _CODES + 1, dtype=np.float32)
    portions, rest = divmod(size, _PORTION)
    # Portions of nearly one length.
    length = size if not portions else _PORTION + (rest - 1) // portions + 1
    # Of sorted values the quantiles are found in less time than it takes to sort them.
    sorted_portions = (ascending(portion).astype(np.float64) for (portion,) in Blocks.of(zip(parts), length))
    found = np.array([np.quantile(portion, at) for portion in sorted_portions], np.float32)
    return np.quantile(found.astype(np.float64), at)[1:-1].astype(np.float32)


@dataclass(frozen=True)
class Means(Grid):
    """The means that :class:`CodeMeans` sends."""

    unbiased = False

    def alphabet(self, state: State) -> int:
        """256, some of them perhaps unused."""
        return _CODES

    def nearest(self, state: State, v: Scaled, key: tuple[int, int]) -> NDArray[np.uint16]:
        return v.codes

    def values(self, symbols: NDArray[np.uint16], scales: Values, bucket: int, size: int) -> Values:
        return scales.take(symbols)


@method
class Int8(Composed):
    """Linear codes from -127 to 127, rounded to nearest; the code -128 is not used."""

    name = "int8"
    parts = Parts(scale=BlockMax(), grid=SignedIntegers(), rounding=Nearest(), coder=OwnCode())
    summary = "8-bit integers, blocks scaled by their largest magnitude"
    formula = "Q(v) = a round(127 v / a) / 127, a = the block's largest |v|, ties to even"
    paper = f"{_DETTMERS} (with linear codes)"
    corrections = (
        "the paper's codes are dynamic (an exponent and a fraction); these are linear, as most int8 all-reduces use",
    )
    about = """What fast all-reduces do: eight bits, a scale for each block, rounding to nearest. No entropy code, no
    randomness."""
    sends = "A float32 scale for each block, then the codes, by the coder: the integer and 127."
    behavior = "Error at most 1/254 of the block's largest magnitude. One outlier spoils its block and no other."
    related = ("minmax", "fp", "qsgdinf")


@method
class IntN(Composed):
    """Integers in two's complement, rounded to nearest, as ZeRO++ sends gradients in four bits."""

    name = "intn"
    parts = Parts(scale=GroupMax(), grid=TwosComplement(), rounding=Nearest(), coder=OwnCode(flag=0x100))
    summary = "small integers, groups scaled by their largest magnitude, rounded to nearest"
    formula = "Q(v) = a k / h, h = 2^(bits-1), k = min(round(h v / a), h - 1), a = the group's largest |v|"
    paper = "Wang et al., ZeRO++: Extremely Efficient Collective Communication for Giant Model Training, 2023 (qgZ)"
    about = "What ZeRO++ and SDP4Bit send: four bits and a scale for each group, rounded to nearest."
    sends = "A float32 scale for each group, then the codes, by the coder; the envelope's flags name the bits."
    behavior = """The largest value of a group is cut by 1/h if it is positive. Nearest rounding is biased: most values
    of a group with an outlier become zero, and averaging over workers does not bring them back."""
    related = ("int8", "qsgdinf", "rotate")


@method
class Nf4(Composed):
    """NormalFloat: 16 quantiles of a normal law."""

    name = "nf4"
    parts = Parts(scale=BlockMax(64), grid=Published(_normal_float), rounding=Nearest(), coder=OwnCode())
    summary = "16 quantiles of a normal law, blocks scaled by their largest magnitude"
    formula = "Q(v) = a t, t the nearest of 16 numbers to v / a, a = the block's largest |v|"
    paper = "Dettmers et al., QLoRA: Efficient Finetuning of Quantized LLMs, 2023"
    about = "The four bits in which weights of language models are often kept, tried on gradients."
    sends = _BLOCKS
    behavior = """Made so that normal values use all codes equally, which is not the least error; the scales cost half a
    bit."""
    related = ("fp4", "intn", "eden")


@method
class Fp4(Composed):
    """bitsandbytes' four-bit float."""

    name = "fp4"
    parts = Parts(scale=BlockMax(64), grid=Published(_float4), rounding=Nearest(), coder=OwnCode())
    summary = "bitsandbytes' table of a four-bit float, blocks scaled by their largest magnitude"
    formula = "Q(v) = a t, t the nearest to v / a of 0, +-{1/16, 2, 3, 4, 6, 8, 12} / 12; a = the block's largest |v|"
    paper = "Dettmers et al., QLoRA: Efficient Finetuning of Quantized LLMs, 2023 (FP4 of bitsandbytes)"
    corrections = ("its two codes of zero are one here",)
    about = "The float of bitsandbytes. OCP's and NVIDIA's four-bit floats are fp:mxfp4 and fp:nvfp4."
    sends = _BLOCKS
    behavior = "Its least magnitude is 1/192 of the block's largest; between that and 1/6 there is nothing."
    related = ("nf4", "fp", "intn")


@method
class Dynamic8(Composed):
    """The dynamic tree type of eight bits: seven decades, with more digits in the upper ones."""

    name = "dynamic8"
    parts = Parts(scale=BlockMax(256), grid=Published(_dynamic8), rounding=Nearest(), coder=OwnCode())
    summary = "8-bit numbers of seven decades, blocks scaled by their largest magnitude"
    formula = "Q(v) = a t, t the nearest of 256 numbers to v / a, a = the block's largest |v|"
    paper = _DETTMERS
    about = "The eight bits of bitsandbytes' optimizers: coarse near the largest value, exact over many decades."
    sends = _BLOCKS
    behavior = "Relative error up to some 1 % near the largest magnitude, more below; hardly anything becomes zero."
    related = ("int8", "fp", "uniform8")


@method
class Uniform8(Composed):
    """256 equal steps over six standard deviations, decoded to the mean of their values."""

    name = "uniform8"
    parts = Parts(scale=CodeMeans(_equal_steps), grid=Means(), rounding=Nearest(), coder=OwnCode())
    summary = "256 equal steps over six deviations, each decoded to the mean of its values"
    formula = "c = 128 + round(256 (v - mean) / (6 sigma)), within 0..255; Q(v) = the mean of the values with code c"
    paper = "Ryabinin et al., Distributed Deep Learning in Open Collaborations, 2021 (hivemind, uniform 8-bit)"
    about = "What hivemind's volunteers send: means as a codebook, so that even outliers keep their sum."
    sends = "256 means in float32, then the codes, by the coder."
    behavior = """Everything beyond three deviations shares two codes, so heavy tails lose most. The codebook costs 8192
    bits a tensor."""
    related = ("quantile8", "minmax", "int8")


@method
class Quantile8(Composed):
    """256 cells with equally many values, decoded to their means."""

    name = "quantile8"
    parts = Parts(scale=CodeMeans(_quantiles), grid=Means(), rounding=Nearest(), coder=OwnCode())
    summary = "256 cells of equally many values, each decoded to their mean"
    formula = "c = number of the quantiles k / 256 below v; Q(v) = the mean of the values with code c"
    paper = "Ryabinin et al., Distributed Deep Learning in Open Collaborations, 2021 (hivemind, quantile 8-bit)"
    about = "Codes that are used equally often: no entropy code can shorten them."
    sends = "256 means in float32, then the codes, by the coder."
    behavior = "Fine where values are many, coarse in the tails, where the energy is. It sorts, so it is slow."
    related = ("uniform8", "zipml", "nf4")
