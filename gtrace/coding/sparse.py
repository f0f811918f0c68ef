"""Sparse tensors: positions as the gaps between them, and a prefix code of zeros, a threshold and exact values."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from gtrace.coding.elias import ELIAS, EliasCode
from gtrace.coding.fixed import ends_after, from_words, read_floats, to_words, width_for, word_room
from gtrace.errors import PayloadError, UsageError
from gtrace.kernels import codes as _codes
from gtrace.kernels import elias as _elias

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

# The first byte: positions as they are, their gaps in an Elias code, or 16 + k for Rice codes of 2^k.
_FIXED = 0
_ELIAS = 1
_RICE = 16
_MAX_RICE = 48
#: Rice parameters that are tried around the best one for gaps drawn at random
_TRIED = 3


def encode_positions(positions: ArrayLike, size: int) -> bytes:
    """Code ascending positions below ``size``, at fixed width or by their gaps, whichever is shortest.

    Layout: a byte for the method (0 fixed width; 1, 2, 3 Elias gamma, delta, omega; 16 + k Rice with parameter k),
    the number of positions in as few bytes as ``size`` needs (little-endian), then the codes.

    Args:
        positions: integers, strictly ascending, from 0 to ``size`` - 1.
        size: number of elements of the tensor; the decoder must know it.

    Raises:
        UsageError: positions that are not.

    >>> encode_positions([3, 5, 6], 8).hex()
    '100368'
    >>> decode_positions(encode_positions([3, 5, 6], 8), 8).tolist()
    [3, 5, 6]
    """
    p = _checked(positions, size)
    method, bits = _best(p, size)
    head = bytes([method]) + p.size.to_bytes(_count_bytes(size), "little")
    if _ELIAS <= method < _RICE:
        return head + EliasCode(ELIAS[method - _ELIAS], origin=1, signed=False).encode(np.diff(p, prepend=-1))
    if method == _FIXED:
        return head + pack_positions(p, size)
    words = word_room(bits)
    _elias.write_rice(p, method - _RICE, words)
    return head + from_words(words, bits)


def decode_positions(data: bytes | memoryview, size: int) -> NDArray[np.int64]:
    """Undo :func:`encode_positions`: int64[count], strictly ascending and below ``size``.

    Raises:
        PayloadError: the bytes are not such positions, or not all of them are used.
    """
    method, count = _head(data, size)
    body = memoryview(data)[1 + _count_bytes(size) :]
    bits = 8 * len(body)
    if method == _FIXED:
        return unpack_positions(body, size, count)
    if bits < count:
        raise PayloadError(f"positions: {len(body)} bytes cannot hold {count} of them")
    if method < _RICE:
        p = EliasCode(ELIAS[method - _ELIAS], origin=1, signed=False).decode(body, count)
        if not _elias.add_up(p, size):
            raise PayloadError("positions: one lies beyond the tensor")
        return p
    p = np.empty(count, np.int64)
    used = int(_elias.read_rice(to_words(body), bits, method - _RICE, size, p))
    if not ends_after(body, used):
        raise PayloadError("positions: the stream ends early, is too long or leaves the tensor")
    return p


def pack_positions(positions: NDArray[np.int64], size: int) -> bytes:
    """Positions below ``size`` in as many bits each as ``size`` needs; the last byte is padded with zeros."""
    width = width_for(size)
    words = word_room(positions.size * width)
    if width:
        _elias.write_wide(positions, width, words)
    return from_words(words, positions.size * width)


def unpack_positions(data: bytes | memoryview, size: int, count: int) -> NDArray[np.int64]:
    """Undo :func:`pack_positions` for ``count`` positions: int64[count].

    Raises:
        PayloadError: the bytes are not such positions.
    """
    width = width_for(size)
    if count <= size and ends_after(data, count * width):
        positions = np.zeros(count, np.int64)
        if not width or _elias.read_wide(to_words(data), width, size, positions):
            return positions
    raise PayloadError("positions: not ascending, beyond the tensor, too short or too long")


def decode_sparse(data: bytes | memoryview, size: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Positions (int64[m]) of :func:`encode_positions`, then their values (float32[m]), little-endian.

    Raises:
        PayloadError: the bytes are not such a tensor, or a value is not finite.
    """
    _, count = _head(data, size)
    split = len(data) - 4 * count
    if split < 1 + _count_bytes(size):
        raise PayloadError(f"positions: {len(data)} bytes cannot hold {count} values")
    view = memoryview(data)
    positions = decode_positions(view[:split], size)
    return positions, read_floats(view[split:])


def _checked(positions: ArrayLike, size: int) -> NDArray[np.int64]:
    array = np.asarray(positions)
    if array.size and array.dtype.kind not in "iu":
        raise UsageError(f"positions of dtype {array.dtype}; pass integers")
    p = np.ascontiguousarray(array, dtype=np.int64).reshape(-1)
    if p.size and not (p[0] >= 0 and p[-1] < size and (p[1:] > p[:-1]).all()):
        raise UsageError(f"positions: they must be strictly ascending and from 0 to {size - 1}")
    return p


def _count_bytes(size: int) -> int:
    return max(1, -(-size.bit_length() // 8))


def _best(p: NDArray[np.int64], size: int) -> tuple[int, int]:
    """The shortest method and its bits; of two that end in the same byte, the simpler one."""
    if p.size == 0:
        return _FIXED, 0
    spread = (int(p[-1]) + 1) / p.size
    # For geometric gaps the best parameter is near log2(ln 2 times their mean); its neighbors are tried too.
    low = max(0, math.floor(math.log2(max(1.0, math.log(2) * spread))) - _TRIED // 2)
    by_length, rice = np.zeros(65, np.int64), np.zeros(_TRIED, np.int64)
    _elias.gap_lengths(p, low, by_length, rice)
    sizes = {_FIXED: p.size * width_for(size)}
    for k in range(_TRIED):
        sizes[_RICE + low + k] = int(rice[k])
    for index, kind in enumerate(ELIAS):
        sizes[_ELIAS + index] = EliasCode(kind).bits_by_length(by_length)
    method = min(sizes, key=lambda m: -(-sizes[m] // 8))
    return method, sizes[method]


def _head(data: bytes | memoryview, size: int) -> tuple[int, int]:
    """Method and number of positions."""
    end = 1 + _count_bytes(size)
    if len(data) < end:
        raise PayloadError(f"positions: {len(data)} bytes are shorter than the {end} that they begin with")
    method, count = data[0], int.from_bytes(data[1:end], "little")
    if not (method == _FIXED or _ELIAS <= method < _ELIAS + len(ELIAS) or _RICE <= method < _RICE + _MAX_RICE):
        raise PayloadError(f"positions: no method has the number {method}")
    if count > size:
        raise PayloadError(f"positions: {count} of them in a tensor of {size} elements")
    return method, count


class PrefixCode:
    """The prefix code of Chmiel et al. (Neural gradients are near-lognormal, 2021) for stochastically pruned tensors.

    A zero is ``0``; plus or minus alpha is ``10`` and a sign bit; any other value is ``11`` and its 32 bits. Alpha
    itself is not part of the stream. The sign of a zero is lost.

    Args:
        alpha: the threshold, positive and finite; rounded to float32.

    Raises:
        UsageError: alpha is not positive, or vanishes or overflows in float32.

    >>> code = PrefixCode(0.5)
    >>> data = code.encode(np.array([0, 0.5, -0.5, 3], np.float32))
    >>> code.bits(np.array([0, 0.5, -0.5, 3], np.float32)), code.decode(data, 4).tolist()
    (41, [0.0, 0.5, -0.5, 3.0])
    """

    def __init__(self, alpha: float) -> None:
        with np.errstate(over="ignore", under="ignore"):
            self.alpha = np.float32(alpha)
        if not (np.isfinite(self.alpha) and self.alpha > 0):
            raise UsageError(f"prefix code: alpha {alpha} must be positive and within float32")
        self._pattern = self.alpha.reshape(1).view(np.uint32)[0]

    def bits(self, values: NDArray[np.float32]) -> int:
        """Exact length of the encoded float32[n] in bits."""
        return int(_codes.pruned_bits(_patterns(values), self._pattern))

    @staticmethod
    def expected_bits(zeros: float, at_alpha: float) -> float:
        """Mean bits per value when these fractions of the values are zero and plus or minus alpha.

        >>> round(PrefixCode.expected_bits(0.8, 0.15), 9)
        2.95
        """
        return zeros + 3.0 * at_alpha + 34.0 * (1.0 - zeros - at_alpha)

    def encode(self, values: NDArray[np.float32]) -> bytes:
        """Encode float32[n]; the last byte is padded with zeros."""
        patterns = _patterns(values)
        out = np.empty(-(-int(_codes.pruned_bits(patterns, self._pattern)) // 8) + _codes.SLACK, np.uint8)
        _codes.write_pruned(patterns, self._pattern, out)
        return out[: -_codes.SLACK].tobytes()

    def decode(self, data: bytes | memoryview, count: int) -> NDArray[np.float32]:
        """Decode ``count`` values that take up all of ``data``: float32[count].

        Raises:
            PayloadError: too short (checked before memory is taken), too long, or nothing that an encoder writes.
        """
        raw = np.frombuffer(data, np.uint8)
        if raw.size * 8 < count:
            raise PayloadError(f"{raw.size} bytes cannot hold {count} values of the prefix code")
        out = np.empty(count, np.uint32)
        padded = np.zeros(raw.size + _codes.SLACK, np.uint8)
        padded[: raw.size] = raw
        used = int(_codes.read_pruned(padded, raw.size, self._pattern, out))
        if not ends_after(raw, used):
            raise PayloadError("the prefix-coded stream ends early, is too long or holds what no encoder writes")
        return out.view(np.float32)


def _patterns(values: NDArray[np.float32]) -> NDArray[np.uint32]:
    return np.ascontiguousarray(values, np.float32).reshape(-1).view(np.uint32)
