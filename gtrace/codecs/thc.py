"""THC: rotated values as integers of a table, under a range that workers can share, so that integers add undecoded."""

from __future__ import annotations

import dataclasses
import math
import struct
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, cast

import numpy as np
import scipy as sp

from gtrace.codecs.base import CodedBits, EncodedPart, parameter
from gtrace.codecs.coders import SharedCode
from gtrace.codecs.engine import Composed, method
from gtrace.codecs.grids import LevelGrid, Stochastic
from gtrace.codecs.parts import FLOAT32_MAX, Parts, Scale, Scaled
from gtrace.codecs.rotation import block_parameter, piece_lengths, rotated
from gtrace.coding.huffman import CodedBlock
from gtrace.errors import PayloadError, UsageError
from gtrace.types import Expectation, Scope, State, SummarySpec

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    from gtrace.codecs.parts import Values

_SEED = struct.Struct("<I")


def _outside() -> Any:
    return parameter(
        1 / 32, "share of rotated values that is cut to the range, if they are normal", minimum=1e-6, maximum=0.5
    )


def _reach(outside: float) -> float:
    """t: the share ``outside`` of a standard normal law lies beyond -t and t."""
    return float(sp.special.ndtri(1 - outside / 2))


def _density(x: ArrayLike) -> NDArray[np.float64]:
    return np.exp(-np.square(x) / 2) / math.sqrt(2 * math.pi)


def _rounding_error(a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.float64]:
    """The integral of (v - a) (b - v) from a to b under a standard normal law."""
    mass, first = sp.special.ndtr(b) - sp.special.ndtr(a), _density(a) - _density(b)
    second = mass + a * _density(a) - b * _density(b)
    return (a + b) * first - a * b * mass - second


@lru_cache(maxsize=64)
def lookup_table(count: int, top: int, outside: float) -> NDArray[np.int64]:
    """The integers of least error for codes of normal values: int64[count], ascending from 0 to ``top``, symmetric.

    Integer k means t (2 k / top - 1) standard deviations, t the quantile that leaves ``outside`` beyond -t and t;
    values between two integers of the table are rounded at random without bias. Dynamic programming over the upper
    half.

    Args:
        count: an even number of integers.
        top: the largest, at least ``count`` - 1.
        outside: share of a normal law beyond the range, both sides together.
    """
    k = np.arange(top // 2 + 1, top + 1)
    x = _reach(outside) * (2 * k / top - 1)
    cost = np.where(x[:, None] < x, _rounding_error(x[:, None], x), np.inf)
    # A half of the cell in the middle.
    best, before = _rounding_error(-x, x) / 2, []
    for _ in range(count // 2 - 1):
        whole = best[:, None] + cost
        before.append(whole.argmin(axis=0))
        best = whole.min(axis=0)
    chosen = [k.size - 1]
    for row in reversed(before):
        chosen.append(int(row[chosen[-1]]))
    upper = k[chosen[::-1]]
    table = np.concatenate([top - upper[::-1], upper])
    table.flags.writeable = False
    return table


@dataclass(frozen=True)
class NormalRange(Scale):
    """What a block's rotated values do not exceed but for a given share, if they are normal; the others are cut."""

    unbiased: ClassVar[bool] = False
    shares: ClassVar[bool] = True
    per = "block"
    width = 4

    block: int = block_parameter(1024)
    outside: float = _outside()

    def measure(self, x: Values) -> Values:
        """The ranges, float32; what is rotated in pieces at the end has the largest of their ranges."""
        lengths = piece_lengths(x.size, self.block)
        whole = x.size // self.block
        energy = np.add.reduceat(np.square(x, dtype=np.float64), np.cumsum(lengths) - lengths) if x.size else lengths
        deviations = np.sqrt(energy / lengths)
        rest = deviations[whole:].max(keepdims=True) if lengths.size > whole else deviations[:0]
        ranges = _reach(self.outside) * np.concatenate([deviations[:whole], rest])
        return np.minimum(ranges, FLOAT32_MAX).astype(np.float32)

    def cut(self, x: Values, state: State, *, late: bool = False) -> Scaled:
        scales = self.scales(x, state)
        each = np.repeat(scales, self.block)[: x.size]
        return Scaled(np.clip(x, -each, each), scales, self.block)


@dataclass(frozen=True)
class Lookup(LevelGrid):
    """2^bits of the integers from 0 to ``granularity``, which mean equal steps through the range."""

    fits = False
    zero = False

    bits: int = parameter(4, "of a code; 2^bits integers are used", minimum=1, maximum=8)
    granularity: int | None = parameter(
        None, "the largest integer; none for 2 (2^bits - 1), and 2^bits - 1 means equal steps", minimum=1, maximum=1023
    )
    outside: float = _outside()

    def check(self, name: str) -> None:
        least = (1 << self.bits) - 1
        if self.granularity is not None and self.granularity < least:
            raise UsageError(
                f"codec {name}: granularity={self.granularity} is below {least}, which bits={self.bits} need"
            )

    @property
    def integers(self) -> NDArray[np.int64]:
        count = 1 << self.bits
        return lookup_table(count, self.granularity or 2 * (count - 1), self.outside)

    def levels(self, state: State) -> Values:
        """The upper half of the table in units of the range."""
        upper = self.integers[self.integers.size // 2 :]
        return (2 * upper / upper[-1] - 1).astype(np.float32)

    def needs(self, parts: Parts) -> SummarySpec | None:
        """Nothing: a sketch says nothing about rotated values, which are only nearly normal."""
        return None


@dataclass(frozen=True)
class FixedWidth(SharedCode):
    """Every symbol in the same number of bits."""

    coder: str = "fixed"
    scope: Scope = "tensor"


@method
class Thc(Composed):
    """Rotated values, cut to a range, as integers that workers can add without decoding.

    Alone each worker has a rotation and ranges of its own. Under the exchange ``shared-scale`` all have the same
    rotation and the largest of their ranges, and ranks add the integers.
    """

    name = "thc"
    parts = Parts(scale=NormalRange(), grid=Lookup(), rounding=Stochastic(), coder=FixedWidth())
    summary = "rotated values as integers of a table that add up undecoded, under a range that workers share"
    formula = """y = R v cut to [-M, M]; Q(v) = R' M (2 T[z] / g - 1), T the table of 2^bits integers in 0..g of least
    error for a normal law, z at random between neighbors; M = t ||R v_b|| / sqrt(block), t leaves outside beyond it"""
    paper = "Li et al., THC: Accelerating Distributed Deep Learning Using Tensor Homomorphic Compression, 2024"
    corrections = (
        "each block has a range of its own, the paper one for the tensor from its norm; what is left over at the end "
        "is rotated in smaller powers of two under the largest of their ranges, not padded",
        "the paper's error feedback is the prefix ef:",
    )
    about = """Made for sums in a switch or a server: what is sent are small integers, and the sum of workers' integers
    is the code of the sum. A rotation makes values nearly normal, so one table suits all."""
    sends = "The rotation's seed (u32), a float32 range for each block, then codes of bits bits."
    behavior = """Relative error 3.7, 0.34, 0.068, 0.02 at 1 to 4 bits on any gradient. What is cut makes values smaller
    by the share outside on average and is 0.007 of the error: with more bits take a smaller one (0.001 at 6 bits:
    0.0015 in all). Under shared-scale a sum takes more bits: with a granularity of 30, 8 workers fit in a byte."""
    related = ("eden", "rotate", "qsgdinf")

    def turned(self, x: Values, number: int, *, back: bool = False, start: int = 0) -> Values:
        return rotated(x, self.parameters["block"], number, back=back, start=start)

    def expected_on_normal(self, size: int) -> Expectation:
        """Error and bits of ``size`` values of energy 1, whatever they are, as far as rotated values are normal."""
        parts = self.parts
        table, t = cast("Lookup", parts.grid).integers, _reach(self.parameters["outside"])
        x = t * (2 * table / table[-1] - 1)
        a, b = x[:-1], x[1:]
        outer, inner = sp.special.ndtr(-t), sp.special.ndtr(b) - sp.special.ndtr(a)
        cut = 2 * ((1 + t * t) * outer - t * _density(t))
        up = (_density(a) - _density(b) - a * inner) / (b - a)
        odds = np.append(inner - up, outer) + np.append(outer, up)
        block = CodedBlock.of(size * odds, np.maximum(size * odds, 1.0), coder="fixed")
        head = 8.0 * _SEED.size + 8.0 * parts.scale.head(memoryview(b""), size)
        bits = CodedBits.of(block, head, size)
        return Expectation(
            squared_error=float(cut + _rounding_error(a, b).sum()),
            bias=self.parameters["outside"],
            bits_payload=bits.fixed,
            **bits.columns,
            bits_norms=head / max(1, size),
        )

    def write(self, state: State, x: Values, key: tuple[int, int]) -> tuple[bytes, int]:
        """The seed, then what is written of rotated values."""
        seed = key[1] & 0xFFFFFFFF
        body, flags = super().write(state, self.turned(x, seed), key)
        return _SEED.pack(seed) + body, flags

    def read(self, shared: bytes, body: memoryview, flags: int, size: int) -> Values:
        if shared or len(body) < _SEED.size:
            raise PayloadError("payload is too short for the seed of its rotation, or has shared bytes")
        values = super().read(shared, body[_SEED.size :], flags, size)
        return self.turned(values, _SEED.unpack_from(body)[0], back=True)

    def encode_part(self, state: State, values: ArrayLike, key: tuple[int, int], start: int) -> EncodedPart:
        """The part's blocks; the seed counts with the first part."""
        seed = key[1] & 0xFFFFFFFF
        part = super().encode_part(state, self.turned(self._values(state, values), seed, start=start), key, start)
        values = self.turned(part.values, seed, back=True, start=start)
        return dataclasses.replace(part, values=values, head=part.head + (0 if start else 8 * _SEED.size))
