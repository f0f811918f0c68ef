"""The codec protocol: pure functions over an explicit state, and a decoder that sees only bytes."""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeAlias

import numpy as np

from gtrace.buckets import TensorSums, as_values
from gtrace.coding.envelope import ENVELOPE_BYTES, sealed_size
from gtrace.errors import UsageError, suggest
from gtrace.kernels.norms import count_nonfinite
from gtrace.types import Expectation, State, SummarySpec

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Sequence

    from _typeshed import DataclassInstance
    from numpy.typing import ArrayLike, NDArray

    from gtrace.coding.huffman import CodedBlock
    from gtrace.sketch import MomentSketch, SketchSet

    #: yields a worker's message, and receives the mean over all workers, of the same shape
    Rounds: TypeAlias = Generator[NDArray[np.float32], NDArray[np.float32], "Averaged"]
    #: gives an iterator over the pieces of a tensor: what is remembered of each, and its values
    Pieces: TypeAlias = Callable[[], Iterator[tuple[State, NDArray[np.float32]]]]


def parameter(
    default: Any,
    help: str,  # noqa: A002
    *,
    choices: tuple[str, ...] = (),
    minimum: float | None = None,
    maximum: float | None = None,
    optional: bool = False,
    doubling: bool = False,
) -> Any:
    """A dataclass field that is a codec parameter.

    Args:
        default: its value when the spec does not name it; its type is the parameter's type.
        help: what it does, for ``gtrace codecs NAME``.
        choices: the words that are allowed, for text.
        minimum: the least number allowed.
        maximum: the largest number allowed.
        optional: ``none`` is allowed.
        doubling: only powers of two are allowed.
    """
    return field(
        default=default,
        metadata={
            "help": help,
            "choices": choices,
            "minimum": minimum,
            "maximum": maximum,
            "optional": optional or default is None,
            "doubling": doubling,
        },
    )


def coder_parameter() -> Any:
    """The parameter ``coder`` of codecs that send a code together with their symbols."""
    return parameter(
        "huffman",
        "how codes become bits: a Huffman code that is sent with them, unless fixed width is shorter",
        choices=("huffman", "fixed"),
    )


def parameter_fields(codec: DataclassInstance | type[DataclassInstance]) -> tuple[dataclasses.Field[Any], ...]:
    """The dataclass fields of a codec or part that are parameters; others, such as a wrapper's inner codec, are not."""
    return tuple(item for item in dataclasses.fields(codec) if "help" in item.metadata)


def kind_of(item: dataclasses.Field[Any]) -> str:
    """The type of a parameter as words: a file without annotations from the future has classes there.

    >>> from dataclasses import fields, make_dataclass
    >>> [kind_of(item) for item in fields(make_dataclass("C", [("a", float), ("b", "int | None"), ("c", int | None)]))]
    ['float', 'int | None', 'int | None']
    """
    return item.type.__name__ if isinstance(item.type, type) else str(item.type)


class Measured(NamedTuple):
    """Length of coded symbols, in bits.

    Attributes:
        sent: in the payload.
        fixed: at fixed width.
        entropy: at the entropy of the symbols.
        huffman: in a Huffman code made for them, its lengths included.
    """

    sent: float
    fixed: float
    entropy: float
    huffman: float


class CodedBits(NamedTuple):
    """Bits per value of a payload under each coder, with norms, without the envelope.

    Attributes:
        fixed: with symbols at fixed width.
        entropy: at the entropy of the symbols that were sent.
        huffman: in a Huffman code made for these symbols, its lengths included; never above ``fixed``.
    """

    fixed: float
    entropy: float
    huffman: float

    @classmethod
    def of(cls, found: CodedBlock | Measured, head: float, size: float) -> CodedBits:
        """Bits for ``size`` values with these symbols and ``head`` bits that are the same with every coder."""
        size = max(1, size)
        return cls((head + found.fixed) / size, (head + found.entropy) / size, (head + found.huffman) / size)

    @property
    def columns(self) -> dict[str, Any]:
        """As fields of :class:`~gtrace.types.Expectation`."""
        return {f"bits_{name}": bits for name, bits in self._asdict().items()}


@dataclass(frozen=True, slots=True, eq=False)
class EncodedPart:
    """A part of a tensor as it arrives. The sum of all parts gives the length of the tensor's payload.

    Attributes:
        values: float32[n], as decoded; none in a sum.
        head: bits of norms, scales and exact values in the payload.
        coded: bits of its symbols.
        tallies: int64[m], number of occurrences of each symbol; none for a codec without symbols.
        lengths: of all symbols of the tensor, from its first part; None if the parts' add up.
    """

    values: NDArray[np.float32] = field(default_factory=lambda: np.empty(0, np.float32))
    head: int = 0
    coded: int = 0
    tallies: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    lengths: Measured | None = None

    def __add__(self, other: EncodedPart) -> EncodedPart:
        head, coded = self.head + other.head, self.coded + other.coded
        return EncodedPart(head=head, coded=coded, tallies=self.tallies + other.tallies, lengths=self.lengths)


class Simulated(NamedTuple):
    """The result of sending values, without the bytes.

    Attributes:
        values: float32[n], as decoded.
        payload_bytes: length of the payload, its envelope included.
        coded: its bits under each coder; None if the symbols were not counted.
    """

    values: NDArray[np.float32]
    payload_bytes: int
    coded: CodedBits | None = None


class Averaged(NamedTuple):
    """The result of a linear codec's rounds for one worker.

    Attributes:
        decoded: float32[n], the mean, bit for bit the same on every worker.
        own: float32[n], this worker's part of it; ``decoded`` is the mean of all parts.
        state: this worker's state for the next step.
    """

    decoded: NDArray[np.float32]
    own: NDArray[np.float32]
    state: State


def advance(rounds: Rounds, mean: NDArray[np.float32] | None = None) -> NDArray[np.float32] | Averaged:
    """The next message of :meth:`Codec.rounds`, or their result.

    Args:
        rounds: the rounds of one worker.
        mean: the mean over all workers of the messages of the previous round; None in the first one.
    """
    try:
        return next(rounds) if mean is None else rounds.send(mean)
    except StopIteration as end:
        return end.value


@dataclass(frozen=True)
class Codec(ABC):
    """A gradient codec: an immutable value whose dataclass fields are its parameters.

    Methods are pure: they take a :class:`~gtrace.types.State` and return bytes, arrays or the next state. Only
    ``encode`` uses randomness, and only through its key. Class attributes describe the method to people.
    """

    name: ClassVar[str] = ""
    #: what it does, in one line
    summary: ClassVar[str] = ""
    #: how a value becomes bytes, as a formula
    formula: ClassVar[str] = ""
    #: the paper that describes it
    paper: ClassVar[str] = ""
    #: corrections to the paper, a line each
    corrections: ClassVar[tuple[str, ...]] = ()
    #: a description, with its use
    about: ClassVar[str] = ""
    #: the body of its payload, in the order of its bytes
    sends: ClassVar[str] = ""
    #: how error and bits behave
    behavior: ClassVar[str] = ""
    #: related codecs and prefixes
    related: ClassVar[tuple[str, ...]] = ()
    #: E decode(encode(v)) = v
    unbiased: ClassVar[bool] = True
    #: the payload depends on the values and the state alone, not on the key; only coins for exact zeros may differ
    deterministic: ClassVar[bool] = False
    #: the state changes from step to step, so steps must be replayed in order
    stateful: ClassVar[bool] = False
    #: workers average their messages before decoding, see :meth:`rounds`
    linear: ClassVar[bool] = False
    #: receivers keep a memory, too, see :meth:`receive`
    both_ends: ClassVar[bool] = False
    #: the method itself reports the payload's length; decoding needs more than these bytes
    declared: ClassVar[bool] = False
    #: the parameter that a word without = sets, e.g. e3m2 in a spec of fp
    word: ClassVar[str] = ""

    def __post_init__(self) -> None:
        for item in parameter_fields(self):
            object.__setattr__(self, item.name, _checked(self.name, item, getattr(self, item.name)))

    def __str__(self) -> str:
        """The canonical spec: the name, ``bits`` if it has any, and parameters that differ from their defaults.

        A codec of ``values`` comes last, because its own parameters follow it.
        """
        order = {"bits": -1, "values": 1}
        shown = [
            f"{item.name}={_written(getattr(self, item.name))}"
            for item in sorted(parameter_fields(self), key=lambda item: order.get(item.name, 0))
            if getattr(self, item.name) != item.default or (item.name == "bits" and item.default is not None)
        ]
        name = type(self).name
        return f"{name}:{','.join(shown)}" if shown else name

    @classmethod
    def words(cls, bits: tuple[int, ...]) -> tuple[str, ...]:
        """The specs that the word ``all`` means at these bits, or at the default if none are given."""
        return ()

    @property
    def parameters(self) -> dict[str, Any]:
        """All parameters with their values."""
        return {item.name: getattr(self, item.name) for item in parameter_fields(self)}

    @property
    def wire_name(self) -> str:
        """The codec's name in envelopes; a wrapper with only a memory uses its inner codec's name."""
        return self.name

    @property
    def needs(self) -> SummarySpec | None:
        """The summary that :meth:`fit` and ``expect`` use; None if they use none."""
        return None

    @property
    def fits(self) -> bool:
        """Whether there is something to :meth:`fit`."""
        return type(self).fit is not Codec.fit

    @property
    def whole_tensor(self) -> bool:
        """Whether an element's code depends on the whole tensor, not only through a norm in ``needs``.

        A scale or a threshold fitted to all elements does so; levels do not, because a part can fit them as well.
        """
        return False

    @property
    def fits_itself(self) -> bool:
        """Whether every tensor is fitted to itself, whatever the schedule: the result travels in each payload."""
        return False

    @property
    def allocates(self) -> bool:
        """Whether tensors share something out among themselves; an engine then calls :meth:`allocate` before fits."""
        return False

    def allocate(self, sketches: Sequence[MomentSketch]) -> Sequence[float]:
        """Each tensor's share, from the sketches of all tensors at the step that they are fitted on.

        Raises:
            UsageError: the codec allocates nothing.
        """
        raise UsageError(f"{self}: treats each tensor separately; it has nothing to allocate")

    def with_target(self, state: State, share: float) -> State:
        """The state with a tensor's share of :meth:`allocate`, as the array ``target``, for later fits."""
        return state.with_arrays(target=np.array(float(share)))

    def init(self, size: int, shape: tuple[int, ...] | None = None) -> State:
        """The state before the first step.

        Args:
            size: elements of the tensor.
            shape: the parameter's true shape; None if it is not known.
        """
        return State(int(size), {}, shape)

    def at_bits(self, bits: int) -> Codec:
        """The same codec with other ``bits``.

        Raises:
            UsageError: it has no ``bits``, or these bits contradict its other parameters.
        """
        if "bits" not in self.parameters:
            raise UsageError(f"codec {self}: has no bits to choose")
        return dataclasses.replace(self, bits=bits)  # type: ignore[call-arg]

    def renewed(self, state: State) -> State:
        """The state for this codec, from one that differed in ``bits``: memory is kept, fitted values are dropped."""
        return self.init(state.size, state.shape)

    def view(self, state: State, values: ArrayLike, start: int = 0) -> ArrayLike:
        """The values that the summary for :meth:`fit` describes: the input, unless a wrapper encodes other values.

        ``start``: number of values of the tensor before these, see :attr:`part_multiple`.
        """
        return values

    def fit(self, state: State, summary: MomentSketch, step: int) -> State:
        """Adapt levels, codes or formats to a summary of :meth:`~gtrace.codecs.Codec.view`, or keep the state."""
        return state

    @abstractmethod
    def encode(self, state: State, values: ArrayLike, key: tuple[int, int]) -> bytes:
        """The payload (envelope and body) of a tensor; the same inputs and key give the same bytes.

        Args:
            state: of this tensor.
            values: ``state.size`` real finite numbers, taken as float32 in C order.
            key: two 64-bit words, see :meth:`gtrace.types.Key.derive`.

        Raises:
            UsageError: wrong size or non-finite values.
        """

    def shared(self, state: State) -> bytes:
        """Bytes that a receiver must hold in order to decode; they are counted when they change."""
        return b""

    @abstractmethod
    def decode(self, shared: bytes, payload: bytes, size: int) -> NDArray[np.float32]:
        """The values of a payload, from bytes alone: float32[size].

        Raises:
            PayloadError: the bytes are not a valid payload of this codec and size.
        """

    def receive(self, held: State, shared: bytes, payload: bytes) -> tuple[NDArray[np.float32], State]:
        """:meth:`decode` for a receiver that keeps something from message to message.

        Args:
            held: what it held before; ``State(size)`` before the first message.
            shared, payload: as for :meth:`decode`.

        Returns:
            the values that it ends with, float32[size], and what it holds from now on.

        Raises:
            PayloadError: as :meth:`decode`; nothing of ``held`` changes.
        """
        return self.decode(shared, payload, held.size), held

    def simulate(self, state: State, values: ArrayLike, key: tuple[int, int]) -> Simulated:
        """The decoded payload of :meth:`encode` and its length, for callers that never send it.

        Values and length are the same, from :meth:`encode_part` of the whole tensor.

        Raises:
            UsageError: wrong size or non-finite values.
        """
        whole = self.encode_part(state, values, key, 0)
        body, coded = self.measured(whole, state.size)
        return Simulated(whole.values, sealed_size(body, state.size), coded)

    def rounds(self, state: State, values: ArrayLike, key: tuple[int, int]) -> Rounds:
        """The messages of a worker with a :attr:`linear` codec, round by round, while all others do the same.

        Each round yields float32 values and receives their mean over all workers; in the end every worker holds the
        same decoded gradient. Such a codec is never fitted. :meth:`encode` sends what a single worker would send; each
        worker has a key of its own.

        Raises:
            UsageError: the codec is not linear; later, as in :meth:`encode`.
        """
        raise UsageError(f"{self}: has no rounds; each worker's payload is decoded separately")

    @property
    def expects(self) -> bool:
        """Whether error and bits have closed forms with these parameters."""
        return type(self).expect is not Codec.expect

    def expect(self, state: State, sketch: MomentSketch) -> Expectation:
        """The average error and bits of one encoding of the sketched tensor.

        Args:
            state: as for ``encode``.
            sketch: the tensor's sketch, built as ``needs`` says.

        Raises:
            UsageError: the sketch was built differently, or there are no closed forms.
        """
        raise UsageError(f"{self}: has no closed forms; encode values instead")

    def weighted_error(self, state: State, sketch: MomentSketch, weighted: MomentSketch) -> float:
        """E sum w (Q(v) - v)^2 of one encoding, with a weight w for each element's squared error.

        ``weighted`` is the same sketch with ``weights``, see :meth:`~gtrace.sketch.MomentSketch.of`.
        """
        return self.expect(state, weighted).squared_error

    @property
    def part_multiple(self) -> int | None:
        """Length of which every part but the last must be a multiple; None: only whole tensors can be encoded."""
        return None

    def prepare(self, state: State, pieces: Pieces, key: tuple[int, int], sums: TensorSums | None = None) -> State:
        """The state with the facts that parts need about the whole tensor; only for :meth:`encode_part`.

        Args:
            state: of the whole tensor; what it remembers of single values is that of the pieces.
            pieces: an iterator over the tensor's pieces, each a multiple of ``part_multiple``, in memory one by one.
            key: as for ``encode``.
            sums: of the values, if they are known already.
        """
        return state

    def encode_part(self, state: State, values: ArrayLike, key: tuple[int, int], start: int) -> EncodedPart:
        """Encode some consecutive values of a tensor, each with the same result as in the whole tensor.

        The values are those that the payload of the whole decodes to, and :meth:`measured` gives the length of that
        payload. Many codecs compute both without building it.

        Args:
            state: from :meth:`prepare`, with the part's size and what is remembered of its values; or, for a part that
                is the whole tensor, as for ``encode``.
            values: the part, in the form that ``encode`` takes.
            key: the key of the whole tensor.
            start: number of values of the tensor before the part, a multiple of ``part_multiple``.

        Raises:
            UsageError: wrong size or non-finite values.
        """
        payload = self.encode(state, values, key)
        decoded = self.decode(self.shared(state), payload, state.size)
        return EncodedPart(decoded, coded=8 * (len(payload) - ENVELOPE_BYTES))

    def measured(self, whole: EncodedPart, size: int) -> tuple[int, CodedBits]:
        """Bytes of the whole payload's body, and its bits per value under each coder, from the sum of all parts."""
        # A payload without symbols has the same length with every coder.
        body = whole.head // 8 + -(-whole.coded // 8)
        bits = 8.0 * body / max(1, size)
        return body, CodedBits(bits, bits, bits)

    def clipping(self, state: State, values: ArrayLike, decoded: NDArray[np.float32]) -> tuple[float, float] | None:
        """Shares of the non-zero values that were cut to the largest number, and that became zero.

        None for a codec without a limited range.
        """
        return None

    def update(self, state: State, values: ArrayLike, decoded: NDArray[np.float32]) -> State:
        """The state of the next step, after ``values`` were sent and arrived as ``decoded``; also of a part."""
        return state

    def settled(self, state: State, prepared: State) -> State:
        """The state of the next step without what :meth:`prepare` found for this one, after all parts were sent."""
        return state

    def aggregate(self, decoded: Sequence[NDArray[np.float32]]) -> NDArray[np.float32]:
        """Combine decoded gradients as a server or the ranks do: their mean, summed in float64 in order.

        Raises:
            UsageError: the sequence is empty.
        """
        if not decoded:
            raise UsageError("aggregate: there are no gradients to aggregate")
        total = np.zeros(decoded[0].shape, np.float64)
        for values in decoded:
            total += values
        total /= len(decoded)
        return total.astype(np.float32)


def expecting(item: Codec) -> bool:
    """Whether a codec's ``expect`` can be called."""
    return item.expects


def check_summary(item: Codec, sketch: MomentSketch | SketchSet) -> None:
    """Raise :class:`~gtrace.errors.UsageError` if it is not the sketch that the codec needs, or a set of such."""
    if item.needs is None or sketch.spec[:4] != item.needs[:4]:
        raise UsageError(f"{item}: needs a sketch of {item.needs}, not of {sketch.spec}")


def sized_values(state: State, values: ArrayLike) -> NDArray[np.float32]:
    """The input of ``encode`` as contiguous float32[n], finite or not.

    Raises:
        UsageError: not ``state.size`` elements.
    """
    x = as_values(values)
    if x.size != state.size:
        raise UsageError(f"encode: {x.size} values for a state of {state.size}")
    return x


def checked_values(state: State, values: ArrayLike) -> NDArray[np.float32]:
    """The input of ``encode`` as contiguous float32[n].

    Raises:
        UsageError: not ``state.size`` elements, or non-finite ones among them.
    """
    x = sized_values(state, values)
    check_finite(x)
    return x


def check_finite(x: NDArray[np.float32], first: int = 0) -> None:
    """Raise :class:`UsageError` if one of the values is not finite; ``first`` is the number of the first value."""
    if count_nonfinite(x):
        at = int(np.flatnonzero(~np.isfinite(x))[0])
        raise UsageError(f"encode: value {first + at} is {x[at]}; a codec takes finite numbers only")


def _written(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:g}" if float(f"{value:g}") == value else repr(value)
    return str(value)


_BOOLEANS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


def _number(kind: str, value: Any) -> Any:
    """A value of a parameter of the type ``kind``, perhaps from text."""
    if kind.startswith("bool"):
        return _BOOLEANS[value.lower()] if isinstance(value, str) else bool(value)
    if kind.startswith("int"):
        return int(str(value).removesuffix(".0")) if isinstance(value, float) else int(value)
    return float(value)


def _checked(name: str, item: dataclasses.Field[Any], value: Any) -> Any:
    """One parameter, converted from text if needed and checked against its field."""
    meta, kind = item.metadata, kind_of(item)
    where = f"codec {name}: {item.name}"
    word = isinstance(value, str) and value.lower() == "none" and (meta["optional"] or "none" not in meta["choices"])
    if value is None or word:
        if not meta["optional"]:
            raise UsageError(f"{where}=none is not allowed")
        return None
    if meta["choices"] and value not in meta["choices"]:
        raise UsageError(f"{where}={value} is unknown; {suggest(str(value), meta['choices'])}")
    if not kind.startswith(("bool", "int", "float")):
        return str(value)
    try:
        number = _number(kind, value)
    except (KeyError, ValueError, TypeError):
        wanted = {"b": "true or false", "i": "an integer", "f": "a number"}[kind[0]]
        raise UsageError(f"{where}={value} is not {wanted}") from None
    low, high = meta["minimum"], meta["maximum"]
    if not math.isfinite(number):
        raise UsageError(f"{where}={value} is not a finite number")
    if (low is not None and number < low) or (high is not None and number > high):
        least, most = _written(low), _written(high)
        allowed = f"at least {least}" if high is None else f"at most {most}" if low is None else f"{least} to {most}"
        raise UsageError(f"{where}={value} is out of range; it must be {allowed}")
    if meta["doubling"] and number & (number - 1):
        raise UsageError(f"{where}={number} is not a power of two; try {1 << number.bit_length()}")
    return number
