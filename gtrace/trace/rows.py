"""One row of a tensor: the numbers that are stored with it, and which elements of a long gradient it holds."""

from __future__ import annotations

import functools
import itertools
import math
import threading
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
from numcodecs.checksum32 import CRC32C

from gtrace.errors import TraceError, UsageError, printable
from gtrace.trace.format import VALUES, are_lengths
from gtrace.types import Key

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from numpy.typing import NDArray


#: elements that are read together: their squares stay in the processor's cache
_BLOCK = 1 << 15


class RowStatistics(NamedTuple):
    """The statistics of one tensor at one step that a trace stores.

    Attributes:
        norm2: sum of squares of the finite values, float64 sums over blocks of 2^15 elements in index order.
        absmax: largest magnitude of the finite values; 0 without any.
        zeros: values that are 0 or -0.
        nonfinite: values that are NaN or infinite.
        crc32c: CRC-32C of the little-endian float32 bytes.
    """

    norm2: float
    absmax: float
    zeros: int
    nonfinite: int
    crc32c: int


def checksum_bytes(data: bytes | NDArray[np.uint8], before: int = 0) -> int:
    """CRC-32C (Castagnoli) of bytes, or of those with the checksum ``before`` and these after them."""
    return int(CRC32C.checksum(data, before))


def checksum(values: NDArray[np.float32]) -> int:
    """CRC-32C of the little-endian bytes of a contiguous float32 array."""
    return checksum_bytes(np.ascontiguousarray(values, VALUES).view(np.uint8))


def verify(found: int, stored: int, about: str, what: str = "with the commit record") -> None:
    """Raise TraceError if two checksums differ."""
    if found != stored:
        raise TraceError(f"{about}: checksum mismatch {what}; damaged or truncated")


class _Scratch(threading.local):
    """Memory for one block, one of each per thread: fresh memory would cost more than the sums."""

    def __init__(self) -> None:
        self.squares = np.empty(_BLOCK)
        self.zero = np.empty(_BLOCK, np.bool_)


_scratch = _Scratch()


def row_statistics(values: NDArray[np.float32]) -> RowStatistics:
    """Statistics of a contiguous 1-D float32 array."""
    norm2, absmax, zeros, nonfinite = 0.0, 0.0, 0, 0
    zero = _scratch.zero
    # A signaling NaN must not cause a warning: it is counted.
    with np.errstate(invalid="ignore"):
        for start in range(0, values.size, _BLOCK):
            block = values[start : start + _BLOCK]
            zeros += int(np.count_nonzero(np.equal(block, 0.0, out=zero[: block.size])))
            total = float(np.add.reduce(_squares(block)))
            # Squares of finite float32 values never overflow float64, so a finite sum means that all are finite.
            if not math.isfinite(total):
                nonfinite += block.size
                block = block[np.isfinite(block)]
                nonfinite -= block.size
                total = float(np.add.reduce(_squares(block)))
            norm2 += total
            if block.size:
                absmax = max(absmax, float(np.maximum.reduce(block)), -float(np.minimum.reduce(block)))
    return RowStatistics(norm2, absmax, zeros, nonfinite, checksum(values))


def rows_statistics(values: NDArray[np.float32]) -> tuple[NDArray[Any], ...]:
    """The fields of :func:`row_statistics` for float32[rows, n], each row contiguous: one array[rows] for each."""
    count, size = values.shape
    height = _BLOCK // size if size else 0
    if count == 1 or height == 0:
        return tuple(map(np.array, zip(*map(row_statistics, values), strict=True)))
    norm2, absmax, zeros, nonfinite = np.empty(count), np.empty(count), np.empty(count, np.int64), np.zeros(count)
    with np.errstate(invalid="ignore"):
        for top in range(0, count, height):
            here, block = slice(top, top + height), values[top : top + height]
            zero = np.equal(block, 0.0, out=_scratch.zero[: block.size].reshape(block.shape))
            zeros[here] = [np.count_nonzero(row) for row in zero]
            squares = _squares(block)
            norm2[here] = np.add.reduce(squares, axis=1)
            # The root of the square of a float32 is exact.
            absmax[here] = np.sqrt(np.maximum.reduce(squares, axis=1))
    for row in np.flatnonzero(~np.isfinite(norm2)).tolist():
        norm2[row], absmax[row], zeros[row], nonfinite[row], _ = row_statistics(values[row])
    return norm2, absmax, zeros, nonfinite, np.array([checksum(row) for row in values])


def _squares(block: NDArray[np.float32]) -> NDArray[np.float64]:
    squares = _scratch.squares[: block.size].reshape(block.shape)
    # Cast first, then multiply: in one call, numpy would do both through a small buffer.
    squares[...] = block
    return np.multiply(squares, squares, out=squares)


Real = TypeVar("Real", np.float32, np.float64)


def rechunk(pieces: Iterable[NDArray[Real]], chunk: int) -> Iterator[NDArray[Real]]:
    """The same elements in pieces of ``chunk``, the last one shorter; none without elements."""
    held: list[NDArray[Real]] = []
    size = 0
    for piece in pieces:
        start = 0
        while start < piece.size:
            part = piece[start : start + chunk - size]
            start += part.size
            size += part.size
            held.append(part)
            if size == chunk:
                yield held[0] if len(held) == 1 else np.concatenate(held)
                held, size = [], 0
    if held:
        yield held[0] if len(held) == 1 else np.concatenate(held)


#: elements of a block
BLOCK = 16384
#: ``kind`` in the attribute ``sample`` of such a tensor
BLOCKS = "blocks"
#: seed of the choice, and of the samples that a writer draws
SEED = 0

#: the numbers about a whole gradient as unknown: all of it is stored, or nothing was measured
UNKNOWN = dict.fromkeys(("whole_norm1", "whole_norm2", "whole_absmax", "whole_nonfinite"), math.nan)

_PASS = 1 << 20


class BlockSample(NamedTuple):
    """Which blocks of a gradient are stored, in order.

    Attributes:
        offsets: index of the first element of each, ascending; multiples of ``block``.
        total: elements of the gradient.
        block: elements of a block; the gradient's last one may be shorter.
    """

    offsets: tuple[int, ...]
    total: int
    block: int = BLOCK

    @classmethod
    def choose(cls, name: str, total: int, most: int) -> BlockSample | None:
        """Draw blocks, every set with the same probability; None if all of them fit.

        Args:
            name: the tensor's name; name and sizes determine the draw, so every step and process has the same blocks.
            total: elements of the gradient.
            most: elements to keep, rounded up to whole blocks; at least 1.

        >>> BlockSample.choose("w", 100_000, 20_000).kept
        2
        """
        blocks, wanted = -(-total // BLOCK), -(-most // BLOCK)
        if wanted >= blocks:
            return None
        key = Key.derive(SEED, tensor=name, role="sample")
        # Numpy's own Philox instead of the kernels' hash: this runs while a model trains, which must not wait for a
        # compiler. Blocks are sorted by random words; the first ones are a draw without replacement.
        words = np.random.Philox(key=np.array(key, np.uint64)).random_raw(blocks)
        chosen = np.sort(np.argsort(words, kind="stable")[:wanted])
        return cls(tuple((chosen * BLOCK).tolist()), total)

    @classmethod
    def read(cls, value: object) -> BlockSample | None:
        """The sample in the attribute ``sample``, None if it does not describe blocks; UsageError if it is wrong."""
        if not isinstance(value, dict) or value.get("kind") != BLOCKS or "block" not in value:
            return None
        offsets, total, block = value.get("offsets"), value.get("total", 0), value["block"]
        whole = are_lengths([total]) and are_lengths([block], 1) and are_lengths(offsets)
        if not whole or not offsets or offsets[-1] >= total:
            raise UsageError("needs a list of offsets with 'total' and 'block'")
        if any(offset % block for offset in offsets) or any(a >= b for a, b in itertools.pairwise(offsets)):
            raise UsageError("needs ascending offsets that are multiples of 'block'")
        return cls(tuple(offsets), total, block)

    def describe(self) -> dict[str, Any]:
        """The attribute ``sample``."""
        return {"kind": BLOCKS, "offsets": list(self.offsets), "total": self.total, "block": self.block}

    @property
    def kept(self) -> int:
        """Number of stored blocks."""
        return len(self.offsets)

    @property
    def blocks(self) -> int:
        """Number of blocks of the gradient."""
        return -(-self.total // self.block)

    @property
    def size(self) -> int:
        """Number of stored elements."""
        return sum(min(self.block, self.total - offset) for offset in self.offsets)

    def take(self, values: NDArray[np.float32]) -> NDArray[np.float32]:
        """The stored elements of a flat gradient."""
        return np.concatenate([values[offset : offset + self.block] for offset in self.offsets])


def whole_numbers(values: NDArray[np.float32]) -> Mapping[str, float]:
    """``whole_*`` of ``format.EXTRAS``, of a flat float32 gradient: float64 sums over blocks of 2^20 in index order."""
    norm1 = norm2 = absmax = 0.0
    nonfinite = 0
    for start in range(0, values.size, _PASS):
        magnitudes = np.abs(values[start : start + _PASS]).astype(np.float64)
        total = float(magnitudes.sum())
        if not math.isfinite(total):
            finite = np.isfinite(magnitudes)
            nonfinite += magnitudes.size - int(np.count_nonzero(finite))
            magnitudes = magnitudes[finite]
            total = float(magnitudes.sum())
        norm1 += total
        absmax = max(absmax, float(magnitudes.max(initial=0.0)))
        norm2 += float(np.square(magnitudes, out=magnitudes).sum())
    return {"whole_norm1": norm1, "whole_norm2": norm2, "whole_absmax": absmax, "whole_nonfinite": float(nonfinite)}


#: the attribute ``sample`` of a tensor with rows of varying length
SAMPLE: Mapping[str, Any] = {"kind": "stretches", "seed": SEED}

#: index arrays that are kept for the next step
_KEPT_SAMPLES = 8


def default_capacity(first: int) -> int:
    """Elements of a row for a tensor that appears with ``first`` elements: a quarter more, and at least one.

    The first batch is usually a full one; the quarter allows for texts of different lengths.

    >>> default_capacity(1000), default_capacity(0)
    (1250, 1)
    """
    return max(first + first // 4, 1)


@functools.lru_cache(maxsize=_KEPT_SAMPLES)
def sample_indices(total: int, count: int) -> NDArray[np.int64]:
    """The ``count`` of ``total`` elements in a sample: one from each of ``count`` ranges of equal length.

    Range i covers the elements ``i * total // count`` up to ``(i + 1) * total // count``; the i-th output of a
    Philox generator with the key, as a uniform number of 53 bits, chooses one of them. So no element occurs
    twice, order is kept, and the cost does not depend on ``total``.

    Args:
        total: elements of the gradient, at least ``count``.
        count: elements of the sample; the same arguments always give the same elements.

    Returns:
        int64[count], ascending, read-only.
    """
    key = Key.derive(SEED, tensor="", role="sample")
    # Numpy's own Philox instead of the kernels' hash: this runs while a model trains, which must not wait for numba.
    words = np.random.Philox(key=np.array(key, np.uint64)).random_raw(count)
    uniforms = (words >> np.uint64(11)) * 2.0**-53
    edges = np.arange(count + 1, dtype=np.int64) * total // max(count, 1)
    indices = edges[:-1] + (uniforms * np.diff(edges)).astype(np.int64)
    indices.flags.writeable = False
    return indices


def row_width(name: str, kind: str, size: int, n_total: int | None, capacity: object) -> tuple[int, int]:
    """Width of the row of a tensor that appears with ``size`` elements, and the gradient's number of elements.

    Raises:
        UsageError: a weight gradient with another size, or inconsistent numbers.
    """
    if kind != "neural" and n_total is None and capacity is None:
        return size, size
    what = f"tensor '{printable(name)}'"
    if kind != "neural":
        raise UsageError(f"{what}: n_total and capacity are for kind 'neural'; other kinds always have one size")
    if n_total is not None and not size <= n_total < 2**63:
        raise UsageError(f"{what}: n_total is {n_total}, but {size} elements were given")
    if capacity is None:
        capacity = default_capacity(size)
    if not isinstance(capacity, (int, np.integer)) or capacity < 1:
        raise UsageError(f"{what}: capacity cannot be {capacity} elements; give at least 1")
    return int(capacity), size if n_total is None else int(n_total)
