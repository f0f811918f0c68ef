"""Coders turn symbols into bytes, with a code that both sides hold, one that is sent along, or none."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from gtrace.codecs.base import EncodedPart, Measured, coder_parameter, parameter
from gtrace.codecs.grids import LevelGrid, judged_alone
from gtrace.codecs.parts import Coder, Grid
from gtrace.coding.elias import EliasCode, EliasKind
from gtrace.coding.fixed import pack_fixed, unpack_fixed, width_for
from gtrace.coding.huffman import CodedBlock, decode_block, huffman_code, pack_lengths, tally, unpack_lengths
from gtrace.errors import PayloadError
from gtrace.kernels.symbols import mean_length
from gtrace.types import Scope, State

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from gtrace.sketch import MomentSketch

#: flag of a payload with fixed-width symbols although the codec's coder is another one
FLAG_FIXED = 1
_SHARED = struct.Struct("<HH")
#: number of shared bytes of a level codec before levels and lengths
SHARED_HEAD = _SHARED.size
_ELIAS: dict[str, EliasKind] = {"elias": "omega", "gamma": "gamma", "delta": "delta"}


@dataclass(frozen=True)
class SharedCode(Coder):
    """A code that both sides hold before the payload: Huffman (after a fit), Elias, or fixed width.

    The state holds ``lengths`` (uint8, the Huffman code's) after a fit has chosen one.
    """

    rank: ClassVar[int] = 2
    splits: ClassVar[bool] = True

    coder: str = parameter(
        "huffman",
        "how symbols become bits; elias is the omega code, as QSGD uses",
        choices=("huffman", "fixed", "elias", "gamma", "delta"),
    )
    scope: Scope = parameter(
        "tensor", "buckets run over one tensor or over the whole model", choices=("tensor", "model")
    )

    def elias(self, symbols: int) -> EliasCode | None:
        """The Elias code of ``symbols`` symbols, the middle one the shortest; None for another coder."""
        kind = _ELIAS.get(self.coder)
        return None if kind is None else EliasCode(kind, origin=(symbols - 1) // 2, symbols=symbols)

    @property
    def fixed_flag(self) -> int:
        return FLAG_FIXED if self.coder == "huffman" else 0

    def is_fixed(self, flags: int) -> bool:
        """Whether a payload's symbols are at fixed width.

        Raises:
            PayloadError: flags that no encoder writes.
        """
        if flags not in ((0, FLAG_FIXED) if self.coder == "huffman" else (0,)):
            raise PayloadError(f"payload has unknown flags {flags:#x}")
        return self.coder == "fixed" or flags == FLAG_FIXED

    def fixed_here(self, state: State) -> bool:
        """Whether :meth:`write` uses fixed width for any symbols."""
        return self.coder == "fixed" or (self.coder == "huffman" and "lengths" not in state.arrays)

    def fit(self, state: State, grid: LevelGrid, summary: MomentSketch) -> State:
        """Take a Huffman code if it saves more than it costs to send."""
        if self.coder != "huffman" or summary.quantized == 0:
            return state
        judged = judged_alone(grid.levels(state), grid.zero, summary)
        old = state.arrays.get("lengths")
        if old is not None and old.size != judged.lengths.size:
            # The number of fitted levels changed: the old code belongs to other symbols.
            kept_arrays = {name: value for name, value in state.arrays.items() if name != "lengths"}
            state, old = State(state.size, kept_arrays, state.shape), None
        _, coded, sent = judged.bits[:, 0].tolist()
        fixed = float(width_for(judged.lengths.size))
        kept = fixed if old is None else min(fixed, mean_length(old, judged.probabilities))
        return state.with_arrays(lengths=judged.lengths) if (kept - coded) * state.size > sent else state

    def shared(self, state: State, grid: LevelGrid) -> bytes:
        """Fitted levels (float32) and code lengths, empty if there are neither."""
        fitted, lengths = grid.fitted(state), state.arrays.get("lengths")
        if fitted is None and lengths is None:
            return b""
        sent = b"" if fitted is None else fitted.astype("<f4").tobytes()
        code = b"" if lengths is None else pack_lengths(lengths, int(lengths[-1]))
        return _SHARED.pack(len(sent) // 4, 0) + sent + code

    def heard(self, state: State, grid: LevelGrid, shared: bytes) -> State:
        if not shared:
            return state
        count = _SHARED.unpack_from(shared)[0] if len(shared) >= SHARED_HEAD else 0
        end = SHARED_HEAD + 4 * count
        if len(shared) < end:
            raise PayloadError("shared bytes are too short for the levels that they announce")
        if count:
            state = grid.with_fitted(state, np.frombuffer(shared, "<f4", count, SHARED_HEAD).astype(np.float32))
        code = shared[end:]
        if not code:
            return state
        lengths, size = unpack_lengths(code, grid.alphabet(state))
        if size != len(code) or not lengths.all():
            raise PayloadError("shared bytes go on after the code lengths, or leave a symbol without a code")
        return state.with_arrays(lengths=lengths)

    def write(self, symbols: NDArray[np.uint16], grid: LevelGrid, state: State) -> tuple[bytes, int]:
        alphabet = grid.alphabet(state)
        elias = self.elias(alphabet)
        if elias is not None:
            return elias.encode(symbols), 0
        lengths, width = state.arrays.get("lengths"), width_for(alphabet)
        if lengths is not None:
            code = huffman_code(lengths.tobytes())
            if 0 <= code.bits(symbols) < symbols.size * width:
                return code.encode(symbols), 0
        return pack_fixed(symbols, width), self.fixed_flag

    def read(self, data: memoryview, flags: int, size: int, grid: LevelGrid, state: State) -> NDArray[np.uint16]:
        alphabet = grid.alphabet(state)
        if self.is_fixed(flags):
            return unpack_fixed(data, size, width_for(alphabet), alphabet)
        elias = self.elias(alphabet)
        if elias is not None:
            return elias.decode(data, size).astype(np.uint16)
        lengths = state.arrays.get("lengths")
        if lengths is None:
            raise PayloadError("payload is Huffman coded, but the shared bytes hold no code")
        return huffman_code(lengths.tobytes()).decode(data, size)

    def bits(self, state: State, tallies: NDArray[np.int64]) -> int:
        """Bits of symbols with these counts, in the code of this state."""
        elias = self.elias(tallies.size)
        if elias is not None:
            return int(elias.expected_bits(tallies))
        lengths = state.arrays.get("lengths")
        if lengths is not None:
            return int(tallies @ lengths.astype(np.int64))
        return int(tallies.sum()) * width_for(tallies.size)

    def lengths(self, whole: EncodedPart) -> Measured:
        """Lengths for these counts; fixed width is sent if a Huffman code made for other data is longer."""
        block = CodedBlock.of(whole.tallies)
        sent = min(whole.coded, block.fixed) if self.coder == "huffman" else whole.coded
        return Measured(sent, block.fixed, block.entropy, block.huffman)

    def expected_bits(self, state: State, probabilities: NDArray[np.float64]) -> float:
        """Mean bits of a symbol in the code of this state."""
        elias = self.elias(probabilities.size)
        if elias is not None:
            return elias.expected_bits(probabilities)
        fixed, lengths = float(width_for(probabilities.size)), state.arrays.get("lengths")
        return fixed if lengths is None else min(fixed, mean_length(lengths, probabilities))


@dataclass(frozen=True)
class OwnCode(Coder):
    """A Huffman code made for the symbols and sent with them, unless fixed width is shorter."""

    splits: ClassVar[bool] = True

    #: flag of a payload that holds a code
    flag: int = 1

    coder: str = coder_parameter()

    def write(self, symbols: NDArray[np.uint16], grid: Grid, state: State) -> tuple[bytes, int]:
        block = CodedBlock.of(tally(symbols, grid.alphabet(state)), coder=self.coder)
        return block.encode(symbols), 0 if block.lengths is None else self.flag

    def read(self, data: memoryview, flags: int, size: int, grid: Grid, state: State) -> NDArray[np.uint16]:
        if flags & ~self.flag:
            raise PayloadError(f"payload has unknown flags {flags:#x}")
        return decode_block(data, size, grid.alphabet(state), coded=bool(flags))

    def count(self, symbols: NDArray[np.uint16], size: int, grid: Grid, state: State) -> EncodedPart:
        return EncodedPart(tallies=tally(symbols, grid.alphabet(state)))

    def lengths(self, whole: EncodedPart) -> Measured:
        block = CodedBlock.of(whole.tallies, coder=self.coder)
        return Measured(8.0 * block.size, block.fixed, block.entropy, block.huffman)


@dataclass(frozen=True)
class Plain(Coder):
    """Symbols uncoded, little-endian, in the bytes of their type."""

    splits: ClassVar[bool] = True

    layout: str = "<u2"

    def write(self, symbols: NDArray[Any], grid: Grid, state: State) -> tuple[bytes, int]:
        return symbols.astype(self.layout).tobytes(), 0

    def read(self, data: memoryview, flags: int, size: int, grid: Grid, state: State) -> NDArray[Any]:
        wanted = size * np.dtype(self.layout).itemsize
        if len(data) != wanted or flags:
            raise PayloadError(f"payload body has {len(data)} bytes; expected {wanted}")
        return np.frombuffer(data, self.layout).astype(np.dtype(self.layout).newbyteorder("="))

    def count(self, symbols: NDArray[Any], size: int, grid: Grid, state: State) -> EncodedPart:
        return EncodedPart(coded=8 * size * np.dtype(self.layout).itemsize)


@dataclass(frozen=True)
class Bit(Coder):
    """One bit a value, 1 for negative, the first value in the lowest bit; no bits for a tensor of zeros."""

    splits: ClassVar[bool] = True

    def write(self, symbols: NDArray[np.uint8], grid: Grid, state: State) -> tuple[bytes, int]:
        return symbols.tobytes(), 0

    def read(self, data: memoryview, flags: int, size: int, grid: Grid, state: State) -> NDArray[np.uint8]:
        bits = np.frombuffer(data, np.uint8)
        if flags or bits.size not in (0, -(-size // 8)):
            raise PayloadError(f"payload holds {bits.size} bytes of signs for {size} values")
        if bits.size and size % 8 and bits[-1] >> (size % 8):
            raise PayloadError("padding after the last sign is not zero")
        return bits

    def count(self, symbols: NDArray[np.uint8], size: int, grid: Grid, state: State) -> EncodedPart:
        return EncodedPart(coded=size if symbols.size else 0)
