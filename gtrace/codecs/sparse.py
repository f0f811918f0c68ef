"""Methods that send only some values: which of them, and how positions and values become bytes."""

from __future__ import annotations

import dataclasses
import math
import struct
from abc import abstractmethod
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, cast

import numpy as np
import scipy as sp

from gtrace.buckets import Blocks, TensorSums
from gtrace.codecs.base import CodedBits, EncodedPart, Measured, coder_parameter, parameter
from gtrace.codecs.engine import Composed, method
from gtrace.codecs.memory import UNITS, Residual, saturating
from gtrace.codecs.parts import FLOAT32_MAX, Coder, Grid, Memory, Nearest, Parts
from gtrace.codecs.spec import codec
from gtrace.coding.envelope import ENVELOPE_BYTES, open_envelope, seal
from gtrace.coding.fixed import fixed_size, read_floats, width_for
from gtrace.coding.huffman import CodedBlock, Floats, decode_floats, expected_floats
from gtrace.coding.sparse import decode_positions, decode_sparse, encode_positions, pack_positions, unpack_positions
from gtrace.errors import PayloadError, UsageError
from gtrace.kernels import compare as _compare
from gtrace.kernels import elementwise as _elementwise
from gtrace.kernels.norms import BLOCK, power_sum
from gtrace.types import Expectation, Key, State, SummarySpec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from numpy.typing import NDArray

    from gtrace.codecs.base import Codec, Pieces
    from gtrace.codecs.parts import Arrays, Opened, Scaled, Values
    from gtrace.sketch import MomentSketch

_MAGNITUDE = np.uint32(0x7FFFFFFF)
#: the magnitude of the smallest number above 0
_LEAST = np.uint32(1)
#: the length of positions, or a seed
_NUMBER = struct.Struct("<I")
#: the number of values, the length of their positions, and the flags of their payload
_INNER = struct.Struct("<IIH")
_SCALE = struct.Struct("<f")
#: flag of a payload whose values are coded
_CODED = 1
#: the ratio of dgc in the first stage of the warm-up, and the divisor from stage to stage
_FIRST, _STAGES = 0.25, 4
#: values drawn at random below which their entropy is clearly less than that of all
_FEW = 1 << 7
_POSITIONS = """The positions, as gaps in the shortest of several codes (coder=gaps) or in ceil(log2 n) bits each
(coder=fixed); then the values in their order: float32, by coder=gaps with the exponents in a Huffman code if that is
shorter."""
_TIES = "of equal magnitudes the first in the tensor are sent, so that their number is always the same"


class Kept(NamedTuple):
    """The values that a sparsifier sends.

    Attributes:
        positions: int64[k], ascending.
        values: float32[k].
        size: values of the tensor.
        head: what is sent besides: the seed of random positions, or the magnitude of all values.
        factor: what the receiver multiplies values by.
    """

    positions: NDArray[np.int64]
    values: Values
    size: int
    head: bytes = b""
    factor: float = 1.0

    @property
    def arrived(self) -> Values:
        """float32[k], the values as they arrive."""
        if self.factor == 1:
            return self.values
        with np.errstate(over="ignore"):
            return np.clip(self.values * np.float32(self.factor), -FLOAT32_MAX, FLOAT32_MAX)

    @classmethod
    def of(cls, pieces: Pieces, size: int, found: Callable[[Values, int], NDArray[np.int64]]) -> Kept:
        """The values of a tensor in pieces at the positions that are found in each, given values and its start."""
        start, places, values = 0, [np.empty(0, np.int64)], [np.empty(0, np.float32)]
        for _, x in pieces():
            positions = found(x, start)
            places.append(start + positions)
            values.append(x[positions])
            start += x.size
        return cls(np.concatenate(places), np.concatenate(values), size)

    @classmethod
    def at(cls, pieces: Pieces, size: int, places: NDArray[np.int64]) -> Kept:
        """The values at ascending positions of a tensor in pieces."""

        def within(x: Values, start: int) -> NDArray[np.int64]:
            first, last = np.searchsorted(places, (start, start + x.size))
            return places[first:last] - start

        return cls.of(pieces, size, within)


@dataclass(frozen=True)
class Subset(Grid):
    """Zero, and some of the values."""

    @abstractmethod
    def over(self, pieces: Pieces, size: int, key: tuple[int, int]) -> Kept:
        """The choice of a tensor of ``size`` values in pieces; held are a piece and what is chosen."""

    def nearest(self, state: State, v: Scaled, key: tuple[int, int]) -> Kept:
        return self.over(lambda: iter([(state, v.x)]), v.x.size, key)

    def values(self, symbols: Kept, scales: Values, bucket: int, size: int) -> Values:
        out = np.zeros(size, np.float32)
        out[symbols.positions] = symbols.arrived
        return out


@dataclass(frozen=True)
class LargestOfChunks(Subset):
    """Zero, and the k largest magnitudes of the tensor as they are, or of each chunk of it."""

    unbiased = False
    #: all values as large as the least one that is sent are sent, too, but no zeros
    ties: ClassVar[bool] = False

    ratio: float = parameter(0.01, "share of the values that is sent, at least one", minimum=0.0, maximum=1.0)
    chunk: int | None = parameter(
        None, "choose in each chunk of this length; none for the whole tensor", minimum=1, optional=True
    )

    @property
    def part_multiple(self) -> int | None:
        return self.chunk or 1

    def over(self, pieces: Pieces, size: int, key: tuple[int, int]) -> Kept:
        length = self.chunk
        if length is None:
            return largest_of((x for _, x in pieces()), kept(self.ratio, size), size, magnitudes, ties=self.ties)

        def found(x: Values, start: int) -> NDArray[np.int64]:
            whole = x.size - x.size % length
            rows, rest = magnitudes(x[:whole]).reshape(-1, length), magnitudes(x[whole:])
            chosen = largest(rows, kept(self.ratio, length)), whole + largest(rest, kept(self.ratio, rest.size))
            return np.concatenate(chosen)

        return Kept.of(pieces, size, found)


@dataclass(frozen=True)
class Threshold(LargestOfChunks):
    """Zero, and magnitudes from a quantile of the whole tensor on as they are."""

    ties = True
    chunk: int | None = None

    sample: float = parameter(1.0, "share of the values that set the threshold", minimum=0.0, maximum=1.0)

    @property
    def deterministic(self) -> bool:
        return self.sample >= 1

    def over(self, pieces: Pieces, size: int, key: tuple[int, int]) -> Kept:
        if self.sample >= 1 or not size:
            return super().over(pieces, size, key)
        # Drawn with replacement.
        words = np.empty(kept(self.sample, size), np.uint32)
        _elementwise.fill_words(np.uint64(key[0]), np.uint64(key[1]), 0, words)
        places = np.sort((words * np.float64(size / 2**32)).astype(np.int64))
        seen = magnitudes(Kept.at(pieces, size, places).values)
        limit = max(_LEAST, seen[largest(seen, kept(self.ratio, seen.size))].min())
        return Kept.of(pieces, size, lambda x, _: np.flatnonzero(magnitudes(x) >= limit))


@lru_cache(maxsize=64)
def _values_codec(spec: str) -> Codec:
    """The codec of a sparsifier's values.

    Raises:
        UsageError: it keeps a memory, which would belong to other positions at every step.
    """
    made = codec(spec)
    if made.stateful:
        raise UsageError(f"values={spec}: a memory goes before the sparsifier; write ef: in front of it")
    return made


@dataclass(frozen=True)
class WholeChoice(Nearest):
    """The grid's choice of values; that of a tensor in pieces is made before the first of them is encoded."""

    def sent(self, parts: Parts, state: State, chosen: Kept, key: tuple[int, int]) -> tuple[Kept, Measured]:
        """The grid's choice as it arrives, and its bits."""
        counted = parts.coder.count(chosen, chosen.size, parts.grid, state)
        return chosen, counted.lengths or parts.coder.lengths(counted)

    def prepare(self, parts: Parts, state: State, pieces: Pieces, key: tuple[int, int]) -> State:
        """Store positions and decoded values of the choice, and the bits that it takes."""
        chosen = cast("Subset", parts.grid).over(pieces, state.size, key)
        found, lengths = self.sent(parts, state, chosen, key)
        return state.with_arrays(chosen=found.positions, values=found.arrived, coded=np.array(lengths))

    def simulate(self, parts: Parts, state: State, v: Scaled, key: tuple[int, int], start: int = 0) -> EncodedPart:
        grid = cast("Subset", parts.grid)
        found, lengths = self.sent(parts, state, grid.nearest(state, v, key), key)
        return EncodedPart(grid.values(found, v.scales, 1, v.x.size), lengths=lengths)

    def part(self, state: State, start: int) -> EncodedPart | None:
        """The chosen values of the part; the lengths of all go with the first one."""
        if "chosen" not in state.arrays:
            return None
        places, out = state.arrays["chosen"], np.zeros(state.size, np.float32)
        first, last = np.searchsorted(places, (start, start + state.size))
        out[places[first:last] - start] = state.arrays["values"][first:last]
        return EncodedPart(out, lengths=None if start else Measured(*state.arrays["coded"].tolist()))


@dataclass(frozen=True)
class ChosenValues(WholeChoice):
    """The grid's choice of values, as they are or through a codec of their own."""

    values: str | None = parameter(
        None,
        "a codec for the chosen values, last in a spec: values=intn:bits=2,group=64; none for float32",
        optional=True,
    )

    @property
    def deterministic(self) -> bool:
        return self.values is None or _values_codec(self.values).deterministic

    def write(self, parts: Parts, state: State, v: Scaled, key: tuple[int, int]) -> tuple[bytes, int]:
        """The positions and the body of the values' payload, after their number, lengths and flags."""
        if self.values is None:
            return super().write(parts, state, v, key)
        chosen, inner = self.symbols(parts.grid, state, v, key), _values_codec(self.values)
        places = cast("IndexValue", parts.coder).places(chosen)
        payload = inner.encode(inner.init(chosen.values.size), chosen.values, key)
        body, flags = open_envelope(payload, codec=inner.wire_name, size=chosen.values.size, shared=b"")
        return _INNER.pack(chosen.values.size, len(places), flags) + places + bytes(body), 0

    def read(self, parts: Parts, found: Opened, flags: int) -> Values:
        if self.values is None:
            return super().read(parts, found, flags)
        inner, data = _values_codec(self.values), found.coded
        if flags or len(data) < _INNER.size:
            raise PayloadError("payload ends before the length of its positions, or has unknown flags")
        count, length, own = _INNER.unpack_from(data)
        end = _INNER.size + length
        positions = cast("IndexValue", parts.coder).find(data[_INNER.size : end], found.size, count)
        payload = seal(bytes(data[end:]), codec=inner.wire_name, size=positions.size, shared=b"", flags=own)
        values = inner.decode(b"", payload, positions.size)
        return parts.grid.values(Kept(positions, values, found.size), found.scales, 1, found.size)

    def sent(self, parts: Parts, state: State, chosen: Kept, key: tuple[int, int]) -> tuple[Kept, Measured]:
        if self.values is None:
            return super().sent(parts, state, chosen, key)
        inner, count = _values_codec(self.values), chosen.values.size
        found = inner.simulate(inner.init(count), chosen.values, key)
        head = 8 * (_INNER.size + len(cast("IndexValue", parts.coder).places(chosen)))
        sent = head + 8.0 * (found.payload_bytes - ENVELOPE_BYTES)
        each = [head + count * bits for bits in found.coded] if found.coded else [sent] * 3
        return chosen._replace(values=found.values), Measured(sent, *each)


@dataclass(frozen=True)
class IndexValue(Coder):
    """Positions and values: gaps and exponents in the shortest of several codes, or both at fixed width."""

    splits = True

    coder: Literal["gaps", "fixed"] = parameter(
        "gaps",
        "positions by their gaps and values' exponents in a Huffman code, or ceil(log2 n) and 32 bits each",
        choices=("gaps", "fixed"),
    )

    def places(self, symbols: Kept) -> bytes:
        if self.coder == "fixed":
            return pack_positions(symbols.positions, symbols.size)
        return encode_positions(symbols.positions, symbols.size)

    def find(self, data: memoryview, size: int, count: int) -> NDArray[np.int64]:
        """Undo :meth:`places` for ``count`` positions in a tensor of ``size`` values.

        Raises:
            PayloadError: bytes that it never returns.
        """
        found = decode_positions(data, size) if self.coder == "gaps" else unpack_positions(data, size, count)
        if found.size != count:
            raise PayloadError(f"payload holds {found.size} positions of {count} values")
        return found

    def write(self, symbols: Kept, grid: Grid, state: State) -> tuple[bytes, int]:
        """Positions, then values; flag 1: the exponents of the values are coded."""
        places, plain = self.places(symbols), symbols.values.astype("<f4").tobytes()
        found = Floats(symbols.values)
        if self.coder == "gaps" and found.coded:
            coded = _NUMBER.pack(len(places)) + places + found.encode()
            if len(coded) < len(places) + len(plain):
                return coded, _CODED
        return places + plain, 0

    def read(self, data: memoryview, flags: int, size: int, grid: Grid, state: State) -> Kept:
        if flags & ~(_CODED if self.coder == "gaps" else 0):
            raise PayloadError(f"payload has unknown flags {flags:#x}")
        if self.coder == "fixed":
            count = 8 * len(data) // (32 + width_for(size))
            split = fixed_size(count, width_for(size))
            if len(data) != split + 4 * count:
                raise PayloadError(f"payload body of {len(data)} bytes does not fit a tensor of {size} values")
            return Kept(unpack_positions(data[:split], size, count), read_floats(data[split:]), size)
        if not flags:
            return Kept(*decode_sparse(data, size), size)
        if len(data) < _NUMBER.size:
            raise PayloadError("payload ends before the length of its positions")
        end = _NUMBER.size + int(_NUMBER.unpack_from(data)[0])
        positions = decode_positions(data[_NUMBER.size : end], size)
        return Kept(positions, decode_floats(data[end:], positions.size, coded=True), size)

    def count(self, symbols: Kept, size: int, grid: Grid, state: State) -> EncodedPart:
        """Positions are sent in one way whatever codes the values."""
        places, count, block = len(self.places(symbols)), symbols.positions.size, Floats(symbols.values).block
        plain, coded = places + 4 * count, _NUMBER.size + places + Floats.size(count, block)
        shorter = self.coder == "gaps" and block.lengths is not None and coded < plain
        sent = 8 * (coded if shorter else plain)
        head = sent - int(block.bits if shorter else block.fixed)
        return EncodedPart(lengths=_lengths(sent, head, block))


def _lengths(sent: int, head: int, block: CodedBlock) -> Measured:
    """Bits of a block and of ``head`` bits that are the same with every coder, ``sent`` of them in the payload."""
    return Measured(sent, head + block.fixed, head + block.entropy, head + block.huffman)


@dataclass(frozen=True)
class RandomChoice(Subset):
    """Zero, and k values drawn without replacement. Their positions follow from a seed of 32 bits."""

    deterministic = False

    ratio: float = parameter(0.01, "share of the values that is sent, at least one", minimum=0.0, maximum=1.0)
    scale: bool = parameter(True, "multiply by n/k, so that the mean is right")

    @property
    def unbiased(self) -> bool:
        return self.scale

    def chosen(self, seed: int, size: int) -> NDArray[np.int64]:
        """Ascending positions: those of the k largest of n random words."""
        key = Key.hashed(_NUMBER.pack(seed), b"randomk")

        def words() -> Iterator[NDArray[np.uint32]]:
            for start in range(0, size, BLOCK):
                some = np.empty(min(BLOCK, size - start), np.uint32)
                _elementwise.fill_words(np.uint64(key.high), np.uint64(key.low), start, some)
                yield some

        return largest_of(words(), kept(self.ratio, size), size, lambda words: words).positions

    def over(self, pieces: Pieces, size: int, key: tuple[int, int]) -> Kept:
        seed = key[1] & 0xFFFFFFFF
        found = Kept.at(pieces, size, self.chosen(seed, size))
        return found._replace(head=_NUMBER.pack(seed), factor=self.factor(size))

    def factor(self, size: int) -> float:
        """What makes up for the values that are not sent."""
        return size / kept(self.ratio, size) if self.scale and size else 1.0

    def needs(self, parts: Parts) -> SummarySpec:
        return SummarySpec("none", None)

    def expect(self, parts: Parts, state: State, sketch: MomentSketch) -> Expectation:
        """(n/k - 1) ||v||_2^2; unscaled (1 - k/n) ||v||_2^2, of which the share 1 - k/n is bias."""
        n = max(1, round(sketch.size))
        count = kept(self.ratio, round(sketch.size))
        share = max(1, count) / n
        tallies = expected_floats(sketch.lower, sketch.sums[:, 0], sketch.zeros)
        block = CodedBlock.signed(tallies * (count / n))
        if 0 < count <= _FEW:
            block = dataclasses.replace(block, entropy=_drawn_entropy(tallies, count))
        bits = CodedBits.of(block, 8 * _NUMBER.size + 23 * count, n)
        return Expectation(
            squared_error=self.weighted_error(parts, state, sketch, sketch),
            bias=0.0 if self.scale else (1 - share) * math.sqrt(sketch.energy),
            sparsity=1 - share * (1 - sketch.zeros / n),
            **bits.columns,
            bits_payload=bits.fixed if cast("SeedValue", parts.coder).coder == "fixed" else bits.huffman,
            bits_norms=0.0,
        )

    def weighted_error(self, parts: Parts, state: State, sketch: MomentSketch, weighted: MomentSketch) -> float:
        """Every value has the same probability of being lost."""
        share = max(1, kept(self.ratio, round(weighted.size))) / max(1, weighted.size)
        return ((1 / share - 1) if self.scale else (1 - share)) * weighted.energy


def _drawn_entropy(tallies: NDArray[np.float64], count: int) -> float:
    """Mean bits of ``count`` values drawn from those of :attr:`Floats.tallies`, at the entropy of their own symbols.

    The entropy of few is below that of all: a single one has none, besides its sign.
    """
    n = float(tallies.sum())
    # Pairs of signs, of which each has half; the sign of zero says nothing.
    own = np.concatenate([tallies[:2], tallies[2:].reshape(-1, 2).sum(axis=1)])
    own, c = own[own > 0][:, None], np.arange(1, count + 1)
    # A hypergeometric law, from the logarithms of numbers of ways to choose: of the class, of the others, of all.
    total = np.stack(np.broadcast_arrays(own, n - own, [[n]]))
    some = np.stack(np.broadcast_arrays(c, count - c, [count]))[:, None]
    ways = sp.special.gammaln(total + 1) - sp.special.gammaln(some + 1) - sp.special.gammaln(total - some + 1)
    odds = np.exp(ways[0] + ways[1] - ways[2]) * ((c <= own) & (count - c <= n - own))
    return count * math.log2(count) - float((odds @ (c * np.log2(c))).sum()) + count * float(tallies[2:].sum()) / n


@dataclass(frozen=True)
class SeedValue(Coder):
    """A seed, then the values that it chose, with exponents in a code of their own if that is shorter."""

    splits = True

    coder: str = coder_parameter()

    def write(self, symbols: Kept, grid: Grid, state: State) -> tuple[bytes, int]:
        """Flag 1: the exponents are coded."""
        found = Floats(symbols.values, coder=self.coder)
        return symbols.head + found.encode(), _CODED if found.coded else 0

    def read(self, data: memoryview, flags: int, size: int, grid: RandomChoice, state: State) -> Kept:
        if flags & ~_CODED or len(data) < _NUMBER.size:
            raise PayloadError(f"payload body of {len(data)} bytes with flags {flags:#x} is not a seed and values")
        (seed,) = _NUMBER.unpack_from(data)
        values = decode_floats(data[_NUMBER.size :], kept(grid.ratio, size), coded=bool(flags))
        return Kept(grid.chosen(seed, size), values, size, factor=grid.factor(size))

    def count(self, symbols: Kept, size: int, grid: Grid, state: State) -> EncodedPart:
        """The seed and the fractions are the same with every coder."""
        found, sent = Floats(symbols.values, coder=self.coder), 8 * len(self.write(symbols, grid, state)[0])
        return EncodedPart(lengths=_lengths(sent, 8 * _NUMBER.size + found.raw, found.block))


@dataclass(frozen=True)
class NearPeaks(Subset):
    """Zero, and one magnitude with the signs of values near their bin's largest; needs a residual."""

    unbiased = False

    bin_size: int = parameter(500, "values per bin; the paper takes 50 for convolutions, 500 elsewhere", minimum=1)

    def over(self, pieces: Pieces, size: int, key: tuple[int, int]) -> Kept:
        """The values that would reach their bin's largest if the same gradient came once more; bins are held whole."""
        length = min(max(1, size), self.bin_size * max(1, BLOCK // self.bin_size))
        # The gradient alone is the input minus the residual: p + v = 2 p - e.
        both = ((x, saturating(x, kept.arrays["residual"], 2.0, -1.0)) for kept, x in pieces())
        total, start = 0.0, 0
        places, negative = [np.empty(0, np.int64)], [np.empty(0, np.bool_)]
        for x, again in Blocks.of(both, length):
            chosen = np.empty(x.size, np.bool_)
            total = _elementwise.above_local_peak(x, again, self.bin_size, chosen, total)
            positions = np.flatnonzero(chosen)
            places.append(start + positions)
            negative.append(np.signbit(x[positions]))
            start += x.size
        scale = np.float32(total / max(1, -(-size // self.bin_size)))
        values = np.where(np.concatenate(negative), -scale, scale)
        return Kept(np.concatenate(places), values, size, head=_SCALE.pack(scale))


@dataclass(frozen=True)
class SignedPositions(Coder):
    """The scale (float32), then 2 i for each position i, or 2 i + 1 if negative, coded as positions are."""

    splits = True

    def write(self, symbols: Kept, grid: Grid, state: State) -> tuple[bytes, int]:
        return symbols.head + encode_positions(2 * symbols.positions + np.signbit(symbols.values), 2 * symbols.size), 0

    def read(self, data: memoryview, flags: int, size: int, grid: Grid, state: State) -> Kept:
        if flags or len(data) < _SCALE.size:
            raise PayloadError(f"payload body of {len(data)} bytes is not a scale and signs")
        (scale,) = _SCALE.unpack_from(data)
        if not (math.isfinite(scale) and scale >= 0):
            raise PayloadError(f"payload holds the scale {scale}")
        numbers = decode_positions(data[_SCALE.size :], 2 * size)
        positions = numbers >> 1
        if (positions[1:] == positions[:-1]).any():
            raise PayloadError("payload holds both signs of a value")
        return Kept(positions, np.where(numbers & 1, -scale, scale).astype(np.float32), size)


@dataclass(frozen=True)
class Velocity(Memory):
    """Momentum, and its sum that was not sent yet. Kept as ``velocity`` and ``residual``, float32[n], and ``step``."""

    zeros = "velocity", "residual"
    rank = 6

    momentum: float = parameter(0.9, "share of the momentum that stays", minimum=0.0, maximum=1.0)
    masking: bool = parameter(True, "momentum stops where a value was sent")
    clip: float | None = parameter(None, "largest l2 norm of a gradient; none for no clipping", minimum=0.0)

    def whole(self, sums: Callable[[], TensorSums]) -> Arrays:
        return {} if self.clip is None else {"energy": np.array(sums().energy)}

    def start(self, size: int) -> Arrays:
        return {**super().start(size), "step": np.zeros((), np.int64)}

    def given(self, arrays: Arrays, x: Values) -> Values:
        return saturating(arrays["residual"], self._moved(arrays, x))

    def after(self, arrays: Arrays, x: Values, given: Values, decoded: Values) -> Arrays:
        """Clear what was sent, and the momentum there."""
        waits = decoded == 0
        velocity = self._moved(arrays, x)
        return {
            "velocity": velocity * waits if self.masking else velocity,
            "residual": given * waits,
            "step": np.asarray(arrays["step"] + 1, np.int64),
        }

    def _moved(self, arrays: Arrays, x: Values) -> Values:
        if self.clip is not None:
            norm = float(arrays["energy"] if "energy" in arrays else power_sum(x, 2)) ** 0.5
            if norm > self.clip:
                x = x * np.float32(self.clip / norm)
        return saturating(arrays["velocity"], x, self.momentum)


@dataclass(frozen=True)
class WarmingUp(LargestOfChunks):
    """The largest magnitudes, at first more of them; goes with a memory that counts steps."""

    warmup: int = parameter(0, "steps over which the ratio falls, from 1/4 in four stages, each a quarter", minimum=0)

    def ratio_at(self, step: int) -> float:
        """The share that is sent at a step.

        >>> [WarmingUp(0.001, warmup=8).ratio_at(step) for step in (0, 1, 2, 4, 6, 8)]
        [0.25, 0.25, 0.0625, 0.015625, 0.00390625, 0.001]
        """
        if step >= self.warmup:
            return self.ratio
        return max(self.ratio, _FIRST ** (1 + _STAGES * step // self.warmup))

    def over(self, pieces: Pieces, size: int, key: tuple[int, int]) -> Kept:
        step = int(next(pieces())[0].arrays["step"])
        return LargestOfChunks(self.ratio_at(step), self.chunk).over(pieces, size, key)


def kept(ratio: float, size: int) -> int:
    """Number of ``size`` values that a sparsifier keeps.

    >>> [kept(0.01, n) for n in (0, 1, 149, 151, 1000)]
    [0, 1, 1, 2, 10]
    """
    return min(size, max(1, round(ratio * size)))


def magnitudes(x: Values) -> NDArray[np.uint32]:
    """|x| as integers in the same order, uint32[n]: they are compared and selected faster than floats."""
    return x.view(np.uint32) & _MAGNITUDE


def largest_of(
    pieces: Iterable[NDArray[Any]],
    count: int,
    size: int,
    ranked: Callable[[NDArray[Any]], NDArray[np.uint32]],
    *,
    ties: bool = False,
) -> Kept:
    """The ``count`` values of highest rank, of equal ones the first, out of ``size`` that arrive in pieces.

    With ``ties`` those of rank 0 are left out, and all others that are equal to the last are in. Never holds many more
    than it takes.
    """

    def best(ranks: NDArray[np.uint32]) -> NDArray[np.int64]:
        chosen = largest(ranks, count)
        return np.flatnonzero(ranks >= max(ranks[chosen].min(initial=_MAGNITUDE), _LEAST)) if ties else chosen

    limit, start = np.uint32(0), 0
    places, values = np.empty(0, np.int64), np.empty(0, np.float32)
    waiting: list[tuple[NDArray[np.int64], NDArray[Any]]] = []
    for x in pieces:
        ranks = ranked(x)
        # Without ties, of equal ranks those before come first.
        found = np.flatnonzero(ranks >= limit + (not ties)) if limit else best(ranks)
        if x.size == size:
            return Kept(found, x[found], size)
        waiting.append((start + found, x[found]))
        start += x.size
        if start == size or sum(len(some) for some, _ in waiting) > 2 * count + BLOCK:
            places, values = map(np.concatenate, zip(*waiting, strict=True))
            ranks = ranked(values)
            chosen = best(ranks)
            places, values = places[chosen], values[chosen]
            limit = ranks[chosen].min() if chosen.size >= count else limit
            waiting = [(places, values)]
    return Kept(places, values, size)


def largest(ranks: NDArray[np.uint32], count: int) -> NDArray[np.int64]:
    """Positions, ascending, of the ``count`` largest of uint32[n], or of each row of uint32[rows, n]; those of rows in
    the whole array. Of equal ones those that come first.

    >>> largest(np.array([3, 7, 7, 1, 7], np.uint32), 2).tolist()
    [1, 2]
    >>> largest(np.array([[3, 7, 7], [2, 1, 0]], np.uint32), 1).tolist()
    [1, 3]
    """
    rows = ranks.reshape(-1, ranks.shape[-1]) if ranks.size else ranks.reshape(0, 1)
    if count >= rows.shape[1]:
        return np.arange(ranks.size)
    found = np.empty(rows.shape[0] * count + 1, np.int64)
    _compare.largest(rows, count, found)
    return found[:-1]


@method
class TopK(Composed):
    """The k largest magnitudes exactly, the rest zero."""

    name = "topk"
    parts = Parts(grid=LargestOfChunks(), rounding=ChosenValues(), coder=IndexValue())
    summary = "the largest magnitudes exactly, the rest zero"
    formula = "Q(v_i) = v_i for the k largest |v_i|, else 0; k = max(1, round(ratio n))"
    paper = "Alistarh et al., The Convergence of Sparsified Gradient Methods, 2018"
    corrections: ClassVar[tuple[str, ...]] = (_TIES,)
    about = """The largest magnitudes exactly. Without memory the rest never arrives, so it is mostly used as mem-sgd or
    ef:topk."""
    sends = _POSITIONS
    behavior = (
        "Of all choices of k values the least error. A value costs some 26 bits and its position 5 to 10, so ratio "
        "0.01 is about 0.33 bits per value."
    )
    related = ("mem-sgd", "dgc", "randomk")


@method
class MemSgd(TopK):
    """Top-k with memory: what is not sent is added to the next gradient."""

    name = "mem-sgd"
    parts = Parts(memory=Residual(), grid=LargestOfChunks(), rounding=ChosenValues(), coder=IndexValue())
    summary = "the largest magnitudes exactly, the rest kept for the next step"
    formula = "p = v + e; Q(p_i) = p_i for the k largest |p_i|, else 0; e <- p - Q(p)"
    paper = "Stich, Cordonnier and Jaggi, Sparsified SGD with Memory, 2018"
    corrections = (_TIES, UNITS)
    about = """Top-k of gradient plus memory: what is not sent is added to the next gradient. The plain form of error
    feedback for sparse gradients; the same as ef:topk."""
    sends = _POSITIONS
    behavior = """Against one gradient its error is larger than topk's, because it sends old values too; over steps
    nothing is lost."""
    related = ("topk", "dgc", "ef")


@method
class Dropping(Composed):
    """A threshold on the magnitudes, from all of them or from a sample, with memory."""

    name = "dropping"
    parts = Parts(memory=Residual(), grid=Threshold(), rounding=ChosenValues(), coder=IndexValue())
    summary = "magnitudes from a threshold on exactly, the rest kept for the next step"
    formula = "p = v + e; Q(p_i) = p_i where |p_i| >= t, else 0; t = the ratio's quantile; e <- p - Q(p)"
    paper = "Aji and Heafield, Sparse Communication for Distributed Gradient Descent, 2017"
    corrections = (
        "values equal to the threshold are sent: otherwise a constant tensor would never be sent",
        "each tensor has a threshold of its own",
        "the threshold is exact by default; the paper's comes from a sample of 0.1% of the values (sample=0.001)",
        UNITS,
    )
    about = """A threshold on magnitudes with memory; with sample=0.001 the threshold comes from a sample, as the paper
    does to save the selection."""
    sends = _POSITIONS
    behavior = "With the exact threshold it sends the values of mem-sgd, and ties."
    related = ("mem-sgd", "topk")

    sample: float


@method
class RandomK(Composed):
    """k values drawn without replacement. Their positions follow from a seed of 32 bits in the payload."""

    name = "randomk"
    parts = Parts(grid=RandomChoice(), rounding=WholeChoice(), coder=SeedValue())
    summary = "values chosen at random, scaled up, the rest zero"
    formula = "Q(v_i) = (n/k) v_i for k random i, else 0; k = max(1, round(ratio n))"
    paper = "Stich, Cordonnier and Jaggi, Sparsified SGD with Memory, 2018 (rand_k)"
    corrections = (
        "the paper's rand_k is not scaled and needs memory: that is ef:randomk:scale=false",
        "positions are not sent: 32 bits of seed name them",
    )
    about = """The plainest sparsifier: values chosen at random, scaled up. Positions are free, as both sides draw them
    from a seed."""
    sends = """A seed (u32), then the chosen values in the order of their positions: float32, with the exponents in a
    Huffman code if that is shorter."""
    behavior = "Relative variance n/k - 1, whatever the data: a floor that others must beat."
    related = ("topk", "mcgq", "ef")


@method
class AdaComp(Composed):
    """Signs of the values that would reach their bin's largest if the gradient came once more, with memory."""

    name = "adacomp"
    parts = Parts(memory=Residual(), grid=NearPeaks(), rounding=WholeChoice(), coder=SignedPositions())
    summary = "signs of what nears its bin's largest magnitude, one scale, the rest kept"
    formula = """p = v + e; Q(p_i) = s sign(p_i) where |p_i + v_i| >= the bin's largest |p|, else 0; s = mean of the
    bins' largest |p|; e <- p - Q(p)"""
    paper = "Chen et al., AdaComp: Adaptive Residual Gradient Compression for Data-Parallel Distributed Training, 2018"
    corrections = ("values that are zero are never sent, or a bin of zeros would be sent whole", UNITS)
    about = """A sparsifier that finds its own ratio: in each bin it sends what is near the bin's largest magnitude once
    the present gradient is added again. One scale a tensor makes values cheap; memory keeps the rest."""
    sends = "The scale in float32, then the positions, each with its sign, as gaps in the shortest of several codes."
    behavior = """The ratio follows the data: few values if gradients are heavy-tailed, many if they are flat. Smaller
    bins send more."""
    related = ("dropping", "mem-sgd", "ef")


@method
class Dgc(Composed):
    """Momentum correction, factor masking, gradient clipping and warm-up around the largest magnitudes.

    The optimizer behind it must have no momentum, because what arrives already includes it. The state holds
    ``velocity`` and ``residual`` (float32[n]: momentum, and its sum that was not sent) and ``step`` (int64[]).
    """

    name = "dgc"
    parts = Parts(memory=Velocity(), grid=WarmingUp(0.001), rounding=ChosenValues(), coder=IndexValue())
    summary = "the largest sums of momentum exactly, the rest kept; warm-up, clipping, factor masking"
    formula = "u <- beta u + clip(v); e <- e + u; send e_i for the k largest |e_i|, and set their e_i and u_i to 0"
    paper = "Lin et al., Deep Gradient Compression: Reducing the Communication Bandwidth for Distributed Training, 2018"
    corrections = (
        "the threshold is exact, not estimated from a sample",
        "clip limits one tensor's norm on one worker; the paper's limit is the model's, over the root of the workers",
    )
    about = """Top-k with everything that its paper adds for deep networks: momentum in the memory, clearing the
    momentum of what was sent, clipping, a ratio that falls over the first steps."""
    sends = _POSITIONS
    behavior = """Its error against one gradient may exceed 1, because what it sends is a sum of momentum over many
    steps; compare it by training."""
    related = ("mem-sgd", "topk", "momentum")

    warmup: int
