"""Which codec each tensor goes through: a table of exact names, then patterns, then a default.

What one writes by hand as ``--rule`` and what a plan says is the same table: training, communication hooks and sweeps
take it in the place of a codec.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

from gtrace.codecs.base import Codec, ExpectingCodec, Simulated, expecting
from gtrace.codecs.identity import Identity
from gtrace.codecs.registry import codec as build_codec
from gtrace.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numpy.typing import ArrayLike, NDArray

    from gtrace.sketch import MomentSketch
    from gtrace.types import Expectation, State, SummarySpec


@runtime_checkable
class HasTable(Protocol):
    """What carries a table with it, such as a plan."""

    @property
    def table(self) -> CodecTable:
        """The table."""


#: one codec for all tensors, or a table of them
Coding: TypeAlias = "Codec | CodecTable"
#: what :meth:`CodecTable.of` takes
TableLike: TypeAlias = "str | Codec | CodecTable | HasTable"


@dataclass(frozen=True, slots=True)
class CodecTable:
    """Which codec each tensor goes through.

    Attributes:
        codec: for all tensors that nothing else is about.
        rules: (pattern, codec), the first that fits counts. A shell pattern of the whole name or of its last part, so
            that ``bias`` means every bias.
        min_size: tensors with fewer elements go uncompressed, unless a name or a rule is about them.
        tensors: codecs of single tensors, by their whole names; they come before the rules.
        name: of the table, for run logs and rows of a sweep; empty for one that is written by hand.
        source: the file that it was read from.
    """

    codec: Codec
    rules: tuple[tuple[str, Codec], ...] = ()
    min_size: int = 0
    tensors: Mapping[str, Codec] = field(default_factory=dict, hash=False)
    name: str = ""
    source: str = field(default="", compare=False)

    @classmethod
    def of(
        cls,
        codec: TableLike,
        rules: Mapping[str, str | Codec] | Iterable[tuple[str, str | Codec]] = (),
        min_size: int = 0,
    ) -> CodecTable:
        """Build from specs; a table that is built already, and the one of a plan, is taken as it is.

        Raises:
            UsageError: an unknown codec, a negative size, or rules beside a table that has its own.
        """
        if min_size < 0:
            raise UsageError(f"min-size: {min_size} is below 0")
        found = codec.table if isinstance(codec, HasTable) else codec
        pairs = rules.items() if hasattr(rules, "items") else rules
        built = tuple((pattern, _built(item)) for pattern, item in pairs)
        if not isinstance(found, CodecTable):
            return cls(_built(found), built, min_size)
        if built or min_size:
            raise UsageError(f"{found}: a table names the codec of every tensor; rules and min-size are for one codec")
        return found

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> CodecTable:
        """Undo :meth:`describe`.

        Raises:
            UsageError: an unknown codec.
        """
        named = {name: build_codec(spec) for name, spec in plain.get("tensors", {}).items()}
        rules = tuple((pattern, build_codec(spec)) for pattern, spec in plain.get("rules", ()))
        return cls(build_codec(plain["codec"]), rules, int(plain.get("min_size", 0)), named, plain.get("name", ""))

    def __str__(self) -> str:
        """``plan:NAME``, or the codec of the tensors that nothing is said about."""
        return f"plan:{self.name}" if self.name else str(self.codec)

    def choose(self, name: str, size: int) -> Codec:
        """The codec of a tensor with this name and so many elements."""
        found = self.tensors.get(name)
        if found is not None:
            return found
        last = name.rpartition(".")[2]
        for pattern, codec in self.rules:
            if fnmatchcase(name, pattern) or fnmatchcase(last, pattern):
                return codec
        return self.codec if size >= self.min_size else Identity()

    def planned(self, name: str, size: int) -> Planned:
        """The codec of a tensor under the name of this table, as a sweep writes it into its rows."""
        codec = self.choose(name, size)
        kind = Planned if type(codec).view is Codec.view else _PlannedView
        return kind(codec, str(self), self.digest)

    def unmatched(self, names: Iterable[str]) -> list[str]:
        """A warning where tensors of this table are not among the names, and what that means; nothing otherwise."""
        known = set(names)
        missing = [name for name in self.tensors if name not in known]
        if not missing:
            return []
        which = f"{len(missing)} of its {len(self.tensors)} tensors are not in this model, {missing[0]} among them"
        return [f"{self}: {which}; what it does not name goes through {self.codec}"]

    @property
    def codecs(self) -> tuple[Codec, ...]:
        """All that may be chosen."""
        return (self.codec, *(codec for _, codec in self.rules), *self.tensors.values())

    @property
    def declared(self) -> bool:
        """Whether any of them only declares the length of its payloads."""
        return any(item.declared for item in self.codecs)

    @property
    def digest(self) -> str:
        """Tells tables of the same name apart."""
        return hashlib.blake2b(json.dumps(self.describe(), sort_keys=True).encode(), digest_size=8).hexdigest()

    def describe(self) -> dict[str, Any]:
        """Plain values, for logs and checkpoints."""
        return {
            "codec": str(self.codec),
            "rules": [[pattern, str(codec)] for pattern, codec in self.rules],
            "min_size": self.min_size,
            **({"tensors": {name: str(codec) for name, codec in self.tensors.items()}} if self.tensors else {}),
            **({"name": self.name} if self.name else {}),
        }


@dataclass(frozen=True)
class Planned(ExpectingCodec):
    """One tensor's codec under the name of the table that it is from; everything else is that codec's own.

    Attributes:
        inner: the codec.
        label: what rows of a sweep call it.
        digest: of the table, so that rows of another one of the same name are not taken for this one's.
    """

    inner: Codec
    label: str
    digest: str

    def __post_init__(self) -> None:
        super().__post_init__()
        # Facts live on the class for every other codec; a frozen instance shadows them once, here.
        for name in ("unbiased", "stateful", "deterministic", "declared"):
            object.__setattr__(self, name, getattr(self.inner, name))
        object.__setattr__(self, "name", "plan")

    def __str__(self) -> str:
        """The name of the table."""
        return self.label

    @property
    def parameters(self) -> dict[str, Any]:
        """Which table it is; the codec itself differs from tensor to tensor."""
        return {"plan": self.label.partition(":")[2], "digest": self.digest}

    @property
    def wire_name(self) -> str:
        """That of the codec."""
        return self.inner.wire_name

    @property
    def needs(self) -> SummarySpec | None:
        """What the codec needs."""
        return self.inner.needs

    @property
    def whole_tensor(self) -> bool:
        """As the codec."""
        return self.inner.whole_tensor

    @property
    def expects(self) -> bool:
        """Whether the codec has closed forms."""
        return expecting(self.inner)

    def init(self, size: int) -> State:
        """The codec's state."""
        return self.inner.init(size)

    def fit(self, state: State, summary: MomentSketch, step: int) -> State:
        """Fit the codec."""
        return self.inner.fit(state, summary, step)

    def encode(self, state: State, values: ArrayLike, key: tuple[int, int]) -> bytes:
        """The codec's payload."""
        return self.inner.encode(state, values, key)

    def shared(self, state: State) -> bytes:
        """What the codec shares."""
        return self.inner.shared(state)

    def decode(self, shared: bytes, payload: bytes, size: int) -> NDArray[Any]:
        """As the codec decodes."""
        return self.inner.decode(shared, payload, size)

    def simulate(self, state: State, values: ArrayLike, key: tuple[int, int]) -> Simulated:
        """As the codec does it."""
        return self.inner.simulate(state, values, key)

    def clipping(self, state: State, values: ArrayLike, decoded: NDArray[Any]) -> tuple[float, float] | None:
        """As the codec clips."""
        return self.inner.clipping(state, values, decoded)

    def update(self, state: State, values: ArrayLike, decoded: NDArray[Any]) -> State:
        """The codec's next state."""
        return self.inner.update(state, values, decoded)

    def aggregate(self, decoded: Sequence[NDArray[Any]]) -> NDArray[Any]:
        """As the codec aggregates."""
        return self.inner.aggregate(decoded)

    def expect(self, state: State, sketch: MomentSketch) -> Expectation:
        """What the codec expects.

        Raises:
            UsageError: it has no closed forms, or the sketch was built otherwise.
        """
        if not expecting(self.inner):
            raise UsageError(f"{self.inner}: its error has no closed form")
        return self.inner.expect(state, sketch)

    def weighted_error(self, state: State, sketch: MomentSketch, weighted: MomentSketch) -> float:
        """What the codec expects of elements that count unlike.

        Raises:
            UsageError: as of :meth:`expect`.
        """
        if not expecting(self.inner):
            raise UsageError(f"{self.inner}: its error has no closed form")
        return self.inner.weighted_error(state, sketch, weighted)


class _PlannedView(Planned):
    # Apart, because codecs that look at the values themselves can be judged from stored sketches.
    def view(self, state: State, values: ArrayLike) -> ArrayLike:
        return self.inner.view(state, values)


def coding_of(item: TableLike) -> Coding:
    """A codec from its spec, the table of a plan, and codecs and tables as they are.

    Raises:
        UsageError: an unknown codec.
    """
    found = item.table if isinstance(item, HasTable) else item
    return found if isinstance(found, CodecTable) else _built(found)


def _built(item: str | Codec) -> Codec:
    return build_codec(item) if isinstance(item, str) else item
