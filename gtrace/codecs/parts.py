"""The five words of gtrace: a method is a scale, a grid, a rounding, a memory and a coder.

Each part is a small frozen value. What it lists as :func:`~gtrace.codecs.base.parameter` is a parameter of every codec
that it is part of, with its help and range; its other fields are settings of a row, which no spec changes. The engine
(:mod:`gtrace.codecs.engine`) runs the parts, a method (:func:`~gtrace.codecs.engine.method`) names them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from gtrace.errors import PayloadError

if TYPE_CHECKING:
    import dataclasses
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from gtrace.codecs.chunked import TensorSums
    from gtrace.types import State

FLOAT32_MAX = np.finfo(np.float32).max


@dataclass(frozen=True)
class Word(ABC):  # noqa: B024 - the words below are abstract where they must be
    """One word of a method."""

    @property
    def unbiased(self) -> bool:
        """Whether these parameters keep the mean of what is decoded right, in a method that does so."""
        return True

    @property
    def deterministic(self) -> bool:
        """Whether these parameters need no randomness, in a method that may do without."""
        return True

    @classmethod
    def own_parameters(cls) -> tuple[dataclasses.Field[Any], ...]:
        """The fields that a spec can set."""
        return tuple(item for item in fields(cls) if "help" in item.metadata)


@dataclass(frozen=True)
class Scale(Word):
    """What values are divided by before they are rounded; here nothing, and nothing is sent."""

    @property
    def whole_tensor(self) -> bool:
        """Whether one scale belongs to all values and is no norm of a sketch."""
        return False

    def over(self, size: int) -> int:
        """How many of ``size`` values share a scale, at least 1."""
        return max(1, size)

    def measure(self, x: NDArray[np.float32], state: State) -> NDArray[np.float32]:
        """The scales of finite float32[n]; a part of a tensor finds that of the whole in the state."""
        del x, state
        return np.empty(0, np.float32)

    def whole(self, sums: TensorSums) -> NDArray[np.float32] | None:
        """The scale of all parts of a tensor, float32[1]; None if parts need not know one."""
        del sums
        return None

    def head(self, body: memoryview, size: int) -> int:
        """How many bytes at the front of a body are scales."""
        del body, size
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


@dataclass(frozen=True)
class Grid(Word):
    """Which values can be sent, in units of the scale."""

    def check(self, name: str) -> None:
        """Check parameters against each other, for the codec of this name.

        Raises:
            UsageError: they contradict each other.
        """
        del name


@dataclass(frozen=True)
class FixedGrid(Grid):
    """A grid whose symbols mean the same for every tensor and step."""

    @property
    def mark(self) -> int:
        """Flags of the envelope by which a decoder knows payloads of a grid with other settings."""
        return 0

    @property
    def alphabet(self) -> int:
        """How many symbols there are."""
        return 1 << 16

    @abstractmethod
    def nearest(self, x: NDArray[np.float32], scales: NDArray[np.float32], bucket: int, key: tuple[int, int]) -> Any:
        """The symbols of finite float32[n]; only what draws values at random uses the key."""

    @abstractmethod
    def values(self, symbols: Any, scales: NDArray[np.float32], bucket: int, size: int) -> NDArray[np.float32]:
        """What symbols stand for: float32[size]."""


@dataclass(frozen=True)
class Rounding(Word):
    """How values become symbols of the grid."""

    @abstractmethod
    def symbols(
        self,
        grid: Any,
        x: NDArray[np.float32],
        scales: NDArray[np.float32],
        bucket: int,
        key: tuple[int, int],
        start: int,
    ) -> Any:
        """What is sent of finite float32[n].

        Args:
            grid: of a kind that this rounding goes with.
            x: the values.
            scales: what :meth:`Scale.measure` returned.
            bucket: how many values share a scale.
            key: two 64-bit words.
            start: the place of the first value in its tensor, from which random numbers are counted.
        """


@dataclass(frozen=True)
class Nearest(Rounding):
    """To the value of a fixed grid that the grid calls nearest."""

    def symbols(
        self,
        grid: FixedGrid,
        x: NDArray[np.float32],
        scales: NDArray[np.float32],
        bucket: int,
        key: tuple[int, int],
        start: int,
    ) -> Any:
        """As the grid has it."""
        del start
        return grid.nearest(x, scales, bucket, key)


class Measured(NamedTuple):
    """Length of coded symbols, in bits.

    Attributes:
        sent: as the coder sends them.
        fixed: at fixed width.
        entropy: at the entropy of the symbols.
        huffman: in a Huffman code made for them, its lengths included.
    """

    sent: float
    fixed: float
    entropy: float
    huffman: float


@dataclass(frozen=True)
class Coder(Word):
    """How symbols become bytes."""

    @property
    def splits(self) -> bool:
        """Whether a part of a tensor is coded as it is in the whole tensor, in as many bits."""
        return False

    @abstractmethod
    def write(self, symbols: Any, grid: FixedGrid) -> tuple[bytes, int]:
        """The bytes, and flags for the envelope."""

    @abstractmethod
    def read(self, data: memoryview, flags: int, size: int, grid: FixedGrid) -> Any:
        """Undo :meth:`write` for a tensor of ``size`` values.

        Raises:
            PayloadError: bytes or flags that :meth:`write` never returns.
        """

    def part_bits(self, coded: bytes, size: int) -> int:
        """Bits of the symbols of a part of ``size`` values, without padding."""
        del size
        return 8 * len(coded)

    def measure(self, symbols: Any, grid: FixedGrid) -> Measured:
        """How long the symbols are; the same with every coder unless the coder says otherwise."""
        bits = 8.0 * len(self.write(symbols, grid)[0])
        return Measured(bits, bits, bits, bits)


@dataclass(frozen=True)
class Memory(Word):
    """What a worker keeps from step to step; here nothing."""

    @property
    def keeps(self) -> bool:
        """Whether anything is kept."""
        return False

    def start(self, size: int) -> dict[str, NDArray[np.float32]]:
        """The arrays before the first step."""
        del size
        return {}

    def given(self, arrays: Mapping[str, NDArray[Any]], x: NDArray[np.float32]) -> NDArray[np.float32]:
        """What is encoded instead of the gradient, float32[n]."""
        del arrays
        return x

    def after(self, given: NDArray[np.float32], decoded: NDArray[np.float32]) -> dict[str, NDArray[np.float32]]:
        """The arrays of the next step, after ``given`` arrived as ``decoded``."""
        del given, decoded
        return {}
