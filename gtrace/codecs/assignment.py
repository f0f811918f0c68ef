"""The codec of each tensor: a table of exact names, then patterns, then a default.

A table comes from ``--rule`` options or from a plan. Training, communication hooks and sweeps accept it instead of a
codec.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

from gtrace.codecs.casts import Identity
from gtrace.codecs.spec import codec as build_codec
from gtrace.errors import UsageError, suggest
from gtrace.types import WHOLE_MODEL

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from gtrace.codecs.base import Codec


@runtime_checkable
class HasTable(Protocol):
    """Anything with a table, such as a plan."""

    @property
    def table(self) -> CodecTable:
        """The table."""


#: one codec for all tensors, or a table of codecs
Coding: TypeAlias = "Codec | CodecTable"
#: the types that :meth:`CodecTable.of` accepts
TableLike: TypeAlias = "str | Codec | CodecTable | HasTable"


@dataclass(frozen=True, slots=True)
class CodecTable:
    """The codec of each tensor.

    Attributes:
        codec: the default, for tensors without a name or a rule below.
        rules: (pattern, codec), the first match counts. A shell pattern of the whole name or of its last part, so
            ``bias`` means every bias.
        min_size: tensors with fewer elements go uncompressed, unless a name or a rule matches them.
        tensors: codecs of single tensors, by their whole names; they come before the rules.
        name: the table's name, for run logs and rows of a sweep; empty for a table written by hand.
        source: the file that the table was read from.
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
        """Build from specs; an existing table, or a plan's, is returned as it is.

        Raises:
            UsageError: an unknown codec, a negative size, or rules for a table that has its own.
        """
        if min_size < 0:
            raise UsageError(f"min-size: {min_size} is below 0")
        found = coding_of(codec)
        pairs = rules.items() if hasattr(rules, "items") else rules
        built = tuple((pattern, _built(item)) for pattern, item in pairs)
        if not isinstance(found, CodecTable):
            return cls(found, built, min_size)
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
        """``plan:NAME``, or the default codec."""
        return f"plan:{self.name}" if self.name else str(self.codec)

    def choose(self, name: str, size: int) -> Codec:
        """The codec of a tensor with this name and ``size`` elements."""
        found = self.tensors.get(name)
        if found is not None:
            return found
        last = name.rpartition(".")[2]
        for pattern, codec in self.rules:
            if fnmatchcase(name, pattern) or fnmatchcase(last, pattern):
                return codec
        return self.codec if size >= self.min_size else Identity()

    def assign(self, sizes: Mapping[str, int]) -> dict[str, Codec]:
        """The codec of each tensor; under ``*`` the codec of the whole model, if there is one.

        Args:
            sizes: name -> elements.

        Raises:
            UsageError: as in ``over_model``.
        """
        if self.over_model:
            return {WHOLE_MODEL: self.codec}
        return {name: self.choose(name, size) for name, size in sizes.items()}

    @property
    def over_model(self) -> bool:
        """Whether the table is one codec over the whole model's gradient.

        Raises:
            UsageError: such a codec together with others, or with a least size.
        """
        if not any(item.needs is not None and item.needs.scope == "model" for item in self.codecs):
            return False
        if len(self.codecs) > 1 or self.min_size:
            raise UsageError(f"{self}: a codec over the whole model leaves no tensor to another codec")
        return True

    @property
    def identity(self) -> dict[str, Any]:
        """The columns of a sweep's rows that name the codec, for rows of this table."""
        params = {"plan": self.name, "digest": self.digest}
        return {"codec": str(self), "method": "plan", "bits": None, "params": json.dumps(params, sort_keys=True)}

    def unmatched(self, names: Iterable[str]) -> list[str]:
        """Warnings about rules that fit no tensor of a model, and tensors that it lacks, with the consequence."""
        known = dict.fromkeys(names)
        parts = {part for name in known for part in (name, name.rpartition(".")[2])}
        said = [
            f"rule {pattern}={codec}: fits no tensor; {suggest(pattern, known)}"
            for pattern, codec in self.rules
            if not any(fnmatchcase(part, pattern) for part in parts)
        ]
        missing = [name for name in self.tensors if name not in known]
        if missing:
            which = f"{len(missing)} of its {len(self.tensors)} tensors are not in this model, {missing[0]} among them"
            said.append(f"{self}: {which}; tensors without an entry use {self.codec}")
        return said

    @property
    def codecs(self) -> tuple[Codec, ...]:
        """All codecs of the table."""
        return (self.codec, *(codec for _, codec in self.rules), *self.tensors.values())

    @property
    def declared(self) -> bool:
        """Whether any of them only declares the length of its payloads."""
        return any(item.declared for item in self.codecs)

    @property
    def digest(self) -> str:
        """A digest that distinguishes tables of the same name."""
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


def coding_of(item: TableLike) -> Coding:
    """A codec from its spec, or the table of a plan; codecs and tables are returned as they are.

    Raises:
        UsageError: an unknown codec.
    """
    found = item.table if isinstance(item, HasTable) else item
    return found if isinstance(found, CodecTable) else _built(found)


def _built(item: str | Codec) -> Codec:
    return build_codec(item) if isinstance(item, str) else item
