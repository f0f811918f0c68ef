"""Run-length coding of integers, used by MCGQ for its counts: most significant bit first.

A stream has two widths, ``value_bits`` and ``run_bits``, and the symbols: a non-zero one in ``value_bits`` bits of
two's complement, a maximal run of zeros as one zero in ``value_bits`` bits and its length in ``run_bits`` bits.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from gtrace.coding.fixed import from_words, to_words, word_room
from gtrace.errors import PayloadError, UsageError
from gtrace.kernels import mcgq as _mcgq

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

_HEADER = struct.Struct(">II")
HEADER_BITS = 8 * _HEADER.size
#: if more values than this per byte are asked for, a decoder checks the whole stream before it allocates memory
_EXPANSION = 64
_FAULTS = {
    _mcgq.SHORT: "the run-length stream ends early",
    _mcgq.EMPTY_RUN: "the run-length stream holds a run of no zeros",
    _mcgq.LONG_RUN: "the run-length stream holds a run beyond the last value",
    _mcgq.ADJACENT_RUNS: "the run-length stream holds two runs in a row",
    _mcgq.LOWEST_CODE: "the run-length stream holds the lowest code of its width, which no encoder writes",
    _mcgq.PADDING: "the run-length stream goes on after its last value",
}


class Runs(NamedTuple):
    """The numbers that determine the length of a run-length stream.

    Attributes:
        value_bits: 1 + bit length of the largest magnitude.
        run_bits: bit length of the longest run of zeros.
        nonzero: number of values that are not zero.
        runs: number of maximal runs of zeros.
    """

    value_bits: int
    run_bits: int
    nonzero: int
    runs: int

    @property
    def bits(self) -> int:
        """Length of the symbols in bits, the two widths not counted."""
        return self.value_bits * (self.nonzero + self.runs) + self.run_bits * self.runs

    @property
    def header(self) -> bytes:
        """The two widths, 32 bits each."""
        return _HEADER.pack(self.value_bits, self.run_bits)


def measure_runs(values: NDArray[np.int64]) -> Runs:
    """Widths and counts of int64[n] in one pass.

    Raises:
        UsageError: -2^63, whose magnitude is beyond int64.
    """
    return measure_pieces([values])


def measure_pieces(pieces: Iterable[NDArray[np.int64]]) -> Runs:
    """:func:`measure_runs` of values that come in pieces."""
    top = nonzero = runs = longest = behind = 0
    for piece in pieces:
        low, high, own, ended, run, behind = _mcgq.measure(piece, behind)
        top, nonzero, runs = max(top, int(high), -int(low)), nonzero + int(own), runs + int(ended)
        longest = max(longest, int(run))
    if top > np.iinfo(np.int64).max:
        raise UsageError("run-length code: -2^63 cannot be coded; its magnitude is beyond 63 bits")
    return Runs(1 + top.bit_length(), max(longest, int(behind)).bit_length(), nonzero, runs + (behind > 0))


def write_runs(values: NDArray[np.int64], runs: Runs) -> bytes:
    """The symbols of int64[n], without header; ``runs`` is the result of :func:`measure_runs`."""
    words = word_room(runs.bits)
    _mcgq.write(values, runs.value_bits, runs.run_bits, words)
    return from_words(words, runs.bits, "high")


def read_widths(data: bytes | memoryview) -> tuple[int, int]:
    """``value_bits`` and ``run_bits`` from the header.

    Raises:
        PayloadError: too short, or widths that no 64-bit integer needs.
    """
    if len(data) < _HEADER.size:
        raise PayloadError(f"{len(data)} bytes are shorter than the {_HEADER.size} of a run-length header")
    value_bits, run_bits = _HEADER.unpack_from(data)
    if not 1 <= value_bits <= 64 or run_bits > 64:
        raise PayloadError(f"the run-length header asks for {value_bits} and {run_bits} bits; at most 64 are used")
    return value_bits, run_bits


def read_runs(data: bytes | memoryview, value_bits: int, run_bits: int, count: int) -> NDArray[np.int64]:
    """Undo :func:`write_runs`: int64[count], which must use all of ``data``.

    Raises:
        PayloadError: the stream ends early or goes on too long, or holds a run of length 0, a run beyond the last
            value, two runs in a row, the lowest code of ``value_bits``, or padding that is not zero.
    """
    words = to_words(data, "high")
    bits = 8 * len(data)
    if count > _EXPANSION * len(data):
        _check(_mcgq.read(words, bits, value_bits, run_bits, count, np.empty(0, np.int64)))
    out = np.zeros(count, np.int64)
    _check(_mcgq.read(words, bits, value_bits, run_bits, count, out))
    return out


def _check(fault: int) -> None:
    if fault != _mcgq.GOOD:
        raise PayloadError(_FAULTS[fault])
