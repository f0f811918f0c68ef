"""Words at any byte, symbols of a fixed width, least significant bit first, and the code lengths of a Huffman tree."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import config
from numba.extending import intrinsic, overload

from gtrace.kernels._jit import inline, jit

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from gtrace.kernels import Bytes, Floats, Ints, Symbols

_8 = np.uint64(8)
_32 = np.uint64(32)


#: symbols that are packed at a time; this many symbols of any width end on a byte
CHUNK = 2048
#: bytes beyond the packed ones that :func:`pack_chunk` may write zeros into
SLACK = 16
#: values whose lines of the cache are asked for at a time: more would wait for each other
PIECE = 128
#: float32 and bytes in a line of the cache
FLOATS, BYTES = 16, 64
_4 = np.uint16(4)
_U1 = np.uint64(1)
_U2 = np.uint64(2)
_U4 = np.uint64(4)
_16 = np.uint64(16)
_64 = np.uint64(64)
_EVEN8 = np.uint64(0x00FF00FF00FF00FF)
_EVEN16 = np.uint64(0x0000FFFF0000FFFF)
_LOW32 = np.uint64(0xFFFFFFFF)


def load64(data: Bytes, at: int) -> np.uint64:
    """The eight bytes at ``at``, all inside the array, which is contiguous."""
    return data[at : at + 8].copy().view("<u8")[0]


def store64(data: Bytes, at: int, value: np.uint64) -> None:
    """Write eight bytes at ``at``, all inside the array, which is contiguous."""
    data[at : at + 8] = np.array([value], "<u8").view(np.uint8)


def shift(value: np.int32, by: np.int32) -> np.int32:
    """``value >> by``, 0 to 31, in 32-bit lanes; numba's own has 64."""
    return np.int32(value >> by)


def touch(values: NDArray[Any], at: int) -> None:
    """Ask for the line of the cache with ``values[at]``, which may lie beyond the array; nothing waits for it."""


def _place(context: Any, builder: Any, array_type: Any, array: Any, at: Any, bits: int = 64) -> Any:
    data = context.make_array(array_type)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [at]), ir.IntType(bits).as_pointer())


if not config.DISABLE_JIT:

    @intrinsic
    def _load(typing: Any, data: Any, at: Any) -> Any:
        del typing, at

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            place = _place(context, builder, signature.args[0], *arguments)
            return builder.load(place, align=1)

        return types.uint64(data, types.intp), generate

    @intrinsic
    def _store(typing: Any, data: Any, at: Any, value: Any) -> Any:
        del typing, at, value

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            place = _place(context, builder, signature.args[0], *arguments[:2])
            builder.store(arguments[2], place, align=1)
            return context.get_dummy_value()

        return types.void(data, types.intp, types.uint64), generate

    @intrinsic
    def _shift(typing: Any, value: Any, by: Any) -> Any:
        del typing, value, by
        word = types.int32
        return word(word, word), lambda _context, builder, _signature, arguments: builder.ashr(*arguments)

    @intrinsic
    def _touch(typing: Any, values: Any, at: Any) -> Any:
        del typing, at

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            place, number = _place(context, builder, signature.args[0], arguments[0], arguments[1], 8), ir.IntType(32)
            kind = ir.FunctionType(ir.VoidType(), [place.type, number, number, number])
            prefetch = builder.module.declare_intrinsic("llvm.prefetch", [place.type], kind)
            # For reading, of data (not instructions), into the second level, whose room a few buckets do not use up.
            builder.call(prefetch, [place, number(0), number(2), number(1)])
            return context.get_dummy_value()

        return types.void(values, types.intp), generate

    # numba needs functions of the same signature, annotations included, around what it compiles.
    overload(shift, inline="always")(lambda value, by: lambda value, by: _shift(value, by))  # type: ignore[call-arg]  # noqa: PLW0108
    overload(touch, inline="always")(lambda values, at: lambda values, at: _touch(values, at))  # type: ignore[call-arg]  # noqa: PLW0108
    overload(load64, inline="always")(lambda data, at: lambda data, at: _load(data, at))  # type: ignore[call-arg]  # noqa: PLW0108
    overload(store64, inline="always")(
        lambda data, at, value: lambda data, at, value: _store(data, at, value)  # type: ignore[call-arg]  # noqa: PLW0108
    )


@inline
def prefetch(values: NDArray[Any], at: int, size: int, line: int) -> None:
    """Ask for the lines, of ``line`` values, with ``size`` values from ``at`` on, which may lie beyond the array."""
    for k in range(0, size, line):
        touch(values, at + k)


@inline
def pack_bytes(codes: Bytes, count: int, width: int, out: Bytes) -> None:
    """Like :func:`pack_chunk`, up to 8 bits of each of uint8[CHUNK], which is overwritten."""
    bits = np.uint64(width)
    groups = -(-count // 8)
    for i in range(count, groups * 8):
        codes[i] = 0
    # Writing must not wait for the lines of the next chunk.
    prefetch(out, CHUNK * width // 8, CHUNK * width // 8, BYTES)
    if width == 8:
        for i in range(groups * 8):
            out[i] = codes[i]
        return
    if width == 4:
        twos = codes.view(np.uint16)
        for i in range(groups * 4):
            out[i] = twos[i] | (twos[i] >> _4)
        return
    eights = codes.view(np.uint64)
    for i in range(CHUNK // 8):
        v = eights[i]
        v = (v & _EVEN8) | ((v & ~_EVEN8) >> (_8 - bits))
        v = (v & _EVEN16) | ((v & ~_EVEN16) >> (_16 - _U2 * bits))
        eights[i] = (v & _LOW32) | ((v >> _32) << (_U4 * bits))
    at, pairs = 0, groups // 2 if width < 4 else 0
    for g in range(pairs):
        store64(out, at, eights[2 * g] | (eights[2 * g + 1] << (_8 * bits)))
        at += 2 * width
    for g in range(2 * pairs, groups):
        store64(out, at, eights[g])
        at += width


@inline
def pack_chunk(codes: Symbols, count: int, width: int, scratch: Bytes, out: Bytes) -> None:
    """Write the first ``count`` of CHUNK symbols in ``width`` bits each, 1 to 16, and up to SLACK bytes of zeros.

    Neighbours are pushed together within words, eight (up to 8 bits) or four at a time, which is vectorized; eight
    symbols are ``width`` bytes. Loops over whole chunks have a length that the compiler knows. The symbols after
    ``count`` are overwritten, as is ``scratch``, uint8[CHUNK].
    """
    if width <= 8:
        for i in range(CHUNK):
            scratch[i] = codes[i]
        pack_bytes(scratch, count, width, out)
        return
    bits = np.uint64(width)
    groups = -(-count // 8)
    for i in range(count, groups * 8):
        codes[i] = 0
    fours = codes.view(np.uint64)
    for i in range(CHUNK // 4):
        v = fours[i]
        v = (v & _EVEN16) | ((v & ~_EVEN16) >> (_16 - bits))
        fours[i] = (v & _LOW32) | ((v >> _32) << (_U2 * bits))
    length = _U4 * bits
    at = 0
    for g in range(groups):
        store64(out, at, fours[2 * g] | ((fours[2 * g + 1] << _U1) << (length - _U1)))
        store64(out, at + 8, fours[2 * g + 1] >> (_64 - length))
        at += width


@jit
def pack(symbols: Symbols, width: int, out: Bytes) -> None:
    """Write each symbol in ``width`` bits, 1 to 16, into the first ceil(n width / 8) bytes of ``out``.

    The unused bits of the last of them are zero; ``out`` has SLACK bytes more.
    """
    codes, scratch = np.empty(CHUNK, np.uint16), np.empty(CHUNK, np.uint8)
    for p in range(0, symbols.size, CHUNK):
        sp = symbols[p : min(p + CHUNK, symbols.size)]
        for i in range(sp.size):
            codes[i] = sp[i]
        pack_chunk(codes, sp.size, width, scratch, out[p * width // 8 :])


@inline
def readable(data: Bytes, start: int, width: int, last: Bytes) -> Bytes:
    """The bytes from ``start`` on, or ``last``, uint8[2 CHUNK + SLACK], with a copy: whole chunks can be read.

    What follows the copy in ``last`` has no meaning.
    """
    source = data[start:]
    if source.size >= CHUNK // 8 * width + SLACK:
        return source
    for i in range(source.size):
        last[i] = source[i]
    return last


@inline
def unpack_chunk(data: Bytes, width: int, narrow: Bytes, codes: Symbols) -> None:
    """Read CHUNK symbols of ``width`` bits, 1 to 8 into ``narrow``, 9 to 16 into ``codes``.

    Words of eight symbols or four are read and then spread, which is vectorized; ``data`` has SLACK bytes more than the
    symbols.
    """
    bits = np.uint64(width)
    one, two = (_U1 << bits) - _U1, (_U1 << (_U2 * bits)) - _U1
    length = _U4 * bits
    at = 0
    if width <= 8:
        eights = narrow.view(np.uint64)
        for g in range(CHUNK // 8):
            eights[g] = load64(data, at)
            at += width
        four = (_U1 << length) - _U1
        two |= two << _32
        one |= one << _16
        one |= one << _32
        for i in range(CHUNK // 8):
            v = eights[i]
            v = (v & four) | (((v >> length) & four) << _32)
            v = (v & two) | (((v >> (_U2 * bits)) & two) << _16)
            eights[i] = (v & one) | (((v >> bits) & one) << _8)
    else:
        fours = codes.view(np.uint64)
        for g in range(CHUNK // 8):
            v = load64(data, at)
            fours[2 * g] = v
            fours[2 * g + 1] = ((v >> _U1) >> (length - _U1)) | (load64(data, at + 8) << (_64 - length))
            at += width
        one |= one << _32
        for i in range(CHUNK // 4):
            v = fours[i]
            v = (v & two) | (((v >> (_U2 * bits)) & two) << _32)
            fours[i] = (v & one) | (((v >> bits) & one) << _16)


@jit
def unpack(data: Bytes, width: int, out: Symbols) -> int:
    """Read ``out.size`` symbols of ``width`` bits, 1 to 16; returns the largest, 0 for none."""
    narrow, codes, last = np.empty(CHUNK, np.uint8), np.empty(CHUNK, np.uint16), np.empty(2 * CHUNK + SLACK, np.uint8)
    top = np.uint16(0)
    for p in range(0, out.size, CHUNK):
        op = out[p : min(p + CHUNK, out.size)]
        unpack_chunk(readable(data, p * width // 8, width, last), width, narrow, codes)
        for i in range(op.size):
            op[i] = narrow[i] if width <= 8 else codes[i]
        for i in range(op.size):
            top = max(top, op[i])
    return np.int64(top)


@jit
def huffman_depths(weights: Floats, depths: Ints) -> None:
    """Depths of the leaves of a Huffman tree for ascending positive ``weights``, two or more.

    With sorted leaves, merged nodes come out in ascending order too, so two queues replace a heap. On ties
    a leaf comes before a merged node: this gives the flattest of the optimal trees.
    """
    m = weights.size
    merged = np.empty(m - 1)
    parent = np.empty(2 * m - 1, np.int64)
    leaf, node = 0, 0
    for k in range(m - 1):
        total = 0.0
        for _ in range(2):
            if leaf < m and (node >= k or weights[leaf] <= merged[node]):
                total += weights[leaf]
                parent[leaf] = m + k
                leaf += 1
            else:
                total += merged[node]
                parent[m + node] = m + k
                node += 1
        merged[k] = total
    below = np.empty(2 * m - 1, np.int64)
    below[2 * m - 2] = 0
    for k in range(2 * m - 3, -1, -1):
        below[k] = below[parent[k]] + 1
    for k in range(m):
        depths[k] = below[k]


@jit
def package_merge(weights: Floats, longest: int, depths: Ints) -> None:
    """Depths of the leaves of the best tree of at most ``longest`` levels, for ascending positive ``weights``.

    Larmore and Hirschberg, 1990: the items of a level are the leaves and the pairs of the level below, ascending; the
    first 2 m - 2 items of the last level say how often each leaf is taken, which is its depth. There must be two leaves
    or more, and at most 2^longest.
    """
    m = weights.size
    most = 2 * m - 2
    paired = np.zeros((longest, most), np.bool_)
    both = np.empty((2, most))
    for k in range(m):
        both[0, k] = weights[k]
    count = m
    for level in range(1, longest):
        items, below = both[level % 2], both[1 - level % 2]
        pairs, count = count // 2, min(most, m + count // 2)
        leaf, pair = 0, 0
        for k in range(count):
            joined = below[2 * pair] + below[2 * pair + 1] if pair < pairs else np.inf
            if leaf < m and weights[leaf] <= joined:
                items[k] = weights[leaf]
                leaf += 1
            else:
                items[k] = joined
                paired[level, k] = True
                pair += 1
    for k in range(m):
        depths[k] = 0
    taken = most
    for level in range(longest - 1, -1, -1):
        leaves = 0
        for k in range(taken):
            leaves += not paired[level, k]
        for k in range(leaves):
            depths[k] += 1
        taken = 2 * (taken - leaves)


@jit
def entropy(probabilities: Floats) -> float:
    """Shannon entropy in bits; zero probabilities add nothing."""
    total = 0.0
    for k in range(probabilities.size):
        if probabilities[k] > 0.0:
            total -= probabilities[k] * np.log2(probabilities[k])
    return total
