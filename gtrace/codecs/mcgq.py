"""MCGQ: sample the gradient's magnitudes systematically and count the hits of each coordinate.

Counts are run-length coded, most significant bit first. The stream has two widths, B_g and B_RLE, and the symbols: a
non-zero one in B_g bits of two's complement, a maximal run of zeros as one zero in B_g bits and its length in B_RLE.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from gtrace.buckets import TensorSums, as_values
from gtrace.codecs.base import Codec, EncodedPart, checked_values, parameter
from gtrace.codecs.engine import Composed
from gtrace.codecs.memory import Accumulated
from gtrace.codecs.parts import Parts
from gtrace.codecs.spec import register
from gtrace.coding.elias import ELIAS, EliasCode, as_integers
from gtrace.coding.fixed import from_words, to_words, word_room
from gtrace.errors import PayloadError, UsageError
from gtrace.kernels import compare as _compare
from gtrace.kernels import mcgq as _mcgq
from gtrace.kernels.norms import FLOAT32_MAX

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from numpy.typing import ArrayLike, NDArray

    from gtrace.codecs.base import Pieces
    from gtrace.codecs.parts import Values
    from gtrace.types import State

#: a kernel computes counts exactly up to this many samples
MAX_SAMPLES = 2**48
#: dynamic sampling keeps the amount at or below this, and at one sample or more
MAX_AMOUNT = 32.0
_NORM_BYTES = 4
_WIDTHS = struct.Struct(">II")
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
        value_bits: B_g, 1 + bit length of the largest magnitude.
        run_bits: B_RLE, bit length of the longest run of zeros.
        symbols: number of values that are not zero, and of maximal runs of zeros.
        runs: number of the latter.
    """

    value_bits: int
    run_bits: int
    symbols: int
    runs: int

    @classmethod
    def of(cls, pieces: Iterable[NDArray[np.int64]]) -> Runs:
        """Widths and counts of values in pieces, int64[n] each, in one pass.

        Raises:
            UsageError: -2^63, whose magnitude is beyond int64.
        """
        top = nonzero = runs = longest = behind = 0
        for piece in pieces:
            low, high, own, ended, run, behind = _mcgq.measure(piece, behind)
            top, nonzero, runs = max(top, int(high), -int(low)), nonzero + int(own), runs + int(ended)
            longest = max(longest, int(run))
        if top > np.iinfo(np.int64).max:
            raise UsageError("run-length code: -2^63 cannot be coded; its magnitude is beyond 63 bits")
        runs += behind > 0
        return cls(1 + top.bit_length(), max(longest, int(behind)).bit_length(), nonzero + runs, runs)

    @property
    def bits(self) -> int:
        """Length of the symbols in bits, the two widths not counted."""
        return self.value_bits * self.symbols + self.run_bits * self.runs


def sample_count(size: int, amount: float) -> int:
    """N, the samples of a tensor: ceil(size amount), at least 1.

    A product within 1e-9 (relative) of an integer counts as that integer, so that 25 elements at 0.28 get 7.

    Raises:
        UsageError: an amount that is not positive, or more than 2^48 samples.

    >>> sample_count(25, 0.28)
    7
    """
    if not 0 < amount < math.inf:
        raise UsageError(f"mcgq: a sampling amount of {amount:g}; it must be above 0")
    wanted = size * float(amount)
    if wanted > MAX_SAMPLES:
        raise UsageError(f"mcgq: {wanted:.3g} samples of {size} elements exceed the limit of 2^48; lower the amount")
    nearest = round(wanted)
    return max(1, nearest if abs(wanted - nearest) <= 1e-9 * wanted else math.ceil(wanted))


def counts(g: ArrayLike, amount: float, xi: float) -> NDArray[np.int64]:
    """Number of hits of each coordinate by the samples (i + xi) / N, with the coordinate's sign.

    A sample hits the first coordinate whose share of the running sum of |g| (float64, in index order) lies strictly
    above it. The result is that of the loop over samples in exact arithmetic.

    Args:
        g: finite real numbers, any shape, taken as float32.
        amount: samples per element, K; N is :func:`sample_count`.
        xi: position of the first sample, in [0, 1).

    Returns:
        int64, shaped like ``g``. The magnitudes add up to N, unless g is zero.

    Raises:
        UsageError: an amount or offset out of range, values that are not finite, a norm beyond float32.

    >>> counts([1.0, 2.0, 1.0], 1.0, 0.25).tolist()
    [1, 1, 1]
    """
    x = as_values(g)
    samples = sample_count(x.size, amount)
    if not 0 <= xi < 1:
        raise UsageError(f"mcgq: xi={xi:g} is out of range; it must be in [0, 1)")
    total, starts = _summed(x)
    if total > FLOAT32_MAX:
        raise UsageError(f"mcgq: the norm {total:.6g} is beyond float32; scale the gradient down")
    return _sample(x, total, starts, samples, xi).reshape(np.shape(g))


def payload_bits(q: ArrayLike, with_norm: bool = False) -> int:
    """Bits of the run-length payload of integer counts, padding not counted.

    Args:
        q: integers, any shape.
        with_norm: whether the norm is sent (32 bits).

    Raises:
        UsageError: values that are not integers.

    >>> payload_bits([2, -1, 0, 0, 0, 3, 0, 1])
    86
    """
    return 8 * (_WIDTHS.size + _NORM_BYTES * with_norm) + Runs.of([as_integers(q).astype(np.int64, copy=False)]).bits


def encode_counts(q: ArrayLike, norm: float | None = None) -> bytes:
    """The paper's payload, most significant bit first: u32 B_g, u32 B_RLE, the norm if given, then the symbols.

    A count takes B_g bits of two's complement; a 0 means a whole run of zeros and is followed by its length in
    B_RLE bits. The last byte is padded with zeros.

    Args:
        q: integers, any shape.
        norm: ||g||_1, rounded to float32 and sent if given.

    Raises:
        UsageError: values that are not integers, or a norm that is negative, not finite or beyond float32.

    The paper's example takes 86 bits:

    >>> encode_counts([2, -1, 0, 0, 0, 3, 0, 1]).hex()
    '00000003000000025c6c24'
    >>> decode_counts(bytes.fromhex("00000003000000025c6c24"), 8)[0].tolist()
    [2, -1, 0, 0, 0, 3, 0, 1]
    """
    values = as_integers(q).astype(np.int64, copy=False)
    runs = Runs.of([values])
    sent = b""
    if norm is not None:
        if not 0 <= norm <= FLOAT32_MAX:
            raise UsageError(f"mcgq: the norm {norm:g} cannot be sent; it must be from 0 to the largest float32")
        sent = struct.pack(">f", norm)
    words = word_room(runs.bits)
    _mcgq.write(values, runs.value_bits, runs.run_bits, words)
    return _WIDTHS.pack(runs.value_bits, runs.run_bits) + sent + from_words(words, runs.bits, "high")


def decode_counts(
    payload: bytes | memoryview, n: int, with_norm: bool | None = None
) -> tuple[NDArray[np.int64], float | None]:
    """Undo :func:`encode_counts`.

    Args:
        payload: the bytes.
        n: number of counts, known from the tensor's shape.
        with_norm: whether the norm is in the payload. The format does not say; None tries both, which is
            enough for all but a few payloads.

    Returns:
        counts (int64[n]), and the norm or None.

    Raises:
        PayloadError: not a valid payload of ``n`` counts: truncated, too long, padded with ones, a run of
            length 0 or beyond the end, two runs in a row, the code -2^(B_g-1), a norm that is negative or not finite;
            or, with ``with_norm=None``, a payload that can be read both ways.
    """
    if n < 0:
        raise UsageError(f"mcgq: {n} counts cannot be decoded")
    if len(payload) < _WIDTHS.size:
        raise PayloadError(f"{len(payload)} bytes are shorter than the {_WIDTHS.size} of a run-length header")
    value_bits, run_bits = _WIDTHS.unpack_from(payload)
    if not 1 <= value_bits <= 64 or run_bits > 64:
        raise PayloadError(f"the run-length header asks for {value_bits} and {run_bits} bits; at most 64 are used")
    body = memoryview(payload)[_WIDTHS.size :]
    found: list[tuple[NDArray[np.int64], float | None]] = []
    faults: list[PayloadError] = []
    for normed in (False, True) if with_norm is None else (with_norm,):
        try:
            norm = _read_norm(body, ">f") if normed else None
            found.append((_read_runs(body[_NORM_BYTES * normed :], value_bits, run_bits, n), norm))
        except PayloadError as fault:
            faults.append(fault)
    if not found:
        raise faults[0]
    if len(found) > 1:
        raise PayloadError("mcgq: the payload can be read with and without a norm; pass with_norm")
    return found[0]


def distance(g: ArrayLike, q: ArrayLike) -> float:
    """Wasserstein-1 distance of the values of g / ||g||_1 and q / ||q||_1: mean |sort(u) - sort(v)|.

    Args:
        g: real numbers, taken as float32.
        q: the same number of values, decoded or counts.

    Returns:
        the distance, of the order of 1 / n; NaN when one of the two is all zero.

    Raises:
        UsageError: the numbers of elements differ.
    """
    u, v = as_values(g), as_values(q)
    if u.size != v.size:
        raise UsageError(f"mcgq: {v.size} quantized values for {u.size} exact ones")
    norm_u, norm_v = _summed(u)[0], _summed(v)[0]
    if norm_u == 0 or norm_v == 0:
        return math.nan
    return float(
        _compare.distances(_compare.ascending(u), _compare.ascending(v), u.size, 1.0 / norm_u, 1.0 / norm_v)[1]
    )


@register
@dataclass(frozen=True)
class Mcgq(Composed):
    """Counts of systematic samples times ||g||_1 / N.

    The state holds ``accumulated`` (float32[n], with ``accumulate``) and ``amount`` and ``distance`` (float64, with
    ``delta_k``). Accumulation resets every coordinate that arrived; over time it is not unbiased. A gradient whose
    norm is beyond float32 is sent with the largest float32 as its norm, so it arrives scaled down.

    Whether an instance keeps memory or is unbiased depends on its parameters: ``stateful`` and ``unbiased`` of the
    class are those of the defaults.

    Raises:
        UsageError: parameters that exclude each other.
    """

    name = "mcgq"
    summary = "systematic samples proportional to the magnitudes, counted; zeros run-length coded"
    formula = """Q(v)_k = ||v||_1 / N sign(v_k) (D_k - D_(k-1)), D_k = ceil(N S_k / ||v||_1 - xi), S_k = |v_1| + ... +
    |v_k|, N = ceil(n amount)"""
    paper = "Mordido, Van Keirsbilck, Keller, Monte Carlo Gradient Quantization, 2020"
    corrections = (
        "a sample hits the first coordinate whose cumulative share lies strictly above it; the search starts there",
        "a product n * amount within 1e-9 of an integer counts as that integer",
        "dynamic sampling compares the values of g / ||g||_1 and q / ||q||_1, not their mass over coordinates",
        "that distance is of the order of 1 / n, so useful delta_k are of the order of n",
        "with accumulation the scheme is not unbiased over time",
    )
    about = """Samples coordinates in proportion to their magnitude and sends the number of hits of each. The number of
    samples sets the error; zeros come in runs and are counted."""
    sends = """B_g and B_RLE (u32), with with_norm the norm (float32), then counts of B_g bits in two's complement, a 0
    followed by the length of its run in B_RLE bits; most significant bit first. With another coder: the norm, then
    codes."""
    behavior = """Variance (||v||_1/N)^2 f (1 - f) a coordinate, f the fraction of its expected count. A heavy tail
    costs little, an even gradient many samples."""
    related = ("randomk", "prune", "accumulate")

    amount: float = parameter(1.0, "samples per element, K; not used with bits", minimum=1e-9)
    bits: int | None = parameter(
        None, "as many samples as keep every count within this many bits", minimum=2, maximum=24, optional=True
    )
    with_norm: bool = parameter(
        True, "send the norm; without it the counts themselves arrive, for optimizers that ignore scale"
    )
    accumulate: bool = parameter(
        False, "sample the gradients accumulated since each coordinate was last hit; then it starts again from zero"
    )
    scale: Literal["gradient", "accumulated"] = parameter(
        "gradient",
        "with accumulate: the norm of the gradient or of what is accumulated",
        choices=("gradient", "accumulated"),
    )
    delta_k: float = parameter(
        0.0,
        "dynamic sampling: how fast the amount follows the distance; useful values are of the order of n",
        minimum=0.0,
    )
    coder: Literal["runlength", "gamma", "delta", "omega"] = parameter(
        "runlength", "how counts become bits", choices=("runlength", *ELIAS)
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bits is not None and self.delta_k:
            raise UsageError("codec mcgq: bits and delta_k both set the number of samples; give one of them")
        if self.scale == "accumulated" and not self.accumulate:
            raise UsageError("codec mcgq: scale=accumulated needs accumulate=true")
        if self.accumulate:
            object.__setattr__(self, "parts", Parts(memory=Accumulated()))
        object.__setattr__(self, "stateful", self.accumulate or self.delta_k > 0)
        object.__setattr__(self, "unbiased", self.with_norm and not self.accumulate)

    def init(self, size: int, shape: tuple[int, ...] | None = None) -> State:
        """Nothing accumulated, the amount as the parameter says."""
        state = super().init(size, shape)
        if self.delta_k:
            state = state.with_arrays(amount=np.array(self.amount), distance=np.array(math.nan))
        return state

    def renewed(self, state: State) -> State:
        """The same state: nothing in it depends on the bits."""
        return state

    def write(self, state: State, x: Values, key: tuple[int, int]) -> tuple[bytes, int]:
        """The paper's run-length payload; with another coder the norm (little-endian float32), then the codes."""
        q, norm = self._sampled(state, x, key)
        if self.coder == "runlength":
            return encode_counts(q, norm), 0
        sent = b"" if norm is None else struct.pack("<f", norm)
        return sent + EliasCode(self.coder).encode(q), 0

    def _sampled(self, state: State, x: Values, key: tuple[int, int]) -> tuple[NDArray[np.int64], float | None]:
        """The counts, int64[n], and the norm if it is sent."""
        sampled = self.parts.memory.given(state.arrays, x)
        total, starts = _summed(sampled)
        samples = self._samples(state, total, 0.0 if self.bits is None else _largest(sampled))
        q = _sample(sampled, total, starts, samples, _mcgq.offset(*map(np.uint64, key)))
        if not self.with_norm:
            return q, None
        norm = total if sampled is x or self.scale == "accumulated" else _summed(x)[0]
        return q, min(norm, FLOAT32_MAX)

    def _samples(self, state: State, total: float, top: float) -> int:
        """N for values with this sum and largest magnitude; the latter counts only with ``bits``."""
        if self.bits is None:
            return sample_count(state.size, float(state.arrays["amount"]) if self.delta_k else self.amount)
        if total == 0:
            return 1
        wanted = ((1 << (self.bits - 1)) - 1) * Fraction(total) / Fraction(top)
        return min(max(1, math.floor(wanted)), MAX_SAMPLES)

    @property
    def part_multiple(self) -> int | None:
        """Any block of sums; None with a memory of its own."""
        return None if self.stateful else _mcgq.BLOCK

    def prepare(self, state: State, pieces: Pieces, key: tuple[int, int], sums: TensorSums | None = None) -> State:
        """Store ``sums``, float64[blocks + 1], before each block of values and in the end, ``samples`` and ``bits``.

        The bits of the whole payload take a second pass.
        """
        before, total, top = [], 0.0, 0.0
        for _, x in pieces():
            total, starts = _summed(x, total)
            top = max(top, _largest(x))
            before.append(starts[:: _mcgq.BLOCK // _mcgq.CHAIN].copy())
        samples = np.array(self._samples(state, total, top))
        state = state.with_arrays(sums=np.concatenate([*before, [total]]), samples=samples)
        start = 0

        def counted() -> Iterator[NDArray[np.int64]]:
            nonlocal start
            for _, x in pieces():
                yield self._part(state, x, key, start)
                start += x.size

        return state.with_arrays(bits=np.array(self._bits(counted())))

    def _part(self, state: State, x: Values, key: tuple[int, int], start: int) -> NDArray[np.int64]:
        """The counts of a part, from :meth:`prepare`'s state."""
        sums = state.arrays["sums"]
        _, starts = _summed(x, float(sums[start // _mcgq.BLOCK]))
        xi = _mcgq.offset(*map(np.uint64, key))
        return _sample(x, float(sums[-1]), starts, int(state.arrays["samples"]), xi)

    def encode_part(self, state: State, values: ArrayLike, key: tuple[int, int], start: int) -> EncodedPart:
        """The values of the part; all bits count with the first part."""
        x = checked_values(state, values)
        if "sums" in state.arrays:
            q, norm = self._part(state, x, key, start), min(state.arrays["sums"][-1], FLOAT32_MAX)
            samples, bits = float(state.arrays["samples"]), 0 if start else int(state.arrays["bits"])
        else:
            q, norm = self._sampled(state, x, key)
            samples, bits = None, self._bits([q])
        return EncodedPart(_restored(q, float(np.float32(norm)) if self.with_norm else None, samples), coded=bits)

    def _bits(self, pieces: Iterable[NDArray[np.int64]]) -> int:
        """Bits of the payload of counts that come in pieces."""
        norm = 8 * _NORM_BYTES * self.with_norm
        if self.coder == "runlength":
            return norm + 8 * _WIDTHS.size + Runs.of(pieces).bits
        return norm + sum(EliasCode(self.coder).bits(q) for q in pieces)

    measured = Codec.measured

    def read(self, shared: bytes, body: memoryview, flags: int, size: int) -> Values:
        """Undo :meth:`write`; N is the sum of the magnitudes."""
        if flags:
            raise PayloadError(f"payload has unknown flags {flags:#x}")
        if self.coder == "runlength":
            return _restored(*decode_counts(body, size, self.with_norm))
        q = EliasCode(self.coder).decode(body[_NORM_BYTES * self.with_norm :], size)
        return _restored(q, _read_norm(body, "<f") if self.with_norm else None)

    def update(self, state: State, values: ArrayLike, decoded: Values) -> State:
        """Accumulate and clear what arrived; move the amount against the change of the distance."""
        if self.delta_k and state.size:
            sampled = self.parts.memory.given(state.arrays, as_values(values))
            state = self._moved(state, distance(sampled, decoded))
        return super().update(state, values, decoded)

    def _moved(self, state: State, now: float) -> State:
        """K + delta_k (before - now), within [1 / n, 32]; the first distance, or none, leaves K as it is."""
        if math.isnan(now):
            return state
        before = float(state.arrays["distance"])
        amount = float(state.arrays["amount"])
        if not math.isnan(before):
            amount = min(max(amount + self.delta_k * (before - now), 1.0 / state.size), MAX_AMOUNT)
        return state.with_arrays(amount=np.array(amount), distance=np.array(now))


def _restored(q: NDArray[np.int64], norm: float | None, samples: float | None = None) -> Values:
    """Counts times the norm over the number of samples, by default what they add up to; without a norm as they are."""
    out, unit = np.empty(q.size, np.float32), 1.0
    if norm is not None:
        unit = norm / max(1.0, float(_mcgq.magnitude_sum(q)) if samples is None else samples)
    _mcgq.restore(q, unit, out)
    return out


def _summed(x: Values, before: float = 0.0) -> tuple[float, NDArray[np.float64]]:
    """||x||_1 as the sequential float64 sum, after ``before``, and the sums before each chain of values.

    Raises:
        UsageError: not finite.
    """
    starts = np.empty(-(-x.size // _mcgq.CHAIN))
    total = float(_mcgq.absolute_sum(x, before, starts))
    if not math.isfinite(total):
        at = int(np.flatnonzero(~np.isfinite(x))[0])
        raise UsageError(f"mcgq: value {at} is {x[at]}; only finite numbers can be sampled")
    return total, starts


def _largest(x: Values) -> float:
    return max(float(x.max()), -float(x.min())) if x.size else 0.0


def _sample(x: Values, total: float, starts: NDArray[np.float64], samples: int, xi: float) -> NDArray[np.int64]:
    if total == 0:
        return np.zeros(x.size, np.int64)
    q = np.empty(x.size, np.int64)
    _mcgq.counts(x, total, starts, float(samples), float(xi), q)
    return q


def _read_norm(body: memoryview, layout: str) -> float:
    if len(body) < _NORM_BYTES:
        raise PayloadError("mcgq: the payload ends before its norm")
    norm = float(struct.unpack_from(layout, body)[0])
    if not 0 <= norm < math.inf:
        raise PayloadError(f"mcgq: the payload holds a norm of {norm:g}")
    return norm


def _read_runs(data: memoryview, value_bits: int, run_bits: int, count: int) -> NDArray[np.int64]:
    """The symbols of :func:`encode_counts`: int64[count], which must use all of ``data``."""
    words, out = to_words(data, "high"), np.empty(0, np.int64)
    fault = _mcgq.GOOD
    if count > _EXPANSION * len(data):
        fault = _mcgq.read(words, 8 * len(data), value_bits, run_bits, count, out)
    if fault == _mcgq.GOOD:
        out = np.zeros(count, np.int64)
        fault = _mcgq.read(words, 8 * len(data), value_bits, run_bits, count, out)
    if fault != _mcgq.GOOD:
        raise PayloadError(_FAULTS[fault])
    return out
