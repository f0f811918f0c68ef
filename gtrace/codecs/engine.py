"""The engine: one encode, decode, simulate, fit and expect over scale x grid x rounding x memory x coder.

A method is a class of one screen: its name, its description, and its parts. :func:`method` turns the parameters of the
parts into parameters of the codec; everything else is here.
"""

from __future__ import annotations

import dataclasses
import inspect
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar, TypeVar, cast

import numpy as np

from gtrace.buckets import TensorSums
from gtrace.codecs.base import Codec, CodedBits, check_summary, checked_values, kind_of, parameter_fields, sized_values
from gtrace.codecs.grids import LevelGrid
from gtrace.codecs.parts import Parts, Rounding, common_multiple
from gtrace.codecs.spec import register
from gtrace.coding.envelope import open_envelope, seal
from gtrace.errors import PayloadError
from gtrace.types import Expectation, State, SummarySpec

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import ArrayLike

    from gtrace.codecs.base import EncodedPart, Pieces
    from gtrace.codecs.parts import Opened, Values
    from gtrace.sketch import MomentSketch

C = TypeVar("C", bound=type[Codec])
#: the facts about a row that follow from its parts, unless the row sets them
_FACTS = ("unbiased", "deterministic")


def assembled(cls: C) -> C:
    """Class decorator: a frozen dataclass with the parameters of its parts before its own, and the facts of its parts.

    A row that annotates a parameter of a part lists it with its own.
    """
    own = inspect.get_annotations(cls)
    found: dict[str, str] = {}
    parts: Parts = cls.parts  # type: ignore[attr-defined]
    for part in parts.each.values():
        for item in parameter_fields(part):
            found[item.name] = kind_of(item)
            default = getattr(part, item.name)
            setattr(cls, item.name, dataclasses.field(default=default, metadata=item.metadata))
    cls.__annotations__ = {**{name: kind for name, kind in found.items() if name not in own}, **own}
    for fact in _FACTS:
        if fact not in vars(cls):
            setattr(cls, fact, parts.all(fact))
    cls.stateful = parts.memory.keeps
    return cast("C", dataclass(frozen=True)(cls))


def method(cls: C) -> C:
    """Class decorator of a row: :func:`assembled` and registered."""
    return register(assembled(cls))


class Composed(Codec):
    """A codec made of parts. A codec with only an envelope and perhaps a memory writes its own body.

    ``parts`` of the class describe the row; ``parts`` of a codec have the codec's own parameters.
    """

    parts: ClassVar[Parts] = Parts()
    #: whether workers' signs are voted on; otherwise decoded gradients are averaged
    votes: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        kind = type(self)
        parts = kind.parts.of(self)
        parts.grid.check(self.name)
        # Facts of the class; a frozen codec overrides them once, here.
        object.__setattr__(self, "parts", parts)
        for fact in _FACTS:
            holds = parts.all(fact)
            if holds != kind.parts.all(fact):
                object.__setattr__(self, fact, holds)

    @property
    def whole_tensor(self) -> bool:
        return self.parts.scale.whole_tensor

    @cached_property
    def needs(self) -> SummarySpec | None:
        return self.parts.grid.needs(self.parts)

    @property
    def fits(self) -> bool:
        return self.parts.grid.fits or type(self).fit is not Composed.fit

    def init(self, size: int, shape: tuple[int, ...] | None = None) -> State:
        return State(int(size), self.parts.memory.start(size), shape)

    def turned(self, x: Values, number: int, *, back: bool = False) -> Values:
        """float32[n] in the coordinates in which it is rounded, those of a 32-bit number, or back from there."""
        return x

    def fit(self, state: State, summary: MomentSketch, step: int) -> State:
        return self.parts.coder.fit(self.parts.grid.fit(state, summary), self.parts.grid, summary)

    def shared(self, state: State) -> bytes:
        return self.parts.coder.shared(state, self.parts.grid)

    def encode(self, state: State, values: ArrayLike, key: tuple[int, int]) -> bytes:
        """The body from :meth:`write` in an envelope."""
        body, flags = self.write(state, self._values(state, values), key)
        return seal(body, codec=self.name, size=state.size, shared=self.shared(state), flags=flags)

    def decode(self, shared: bytes, payload: bytes, size: int) -> Values:
        body, flags = open_envelope(payload, codec=self.name, size=size, shared=shared)
        return self.read(shared, body, flags, size)

    def _values(self, state: State, values: ArrayLike) -> Values:
        """The input of ``encode``, checked; without a look at the values if the rounding checks them."""
        late = self.parts.scale.checks and not self.parts.memory.keeps and "scale" not in state.arrays
        return sized_values(state, values) if late else checked_values(state, values)

    def write(self, state: State, x: Values, key: tuple[int, int]) -> tuple[bytes | memoryview, int]:
        """Body and flags of the payload of float32[n]: scales, an exact tail, coded symbols."""
        parts = self.parts
        v = parts.scale.cut(parts.memory.given(state.arrays, x), state, late=True)
        coded, flags = parts.rounding.write(parts, state, v, key)
        return parts.scale.pack(v.scales) + v.tail.astype("<f4").tobytes() + coded, flags | parts.grid.mark

    def read(self, shared: bytes, body: memoryview, flags: int, size: int) -> Values:
        """Undo :meth:`write`: float32[size].

        Raises:
            PayloadError: body or flags do not fit this codec and size.
        """
        found = self._open(shared, body, flags, size)
        return self.parts.rounding.read(self.parts, found, flags & ~self.parts.grid.mark)

    def _open(self, shared: bytes, body: memoryview, flags: int, size: int) -> Opened:
        parts = self.parts
        if flags & parts.grid.mark != parts.grid.mark:
            raise PayloadError(f"payload has the flags {flags:#x}, which {self} does not write")
        return parts.scale.open(parts.coder.heard(State(size), parts.grid, shared), body, size)

    def seal(self, state: State, scales: Values, tail: Values, coded: bytes, flags: int) -> bytes:
        """The payload of values that were already rounded, e.g. on a device.

        Args:
            state: the tensor's state.
            scales: float32, one per bucket.
            tail: float32, the exact values at the end.
            coded, flags: the symbols before the tail as the coder writes them.
        """
        body = self.parts.scale.pack(scales) + tail.astype("<f4").tobytes() + coded
        return seal(
            body, codec=self.name, size=state.size, shared=self.shared(state), flags=flags | self.parts.grid.mark
        )

    def unseal(self, shared: bytes, payload: bytes, size: int) -> tuple[Opened, int]:
        """Undo :meth:`seal`: the parts of a payload, and the flags of its symbols.

        Raises:
            PayloadError: the bytes are not a valid payload of this codec and size.
        """
        body, flags = open_envelope(payload, codec=self.name, size=size, shared=shared)
        return self._open(shared, body, flags, size), flags & ~self.parts.grid.mark

    @property
    def part_multiple(self) -> int | None:
        """A multiple of scale's, grid's and memory's, if the coder codes a part like the whole."""
        parts = self.parts
        return common_multiple(parts.scale, parts.grid, parts.memory) if parts.coder.splits else None

    def prepare(self, state: State, pieces: Pieces, key: tuple[int, int], sums: TensorSums | None = None) -> State:
        """Store what parts need of the whole tensor: of its memory, its scale (``scale``) and a choice of values."""
        memory = self.parts.memory
        known = memory.whole(lambda: sums or TensorSums.of(x for _, x in pieces()))

        def given() -> Iterator[tuple[State, Values]]:
            return ((kept, memory.given({**kept.arrays, **known}, x)) for kept, x in pieces())

        def summed() -> TensorSums:
            return TensorSums.of(x for _, x in given()) if sums is None or memory.keeps else sums

        whole = self.parts.scale.whole(state.size, lambda: (x for _, x in given()), summed)
        state = state.with_arrays(**known, **whole)
        return self.parts.rounding.prepare(self.parts, state, given, key)

    def encode_part(self, state: State, values: ArrayLike, key: tuple[int, int], start: int) -> EncodedPart:
        """Round the part as ``encode`` does; a scale of the whole tensor counts with the first part."""
        parts = self.parts
        if type(parts.rounding) is Rounding:
            # The codec writes a body of its own.
            return super().encode_part(state, values, key, start)
        found = parts.rounding.part(state, start)
        if found is not None:
            return found
        v = parts.scale.cut(parts.memory.given(state.arrays, self._values(state, values)), state, late=True)
        part = parts.rounding.simulate(parts, state, v, key, start)
        known = start and "scale" in state.arrays
        head = 0 if known else 8 * (len(parts.scale.pack(v.scales)) + 4 * v.tail.size)
        return dataclasses.replace(part, head=head)

    def measured(self, whole: EncodedPart, size: int) -> tuple[int, CodedBits]:
        found = whole.lengths or self.parts.coder.lengths(whole)
        return whole.head // 8 + -(-int(found.sent) // 8), CodedBits.of(found, whole.head, size)

    @property
    def expects(self) -> bool:
        return type(self).expect is not Composed.expect or self.parts.grid.expects(self.parts)

    def expect(self, state: State, sketch: MomentSketch) -> Expectation:
        check_summary(self, sketch)
        return self.parts.grid.expect(self.parts, state, sketch)

    def expected_on_normal(self, size: int) -> Expectation | None:
        """What it does to ``size`` values of energy 1, if that hardly depends on them; None if it does."""
        return None

    def weighted_error(self, state: State, sketch: MomentSketch, weighted: MomentSketch) -> float:
        return self.parts.grid.weighted_error(self.parts, state, sketch, weighted)

    def update(self, state: State, values: ArrayLike, decoded: Values) -> State:
        memory = self.parts.memory
        if not memory.keeps:
            return state
        x = checked_values(state, values)
        return state.with_arrays(**memory.after(state.arrays, x, memory.given(state.arrays, x), decoded))

    def aggregate(self, decoded: Sequence[Values]) -> Values:
        """The mean; with ``votes`` the sign that most workers sent, times their mean magnitude, 0 on a tie."""
        mean = super().aggregate(decoded)
        if not self.votes:
            return mean
        votes, total = np.zeros((2, *mean.shape))
        for values in decoded:
            votes += np.sign(values)
            total += np.abs(values)
        return (np.sign(votes) * (total / len(decoded))).astype(np.float32)


def level_grid(item: Codec) -> LevelGrid | None:
    """The grid of magnitudes that a codec rounds to; None for a codec without one, and for a prefix."""
    grid = item.parts.grid if isinstance(item, Composed) else None
    return grid if isinstance(grid, LevelGrid) else None
