"""Coders: how symbols become bytes, by a code that both sides hold, one that is sent along, or none."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from gtrace.codecs.base import coder_parameter, parameter
from gtrace.codecs.parts import Coder, FixedGrid, Measured, Word
from gtrace.coding import (
    CodedBlock,
    EliasCode,
    EliasKind,
    decode_block,
    huffman_code,
    mean_length,
    pack_fixed,
    pack_lengths,
    tally,
    unpack_fixed,
    unpack_lengths,
    width_for,
)
from gtrace.errors import PayloadError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from gtrace.types import State

#: flag of a payload whose symbols are fixed width although the codec's coder is another
FLAG_FIXED = 1
SHARED = struct.Struct("<HH")
#: bytes of a level codec's shared bytes ahead of levels and lengths
SHARED_HEAD = SHARED.size


@dataclass(frozen=True)
class SharedCode(Word):
    """A code that both sides hold before the payload: Huffman (adopted by a fit), an Elias code, or fixed width.

    The state holds ``lengths`` (uint8, the Huffman code's, once one is adopted).
    """

    coder: str = parameter(
        "huffman",
        "how symbols become bits; elias is the omega code, as in QSGD",
        choices=("huffman", "fixed", "elias", "gamma", "delta"),
    )

    @property
    def elias(self) -> EliasKind | None:
        """The Elias code of the symbols around the one for 0; None for another coder."""
        kinds: dict[str, EliasKind] = {"elias": "omega", "gamma": "gamma", "delta": "delta"}
        return kinds.get(self.coder)

    @property
    def fixed_flag(self) -> int:
        """Flag of symbols at fixed width."""
        return FLAG_FIXED if self.coder == "huffman" else 0

    def is_fixed(self, flags: int) -> bool:
        """Whether a payload's symbols are at fixed width."""
        return self.coder == "fixed" or flags == FLAG_FIXED

    def fixed_here(self, state: State) -> bool:
        """Whether :meth:`write` uses fixed width whatever the symbols are."""
        return self.coder == "fixed" or (self.coder == "huffman" and "lengths" not in state.arrays)

    def check_flags(self, flags: int) -> None:
        """Raise :class:`~gtrace.errors.PayloadError` for flags that no encoder writes."""
        if flags not in ((0, FLAG_FIXED) if self.coder == "huffman" else (0,)):
            raise PayloadError(f"payload has unknown flags {flags:#x}")

    def write(self, state: State, symbols: NDArray[np.uint16], alphabet: int) -> tuple[bytes, int]:
        """uint16[n] as bytes, and the envelope's flags."""
        if self.elias is not None:
            return elias_code(self.elias, alphabet).encode(symbols), 0
        lengths, width = state.arrays.get("lengths"), width_for(alphabet)
        if lengths is not None:
            code = huffman_code(lengths.tobytes())
            if 0 <= code.bits(symbols) < symbols.size * width:
                return code.encode(symbols), 0
        return pack_fixed(symbols, width), self.fixed_flag

    def read(self, state: State, data: memoryview, flags: int, count: int, alphabet: int) -> NDArray[np.uint16]:
        """Undo :meth:`write`: uint16[count].

        Raises:
            PayloadError: no such bytes.
        """
        if self.is_fixed(flags):
            return unpack_fixed(data, count, width_for(alphabet), alphabet)
        if self.elias is not None:
            return elias_code(self.elias, alphabet).decode(data, count).astype(np.uint16)
        lengths = state.arrays.get("lengths")
        if lengths is None:
            raise PayloadError("payload is Huffman coded, but the shared bytes hold no code")
        return huffman_code(lengths.tobytes()).decode(data, count)

    def bits(self, state: State, tallies: NDArray[np.int64]) -> int:
        """Bits of symbols that occur so often, in the code of this state."""
        if self.elias is not None:
            return int(tallies @ elias_code(self.elias, tallies.size).symbol_bits)
        lengths = state.arrays.get("lengths")
        if lengths is not None:
            return int(tallies @ lengths.astype(np.int64))
        return int(tallies.sum()) * width_for(tallies.size)

    def expected_bits(self, state: State, probabilities: NDArray[np.float64]) -> float:
        """Mean bits of a symbol in the code of this state."""
        if self.elias is not None:
            return elias_code(self.elias, probabilities.size).expected_bits(probabilities)
        fixed, lengths = float(width_for(probabilities.size)), state.arrays.get("lengths")
        return fixed if lengths is None else min(fixed, mean_length(lengths, probabilities))


def elias_code(kind: EliasKind, symbols: int) -> EliasCode:
    """The Elias code of so many symbols, the middle one the shortest."""
    return EliasCode(kind, origin=(symbols - 1) // 2, symbols=symbols)


def pack_shared(fitted: NDArray[np.float32] | None, lengths: NDArray[np.uint8] | None) -> bytes:
    """What a receiver must hold: fitted levels (float32) and code lengths; empty if there are neither."""
    if fitted is None and lengths is None:
        return b""
    sent = b"" if fitted is None else fitted.astype("<f4").tobytes()
    code = b"" if lengths is None else pack_lengths(lengths, int(lengths[-1]))
    return SHARED.pack(len(sent) // 4, 0) + sent + code


def unpack_levels(shared: bytes) -> tuple[NDArray[np.float32], bytes]:
    """The fitted levels of :func:`pack_shared`, none or more, and the bytes behind them.

    Raises:
        PayloadError: the bytes are too short.
    """
    if len(shared) < SHARED.size:
        raise PayloadError("shared bytes are too short")
    count, _ = SHARED.unpack_from(shared)
    end = SHARED.size + 4 * count
    if len(shared) < end:
        raise PayloadError("shared bytes are too short for the levels they announce")
    return np.frombuffer(shared, "<f4", count, SHARED.size).astype(np.float32), shared[end:]


def unpack_code(data: bytes, alphabet: int) -> NDArray[np.uint8]:
    """The code lengths of :func:`pack_shared`, uint8[alphabet].

    Raises:
        PayloadError: they are those of no code that leaves no symbol without one.
    """
    lengths, size = unpack_lengths(data, alphabet)
    if size != len(data) or not lengths.all():
        raise PayloadError("shared bytes go on after the code lengths, or leave a symbol without a code")
    return lengths


@dataclass(frozen=True)
class OwnCode(Coder):
    """A Huffman code that is made for the symbols and sent with them, unless fixed width is shorter."""

    #: flag of a payload that holds a code
    flag: int = 1

    coder: str = coder_parameter()

    def write(self, symbols: NDArray[np.uint16], grid: FixedGrid) -> tuple[bytes, int]:
        """A block of symbols, uint16[n]."""
        block = self._block(symbols, grid)
        return block.encode(symbols), 0 if block.lengths is None else self.flag

    def read(self, data: memoryview, flags: int, size: int, grid: FixedGrid) -> NDArray[np.uint16]:
        """Undo :meth:`write`."""
        if flags & ~self.flag:
            raise PayloadError(f"payload has unknown flags {flags:#x}")
        return decode_block(data, size, grid.alphabet, coded=bool(flags))

    def measure(self, symbols: NDArray[np.uint16], grid: FixedGrid) -> Measured:
        """From how often each symbol occurs."""
        block = self._block(symbols, grid)
        return Measured(8.0 * block.size, block.fixed, block.entropy, block.huffman)

    def _block(self, symbols: NDArray[np.uint16], grid: FixedGrid) -> CodedBlock:
        return CodedBlock.of(tally(symbols, grid.alphabet), coder=self.coder)


@dataclass(frozen=True)
class Plain(Coder):
    """Symbols as they are, little-endian, in the bytes of their type."""

    layout: str = "<u2"

    @property
    def splits(self) -> bool:
        """They do."""
        return True

    def write(self, symbols: NDArray[Any], grid: FixedGrid) -> tuple[bytes, int]:
        """The bytes of an array."""
        del grid
        return symbols.astype(self.layout).tobytes(), 0

    def read(self, data: memoryview, flags: int, size: int, grid: FixedGrid) -> NDArray[Any]:
        """Undo :meth:`write`."""
        del grid
        wanted = size * np.dtype(self.layout).itemsize
        if len(data) != wanted or flags:
            raise PayloadError(f"payload body of {len(data)} bytes where {wanted} were expected")
        return np.frombuffer(data, self.layout).astype(np.dtype(self.layout).newbyteorder("="))


@dataclass(frozen=True)
class Bit(Coder):
    """One bit a value, 1 for negative, the first value lowest; no bits at all for a tensor that has no signs."""

    @property
    def splits(self) -> bool:
        """They do."""
        return True

    def part_bits(self, coded: bytes, size: int) -> int:
        """One for each value."""
        return size if coded else 0

    def write(self, symbols: NDArray[np.uint8], grid: FixedGrid) -> tuple[bytes, int]:
        """Packed bits as they are."""
        del grid
        return symbols.tobytes(), 0

    def read(self, data: memoryview, flags: int, size: int, grid: FixedGrid) -> NDArray[np.uint8]:
        """Undo :meth:`write`."""
        del grid
        bits = np.frombuffer(data, np.uint8)
        if flags or bits.size not in (0, -(-size // 8)):
            raise PayloadError(f"payload holds {bits.size} bytes of signs for {size} values")
        if bits.size and size % 8 and bits[-1] >> (size % 8):
            raise PayloadError("padding after the last sign is not zero")
        return bits
