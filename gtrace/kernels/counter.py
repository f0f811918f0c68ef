"""Counter-based randomness: element i of a stream is a hash of (key, i), with no state in between."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import config
from numba.extending import intrinsic, overload

from gtrace.kernels._jit import inline, jit

if TYPE_CHECKING:
    from collections.abc import Sequence

MASK32 = np.uint64(0xFFFFFFFF)
#: the multipliers and shifts of triple32, a permutation of 32 bits with little bias between its input and output bits
_M1 = np.uint64(0xED5AD4BB)
_M2 = np.uint64(0xAC4C1B51)
_M3 = np.uint64(0x31848BAB)
_S8 = np.uint64(8)
_S11 = np.uint64(11)
_S14 = np.uint64(14)
_S15 = np.uint64(15)
_S17 = np.uint64(17)
_S32 = np.uint64(32)
#: one step of the 24-bit grid on which uniforms lie
STEP24 = np.float32(2.0**-24)


def mix(counter: np.uint64, add: np.uint64, flip: np.uint64, last: np.uint64) -> np.uint64:
    """32 random bits of one counter under three 32-bit words of a key.

    The rounds of triple32, with a word of the key before each. Neighboring counters differ in few bits, so the first
    multiplication alone does not separate them: elements at some distances are correlated after two rounds. Kernels
    get this function in 32-bit lanes, see below; this form is masked in 64 bits, so that products wrap the same without
    compilation.
    """
    x = (counter + add) & MASK32
    x ^= x >> _S17
    x = (x * _M1) & MASK32
    x ^= flip
    x ^= x >> _S11
    x = (x * _M2) & MASK32
    x = (x + last) & MASK32
    x ^= x >> _S15
    x = (x * _M3) & MASK32
    return x ^ (x >> _S14)


def _lanes(builder: Any, words: Sequence[Any]) -> Any:
    """:func:`mix` as instructions on 32-bit lanes; left to itself, the compiler takes 64, which halves the speed."""
    narrow, wide = ir.IntType(32), ir.IntType(64)
    counter, add, flip, last = (builder.trunc(word, narrow) for word in words)

    def folded(value: Any, shift: int) -> Any:
        return builder.xor(value, builder.lshr(value, narrow(shift)))

    x = builder.mul(folded(builder.add(counter, add), 17), narrow(int(_M1)))
    x = builder.mul(folded(builder.xor(x, flip), 11), narrow(int(_M2)))
    x = builder.mul(folded(builder.add(x, last), 15), narrow(int(_M3)))
    return builder.zext(folded(x, 14), wide)


if not config.DISABLE_JIT:

    @intrinsic
    def _mix(typing: Any, counter: Any, add: Any, flip: Any, last: Any) -> Any:
        del typing, counter, add, flip, last
        word = types.uint64
        return word(word, word, word, word), lambda _context, builder, _signature, words: _lanes(builder, words)

    # numba wants functions of the same signature, annotations included, around what it compiles.
    overload(mix, inline="always")(
        lambda counter, add, flip, last: (
            lambda counter, add, flip, last: _mix(counter, add, flip, last)  # type: ignore[call-arg]  # noqa: PLW0108
        )
    )


@inline
def words(high: np.uint64, low: np.uint64, index: int) -> tuple[np.uint64, np.uint64, np.uint64]:
    """The three 32-bit words of a 128-bit key for the block of 2^32 elements that ``index`` lies in."""
    block = np.uint64(index) >> _S32
    a = high & MASK32
    b = high >> _S32
    c = low & MASK32
    d = low >> _S32
    add = mix(block, a, d, c)
    flip = mix(block, b, c, d)
    last = mix(block, (a + d) & MASK32, b, (c + b) & MASK32)
    return add, flip, last


@inline
def moved(key: tuple[np.uint64, np.uint64, np.uint64], place: int) -> tuple[np.uint64, np.uint64, np.uint64]:
    """The words with which counter i gives element place + i of the block.

    A loop's own counter has 32-bit lanes; the sum of a counter and a place would have 64-bit ones.
    """
    add, flip, last = key
    return (add + np.uint64(place)) & MASK32, flip, last


@inline
def uniform(counter: np.uint64, add: np.uint64, flip: np.uint64, last: np.uint64) -> np.float32:
    """A uniform number k / 2^24, 0 <= k < 2^24, exact in float32."""
    return np.float32(np.int32(mix(counter, add, flip, last) >> _S8)) * STEP24


@jit
def fill_uniform(out, high, low, start):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """Uniforms of the elements start, start + 1, ... of a stream into ``out`` (float32); one 2^32 block."""
    add, flip, last = moved(words(high, low, start), start)
    for i in range(out.size):
        out[i] = uniform(np.uint64(i), add, flip, last)
