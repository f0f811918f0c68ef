"""Prefixes: a codec around any codec, with a memory of its own or in rotated coordinates."""

from __future__ import annotations

import dataclasses
import struct
from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from gtrace.buckets import TensorSums, as_values
from gtrace.codecs.base import Codec, CodedBits, checked_values
from gtrace.codecs.engine import assembled
from gtrace.codecs.memory import UNITS, Accumulated, Estimate, FadingResidual, MomentumSum
from gtrace.codecs.parts import Parts, common_multiple
from gtrace.codecs.spec import register_wrapper
from gtrace.coding.envelope import open_envelope, seal
from gtrace.errors import PayloadError, UsageError
from gtrace.types import State, SummarySpec

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import ArrayLike

    from gtrace.codecs.base import EncodedPart, Pieces, Rounds
    from gtrace.codecs.parts import Values
    from gtrace.sketch import MomentSketch

#: prefix of the names of the inner codec's arrays in the wrapper's state
INNER = "inner."
_NUMBER = struct.Struct("<I")


@dataclass(frozen=True)
class Wrapper(Codec):
    """A codec around another codec or wrapper, with a memory before it if its ``parts`` have one.

    The state holds the memory's arrays and the inner codec's; payloads are the inner codec's. The first field is the
    inner codec; a wrapper's own parameters follow it. ``name``, ``unbiased``, ``stateful``, ``deterministic``,
    ``linear``, ``both_ends`` and ``declared`` are facts of the instance, because they depend on what is inside.
    """

    parts: ClassVar[Parts] = Parts()

    inner: Codec

    def __post_init__(self) -> None:
        super().__post_init__()
        prefix = type(self).name
        if self.parts.memory.keeps and prefix in self.inner.name.split(":"):
            raise UsageError(f"codec '{self}': {prefix}: is there twice; write {self.inner}.")
        object.__setattr__(self, "parts", type(self).parts.of(self))
        # Other codecs have these facts on the class; a frozen instance overrides them once, here.
        object.__setattr__(self, "name", f"{type(self).name}:{self.inner.name}")
        object.__setattr__(self, "unbiased", type(self).unbiased and self.inner.unbiased)
        object.__setattr__(self, "stateful", type(self).stateful or self.inner.stateful)
        object.__setattr__(self, "deterministic", self.inner.deterministic)
        object.__setattr__(self, "both_ends", type(self).both_ends or self.inner.both_ends)
        # A change of a worker's own estimate means nothing to the others.
        object.__setattr__(self, "linear", self.inner.linear and not self.both_ends)
        object.__setattr__(self, "declared", self.inner.declared)

    def __str__(self) -> str:
        """The prefix, parameters that differ from their defaults, and the spec inside."""
        return f"{super().__str__()}:{self.inner}"

    @property
    def parameters(self) -> dict[str, Any]:
        """The inner codec's parameters, and the wrapper's own as ``prefix.parameter``."""
        own = {f"{type(self).name}.{key}": value for key, value in super().parameters.items()}
        return {**self.inner.parameters, **own}

    @property
    def wire_name(self) -> str:
        """The inner codec's name, because its payloads travel unchanged."""
        return self.inner.wire_name

    @property
    def needs(self) -> SummarySpec | None:
        return self.inner.needs

    @property
    def fits_itself(self) -> bool:
        return self.inner.fits_itself

    @property
    def allocates(self) -> bool:
        return self.inner.allocates

    def allocate(self, sketches: Sequence[MomentSketch]) -> Sequence[float]:
        """As the inner codec, from the gradients themselves: memories of other tensors are not known."""
        return self.inner.allocate(sketches)

    def with_target(self, state: State, share: float) -> State:
        return self.with_inner(state, self.inner.with_target(self.inner_state(state), share))

    def init(self, size: int, shape: tuple[int, ...] | None = None) -> State:
        """Nothing remembered yet, and the inner codec's state under the prefix ``inner.``."""
        return self.with_inner(State(int(size), self.parts.memory.start(size), shape), self.inner.init(size, shape))

    def given(self, state: State, values: ArrayLike, start: int = 0) -> Values:
        """The values that the inner codec encodes, float32[n]; the first is value ``start`` of its tensor."""
        return self.parts.memory.given(state.arrays, checked_values(state, values))

    def inside(self, state: State, received: Values) -> Values:
        """What the inner codec's receiver ended with when this one's ended with ``received``, float32[n]."""
        return self.parts.memory.inside(state.arrays, received)

    def view(self, state: State, values: ArrayLike, start: int = 0) -> ArrayLike:
        return self.inner.view(self.inner_state(state), self.given(state, values, start), start)

    @property
    def part_multiple(self) -> int | None:
        return common_multiple(self.parts.memory, self.inner)

    def prepare(self, state: State, pieces: Pieces, key: tuple[int, int], sums: TensorSums | None = None) -> State:
        def encoded() -> Iterator[tuple[State, Values]]:
            start = 0
            for kept, x in pieces():
                yield self.inner_state(kept), self.encoded(kept, x, key, start)
                start += x.size

        return self.with_inner(state, self.inner.prepare(self.inner_state(state), encoded, self.inner_key(key)))

    def encoded(self, state: State, values: ArrayLike, key: tuple[int, int], start: int) -> Values:
        """What the inner codec encodes of the values from ``start`` on, float32[n]."""
        return self.given(state, values, start)

    def inner_key(self, key: tuple[int, int]) -> tuple[int, int]:
        return key

    def encode_part(self, state: State, values: ArrayLike, key: tuple[int, int], start: int) -> EncodedPart:
        x, inner = self.encoded(state, values, key, start), self.inner_state(state)
        part = self.inner.encode_part(inner, x, self.inner_key(key), start)
        return dataclasses.replace(part, values=self.parts.memory.received(state.arrays, part.values)[0])

    def settled(self, state: State, prepared: State) -> State:
        return self.with_inner(state, self.inner.settled(self.inner_state(state), self.inner_state(prepared)))

    def measured(self, whole: EncodedPart, size: int) -> tuple[int, CodedBits]:
        return self.inner.measured(whole, size)

    def encode(self, state: State, values: ArrayLike, key: tuple[int, int]) -> bytes:
        return self.inner.encode(self.inner_state(state), self.encoded(state, values, key, 0), self.inner_key(key))

    def update(self, state: State, values: ArrayLike, decoded: Values) -> State:
        given = self.given(state, values)
        own = self.parts.memory.after(state.arrays, as_values(values), given, decoded)
        inner = self.inner.update(self.inner_state(state), given, self.inside(state, decoded))
        return self.with_inner(state, inner).with_arrays(**own)

    def rounds(self, state: State, values: ArrayLike, key: tuple[int, int]) -> Rounds:
        given = self.given(state, values)
        ended = yield from self.inner.rounds(self.inner_state(state), given, key)
        own = self.parts.memory.after(state.arrays, as_values(values), given, ended.decoded)
        return ended._replace(state=self.with_inner(state, ended.state).with_arrays(**own))

    def at_bits(self, bits: int) -> Codec:
        return dataclasses.replace(self, inner=self.inner.at_bits(bits))

    def renewed(self, state: State) -> State:
        return self.with_inner(state, self.inner.renewed(self.inner_state(state)))

    def fit(self, state: State, summary: MomentSketch, step: int) -> State:
        return self.with_inner(state, self.inner.fit(self.inner_state(state), summary, step))

    def shared(self, state: State) -> bytes:
        return self.inner.shared(self.inner_state(state))

    def decode(self, shared: bytes, payload: bytes, size: int) -> Values:
        return self.receive(State(size), shared, payload)[0]

    def receive(self, held: State, shared: bytes, payload: bytes) -> tuple[Values, State]:
        values, inner = self.inner.receive(self.inner_state(held), shared, payload)
        values, kept = self.parts.memory.received(held.arrays, values)
        return values, self.with_inner(held, inner).with_arrays(**kept)

    def aggregate(self, decoded: Sequence[Values]) -> Values:
        return self.inner.aggregate(decoded)

    @staticmethod
    def inner_state(state: State) -> State:
        """The inner codec's part of a state."""
        arrays = {name.removeprefix(INNER): array for name, array in state.arrays.items() if name.startswith(INNER)}
        return State(state.size, arrays, state.shape)

    @staticmethod
    def with_inner(state: State, inner: State) -> State:
        """A state with the inner codec's part replaced."""
        own = {name: array for name, array in state.arrays.items() if not name.startswith(INNER)}
        held = {INNER + name: array for name, array in inner.arrays.items()}
        return State(state.size, {**own, **held}, state.shape)


def _check_ends(codec: Wrapper) -> None:
    """Raise :class:`UsageError` around a memory of both ends: rounding would part what the two hold."""
    if codec.inner.both_ends:
        prefix = type(codec).name
        raise UsageError(f"codec '{codec}': {prefix}: cannot go around ef21:; put ef21: first")


@register_wrapper
@assembled
class ErrorFeedback(Wrapper):
    """Error feedback around any codec: ``ef:topk:ratio=0.01``.

    The state holds ``residual`` (float32[n]; int8[n] and ``scales`` with ``memory_bits``) and the inner codec's
    arrays. Payloads are the inner codec's. ``ef:beta=0.8,reset=1024,memory_bits=8:intn`` is LoCo, and
    ``ef:decay=0.999:dct:topk:ratio=0.008,chunk=4096`` what DeMo sends. If a codec's error exceeds the gradient
    itself, the residual grows without end: unbiased codecs with few bits in large buckets do this, and scaled
    random choice; take smaller buckets, or ``randomk:scale=false``.
    """

    name = "ef"
    parts = Parts(memory=FadingResidual())
    summary = "error feedback around any codec: what was lost is sent with the next gradient"
    formula = "send Q(v + e); e <- v + e - Q(v + e)"
    paper = """Karimireddy et al., Error Feedback Fixes SignSGD and other Gradient Compression Schemes, 2019; beta,
    reset and memory_bits: Xie et al., LoCo: Low-Bit Communication Adaptor for Large-scale Model Training, 2024"""
    corrections = (UNITS,)
    about = "The memory that makes biased codecs converge: what this step lost is added to the next gradient."
    sends = "The payload of the codec inside."
    behavior = """The error of one step is that of gradient plus memory, larger than without; what counts is that it
    does not add up. Around a codec that keeps what did not arrive itself (mem-sgd, dgc, powersgd, ef21:) each memory
    sends what the other one owes, and the error grows without end."""
    related = ("mem-sgd", "accumulate", "momentum")


@register_wrapper
@assembled
class Accumulate(Wrapper):
    """MCGQ's accumulation around any codec: ``accumulate:topk:ratio=0.01``.

    This is not a residual: coordinates that arrived are cleared, without subtracting their values. The paper's method
    is ``mcgq:accumulate=true``, which scales by the norm of the current gradient; around ``mcgq`` the codec sees, and
    scales by, the accumulated one. The state holds ``accumulated`` (float32[n]) and the inner codec's arrays.
    Payloads are the inner codec's.
    """

    name = "accumulate"
    parts = Parts(memory=Accumulated())
    summary = "gradients add up until their coordinate is sent, then it is cleared"
    formula = "a <- a + v; send Q(a); a <- 0 where Q(a) is not 0"
    paper = "Mordido, Van Keirsbilck, Keller, Monte Carlo Gradient Quantization, 2020 (Algorithm 4)"
    about = "A memory that is cleared at sent coordinates, instead of keeping the difference."
    sends = "The payload of the codec inside."
    behavior = "Not unbiased over time: errors of coarse values are forgotten."
    related = ("ef", "mcgq")


@register_wrapper
@assembled
class Momentum(Wrapper):
    """Momentum on every worker, in front of any codec: ``momentum:beta=0.9:signsgd``.

    The optimizer behind it must then have none of its own. The state holds ``momentum`` (float32[n]) and the
    inner codec's arrays. Payloads are the inner codec's.
    """

    name = "momentum"
    parts = Parts(memory=MomentumSum())
    summary = "momentum on the worker, before any codec"
    formula = "m <- beta m + (1 - dampening) v; send Q(m)"
    paper = "Bernstein et al., signSGD: Compressed Optimisation for Non-Convex Problems, 2018 (Signum)"
    about = "Momentum on the worker, before compression, as Signum and DGC use it."
    sends = "The payload of the codec inside."
    behavior = "It encodes the momentum, so its error against one gradient means little; compare it by training."
    related = ("signum", "dgc")


@register_wrapper
@assembled
class Ef21(Wrapper):
    """EF21 around any codec: ``ef21:topk:ratio=0.01``; with ``momentum=`` EF21-SGDM.

    Worker and receiver keep the same estimate of the worker's gradient; only its change is sent. The sender's state
    holds ``estimate`` (float32[n], once something arrived), ``momentum`` (float32[n], if asked for, once a gradient was
    sent) and the inner codec's arrays; a receiver holds ``estimate``. Payloads are the inner codec's.
    """

    name = "ef21"
    parts = Parts(memory=Estimate())
    summary = "only the change of an estimate that both ends keep is encoded"
    formula = "m <- momentum m + (1 - momentum) v; g <- g + Q(m - g), on the worker and on the receiver, who uses g"
    paper = """Richtarik, Sokolov and Fatkhullin, EF21: A New, Simpler, Theoretically Better, and Practically Faster
    Error Feedback, 2021; momentum: Fatkhullin, Tyurin and Richtarik, Momentum Provably Improves Error Feedback!,
    2023"""
    corrections = (
        "g starts at zero and m at the first gradient: the papers choose g at the start, exactly for instance, and m "
        "as a mean over a first batch",
        "workers' estimates are averaged whatever the codec inside would do: a vote over them means nothing",
    )
    about = """Error feedback without a residual: both ends follow the gradient, and what is sent shrinks as the
    estimate catches up."""
    sends = "The payload of the codec inside, for the change."
    behavior = """Suits codecs that never send more than they are given (top-k, nearest rounding): an unbiased codec
    with few bits adds more to the estimate than it corrects. With noisy gradients the estimate lags; momentum averages
    the noise first. Receivers need memory for every worker and tensor."""
    related = ("ef", "momentum", "topk")
    both_ends = True

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_ends(self)

    aggregate = Codec.aggregate


@dataclass(frozen=True)
class Coordinates(Wrapper):
    """Other coordinates around any codec: values are turned, encoded, decoded and turned back.

    Which coordinates follows from a number of 32 bits, which begins the payload unless a receiver knows it.
    """

    receive = Codec.receive
    # The mean: a vote over signs means nothing once they are turned back.
    aggregate = Codec.aggregate

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_ends(self)
        object.__setattr__(self, "deterministic", self.inner.deterministic and not self.random)

    @property
    def random(self) -> bool:
        """Whether every encoding has coordinates of its own."""
        return False

    @property
    def sends_number(self) -> bool:
        """Whether a receiver needs the number in the payload."""
        return True

    @abstractmethod
    def number(self, state: State, key: tuple[int, int]) -> int:
        """The number of the coordinates, below 2^32."""

    @abstractmethod
    def turned(self, x: Values, number: int, *, back: bool = False, start: int = 0) -> Values:
        """float32[n] in the coordinates of a number, or back from there; the first is value ``start`` of its tensor.

        Raises:
            PayloadError: this number has no coordinates among these values.
        """

    @property
    def wire_name(self) -> str:
        """The wrapper's own name: a receiver that does not turn back must refuse the payload."""
        return self.name

    def given(self, state: State, values: ArrayLike, start: int = 0) -> Values:
        """The values in the coordinates that a stateful codec inside always has."""
        return self.encoded(state, values, (0, 0), start)

    def encoded(self, state: State, values: ArrayLike, key: tuple[int, int], start: int) -> Values:
        """The values in the coordinates of the key."""
        return self.turned(checked_values(state, values), self.number(state, key), start=start)

    def encode_part(self, state: State, values: ArrayLike, key: tuple[int, int], start: int) -> EncodedPart:
        part = super().encode_part(state, values, key, start)
        turned = self.turned(part.values, self.number(state, key), back=True, start=start)
        return dataclasses.replace(part, values=turned)

    def measured(self, whole: EncodedPart, size: int) -> tuple[int, CodedBits]:
        body, coded = self.inner.measured(whole, size)
        head = _NUMBER.size if self.sends_number else 0
        return body + head, CodedBits(*(bits + 8 * head / max(1, size) for bits in coded))

    def encode(self, state: State, values: ArrayLike, key: tuple[int, int]) -> bytes:
        """The number if it is sent, then the inner body."""
        payload, size, shared = super().encode(state, values, key), state.size, self.shared(state)
        body, flags = open_envelope(payload, codec=self.inner.wire_name, size=size, shared=shared)
        head = _NUMBER.pack(self.number(state, key)) if self.sends_number else b""
        return seal(head + body, codec=self.name, size=size, shared=shared, flags=flags)

    def decode(self, shared: bytes, payload: bytes, size: int) -> Values:
        body, flags = open_envelope(payload, codec=self.name, size=size, shared=shared)
        number, head = 0, 0
        if self.sends_number:
            if len(body) < _NUMBER.size:
                raise PayloadError("payload is too short for the number of its coordinates")
            (number,), head = _NUMBER.unpack_from(body), _NUMBER.size
        inner = seal(bytes(body[head:]), codec=self.inner.wire_name, size=size, shared=shared, flags=flags)
        return self.turned(self.inner.decode(shared, inner, size), number, back=True)

    def update(self, state: State, values: ArrayLike, decoded: Values) -> State:
        return super().update(state, values, decoded) if self.inner.stateful else state

    def inside(self, state: State, received: Values) -> Values:
        """The values in the coordinates of the codec inside."""
        return self.turned(received, self.number(state, (0, 0)))

    def rounds(self, state: State, values: ArrayLike, key: tuple[int, int]) -> Rounds:
        """The inner codec's rounds, turned back at the end; all workers have the same coordinates."""
        ended = yield from super().rounds(state, values, key)
        number = self.number(state, (0, 0))
        decoded, own = (self.turned(array, number, back=True) for array in (ended.decoded, ended.own))
        return ended._replace(decoded=decoded, own=own)
