"""Random rotations and cosine transforms as prefixes, and EDEN, which quantizes rotated values."""

from __future__ import annotations

import dataclasses
import math
import operator
import struct
from dataclasses import dataclass
from functools import cache, lru_cache, reduce
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np
import scipy as sp

from gtrace.buckets import Blocks
from gtrace.codecs.base import Codec, CodedBits, EncodedPart, Measured, checked_values, coder_parameter, parameter
from gtrace.codecs.engine import Composed, method
from gtrace.codecs.parts import FLOAT32_MAX
from gtrace.codecs.spec import register_wrapper
from gtrace.codecs.wrappers import Coordinates
from gtrace.coding.fixed import read_floats
from gtrace.coding.huffman import CodedBlock, decode_block, tally
from gtrace.errors import PayloadError
from gtrace.kernels import elementwise as _elementwise
from gtrace.kernels import hadamard as _hadamard
from gtrace.kernels.counter import fill_uniform
from gtrace.kernels.norms import BLOCK
from gtrace.types import Expectation, Key, State

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    from gtrace.buckets import TensorSums
    from gtrace.codecs.base import Pieces
    from gtrace.codecs.parts import Values

    #: places of kept values; a slice of all of them
    Kept: TypeAlias = "NDArray[np.int64] | slice"

_SEED = struct.Struct("<I")
#: the signs of NVIDIA's recipe for NVFP4 (Transformer Engine), before a Hadamard transform of 16 values
SIGNS = np.array([1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1], np.float32)
_NONE = np.empty(0, np.float32)
#: values of a block below which eden is biased: two rotations by so few signs are few rotations
_MIXED = 64
#: deviations by which no random number of values falls short
_SURE = 8.0


def block_parameter(default: int) -> Any:
    """The parameter ``block`` of a rotation."""
    about = "values that are mixed with each other, a power of two"
    return parameter(default, about, minimum=2, maximum=1 << 20, doubling=True)


def rotated(x: Values, block: int, seed: int, *, signs: Values = _NONE, back: bool = False, start: int = 0) -> Values:
    """float32[n] rotated in blocks by the signs of a 32-bit seed, or by those of a table, or rotated back.

    The first is value ``start`` of its tensor.
    """
    out = np.empty(x.size, np.float32)
    _hadamard.rotate(x, start, block, signs, *_words(seed), back, out)
    return out


def _words(seed: int, purpose: bytes = b"") -> tuple[np.uint64, np.uint64]:
    key = Key.hashed(_SEED.pack(seed), purpose)
    return np.uint64(key.high), np.uint64(key.low)


@register_wrapper
@dataclass(frozen=True)
class Rotate(Coordinates):
    """A seeded randomized Hadamard rotation around any codec: ``rotate:qsgdinf:bits=3``.

    Values are rotated in blocks, encoded, decoded and rotated back. Every encoding has its own rotation, with its
    seed in 32 bits of the payload. A stateful codec inside needs the same coordinates at every step, so around it the
    rotation stays the same and no seed is sent; it is better to keep memory outside:
    ``ef:rotate:signsgd``. ``rotate:signsgd:scale=energy`` is DRIVE with Hadamard rotations, and
    ``rotate:block=16,signs=fixed:fp:nvfp4,rounding=stochastic`` NVIDIA's recipe for gradients in NVFP4.
    """

    name = "rotate"
    summary = "a random Hadamard rotation before any codec, undone after it"
    formula = "R'(Q(R v)), R = H D / sqrt(block) per block, D random signs, H the Walsh-Hadamard matrix"
    paper = """Suresh et al., Distributed Mean Estimation with Limited Communication, 2017; Vargaftik et al., DRIVE:
    One-bit Distributed Mean Estimation, 2021"""
    corrections = (
        "a tensor is not padded to a power of two: it is rotated in blocks, and a rest in smaller powers of two",
    )
    about = "Spreads outliers over a block, after which values are nearly normal and coarse grids and signs fit."
    sends = "The rotation's seed (u32) if signs are drawn, then the body of the payload of the codec inside."
    behavior = "Helps codecs whose scale an outlier spoils; hurts sparsifiers, as nothing is sparse afterwards."
    related = ("signsgd", "qsgdinf", "minmax")

    block: int = block_parameter(1024)
    signs: str = parameter(
        "random", "drawn for every encoding, or the 16 of NVIDIA's recipe, repeated", choices=("random", "fixed")
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        # Where every worker rotates by signs of its own, sums of payloads mean nothing.
        object.__setattr__(self, "linear", self.inner.linear and not self.random)

    @property
    def random(self) -> bool:
        """With fixed signs, and around a stateful codec, the rotation is always the same."""
        return self.signs == "random" and not self.inner.stateful

    @property
    def sends_number(self) -> bool:
        return self.random

    def number(self, state: State, key: tuple[int, int]) -> int:
        return key[1] & 0xFFFFFFFF if self.random else 0

    def inner_key(self, key: tuple[int, int]) -> tuple[int, int]:
        """Another key for the inner codec: a second rotation must not undo the first one's signs."""
        return Key.hashed(struct.pack("<QQ", *key), b"rotated")

    @property
    def part_multiple(self) -> int | None:
        """Whole blocks; None around a codec with memory, which is in turned coordinates."""
        inner = None if self.inner.stateful else self.inner.part_multiple
        return inner and math.lcm(inner, self.block)

    def turned(self, x: Values, number: int, *, back: bool = False, start: int = 0) -> Values:
        signs = SIGNS if self.signs == "fixed" else _NONE
        return rotated(x, self.block, number, signs=signs, back=back, start=start)


@register_wrapper
@dataclass(frozen=True)
class Dct(Coordinates):
    """A cosine transform of tiles around any codec: ``dct:chunk=64:topk:chunk=4096,ratio=0.01``.

    A matrix is cut into tiles of at most ``chunk`` rows and columns, a vector into pieces; each tile's coefficients
    follow each other, so a codec with chunks of a tile's size chooses in each tile. Tensors of more dimensions are
    matrices with their first one as rows. The transform is orthonormal: errors are those of the codec inside.
    """

    name = "dct"
    summary = "a cosine transform of tiles before any codec, undone after it"
    formula = "T'(Q(T v)), T the orthonormal DCT-II of tiles of chunk x chunk values"
    paper = "Peng et al., DeMo: Decoupled Momentum Optimization, 2024"
    corrections = (
        "tensors of more than two dimensions are matrices, the first dimension by the rest",
        "the momentum that it goes with is ef:decay=; the sign of the sum belongs to the optimizer",
    )
    about = "Momentum of neighbouring weights is correlated, so few coefficients of a cosine transform hold its energy."
    sends = "The number of rows (u32; 0 for a vector), then the body of the payload of the codec inside."
    behavior = "Pays off for sparsifiers where rows and columns have an order; on shuffled weights it does nothing."
    related = ("rotate", "topk", "ef")

    # A tile has values of many rows.
    part_multiple = None

    chunk: int = parameter(64, "a tile's rows and columns at most; their largest divisor up to it", minimum=1)

    def number(self, state: State, key: tuple[int, int]) -> int:
        """Rows of the matrix; 0 for a vector, or without a shape."""
        return state.shape[0] if state.shape is not None and len(state.shape) > 1 else 0

    def turned(self, x: Values, number: int, *, back: bool = False, start: int = 0) -> Values:
        """Coefficients in the order of tiles, or values in the tensor's own."""
        rows = number
        if rows and x.size % rows:
            raise PayloadError(f"payload of a transform of {x.size} values has {rows} rows")
        if not x.size:
            return x
        columns = x.size // max(1, rows)
        high, wide = (_tile(length, self.chunk) for length in (max(1, rows), columns))
        down, across = max(1, rows) // high, columns // wide
        if back:
            tiles = sp.fft.idctn(x.reshape(down, across, high, wide).astype(np.float64), axes=(2, 3), norm="ortho")
            out = tiles.transpose(0, 2, 1, 3)
        else:
            tiles = x.reshape(down, high, across, wide).transpose(0, 2, 1, 3).astype(np.float64)
            out = sp.fft.dctn(tiles, axes=(2, 3), norm="ortho")
        return np.clip(out, -FLOAT32_MAX, FLOAT32_MAX).astype(np.float32).reshape(-1)


@lru_cache(maxsize=1024)
def _tile(length: int, most: int) -> int:
    """The largest divisor of a length up to ``most``."""
    return next(size for size in range(min(length, most), 0, -1) if not length % size)


@cache
def lloyd_max(bits: int) -> NDArray[np.float64]:
    """The 2^bits values of least squared error for a standard normal law, float64, ascending (Max 1960, Lloyd 1982).

    Newton's method for the positive half: each value is the mean of its cell, and cells end halfway between values.
    """
    count = 1 << bits - 1
    # The limit for many values: the quantiles of a normal law with three times the variance.
    c = math.sqrt(3) * sp.special.ndtri(0.5 + (np.arange(count) + 0.5) / (2 * count))
    for _ in range(50):
        ends = np.concatenate([[0.0], (c[1:] + c[:-1]) / 2, [np.inf]])
        density = np.exp(-(ends**2) / 2) / math.sqrt(2 * math.pi)
        mass, first = np.diff(sp.special.ndtr(ends)), -np.diff(density)
        mean = first / mass
        # The mean of a cell follows its ends, and those follow the two values beside them by a half each.
        inner = np.minimum(ends, 1e3)
        left, right = (mean - inner[:-1]) * density[:-1] / mass / 2, (inner[1:] - mean) * density[1:] / mass / 2
        left[0] = 0.0
        bands = np.zeros((3, count))
        bands[0, 1:], bands[1], bands[2, :-1] = -right[:-1], 1 - left - right, -left[1:]
        moved = sp.linalg.solve_banded((1, 1), bands, mean - c)
        c = c + moved
        if np.abs(moved).max() < 1e-14 * c[-1]:
            break
    return np.concatenate([-c[::-1], c])


@method
class Eden(Composed):
    """Rotated values rounded to the best values for a normal law, with a scale that makes the result unbiased.

    Bits between two integers round a random share of the values to the finer ones; below one bit a random share of the
    values is kept. Two rotations follow each other: after one, a block with a single large value is not normal, and
    what is small beside it would be lost.
    """

    name = "eden"
    summary = "rotated values, rounded to the best levels for a normal law, rescaled without bias"
    formula = """y = R v; c_i = the nearest of the 2^bits Lloyd-Max values to sqrt(d) y_i / ||y||; Q(v) = R'(||y||^2 /
    <c, y> c), d = the block's length"""
    paper = "Vargaftik et al., EDEN: Communication-Efficient and Robust Distributed Mean Estimation, 2022"
    corrections = (
        "a tensor is not padded to a power of two: blocks, and smaller powers of two at its end, have a scale each",
        "two rotations by random signs instead of one, so that the mean is right for sparse gradients, too",
    )
    about = """After a rotation values are nearly normal, whatever they were, so nothing is fitted and the error is
    known beforehand; the scale makes the mean right."""
    sends = """The rotation's seed (u32), a float32 scale for each block, then the codes, by the coder; with bits
    between two integers the coarse codes, after their length (u32), and then the fine ones."""
    behavior = """Relative error 0.57, 0.13, 0.036, 0.0096 at 1 to 4 bits on any gradient. A sparse or heavy-tailed
    gradient, which fitted levels take advantage of, is as hard as a normal one. With blocks below 64 it is biased, and
    so is what is left of a tensor after its last longer block: few signs make few rotations."""
    related = ("rotate", "zipml", "signsgd")
    unbiased = True
    deterministic = False

    bits: float = parameter(4.0, "a value on average; need not be an integer", minimum=0.01, maximum=8)
    block: int = block_parameter(8192)
    coder: str = coder_parameter()

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "unbiased", self.block >= _MIXED)

    def write(self, state: State, x: Values, key: tuple[int, int]) -> tuple[bytes, int]:
        """The body, and a flag for each block of symbols that has a code."""
        seed = key[1] & 0xFFFFFFFF
        kept, tables = self._shares(x.size, seed)
        scales, _, symbols = self._rounded(x[kept], tables, seed)
        blocks = [CodedBlock.of(tally(codes, alphabet), coder=self.coder) for alphabet, codes in symbols]
        coded = [block.encode(codes) for block, (_, codes) in zip(blocks, symbols, strict=True)]
        flags = sum(1 << k for k, block in enumerate(blocks) if block.lengths is not None)
        first = b"" if len(coded) == 1 else _SEED.pack(len(coded[0]))
        return _SEED.pack(seed) + scales.astype("<f4").tobytes() + first + b"".join(coded), flags

    def read(self, shared: bytes, body: memoryview, flags: int, size: int) -> Values:
        if shared or len(body) < _SEED.size:
            raise PayloadError("payload is too short for the seed of its rotation, or has shared bytes")
        # Scales, and a bit or more for each value that is kept: seen before memory is taken for them.
        least = size if self.bits >= 1 else self.bits * size - _SURE * math.sqrt(size)
        if len(body) < 4 * (least // self.block) + least / 8:
            raise PayloadError(f"payload of {len(body)} bytes is too short for {size} values")
        (seed,) = _SEED.unpack_from(body)
        kept, tables = self._shares(size, seed)
        count = size if isinstance(kept, slice) else kept.size
        lengths = piece_lengths(count, self.block)
        ends = np.cumsum([_SEED.size, 4 * lengths.size, _SEED.size * (len(tables) - 1)])
        if len(body) < ends[-1] or flags >> len(tables):
            raise PayloadError(f"payload of {len(body)} bytes is too short for its scales, or has unknown flags")
        scales = read_floats(body[ends[0] : ends[1]], 0)
        rest = body[ends[-1] :]
        cut = len(rest) if len(tables) == 1 else _SEED.unpack_from(body, ends[1])[0]
        values = np.empty(count, np.float32)
        for k, (table, where) in enumerate(tables):
            data = rest[cut:] if k else rest[:cut]
            values[where] = table[decode_block(data, values[where].size, table.size, coded=bool(flags >> k & 1))]
        return _placed(self._restored(scales, values, seed), kept, size)

    @property
    def part_multiple(self) -> int:
        """Whole blocks; 1 below one bit, where :meth:`prepare` rounds all values that are kept."""
        return self.block if self.bits >= 1 else 1

    def prepare(self, state: State, pieces: Pieces, key: tuple[int, int], sums: TensorSums | None = None) -> State:
        """Below one bit a block's values come from a longer stretch of the tensor: store them as they arrive.

        ``kept`` are all of them, ``before`` how many come before each 2^20 values of the tensor.
        """
        if self.bits >= 1:
            return state
        seed, length, start = key[1] & 0xFFFFFFFF, self.block * max(1, BLOCK // self.block), 0
        blocks, tables = Blocks(length), self._shares(0, seed)[1]
        parts, counts = [self._part(_NONE, tables, seed, 0)], np.zeros(state.size // BLOCK + 1, np.int64)
        for _, x in pieces():
            places = cast("NDArray[np.int64]", self._shares(x.size, seed, start)[0])
            counts += np.bincount((start + places) // BLOCK, minlength=counts.size)
            start += x.size
            for (block,) in blocks.add(x[places]):
                parts.append(self._part(block, tables, seed, length * (len(parts) - 1)))
        parts += [self._part(block, tables, seed, length * (len(parts) - 1)) for (block,) in blocks.rest()]
        whole, values = reduce(operator.add, parts), np.concatenate([part.values for part in parts])
        before, head = np.cumsum(counts) - counts, np.array(whole.head)
        return state.with_arrays(kept=values, before=before, head=head, tallies=whole.tallies)

    def encode_part(self, state: State, values: ArrayLike, key: tuple[int, int], start: int) -> EncodedPart:
        """The part's blocks; the seed, and below one bit what all blocks take, count with the first part."""
        x, seed, known = checked_values(state, values), key[1] & 0xFFFFFFFF, state.arrays
        kept, tables = self._shares(x.size, seed, start)
        if "before" in known:
            block, rest = divmod(start, BLOCK)
            between = cast("NDArray[np.int64]", self._shares(rest, seed, start - rest)[0])
            first = known["before"][block] + between.size
            arrived = known["kept"][first:][: x[kept].size]
            part = EncodedPart(arrived, 0 if start else int(known["head"]), tallies=known["tallies"] * (not start))
        else:
            part = self._part(x[kept], tables, seed, start)
        head = part.head + (0 if start else 8 * _SEED.size * len(tables))
        return dataclasses.replace(part, values=_placed(part.values, kept, x.size), head=head)

    def _part(self, x: Values, tables: list[tuple[Values, Any]], seed: int, start: int) -> EncodedPart:
        """Kept values from number ``start`` on, in whole blocks, as they arrive."""
        scales, rounded, symbols = self._rounded(x, tables, seed, start)
        tallies = np.concatenate([tally(codes, alphabet) for alphabet, codes in symbols])
        return EncodedPart(self._restored(scales, rounded, seed, start), 32 * scales.size, tallies=tallies)

    def measured(self, whole: EncodedPart, size: int) -> tuple[int, CodedBits]:
        """Bytes and bits of the symbols of each table in a block of their own."""
        coarse = 1 << max(1, math.floor(self.bits))
        blocks = [CodedBlock.of(each, coder=self.coder) for each in np.split(whole.tallies, [coarse]) if each.size]
        return whole.head // 8 + sum(b.size for b in blocks), CodedBits.of(_together(blocks), whole.head, size)

    def expected_on_normal(self, size: int) -> Expectation:
        """Error and bits of ``size`` values of energy 1, whatever they are, as far as rotated values are normal.

        With D the mean squared error of the nearest level under a standard normal law, the scale that makes the mean
        right makes the error D / (1 - D) of the energy (Vargaftik et al. 2022, section 3). It is no
        :meth:`expect`: short and sparse blocks are not normal, and their error is not known beforehand.
        """
        coarse, kept = math.floor(self.bits), min(1.0, self.bits)
        tables = {max(1, coarse): 1 - (self.bits - coarse) if coarse else 1.0}
        if coarse and self.bits > coarse:
            tables[coarse + 1] = self.bits - coarse
        captured, blocks = 0.0, []
        for bits, share in tables.items():
            levels = lloyd_max(bits)
            odds = np.diff(sp.special.ndtr(np.concatenate([[-np.inf], (levels[1:] + levels[:-1]) / 2, [np.inf]])))
            captured += share * float(odds @ levels**2)
            counts = size * kept * share * odds
            # Every level has a code: of a short tensor nobody knows beforehand which ones do not occur.
            blocks.append(CodedBlock.of(counts, np.maximum(counts, 1.0), coder=self.coder))
        head = 8.0 * (_SEED.size * len(blocks) + 4 * piece_lengths(round(size * kept), self.block).size)
        found = _together(blocks)
        return Expectation(
            squared_error=1 / (kept * captured) - 1,
            bits_payload=(head + found.sent) / max(1, size),
            bits_norms=head / max(1, size),
            **CodedBits.of(found, head, size).columns,
        )

    def _shares(self, size: int, seed: int, start: int = 0) -> tuple[Kept, list[tuple[Values, Any]]]:
        """Which values are kept; and each table, float32[2^bits], with those of them that it rounds."""
        coarse, every = math.floor(self.bits), slice(None)
        if self.bits == coarse:
            return every, [(_table(coarse), every)]
        chosen = np.empty(size, np.float32)
        fill_uniform(chosen, *_words(seed, b"share"), start)  # type: ignore[no-untyped-call]
        if not coarse:
            return np.flatnonzero(chosen < self.bits), [(_table(1), every)]
        fine = chosen < self.bits - coarse
        return every, [(_table(coarse), np.flatnonzero(~fine)), (_table(coarse + 1), np.flatnonzero(fine))]

    def _rounded(
        self, x: Values, tables: list[tuple[Values, Any]], seed: int, start: int = 0
    ) -> tuple[Values, Values, list[tuple[int, NDArray[np.uint16]]]]:
        """The scale of each piece, the entries of rotated values, and the symbols of each table with their number."""
        y = rotated(rotated(x, self.block, seed, start=start), self.block, ~seed & 0xFFFFFFFF, start=start)
        lengths = piece_lengths(y.size, self.block)
        if not y.size:
            return _NONE, y, [(table.size, np.empty(0, np.uint16)) for table, _ in tables]
        starts = np.cumsum(lengths) - lengths
        energy = np.add.reduceat(np.square(y, dtype=np.float64), starts)
        units = np.sqrt(energy / lengths)
        z = (y / np.repeat(np.where(units > 0, units, np.inf), lengths)).astype(np.float32)
        entries, symbols = np.empty(y.size, np.float32), []
        for table, where in tables:
            here = z[where]
            codes = np.empty(here.size, np.uint16)
            middles = (table[1:] + table[:-1]) / np.float32(2)
            _elementwise.round_to_table(here, here.size, np.ones(1, np.float32), middles, codes)
            entries[where] = table[codes]
            symbols.append((table.size, codes))
        along = np.add.reduceat(np.multiply(entries, y, dtype=np.float64), starts)
        scales = np.divide(energy, along, out=np.zeros(energy.size), where=along > 0) / min(1.0, self.bits)
        return np.minimum(scales, FLOAT32_MAX).astype(np.float32), entries, symbols

    def _restored(self, scales: Values, entries: Values, seed: int, start: int = 0) -> Values:
        """Entries times their piece's scale, rotated back: float32[n], from kept value ``start`` of a tensor on."""
        with np.errstate(over="ignore"):
            y = entries * np.repeat(scales, piece_lengths(entries.size, self.block))
            y = np.clip(y, -FLOAT32_MAX, FLOAT32_MAX)
        y = rotated(y, self.block, ~seed & 0xFFFFFFFF, back=True, start=start)
        return rotated(y, self.block, seed, back=True, start=start)


def _placed(values: Values, kept: Kept, size: int) -> Values:
    """Kept values in a tensor of ``size`` that is zero elsewhere, float32[size]."""
    out = np.zeros(size, np.float32)
    out[kept] = values
    return out


def _together(blocks: list[CodedBlock]) -> Measured:
    """Bits of several blocks."""
    return Measured(*map(sum, zip(*((b.bits, b.fixed, b.entropy, b.huffman) for b in blocks), strict=True)))


@lru_cache(maxsize=1 << 12)
def expected_on_any(item: Codec, size: int) -> Expectation | None:
    """What a codec does to ``size`` values of energy 1, if that hardly depends on them; None if it does."""
    return item.expected_on_normal(size) if isinstance(item, Composed) else None


@cache
def _table(bits: int) -> Values:
    return lloyd_max(bits).astype(np.float32)


def piece_lengths(size: int, block: int) -> NDArray[np.int64]:
    """Lengths of what is rotated together: blocks, then smaller powers of two."""
    whole, rest = divmod(size, block)
    powers = [1 << k for k in reversed(range(block.bit_length())) if rest >> k & 1]
    return np.array([block] * whole + powers, np.int64)
