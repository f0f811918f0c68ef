"""The five words of gtrace: a method is a scale, a grid, a rounding, a memory and a coder.

Each part is a small frozen value. Fields declared with :func:`~gtrace.codecs.base.parameter` are parameters of every
codec with this part, with help and range; other fields are settings of a row, which no spec changes. The classes below
are the protocol between a part and the engine (:mod:`gtrace.codecs.engine`).
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeAlias

import numpy as np

from gtrace.codecs.base import EncodedPart, Measured, parameter_fields
from gtrace.coding.fixed import read_floats
from gtrace.errors import PayloadError
from gtrace.kernels.norms import GIVEN

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from numpy.typing import NDArray

    from gtrace.buckets import TensorSums
    from gtrace.codecs.base import Pieces
    from gtrace.sketch import MomentSketch
    from gtrace.types import Expectation, State, SummarySpec

    #: float32[n], and arrays by name
    Values: TypeAlias = NDArray[np.float32]
    Arrays: TypeAlias = Mapping[str, NDArray[Any]]

FLOAT32_MAX = np.finfo(np.float32).max
_NONE, _NO_CODES = np.empty(0, np.float32), np.empty(0, np.uint16)


def zeros(size: int, kind: type[np.generic] = np.float32) -> NDArray[Any]:
    """Zeros that are not to be written, and take no memory: a tensor in pieces never asks for all of them."""
    return np.broadcast_to(np.zeros((), kind), size)


class Scaled(NamedTuple):
    """Values with their scales, before rounding.

    Attributes:
        x: float32[m] to be rounded; finite, unless ``norm`` is to be taken.
        scales: float32, from :meth:`Scale.measure`.
        bucket: number of values per scale.
        tail: float32, the values after ``x``, which are sent exactly.
        norm: of kernels.norms: the rounding fills ``scales`` with it and checks that ``x`` is finite; GIVEN: they are
            there.
        codes: uint16[m], if the scale had to round the values already.
    """

    x: Values
    scales: Values
    bucket: int
    tail: Values = _NONE
    norm: int = GIVEN
    codes: NDArray[np.uint16] = _NO_CODES

    @property
    def all(self) -> Values:
        """Those to be rounded and those after them, float32."""
        return np.concatenate([self.x, self.tail])


class Opened(NamedTuple):
    """A payload with its symbols still coded.

    Attributes:
        state: the receiver's state.
        size: number of rounded values.
        scales: scales of their buckets.
        bucket: number of values per scale.
        tail: float32, the values that were sent exactly.
        coded: the symbols.
    """

    state: State
    size: int
    scales: Values
    bucket: int
    tail: Values
    coded: memoryview


@dataclass(frozen=True)
class Word:
    """One word of a method."""

    #: the order in which the parameters of a codec's parts are listed
    rank: ClassVar[int] = 0

    @property
    def unbiased(self) -> bool:
        """Whether the mean of what is decoded is right."""
        return True

    @property
    def deterministic(self) -> bool:
        """Whether no randomness is needed, except for coins of exact zeros."""
        return True


@dataclass(frozen=True)
class Memory(Word):
    """What a worker keeps from step to step; this class keeps nothing."""

    #: names of arrays, float32[n], that are zero before the first step
    zeros: ClassVar[tuple[str, ...]] = ()

    @property
    def keeps(self) -> bool:
        """Whether anything is kept."""
        return type(self) is not Memory

    @property
    def unbiased(self) -> bool:
        """Only without a memory: with one the gradient is not what is encoded."""
        return not self.keeps

    @property
    def part_multiple(self) -> int:
        """Parts of a tensor must be a multiple of this length."""
        return 1

    def whole(self, sums: Callable[[], TensorSums]) -> Arrays:
        """What parts of a tensor need to know of it, from the sums of its values."""
        return {}

    def start(self, size: int) -> Arrays:
        """The arrays before the first step."""
        return {name: zeros(size) for name in self.zeros}

    def given(self, arrays: Arrays, x: Values) -> Values:
        """The values to encode instead of the gradient, float32[n]."""
        return x

    def after(self, arrays: Arrays, x: Values, given: Values, decoded: Values) -> Arrays:
        """The arrays of the next step, after the values of ``given`` for ``x`` arrived as ``decoded``."""
        return {}

    def received(self, arrays: Arrays, values: Values) -> tuple[Values, Arrays]:
        """What a receiver ends with after a payload of these values, float32[n], and what it keeps.

        A receiver's ``arrays`` are those that it kept last, none at first. A sender's hold the same, so it knows what
        arrives without asking.
        """
        return values, {}

    def inside(self, arrays: Arrays, received: Values) -> Values:
        """Undo :meth:`received` with a sender's arrays: the values of the payload, up to rounding."""
        return received


@dataclass(frozen=True)
class Scale(Word):
    """The divisor of values before rounding; this class has none, and sends nothing."""

    rank: ClassVar[int] = 1
    #: the scales of a body that holds none
    absent: ClassVar[Values] = _NONE
    #: the parameter that is the number of values per scale; all share one if there is none
    per: ClassVar[str] = ""
    #: bytes of one scale in a body
    width: ClassVar[int] = 0

    @property
    def checks(self) -> bool:
        """Whether a late :meth:`cut` takes any values, because the rounding takes their norms and checks them."""
        return False

    @property
    def whole_tensor(self) -> bool:
        """Whether all values share one scale that is not a norm in a sketch."""
        return False

    @property
    def part_multiple(self) -> int | None:
        """Parts of a tensor must be a multiple of this length; None if a scale needs the whole tensor."""
        return getattr(self, self.per) if self.per else 1

    @property
    def shares(self) -> bool:
        """Whether workers can take the largest of their scales, so that codes mean the same to all."""
        return False

    def over(self, size: int) -> int:
        """Number of values that share a scale, at least 1, of ``size``."""
        shared: int | None = getattr(self, self.per) if self.per else None
        return shared or max(1, size)

    def measure(self, x: Values) -> Values:
        """The scales of finite float32[n]."""
        return _NONE

    def scales(self, x: Values, state: State) -> Values:
        """The scales of finite float32[n]; of a part of a tensor, the whole tensor's scale, which the state has."""
        whole = state.arrays.get("scale")
        return self.measure(x) if whole is None else whole

    def whole(self, size: int, parts: Callable[[], Iterator[Values]], sums: Callable[[], TensorSums]) -> Arrays:
        """What parts of a tensor need to know of it; ``scale``, float32, is the scale of all of them.

        Args:
            size: elements of the tensor.
            parts: gives its values in parts, float32 each, in a pass of its own.
            sums: of its values.
        """
        return {}

    def cut(self, x: Values, state: State, *, late: bool = False) -> Scaled:
        """Finite float32[n] with its scales; ``late``: the rounding may fill them in, see :attr:`checks`."""
        return Scaled(x, self.scales(x, state), self.over(x.size))

    def head(self, body: memoryview, size: int) -> int:
        """Number of bytes of scales at the start of a body."""
        return self.width * -(-size // self.over(size))

    def pack(self, scales: Values) -> bytes:
        """The scales as they are sent."""
        return scales.astype("<f4").tobytes()

    def read(self, data: memoryview) -> Values:
        """Undo :meth:`pack`.

        Raises:
            PayloadError: a scale that encoders never write.
        """
        return read_floats(data, 0)

    def quantized(self, size: int) -> int:
        """Number of ``size`` values that are rounded; the rest is sent exactly."""
        return size

    def open(self, state: State, body: memoryview, size: int) -> Opened:
        """Take scales and tail from the body of a payload of ``size`` values.

        Raises:
            PayloadError: the body is too short, or holds scales that encoders never write.
        """
        split = self.quantized(size)
        end = self.head(body, split)
        head = end + 4 * (size - split)
        if len(body) < head:
            raise PayloadError(f"payload body of {len(body)} bytes is shorter than its {head} bytes of norms")
        tail = read_floats(body[end:head]) if split < size else _NONE
        scales = self.read(body[:end]) if end else self.absent
        return Opened(state, split, scales, self.over(split), tail, body[head:])


@dataclass(frozen=True)
class Grid(Word):
    """The values that can be sent, in units of the scale."""

    rank: ClassVar[int] = 3
    #: whether the grid, or the code of its symbols, follows the data
    fits: ClassVar[bool] = False

    def check(self, name: str) -> None:
        """Check parameters against each other, for the codec of this name.

        Raises:
            UsageError: they contradict each other.
        """

    @property
    def part_multiple(self) -> int | None:
        """Parts of a tensor must be a multiple of this length; None if a value's symbol depends on all others."""
        return 1

    @property
    def mark(self) -> int:
        """Flags of the envelope by which a decoder recognizes payloads of a grid with other settings."""
        return 0

    @property
    def integers(self) -> NDArray[np.int64] | None:
        """Integers that symbols mean and that add up over workers, int64[m]; None if sums mean nothing.

        They ascend from 0 to g; k means 2 k / g - 1 in units of the scale.
        """
        return None

    def alphabet(self, state: State) -> int:
        """Number of symbols."""
        return 1 << 16

    def fit(self, state: State, summary: MomentSketch) -> State:
        """Adapt the grid to a summary; a fixed one stays as it is."""
        return state

    def needs(self, parts: Parts) -> SummarySpec | None:
        """The summary that fits and closed forms use; None if there are none."""
        return None

    def expects(self, parts: Parts) -> bool:
        """Whether error and bits have closed forms with these other parts."""
        has_forms = type(self).expect is not Grid.expect and self.needs(parts) is not None
        return has_forms and not parts.memory.keeps

    def expect(self, parts: Parts, state: State, sketch: MomentSketch) -> Expectation:
        """The closed forms, see :meth:`gtrace.codecs.Codec.expect`."""
        raise NotImplementedError

    def weighted_error(self, parts: Parts, state: State, sketch: MomentSketch, weighted: MomentSketch) -> float:
        """See :meth:`gtrace.codecs.Codec.weighted_error`."""
        return self.expect(parts, state, weighted).squared_error

    def nearest(self, state: State, v: Scaled, key: tuple[int, int]) -> Any:
        """The symbols of values, of a grid in which they mean the same at every step; only random grids use the key."""
        raise NotImplementedError

    def values(self, symbols: Any, scales: Values, bucket: int, size: int) -> Values:
        """The values of such symbols: float32[size]."""
        raise NotImplementedError


@dataclass(frozen=True)
class Coder(Word):
    """Turns symbols into bytes."""

    rank: ClassVar[int] = 5

    #: whether a part of a tensor gets the same code as in the whole tensor
    splits: ClassVar[bool] = False

    def fit(self, state: State, grid: Any, summary: MomentSketch) -> State:
        """Take a code that a receiver will hold."""
        return state

    def shared(self, state: State, grid: Any) -> bytes:
        """What a receiver must hold about the grid and the code."""
        return b""

    def heard(self, state: State, grid: Any, shared: bytes) -> State:
        """A receiver's state with the contents of :meth:`shared`.

        Raises:
            PayloadError: the bytes do not belong to this codec.
        """
        return state

    def write(self, symbols: Any, grid: Any, state: State) -> tuple[bytes, int]:
        """The bytes, and flags for the envelope."""
        raise NotImplementedError

    def read(self, data: memoryview, flags: int, size: int, grid: Any, state: State) -> Any:
        """Undo :meth:`write` for a tensor of ``size`` values.

        Raises:
            PayloadError: bytes or flags that :meth:`write` never returns.
        """
        raise NotImplementedError

    def count(self, symbols: Any, size: int, grid: Any, state: State) -> EncodedPart:
        """The symbols of ``size`` values, without those: their bits and the count of each, or what lengths follow."""
        return EncodedPart(coded=8 * len(self.write(symbols, grid, state)[0]))

    def lengths(self, whole: EncodedPart) -> Measured:
        """Length of the symbols of all parts; without tallies the same with every coder."""
        bits = 8.0 * -(-whole.coded // 8)
        return Measured(bits, bits, bits, bits)


@dataclass(frozen=True)
class Rounding(Word):
    """Turns values into symbols of the grid; a rounding with a kernel for several steps at once overrides those."""

    rank: ClassVar[int] = 4

    def symbols(self, grid: Any, state: State, v: Scaled, key: tuple[int, int], start: int = 0) -> Any:
        """The symbols of values, the grid's nearest ones by default; the first is value ``start`` of its tensor."""
        return grid.nearest(state, v, key)

    def prepare(self, parts: Parts, state: State, pieces: Pieces, key: tuple[int, int]) -> State:
        """See :meth:`gtrace.codecs.Codec.prepare`; the pieces' values are those that are encoded."""
        return state

    def part(self, state: State, start: int) -> EncodedPart | None:
        """A part of a tensor of which :meth:`prepare` found all symbols."""
        return None

    def write(self, parts: Parts, state: State, v: Scaled, key: tuple[int, int]) -> tuple[bytes, int]:
        """The coded symbols, and flags for the envelope."""
        return parts.coder.write(self.symbols(parts.grid, state, v, key), parts.grid, state)

    def read(self, parts: Parts, found: Opened, flags: int) -> Values:
        """Undo :meth:`write`: all values, float32."""
        symbols = parts.coder.read(found.coded, flags, found.size, parts.grid, found.state)
        return parts.grid.values(symbols, found.scales, found.bucket, found.size)

    def simulate(self, parts: Parts, state: State, v: Scaled, key: tuple[int, int], start: int = 0) -> EncodedPart:
        """The result of :meth:`read` after :meth:`write`, and what the symbols take; value ``start`` is the first."""
        symbols = self.symbols(parts.grid, state, v, key, start)
        decoded = parts.grid.values(symbols, v.scales, v.bucket, v.x.size)
        return dataclasses.replace(parts.coder.count(symbols, v.x.size, parts.grid, state), values=decoded)


@dataclass(frozen=True)
class Nearest(Rounding):
    """Round to the nearest value of a fixed grid."""


def common_multiple(*parts: Any) -> int | None:
    """The least multiple of each part's ``part_multiple``; None if one of them needs the whole tensor."""
    each = [part.part_multiple for part in parts]
    return None if None in each else math.lcm(*each)


@dataclass(frozen=True)
class Parts:
    """A method: one part for each word. A part that is not named does nothing.

    The row decides which scales, grids, roundings and coders go together.
    """

    memory: Memory = field(default_factory=Memory)
    scale: Scale = field(default_factory=Scale)
    grid: Grid = field(default_factory=Grid)
    rounding: Rounding = field(default_factory=Rounding)
    coder: Coder = field(default_factory=Coder)

    @property
    def each(self) -> dict[str, Word]:
        """Word -> part, in the order in which their parameters are listed."""
        named = {item.name: getattr(self, item.name) for item in fields(self)}
        return dict(sorted(named.items(), key=lambda item: item[1].rank))

    def all(self, fact: str) -> bool:
        """Whether a fact holds for every part."""
        return all(getattr(part, fact) for part in self.each.values())

    def of(self, codec: object) -> Parts:
        """The same parts with a codec's parameters."""
        made = {
            word: dataclasses.replace(part, **{item.name: getattr(codec, item.name) for item in parameter_fields(part)})
            for word, part in self.each.items()
        }
        return Parts(**made)  # type: ignore[arg-type]
