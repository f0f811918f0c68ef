"""The five words of gtrace: a method is a scale, a grid, a rounding, a memory and a coder.

Each part is a small frozen value. What it lists as :func:`~gtrace.codecs.base.parameter` is a parameter of every codec
that it is part of, with its help and range; its other fields are settings of a row, which no spec changes. The words
below are what the engine (:mod:`gtrace.codecs.engine`) asks of a part; a part's own file says only what it does.
"""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, cast

import numpy as np

from gtrace.codecs.base import Measured
from gtrace.errors import PayloadError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from gtrace.codecs.base import TensorSums
    from gtrace.sketch import MomentSketch
    from gtrace.types import Expectation, State, SummarySpec

FLOAT32_MAX = np.finfo(np.float32).max
_NONE = np.empty(0, np.float32)


class Scaled(NamedTuple):
    """Values with their scales, on the way to a grid.

    Attributes:
        x: float32[m], finite, to be rounded.
        scales: float32, as :meth:`Scale.measure` returns them.
        bucket: how many values share a scale.
        tail: float32, the values after ``x``, which are sent as they are.
    """

    x: NDArray[np.float32]
    scales: NDArray[np.float32]
    bucket: int
    tail: NDArray[np.float32] = _NONE


class Opened(NamedTuple):
    """A payload with its symbols still coded.

    Attributes:
        state: what the receiver knows.
        size: how many values were rounded.
        scales: of their buckets.
        bucket: how many values share a scale.
        tail: float32, the values that were sent as they are.
        coded: the symbols.
    """

    state: State
    size: int
    scales: NDArray[np.float32]
    bucket: int
    tail: NDArray[np.float32]
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

    @classmethod
    def own_parameters(cls) -> tuple[dataclasses.Field[Any], ...]:
        """The fields that a spec can set."""
        return tuple(item for item in fields(cls) if "help" in item.metadata)


@dataclass(frozen=True)
class Memory(Word):
    """What a worker keeps from step to step; here nothing."""

    #: whether anything is kept
    keeps: ClassVar[bool] = False

    def start(self, size: int) -> dict[str, NDArray[Any]]:
        """The arrays before the first step."""
        return {}

    def given(self, arrays: Mapping[str, NDArray[Any]], x: NDArray[np.float32]) -> NDArray[np.float32]:
        """What is encoded instead of the gradient, float32[n]."""
        return x

    def after(
        self,
        arrays: Mapping[str, NDArray[Any]],
        x: NDArray[np.float32],
        given: NDArray[np.float32],
        decoded: NDArray[np.float32],
    ) -> dict[str, NDArray[Any]]:
        """The arrays of the next step, after ``given`` was sent instead of ``x`` and arrived as ``decoded``."""
        return {}


@dataclass(frozen=True)
class Scale(Word):
    """What values are divided by before they are rounded; here nothing, and nothing is sent."""

    rank: ClassVar[int] = 1
    #: the scales of a body that holds none
    absent: ClassVar[NDArray[np.float32]] = _NONE

    @property
    def whole_tensor(self) -> bool:
        """Whether one scale belongs to all values and is no norm of a sketch."""
        return False

    @property
    def part_multiple(self) -> int | None:
        """Parts of a tensor must be a multiple of this length; None if a scale needs the whole tensor."""
        return 1

    def over(self, size: int) -> int:
        """How many of ``size`` values share a scale, at least 1."""
        return max(1, size)

    def measure(self, x: NDArray[np.float32], state: State) -> NDArray[np.float32]:
        """The scales of finite float32[n]; a part of a tensor finds that of the whole in the state."""
        return _NONE

    def whole(self, sums: TensorSums) -> NDArray[np.float32] | None:
        """The scale of all parts of a tensor, float32[1]; None if parts need not know one."""
        return None

    def cut(self, x: NDArray[np.float32], state: State) -> Scaled:
        """Finite float32[n] with its scales."""
        return Scaled(x, self.measure(x, state), self.over(x.size))

    def head(self, body: memoryview, size: int) -> int:
        """How many bytes at the front of a body are scales."""
        return 0

    def pack(self, scales: NDArray[np.float32]) -> bytes:
        """The scales as they are sent."""
        return scales.astype("<f4").tobytes()

    def read(self, data: memoryview) -> NDArray[np.float32]:
        """Undo :meth:`pack`.

        Raises:
            PayloadError: a scale that no encoder writes.
        """
        scales = np.frombuffer(data, "<f4").astype(np.float32)
        if not (np.isfinite(scales).all() and (scales >= 0).all()):
            raise PayloadError("payload holds a norm that is negative or not finite")
        return scales

    def quantized(self, size: int) -> int:
        """How many of ``size`` values are rounded; the rest is sent as it is."""
        return size

    def open(self, state: State, body: memoryview, size: int) -> Opened:
        """Take scales and tail from the body of a payload of ``size`` values.

        Raises:
            PayloadError: the body is too short, or holds scales that no encoder writes.
        """
        split = self.quantized(size)
        end = self.head(body, split)
        head = end + 4 * (size - split)
        if len(body) < head:
            raise PayloadError(f"payload body of {len(body)} bytes is shorter than its {head} bytes of norms")
        tail = np.frombuffer(body[end:head], "<f4").astype(np.float32) if split < size else _NONE
        scales = self.read(body[:end]) if end else self.absent
        return Opened(state, split, scales, self.over(split), tail, body[head:])


@dataclass(frozen=True)
class Grid(Word):
    """Which values can be sent, in units of the scale."""

    rank: ClassVar[int] = 3
    #: whether the grid, or the code of its symbols, follows the data
    fits: ClassVar[bool] = False

    def check(self, name: str) -> None:
        """Check parameters against each other, for the codec of this name.

        Raises:
            UsageError: they contradict each other.
        """

    @property
    def mark(self) -> int:
        """Flags of the envelope by which a decoder knows payloads of a grid with other settings."""
        return 0

    def alphabet(self, state: State) -> int:
        """How many symbols there are."""
        return 1 << 16

    def fit(self, state: State, summary: MomentSketch) -> State:
        """Adapt the grid to a summary; a fixed one stays as it is."""
        return state

    def needs(self, parts: Parts) -> SummarySpec | None:
        """Which summary fits and closed forms want; None if there are none."""
        return None

    def expects(self, parts: Parts) -> bool:
        """Whether error and bits have closed forms with these other parts."""
        return False

    def expect(self, parts: Parts, state: State, sketch: MomentSketch) -> Expectation:
        """The closed forms, see :meth:`gtrace.codecs.Codec.expect`."""
        raise NotImplementedError

    def weighted_error(self, parts: Parts, state: State, sketch: MomentSketch, weighted: MomentSketch) -> float:
        """See :meth:`gtrace.codecs.Codec.weighted_error`."""
        return self.expect(parts, state, weighted).squared_error


@dataclass(frozen=True)
class FixedGrid(Grid):
    """A grid whose symbols mean the same for every tensor and step."""

    @abstractmethod
    def nearest(self, state: State, v: Scaled, key: tuple[int, int]) -> Any:
        """The symbols of values; only what draws values at random uses the key."""

    @abstractmethod
    def values(self, symbols: Any, scales: NDArray[np.float32], bucket: int, size: int) -> NDArray[np.float32]:
        """What symbols mean: float32[size]."""


@dataclass(frozen=True)
class Coder(Word):
    """How symbols become bytes."""

    rank: ClassVar[int] = 5

    #: whether a part of a tensor is coded as it is in the whole tensor
    splits: ClassVar[bool] = False

    def fit(self, state: State, grid: Any, summary: MomentSketch) -> State:
        """Adopt a code that a receiver will hold."""
        return state

    def shared(self, state: State, grid: Any) -> bytes:
        """What a receiver must hold of the grid and the code."""
        return b""

    def heard(self, state: State, grid: Any, shared: bytes) -> State:
        """A receiver's state with what :meth:`shared` says.

        Raises:
            PayloadError: bytes that are not this codec's.
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

    def count(self, symbols: Any, size: int, grid: Any, state: State) -> tuple[int, NDArray[np.int64] | None]:
        """Bits of the symbols of ``size`` values, and how often each occurs, if that says how long they are."""
        return 8 * len(self.write(symbols, grid, state)[0]), None

    def lengths(self, coded: int, tallies: NDArray[np.int64] | None) -> Measured:
        """How long symbols of these :meth:`count` are; without tallies the same with every coder."""
        bits = 8.0 * -(-coded // 8)
        return Measured(bits, bits, bits, bits)

    def measure(self, symbols: Any, size: int, grid: Any, state: State) -> Measured:
        """How long the symbols of ``size`` values are."""
        return self.lengths(*self.count(symbols, size, grid, state))


@dataclass(frozen=True)
class Rounding(Word):
    """How values become symbols of the grid; a rounding whose kernel does several steps at once overrides those."""

    rank: ClassVar[int] = 4

    def symbols(self, grid: Any, state: State, v: Scaled, key: tuple[int, int], start: int = 0) -> Any:
        """What is sent of values whose first one is number ``start`` of its tensor."""
        raise NotImplementedError

    def write(self, parts: Parts, state: State, v: Scaled, key: tuple[int, int]) -> tuple[bytes, int]:
        """The coded symbols, and flags for the envelope."""
        return parts.coder.write(self.symbols(parts.grid, state, v, key), parts.grid, state)

    def read(self, parts: Parts, found: Opened, flags: int) -> NDArray[np.float32]:
        """Undo :meth:`write`: all values, float32."""
        symbols = parts.coder.read(found.coded, flags, found.size, parts.grid, found.state)
        return cast("FixedGrid", parts.grid).values(symbols, found.scales, found.bucket, found.size)

    def simulate(
        self, parts: Parts, state: State, v: Scaled, key: tuple[int, int]
    ) -> tuple[NDArray[np.float32], Measured]:
        """What :meth:`read` makes of :meth:`write`, and how long that is."""
        symbols = self.symbols(parts.grid, state, v, key)
        decoded = cast("FixedGrid", parts.grid).values(symbols, v.scales, v.bucket, v.x.size)
        return decoded, parts.coder.measure(symbols, v.x.size, parts.grid, state)


@dataclass(frozen=True)
class Nearest(Rounding):
    """To the value of a fixed grid that the grid calls nearest."""

    def symbols(self, grid: FixedGrid, state: State, v: Scaled, key: tuple[int, int], start: int = 0) -> Any:
        """As the grid has it."""
        return grid.nearest(state, v, key)


@dataclass(frozen=True)
class Parts:
    """A method: one of each word. What is not named is nothing.

    Which scales, grids, roundings and coders go together is up to the row.
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
        """The same parts with the parameters of one codec."""
        made = {
            word: dataclasses.replace(part, **{item.name: getattr(codec, item.name) for item in part.own_parameters()})
            for word, part in self.each.items()
        }
        return Parts(**made)  # type: ignore[arg-type]
