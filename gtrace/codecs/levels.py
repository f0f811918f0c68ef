"""The engine of level codecs: scale a bucket, round to levels, code the symbols."""

from __future__ import annotations

import struct
from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from gtrace.buckets import bucket_scales, clip_values, whole_scale
from gtrace.codecs.base import ExpectingCodec, Simulated, checked_values, parameter
from gtrace.codecs.chunked import Part, PartwiseCodec
from gtrace.codecs.rounding import Rule
from gtrace.coding import (
    ENVELOPE_BYTES,
    MAX_LENGTH,
    EliasCode,
    EliasKind,
    check_symbol,
    checked_fixed,
    huffman_code,
    mean_length,
    open_envelope,
    pack_fixed,
    pack_lengths,
    seal,
    tally,
    unpack_fixed,
    unpack_lengths,
    width_for,
)
from gtrace.errors import PayloadError, UsageError
from gtrace.kernels import rounding as _rounding
from gtrace.kernels import symbols as _symbols
from gtrace.types import Expectation, Norm, Scope, State, SummarySpec, Tail

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    from gtrace.codecs.chunked import TensorSums
    from gtrace.sketch import MomentSketch

#: flag of a payload whose symbols are fixed width although the codec's coder is another
FLAG_FIXED = 1
_SHARED = struct.Struct("<HH")
#: bytes of :meth:`LevelCodec.shared` ahead of levels and lengths
SHARED_HEAD = _SHARED.size


class Symbols(NamedTuple):
    """The signed symbols of one level set on one sketch.

    Attributes:
        probabilities: float64[m], of each.
        lengths: uint8[m], of the code made for them; symbols that hardly occur share one, see
            :func:`gtrace.kernels.symbols.escape_lengths`.
        fixed: bits per symbol at fixed width.
        entropy: bits per symbol.
        coded: mean bits per symbol of that code.
        sent: bits that sending ``lengths`` takes.
    """

    probabilities: NDArray[np.float64]
    lengths: NDArray[np.uint8]
    fixed: float
    entropy: float
    coded: float
    sent: float


@dataclass(frozen=True)
class LevelCodec(PartwiseCodec, ExpectingCodec):
    """Buckets divided by their norm, rounded stochastically to magnitudes in [0, 1], symbols coded.

    A method says which magnitudes: the one abstract method is :meth:`levels`. The state holds ``levels``
    (float32, only where they are fitted) and ``lengths`` (uint8, the Huffman code's, once one is adopted).
    """

    norm: Norm = parameter("l2", "what a bucket is divided by", choices=("l2", "linf", "l1"))
    bucket_size: int | None = parameter(
        8192, "consecutive values that share a norm; none for the whole tensor", minimum=1, optional=True
    )
    tail: Tail = parameter(
        "quantized", "a short last bucket: its own norm, or sent in float32", choices=("quantized", "exact")
    )
    clip: float | None = parameter(None, "clip at this many standard deviations before the norm is taken", minimum=0.0)
    coder: str = parameter(
        "huffman",
        "how symbols become bits; elias is the omega code, as in QSGD",
        choices=("huffman", "fixed", "elias", "gamma", "delta"),
    )
    scope: Scope = parameter(
        "tensor", "buckets run over one tensor or over the whole model", choices=("tensor", "model")
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        # A fact of the class otherwise; what is clipped is lost.
        object.__setattr__(self, "unbiased", type(self).unbiased and self.clip is None)

    @property
    def has_zero(self) -> bool:
        """Whether 0 is a level."""
        return True

    @abstractmethod
    def levels(self, state: State) -> NDArray[np.float32]:
        """Ascending magnitudes, float32[m]; the last is 1, the first is 0 exactly when ``has_zero``."""

    def model_error(self, state: State, sketch: MomentSketch) -> float:
        """The squared error that a parametric law promised; NaN for a method without one."""
        del state, sketch
        return float("nan")

    def fit_levels(self, state: State, summary: MomentSketch, step: int) -> State:
        """Adapt the levels; a method with a fixed grid leaves them alone."""
        del summary, step
        return state

    def fitted(self, state: State) -> NDArray[np.float32] | None:
        """What a receiver is told of fitted levels: themselves; None for a fixed grid."""
        return state.arrays.get("levels")

    def with_fitted(self, state: State, fitted: NDArray[np.float32]) -> State:
        """The receiver's state after it was told :meth:`fitted`, one number or more.

        Raises:
            PayloadError: numbers that are none of this codec's.
        """
        if not (np.isfinite(fitted).all() and (np.diff(fitted) > 0).all() and fitted[0] >= 0):
            raise PayloadError("shared bytes hold levels that are not ascending magnitudes")
        return state.with_arrays(levels=fitted)

    @property
    def needs(self) -> SummarySpec:
        """The sketch of r = |v| / scale under this codec's buckets."""
        return SummarySpec(self.norm, self.bucket_size, self.tail, self.clip, self.scope)

    def fit(self, state: State, summary: MomentSketch, step: int) -> State:
        """Fit the levels, then adopt a Huffman code if it saves more than it costs to send."""
        state = self.fit_levels(state, summary, step)
        if self.coder != "huffman" or summary.quantized == 0:
            return state
        symbols = self._symbols(self.levels(state), summary)
        probabilities, lengths = symbols.probabilities, symbols.lengths
        old = state.arrays.get("lengths")
        if old is not None and old.size != probabilities.size:
            # Fitted levels became fewer or more: the old code names other symbols.
            kept_arrays = {name: value for name, value in state.arrays.items() if name != "lengths"}
            state = State(state.size, kept_arrays, state.shape)
            old = None
        kept = symbols.fixed if old is None else min(symbols.fixed, mean_length(old, probabilities))
        gain = (kept - symbols.coded) * state.size
        return state.with_arrays(lengths=lengths) if gain > symbols.sent else state

    def encode(self, state: State, values: ArrayLike, key: tuple[int, int]) -> bytes:
        """Norms (float32), then an exact tail (float32) where asked for, then the coded symbols."""
        return self._sealed(state, self._clipped(state, values), key, 0)

    def _clipped(self, state: State, values: ArrayLike) -> NDArray[np.float32]:
        x = checked_values(state, values)
        return x if self.clip is None else clip_values(x, self.clip)[0]

    @property
    def part_multiple(self) -> int | None:
        """A bucket; clipping takes the deviation of all values first."""
        return None if self.clip is not None else self.bucket_size or 1

    def prepare(self, state: State, sums: TensorSums) -> State:
        """The norm where one bucket is the whole tensor, as the array ``scale``."""
        if self.bucket_size is not None or self.needs.norm == "none":
            return state
        return state.with_arrays(scale=whole_scale(self.needs.norm, sums.norm1, sums.energy, sums.largest))

    def encode_part(self, state: State, values: ArrayLike, key: tuple[int, int], start: int) -> Part:
        """The part as :meth:`encode` does it; one norm of the whole tensor counts with the first part."""
        x = checked_values(state, values)
        scales, split = self._scales(state, x), self.quantized(x.size)
        symbols = self.rule(state).symbols(x[:split], self.bucket_size or max(1, split), scales, key, start)
        tallies = tally(symbols, self.signed_values(state).size)
        head = 0 if start and "scale" in state.arrays else 8 * self._head_bytes(scales, x.size - split)
        return Part(self.seal(state, scales, x[split:], symbols), head, self._coded(state, tallies), tallies)

    def _coded(self, state: State, tallies: NDArray[np.int64]) -> int:
        """Bits of symbols that occur so often, in the code of this state."""
        lengths = state.arrays.get("lengths")
        if self._integers is not None:
            return int(tallies @ self._elias(self._integers, tallies.size).symbol_bits)
        if lengths is not None:
            return int(tallies @ lengths.astype(np.int64))
        return int(tallies.sum()) * self._width(state)

    def body_bytes(self, whole: Part) -> int:
        """Bytes of the whole payload's body: at fixed width where a Huffman code made for other data is longer."""
        if self.coder == "huffman" and whole.tallies is not None:
            fixed = int(whole.tallies.sum()) * width_for(whole.tallies.size)
            whole = Part(b"", whole.head, min(whole.coded, fixed))
        return super().body_bytes(whole)

    def _sealed(self, state: State, x: NDArray[np.float32], key: tuple[int, int], start: int) -> bytes:
        split, scales, rule = self.quantized(x.size), self._scales(state, x), self.rule(state)
        bucket, width = self.bucket_size or max(1, split), self._width(state)
        if width and (self.coder == "fixed" or (self.coder == "huffman" and "lengths" not in state.arrays)):
            packed = rule.packed(x[:split], bucket, scales, key, width, start)
            return self._put_together(state, scales, x[split:], packed, self._fixed_flag, x.size)
        return self.seal(state, scales, x[split:], rule.symbols(x[:split], bucket, scales, key, start))

    def simulate(self, state: State, values: ArrayLike, key: tuple[int, int]) -> Simulated:
        """As :meth:`encode` and :meth:`decode` in one pass, the payload's length from how often each symbol occurs."""
        x = self._clipped(state, values)
        split, scales, signed = self.quantized(x.size), self._scales(state, x), self.signed_values(state)
        out = np.empty(x.size, np.float32)
        out[split:] = x[split:]
        bucket = self.bucket_size or max(1, split)
        tallies = self.rule(state).simulate(x[:split], bucket, scales, key, signed, out[:split], count=True)
        whole = Part(b"", 8 * self._head_bytes(scales, x.size - split), self._coded(state, tallies), tallies)
        return Simulated(out, ENVELOPE_BYTES + self.body_bytes(whole), self.coded_bits(whole, x.size))

    def _scales(self, state: State, x: NDArray[np.float32]) -> NDArray[np.float32]:
        whole = state.arrays.get("scale")
        return bucket_scales(x[: self.quantized(x.size)], self.needs.norm, self.bucket_size) if whole is None else whole

    def _head_bytes(self, scales: NDArray[np.float32], tail: int) -> int:
        """Bytes of a body before its symbols."""
        return (0 if self.needs.norm == "none" else 4 * scales.size) + 4 * tail

    def _width(self, state: State) -> int:
        return width_for(2 * self.levels(state).size - int(self.has_zero))

    @property
    def _fixed_flag(self) -> int:
        return FLAG_FIXED if self.coder == "huffman" else 0

    def rule(self, state: State) -> Rule:
        """How |v| / scale goes to one of :meth:`levels`."""
        return Rule.among(self.levels(state), mirrored=not self.has_zero)

    def seal(
        self, state: State, scales: NDArray[np.float32], tail: NDArray[np.float32], symbols: NDArray[np.uint16]
    ) -> bytes:
        """The payload of values that were rounded already, by whatever engine.

        Args:
            state: of the tensor.
            scales: float32, of each bucket.
            tail: float32, the values beyond :meth:`quantized`.
            symbols: uint16, of the values before; :meth:`signed_values` numbers them.
        """
        coded, flags = self._code(state, symbols)
        return self._put_together(state, scales, tail, coded, flags, symbols.size + tail.size)

    def _put_together(
        self,
        state: State,
        scales: NDArray[np.float32],
        tail: NDArray[np.float32],
        coded: bytes,
        flags: int,
        size: int,
    ) -> bytes:
        norms = b"" if self.needs.norm == "none" else scales.astype("<f4").tobytes()
        body = b"".join((norms, tail.astype("<f4").tobytes(), coded))
        return seal(body, codec=self.name, size=size, shared=self.shared(state), flags=flags)

    def shared(self, state: State) -> bytes:
        """Fitted levels (float32) and code lengths, empty when there are neither."""
        fitted = self.fitted(state)
        lengths = state.arrays.get("lengths")
        if fitted is None and lengths is None:
            return b""
        sent = b"" if fitted is None else fitted.astype("<f4").tobytes()
        code = b"" if lengths is None else pack_lengths(lengths, int(lengths[-1]))
        return _SHARED.pack(len(sent) // 4, 0) + sent + code

    def decode(self, shared: bytes, payload: bytes, size: int) -> NDArray[np.float32]:
        """Undo :meth:`encode`."""
        opened = self._open(shared, payload, size)
        split = opened.split
        bucket = self.bucket_size or max(1, split)
        out = np.empty(size, np.float32)
        out[split:] = opened.tail
        width = width_for(opened.values.size)
        if width and self._is_fixed(opened.flags):
            raw = checked_fixed(opened.coded, split, width)
            top = _rounding.restore_packed(raw, width, bucket, opened.scales, opened.values, out[:split])
            check_symbol(top, opened.values.size)
        else:
            symbols = self._uncode(opened.state, opened.coded, split, opened.values.size, opened.flags)
            _rounding.restore(symbols, bucket, opened.scales, opened.values, out[:split])
        return out

    def unseal(self, shared: bytes, payload: bytes, size: int) -> Unsealed:
        """Undo :meth:`seal`.

        Raises:
            PayloadError: the bytes are no payload of this codec and size, or damaged.
        """
        opened = self._open(shared, payload, size)
        symbols = self._uncode(opened.state, opened.coded, opened.split, opened.values.size, opened.flags)
        return Unsealed(opened.scales, opened.tail, symbols, opened.values)

    def _open(self, shared: bytes, payload: bytes, size: int) -> _Opened:
        body, flags = open_envelope(payload, codec=self.name, size=size, shared=shared)
        state = self._state_from(shared, size)
        split = self.quantized(size)
        buckets = -(-split // (self.bucket_size or max(1, split)))
        norm_bytes = 0 if self.needs.norm == "none" else 4 * buckets
        head = norm_bytes + 4 * (size - split)
        if len(body) < head:
            raise PayloadError(f"payload body of {len(body)} bytes is shorter than its {head} bytes of norms")
        scales = np.frombuffer(body[:norm_bytes], "<f4").astype(np.float32)
        if norm_bytes == 0:
            scales = np.ones(buckets, np.float32)
        if not (np.isfinite(scales).all() and (scales >= 0).all()):
            raise PayloadError("payload holds a norm that is negative or not finite")
        if flags not in ((0, FLAG_FIXED) if self.coder == "huffman" else (0,)):
            raise PayloadError(f"payload has unknown flags {flags:#x}")
        tail = np.frombuffer(body[norm_bytes:head], "<f4").astype(np.float32)
        return _Opened(state, split, scales, tail, body[head:], flags, self.signed_values(state))

    def expect(self, state: State, sketch: MomentSketch) -> Expectation:
        """Closed forms from the sketch; see :class:`~gtrace.types.Expectation`."""
        if sketch.spec[:4] != self.needs[:4]:
            raise UsageError(f"{self}: wants a sketch of {self.needs}, not of {sketch.spec}")
        levels = self.levels(state)
        error, _, bound, magnitudes = sketch.expect(levels, zero=self.has_zero)
        symbols = self._symbols(levels, sketch)
        probabilities = symbols.probabilities
        size = max(1, sketch.size)
        share = sketch.quantized / size
        norms = 32.0 * (sketch.buckets + sketch.exact) / size
        coded = self._expected_bits(state, probabilities)
        huffman = min(symbols.fixed, symbols.coded + symbols.sent / max(1, sketch.quantized))
        zeros = magnitudes[0] * sketch.quantized if self.has_zero else float(sketch.dead)
        return Expectation(
            squared_error=error,
            bias=float(np.sqrt(sketch.clip_error)),
            sparsity=(float(zeros) + sketch.exact_zeros) / size,
            bits_fixed=symbols.fixed * share + norms,
            bits_entropy=symbols.entropy * share + norms,
            bits_huffman=huffman * share + norms,
            bits_payload=coded * share + norms,
            bits_norms=norms,
            probabilities=probabilities,
            error_bound=bound,
            model_error=self.model_error(state, sketch),
        )

    def weighted_error(self, state: State, sketch: MomentSketch, weighted: MomentSketch) -> float:
        """The weighted sums alone: symbols and bits are those of the plain sketch."""
        del sketch
        return weighted.expected_error(self.levels(state), self.has_zero)

    def quantized(self, size: int) -> int:
        """How many of ``size`` values are rounded; the rest is sent as it is."""
        if self.tail == "exact" and self.bucket_size is not None:
            return size - size % self.bucket_size
        return size

    def _symbols(self, levels: NDArray[np.float32], sketch: MomentSketch) -> Symbols:
        # A sweep judges a codec by a step's sketch and fits it to the same sketch for the next step.
        found: Symbols = sketch.remember(
            (levels.tobytes(), self.has_zero, "symbols"), lambda: self._tell(levels, sketch)
        )
        return found

    def _tell(self, levels: NDArray[np.float32], sketch: MomentSketch) -> Symbols:
        magnitudes = sketch.probabilities(levels, self.has_zero)
        # The sketch has no sign, so both signs share alike.
        probabilities = np.empty(2 * magnitudes.size - int(self.has_zero))
        lengths = np.empty(probabilities.size, np.uint8)
        numbers = np.empty(_symbols.SYMBOL_NUMBERS)
        _symbols.tell_symbols(
            magnitudes, not self.has_zero, float(sketch.quantized), MAX_LENGTH, probabilities, lengths, numbers
        )
        bits, coded, sent = numbers.tolist()
        return Symbols(probabilities, lengths, float(width_for(lengths.size)), bits, coded, sent)

    def signed_values(self, state: State) -> NDArray[np.float32]:
        """What each symbol stands for, in units of the scale: float32, ascending."""
        levels = self.levels(state)
        return np.concatenate([-levels[::-1], levels[1:] if self.has_zero else levels])

    @property
    def _integers(self) -> EliasKind | None:
        """The Elias code of the symbols around the one for 0; None for another coder."""
        kinds: dict[str, EliasKind] = {"elias": "omega", "gamma": "gamma", "delta": "delta"}
        return kinds.get(self.coder)

    def _elias(self, kind: EliasKind, symbols: int) -> EliasCode:
        return EliasCode(kind, origin=(symbols - 1) // 2, symbols=symbols)

    def _expected_bits(self, state: State, probabilities: NDArray[np.float64]) -> float:
        """Mean bits per symbol with the coder that encode will use."""
        if self._integers is not None:
            return self._elias(self._integers, probabilities.size).expected_bits(probabilities)
        fixed, lengths = float(width_for(probabilities.size)), state.arrays.get("lengths")
        return fixed if lengths is None else min(fixed, mean_length(lengths, probabilities))

    def _code(self, state: State, symbols: NDArray[np.uint16]) -> tuple[bytes, int]:
        if self._integers is not None:
            return self._elias(self._integers, self.signed_values(state).size).encode(symbols), 0
        lengths = state.arrays.get("lengths")
        if lengths is not None:
            code = huffman_code(lengths.tobytes())
            if 0 <= code.bits(symbols) < symbols.size * self._width(state):
                return code.encode(symbols), 0
        return pack_fixed(symbols, self._width(state)), self._fixed_flag

    def _is_fixed(self, flags: int) -> bool:
        return self.coder == "fixed" or flags == FLAG_FIXED

    def _uncode(self, state: State, data: memoryview, count: int, symbols: int, flags: int) -> NDArray[np.uint16]:
        lengths = state.arrays.get("lengths")
        if self._is_fixed(flags):
            return unpack_fixed(data, count, width_for(symbols), symbols)
        if self._integers is not None:
            return self._elias(self._integers, symbols).decode(data, count).astype(np.uint16)
        if lengths is None:
            raise PayloadError("payload is Huffman coded, but the shared bytes hold no code")
        return huffman_code(lengths.tobytes()).decode(data, count)

    def _state_from(self, shared: bytes, size: int) -> State:
        """The decoder's state: what the shared bytes say.

        Raises:
            PayloadError: they are not this codec's.
        """
        state = State(size)
        if not shared:
            return state
        if len(shared) < _SHARED.size:
            raise PayloadError("shared bytes are too short")
        count, _ = _SHARED.unpack_from(shared)
        end = _SHARED.size + 4 * count
        if len(shared) < end:
            raise PayloadError("shared bytes are too short for the levels they announce")
        if count:
            state = self.with_fitted(state, np.frombuffer(shared, "<f4", count, _SHARED.size).astype(np.float32))
        if len(shared) > end:
            lengths, size_read = unpack_lengths(shared[end:], self.signed_values(state).size)
            if end + size_read != len(shared) or not lengths.all():
                raise PayloadError("shared bytes go on after the code lengths, or leave a symbol without a code")
            state = state.with_arrays(lengths=lengths)
        return state


class _Opened(NamedTuple):
    """A payload with its symbols still coded; what is not here is as in :class:`Unsealed`."""

    state: State
    split: int
    scales: NDArray[np.float32]
    tail: NDArray[np.float32]
    coded: memoryview
    flags: int
    values: NDArray[np.float32]


class Unsealed(NamedTuple):
    """What a payload holds.

    Attributes:
        scales: float32, of each bucket; ones for a codec without.
        tail: float32, the values that were sent as they are.
        symbols: uint16, of the values before.
        values: float32, what each symbol stands for in units of the scale.
    """

    scales: NDArray[np.float32]
    tail: NDArray[np.float32]
    symbols: NDArray[np.uint16]
    values: NDArray[np.float32]
