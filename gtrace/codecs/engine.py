"""The engine: one encode, decode and simulate over scale x grid x rounding x memory x coder.

A method is a class of one screen: what it is called, what people should know of it, and its parts. :func:`method` makes
the parameters of the parts parameters of the codec; everything else is here.
"""

from __future__ import annotations

import dataclasses
import inspect
from abc import abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar, cast

import numpy as np

from gtrace.codecs.base import (
    Codec,
    CodedBits,
    EncodedPart,
    ExpectingCodec,
    PartwiseCodec,
    Simulated,
    checked_values,
    parameter,
)
from gtrace.codecs.coders import SharedCode, pack_shared, unpack_code, unpack_levels
from gtrace.codecs.grids import LevelGrid, Rule, Stochastic, with_levels
from gtrace.codecs.parts import Coder, FixedGrid, Grid, Memory, Rounding, Scale, Word
from gtrace.codecs.scales import BucketNorm
from gtrace.codecs.spec import register
from gtrace.coding import (
    ENVELOPE_BYTES,
    MAX_LENGTH,
    check_symbol,
    checked_fixed,
    mean_length,
    open_envelope,
    seal,
    tally,
    width_for,
)
from gtrace.errors import PayloadError, UsageError
from gtrace.kernels import rounding as _rounding
from gtrace.kernels import symbols as _symbols
from gtrace.types import Expectation, Scope, State, SummarySpec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import ArrayLike, NDArray

    from gtrace.codecs.base import TensorSums
    from gtrace.sketch import MomentSketch

C = TypeVar("C", bound=type[Codec])


@dataclass(frozen=True)
class Parts:
    """A method: one of each word. What is not named is nothing, and rounding is stochastic."""

    memory: Memory = field(default_factory=Memory)
    scale: Scale = field(default_factory=Scale)
    grid: Grid = field(default_factory=Grid)
    rounding: Rounding = field(default_factory=Stochastic)
    coder: Word = field(default_factory=Word)

    @property
    def each(self) -> dict[str, Word]:
        """Word -> part, in the order in which their parameters come."""
        return {item.name: getattr(self, item.name) for item in dataclasses.fields(self)}


def assembled(cls: C) -> C:
    """Class decorator: a frozen dataclass with the parameters of its parts beside its own.

    A parameter that a base class has already keeps its place.
    """
    known = {item.name: item for item in dataclasses.fields(cls.__mro__[1])}
    own = inspect.get_annotations(cls)
    found: dict[str, str] = {}
    parts: Parts = cls.parts  # type: ignore[attr-defined]
    for part in parts.each.values():
        for item in part.own_parameters():
            default, before = getattr(part, item.name), known.get(item.name)
            if before is None or (before.default, before.metadata) != (default, item.metadata):
                found[item.name] = str(item.type)
                setattr(cls, item.name, dataclasses.field(default=default, metadata=item.metadata))
    cls.__annotations__ = {**found, **own}
    return cast("C", dataclass(frozen=True)(cls))


def method(cls: C) -> C:
    """Class decorator of a row: :func:`assembled`, and known by its name."""
    return register(assembled(cls))


def own_parts(codec: Codec, row: Parts) -> Parts:
    """The parts of a row with the parameters of one codec."""
    made = {
        word: dataclasses.replace(part, **{item.name: getattr(codec, item.name) for item in part.own_parameters()})
        for word, part in row.each.items()
    }
    return Parts(**made)  # type: ignore[arg-type]


class Composed(Codec):
    """A codec with the parts of a row: its memory before, its envelope around what :meth:`write` makes.

    ``parts`` of the class is the row; ``parts`` of a codec has the codec's own parameters.
    """

    parts: ClassVar[Parts] = Parts()
    #: workers' signs are put to the vote; otherwise decoded gradients are averaged
    votes: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        kind = type(self)
        parts = own_parts(self, kind.parts)
        parts.grid.check(self.name)
        # What the class says of the row; a frozen codec shadows it once, here.
        object.__setattr__(self, "parts", parts)
        for fact in ("unbiased", "deterministic"):
            holds = all(getattr(part, fact) for part in parts.each.values())
            object.__setattr__(self, fact, getattr(kind, fact) and holds)

    @abstractmethod
    def write(self, state: State, x: NDArray[np.float32], key: tuple[int, int]) -> tuple[bytes, int]:
        """Body and flags of the payload of finite float32[n], the memory in it."""

    @abstractmethod
    def read(self, shared: bytes, body: memoryview, flags: int, size: int) -> NDArray[np.float32]:
        """Undo :meth:`write`: float32[size].

        Raises:
            PayloadError: no body or flags of this codec and size.
        """

    def init(self, size: int, shape: tuple[int, ...] | None = None) -> State:
        """What is remembered before the first step."""
        return State(int(size), self.parts.memory.start(size), shape)

    def given(self, state: State, values: ArrayLike) -> NDArray[np.float32]:
        """What is encoded: the values, or what the memory makes of them, float32[n].

        Raises:
            UsageError: wrong size or non-finite values.
        """
        return self.parts.memory.given(state.arrays, checked_values(state, values))

    def encode(self, state: State, values: ArrayLike, key: tuple[int, int]) -> bytes:
        """What :meth:`write` makes of the values, in an envelope."""
        x = self.given(state, values)
        body, flags = self.write(state, x, key)
        return seal(body, codec=self.name, size=x.size, shared=self.shared(state), flags=flags)

    def decode(self, shared: bytes, payload: bytes, size: int) -> NDArray[np.float32]:
        """Undo ``encode``."""
        body, flags = open_envelope(payload, codec=self.name, size=size, shared=shared)
        return self.read(shared, body, flags, size)

    def update(self, state: State, values: ArrayLike, decoded: NDArray[np.float32]) -> State:
        """The memory takes note."""
        if not self.parts.memory.keeps:
            return state
        return state.with_arrays(**self.parts.memory.after(self.given(state, values), decoded))

    def aggregate(self, decoded: Sequence[NDArray[np.float32]]) -> NDArray[np.float32]:
        """The mean; with ``votes`` the sign that most workers sent, times their mean magnitude, 0 on a tie."""
        mean = super().aggregate(decoded)
        return vote(decoded) if self.votes else mean


class Machine(Composed, PartwiseCodec):
    """Scales, symbols of a fixed grid, and a coder that needs nothing but them."""

    @property
    def whole_tensor(self) -> bool:
        """Whether one scale is fitted to all values."""
        return self.parts.scale.whole_tensor

    def write(self, state: State, x: NDArray[np.float32], key: tuple[int, int]) -> tuple[bytes, int]:
        """Scales, then coded symbols."""
        scales, symbols = self.rounded(state, x, key, 0)
        coded, flags = self._coder.write(symbols, self._grid)
        return self.parts.scale.pack(scales) + coded, flags | self._grid.mark

    def read(self, shared: bytes, body: memoryview, flags: int, size: int) -> NDArray[np.float32]:
        """Undo :meth:`write`."""
        scale, grid = self.parts.scale, self._grid
        if flags & grid.mark != grid.mark:
            raise PayloadError(f"payload has the flags {flags:#x}, those of another codec than {self}")
        head = scale.head(body, size)
        if len(body) < head:
            raise PayloadError(f"payload body of {len(body)} bytes is shorter than its {head} bytes of scales")
        symbols = self._coder.read(body[head:], flags & ~grid.mark, size, grid)
        return grid.values(symbols, scale.read(body[:head]), scale.over(size), size)

    def simulate(self, state: State, values: ArrayLike, key: tuple[int, int]) -> Simulated:
        """As ``encode`` and ``decode``, without bytes where the coder can count them."""
        scale, grid, x = self.parts.scale, self._grid, self.given(state, values)
        scales, symbols = self.rounded(state, x, key, 0)
        head, found = 8 * len(scale.pack(scales)), self._coder.measure(symbols, grid)
        coded = CodedBits(*((head + bits) / max(1, x.size) for bits in (found.fixed, found.entropy, found.huffman)))
        size = ENVELOPE_BYTES + head // 8 + -(-int(found.sent) // 8)
        return Simulated(grid.values(symbols, scales, scale.over(x.size), x.size), size, coded)

    @property
    def part_multiple(self) -> int | None:
        """One value if the coder codes a part as it codes the whole, and no memory has to be cut."""
        return 1 if self._coder.splits and not self.parts.memory.keeps else None

    def prepare(self, state: State, sums: TensorSums) -> State:
        """The scale of the whole tensor as the array ``scale``, if parts share one."""
        whole = self.parts.scale.whole(sums)
        return state if whole is None else state.with_arrays(scale=whole)

    def encode_part(self, state: State, values: ArrayLike, key: tuple[int, int], start: int) -> EncodedPart:
        """The part as ``encode`` does it; a scale of the whole tensor counts with the first part."""
        x = checked_values(state, values)
        scales, symbols = self.rounded(state, x, key, start)
        head = self.parts.scale.pack(scales)
        coded, flags = self._coder.write(symbols, self._grid)
        payload = seal(head + coded, codec=self.name, size=x.size, shared=b"", flags=flags | self._grid.mark)
        return EncodedPart(payload, 0 if start else 8 * len(head), self._coder.part_bits(coded, x.size))

    def rounded(
        self, state: State, x: NDArray[np.float32], key: tuple[int, int], start: int
    ) -> tuple[NDArray[np.float32], Any]:
        """Scales and symbols of values whose first one is number ``start`` of the tensor."""
        scale = self.parts.scale
        scales = scale.measure(x, state)
        return scales, self.parts.rounding.symbols(self._grid, x, scales, scale.over(x.size), key, start)

    @property
    def _grid(self) -> FixedGrid:
        return cast("FixedGrid", self.parts.grid)

    @property
    def _coder(self) -> Coder:
        return cast("Coder", self.parts.coder)


def vote(decoded: Sequence[NDArray[np.float32]]) -> NDArray[np.float32]:
    """The sign that most workers sent, times their mean magnitude; 0 on a tie."""
    votes = np.zeros(decoded[0].shape, np.int32)
    total = np.zeros(decoded[0].shape, np.float64)
    for values in decoded:
        votes += np.sign(values).astype(np.int32)
        total += np.abs(values)
    return (np.sign(votes) * (total / len(decoded))).astype(np.float32)


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


@assembled
class LevelCodec(Composed, PartwiseCodec, ExpectingCodec):
    """Buckets divided by their norm, rounded stochastically to magnitudes in [0, 1], symbols coded.

    A method says which magnitudes: a row by its grid, a codec of your own by its one abstract method, :meth:`levels`.
    The state holds ``levels`` (float32, if they are fitted) and ``lengths`` (uint8, the Huffman code's, once one is
    adopted).
    """

    parts: ClassVar[Parts] = Parts(scale=BucketNorm(), coder=SharedCode())

    scope: Scope = parameter(
        "tensor", "buckets run over one tensor or over the whole model", choices=("tensor", "model")
    )

    @abstractmethod
    def levels(self, state: State) -> NDArray[np.float32]:
        """Ascending magnitudes, float32[m]; the last is 1, the first is 0 exactly when ``has_zero``."""

    @property
    def has_zero(self) -> bool:
        """Whether 0 is a level."""
        return True

    @property
    def adaptive(self) -> bool:
        """Whether levels are fitted."""
        return False

    def rule(self, state: State) -> Rule:
        """How |v| / scale goes to one of :meth:`levels`."""
        return Rule.among(self.levels(state), mirrored=not self.has_zero)

    def fit_levels(self, state: State, summary: MomentSketch, step: int) -> State:
        """Adapt the levels; a method with a fixed grid leaves them alone."""
        del summary, step
        return state

    def fitted(self, state: State) -> NDArray[np.float32] | None:
        """What a receiver must know of fitted levels: themselves; None for a fixed grid."""
        return state.arrays.get("levels")

    def with_fitted(self, state: State, fitted: NDArray[np.float32]) -> State:
        """The receiver's state with :meth:`fitted`, one number or more.

        Raises:
            PayloadError: numbers that are none of this codec's.
        """
        return with_levels(state, fitted)

    def model_error(self, state: State, sketch: MomentSketch) -> float:
        """The squared error that a parametric law promised; NaN for a method without one."""
        del state, sketch
        return float("nan")

    @property
    def _scale(self) -> BucketNorm:
        """Buckets and their norms."""
        return cast("BucketNorm", self.parts.scale)

    @property
    def code(self) -> SharedCode:
        """How symbols become bits."""
        return cast("SharedCode", self.parts.coder)

    @property
    def needs(self) -> SummarySpec:
        """The sketch of r = |v| / scale under this codec's buckets."""
        scale = self._scale
        return SummarySpec(scale.norm, scale.bucket_size, scale.tail, scale.clip, self.scope)

    def fit(self, state: State, summary: MomentSketch, step: int) -> State:
        """Fit the levels, then adopt a Huffman code if it saves more than it costs to send."""
        state = self.fit_levels(state, summary, step)
        if self.code.coder != "huffman" or summary.quantized == 0:
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

    def quantized(self, size: int) -> int:
        """How many of ``size`` values are rounded; the rest is sent as it is."""
        return self._scale.quantized(size)

    def signed_values(self, state: State) -> NDArray[np.float32]:
        """What each symbol stands for, in units of the scale: float32, ascending."""
        levels = self.levels(state)
        return np.concatenate([-levels[::-1], levels[1:] if self.has_zero else levels])

    def alphabet(self, state: State) -> int:
        """How many symbols there are."""
        return 2 * self.levels(state).size - int(self.has_zero)

    def write(self, state: State, x: NDArray[np.float32], key: tuple[int, int]) -> tuple[bytes, int]:
        """Norms (float32), then an exact tail (float32) if asked for, then the coded symbols."""
        x = self._scale.clipped(x)
        split, rule, alphabet = self.quantized(x.size), self.rule(state), self.alphabet(state)
        bucket, width = self._scale.over(split), width_for(alphabet)
        scales = self._scale.measure(x[:split], state)
        if width and self.code.fixed_here(state):
            # The kernel packs symbols as it makes them.
            coded, flags = rule.packed(x[:split], bucket, scales, key, width), self.code.fixed_flag
        else:
            symbols = self.parts.rounding.symbols(rule, x[:split], scales, bucket, key, 0)
            coded, flags = self.code.write(state, symbols, alphabet)
        return self._head(scales, x[split:]) + coded, flags

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
        coded, flags = self.code.write(state, symbols, self.alphabet(state))
        body, size = self._head(scales, tail) + coded, symbols.size + tail.size
        return seal(body, codec=self.name, size=size, shared=self.shared(state), flags=flags)

    def _head(self, scales: NDArray[np.float32], tail: NDArray[np.float32]) -> bytes:
        return self._scale.pack(scales) + tail.astype("<f4").tobytes()

    def shared(self, state: State) -> bytes:
        """Fitted levels (float32) and code lengths, empty if there are neither."""
        return pack_shared(self.fitted(state), state.arrays.get("lengths"))

    def read(self, shared: bytes, body: memoryview, flags: int, size: int) -> NDArray[np.float32]:
        """Undo :meth:`write`."""
        opened = self._open(shared, body, flags, size)
        split, bucket, alphabet = opened.split, self._scale.over(opened.split), opened.values.size
        out = np.empty(size, np.float32)
        out[split:] = opened.tail
        width = width_for(alphabet)
        if width and self.code.is_fixed(flags):
            raw = checked_fixed(opened.coded, split, width)
            top = _rounding.restore_packed(raw, width, bucket, opened.scales, opened.values, out[:split])
            check_symbol(top, alphabet)
        else:
            symbols = self.code.read(opened.state, opened.coded, flags, split, alphabet)
            _rounding.restore(symbols, bucket, opened.scales, opened.values, out[:split])
        return out

    def unseal(self, shared: bytes, payload: bytes, size: int) -> Unsealed:
        """Undo :meth:`seal`.

        Raises:
            PayloadError: the bytes are no payload of this codec and size, or damaged.
        """
        body, flags = open_envelope(payload, codec=self.name, size=size, shared=shared)
        opened = self._open(shared, body, flags, size)
        symbols = self.code.read(opened.state, opened.coded, flags, opened.split, opened.values.size)
        return Unsealed(opened.scales, opened.tail, symbols, opened.values)

    def _open(self, shared: bytes, body: memoryview, flags: int, size: int) -> _Opened:
        state = self._heard(shared, size)
        split = self.quantized(size)
        norms = self._scale.head(body, split)
        head = norms + 4 * (size - split)
        if len(body) < head:
            raise PayloadError(f"payload body of {len(body)} bytes is shorter than its {head} bytes of norms")
        scales = self._scale.read(body[:norms])
        if norms == 0:
            scales = np.ones(-(-split // self._scale.over(split)), np.float32)
        self.code.check_flags(flags)
        tail = np.frombuffer(body[norms:head], "<f4").astype(np.float32)
        return _Opened(state, split, scales, tail, body[head:], self.signed_values(state))

    def _heard(self, shared: bytes, size: int) -> State:
        """The decoder's state: what the shared bytes say.

        Raises:
            PayloadError: they are not this codec's.
        """
        state = State(size)
        if not shared:
            return state
        levels, code = unpack_levels(shared)
        if levels.size:
            state = self.with_fitted(state, levels)
        return state.with_arrays(lengths=unpack_code(code, self.alphabet(state))) if code else state

    def simulate(self, state: State, values: ArrayLike, key: tuple[int, int]) -> Simulated:
        """As ``encode`` and ``decode`` in one pass, the payload's length from how often each symbol occurs."""
        x = self._scale.clipped(self.given(state, values))
        split, signed = self.quantized(x.size), self.signed_values(state)
        scales, bucket = self._scale.measure(x[:split], state), self._scale.over(split)
        out = np.empty(x.size, np.float32)
        out[split:] = x[split:]
        tallies = self.rule(state).simulate(x[:split], bucket, scales, key, signed, out[:split], count=True)
        whole = EncodedPart(b"", 8 * len(self._head(scales, x[split:])), self.code.bits(state, tallies), tallies)
        return Simulated(out, ENVELOPE_BYTES + self.body_bytes(whole), self.coded_bits(whole, x.size))

    @property
    def part_multiple(self) -> int | None:
        """A bucket; clipping takes the deviation of all values first, and memory belongs to all of them."""
        return None if self._scale.clip is not None or self.parts.memory.keeps else self._scale.bucket_size or 1

    def prepare(self, state: State, sums: TensorSums) -> State:
        """The norm of a tensor that is one bucket as the array ``scale``."""
        whole = self._scale.whole(sums)
        return state if whole is None else state.with_arrays(scale=whole)

    def encode_part(self, state: State, values: ArrayLike, key: tuple[int, int], start: int) -> EncodedPart:
        """The part as ``encode`` does it; one norm of the whole tensor counts with the first part."""
        x = checked_values(state, values)
        split = self.quantized(x.size)
        scales = self._scale.measure(x[:split], state)
        bucket = self._scale.over(split)
        symbols = self.parts.rounding.symbols(self.rule(state), x[:split], scales, bucket, key, start)
        tallies = tally(symbols, self.alphabet(state))
        head = 0 if start and "scale" in state.arrays else 8 * len(self._head(scales, x[split:]))
        return EncodedPart(self.seal(state, scales, x[split:], symbols), head, self.code.bits(state, tallies), tallies)

    def body_bytes(self, whole: EncodedPart) -> int:
        """Bytes of the whole payload's body: at fixed width where a Huffman code made for other data is longer."""
        if self.code.coder == "huffman" and whole.tallies is not None:
            fixed = int(whole.tallies.sum()) * width_for(whole.tallies.size)
            whole = EncodedPart(b"", whole.head, min(whole.coded, fixed))
        return super().body_bytes(whole)

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
        coded = self.code.expected_bits(state, probabilities)
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


class LevelMethod(LevelCodec):
    """A row of level codecs: the grid says which levels, and how they are fitted."""

    @property
    def grid(self) -> LevelGrid:
        """The magnitudes."""
        return cast("LevelGrid", self.parts.grid)

    @property
    def has_zero(self) -> bool:
        """Whether 0 is a level."""
        return self.grid.has_zero

    @property
    def adaptive(self) -> bool:
        """Whether levels are fitted."""
        return self.grid.adaptive

    @property
    def needs(self) -> SummarySpec:
        """The sketch under this codec's buckets, with each bucket's mean and sigma if the fit wants them."""
        return super().needs._replace(bucket_moments=self.grid.moments)

    def levels(self, state: State) -> NDArray[np.float32]:
        """Those of the grid."""
        return self.grid.levels(state)

    def rule(self, state: State) -> Rule:
        """That of the grid."""
        return self.grid.rule(state)

    def fit_levels(self, state: State, summary: MomentSketch, step: int) -> State:
        """As the grid does it."""
        del step
        return self.grid.fit(state, summary)

    def fitted(self, state: State) -> NDArray[np.float32] | None:
        """What the grid sends."""
        return self.grid.fitted(state)

    def with_fitted(self, state: State, fitted: NDArray[np.float32]) -> State:
        """As the grid reads it."""
        return self.grid.with_fitted(state, fitted)

    def model_error(self, state: State, sketch: MomentSketch) -> float:
        """What the law of the grid promised."""
        return self.grid.model_error(state, sketch)


class _Opened(NamedTuple):
    """A payload with its symbols still coded; what is not here is as in :class:`Unsealed`."""

    state: State
    split: int
    scales: NDArray[np.float32]
    tail: NDArray[np.float32]
    coded: memoryview
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
