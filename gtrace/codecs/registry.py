"""Names of codecs, and specs such as ``qsgd:bits=3,bucket_size=512`` turned into codecs and back."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, TypeVar

from gtrace.coding.envelope import codec_number
from gtrace.errors import UsageError, suggest

if TYPE_CHECKING:
    from gtrace.codecs.base import Codec

_REGISTRY: dict[str, type[Codec]] = {}
C = TypeVar("C", bound="type[Codec]")


def register(cls: C) -> C:
    """Class decorator: make a codec known by its ``name``.

    Raises:
        ValueError: the name, or its number in payloads, is taken.
    """
    numbers = {codec_number(name): name for name in _REGISTRY}
    if not cls.name or cls.name in _REGISTRY or codec_number(cls.name) in numbers:
        raise ValueError(f"codec name {cls.name!r} is empty or taken")
    _REGISTRY[cls.name] = cls
    return cls


def codec_names() -> tuple[str, ...]:
    """All registered codecs, in the order of registration."""
    return tuple(_REGISTRY)


def codec_class(name: str) -> type[Codec]:
    """The class behind a name.

    Raises:
        UsageError: unknown; the nearest names are suggested.
    """
    if name not in _REGISTRY:
        raise UsageError(f"no codec '{name}'; {suggest(name, _REGISTRY)}")
    return _REGISTRY[name]


def codec(spec: str, **overrides: Any) -> Codec:
    """Build a codec from its spec string, from keyword parameters, or from both (keywords win).

    Raises:
        UsageError: unknown codec or parameter, or a value that is not allowed.

    >>> str(codec("qsgdinf", bits=3, bucket_size=512))
    'qsgdinf:bits=3,bucket_size=512'
    >>> codec("qsgdinf:bits=3,bucket_size=512") == codec("qsgdinf", bits=3, bucket_size=512)
    True
    """
    name, _, rest = spec.strip().partition(":")
    cls = codec_class(name.strip())
    known = [item.name for item in dataclasses.fields(cls)]
    given: dict[str, Any] = {}
    for part in filter(None, (piece.strip() for piece in rest.split(","))):
        key, equals, value = part.partition("=")
        key = key.strip()
        if not equals or not value:
            raise UsageError(f"codec '{spec}': '{part}' is no key=value; write {name}:key=value,key=value")
        if key in given:
            raise UsageError(f"codec '{spec}': {key} is given twice")
        given[key] = value.strip()
    given |= overrides
    for key in given:
        if key not in known:
            hint = suggest(key, known) if known else f"{name} has no parameters"
            raise UsageError(f"codec {name}: no parameter '{key}'; {hint}")
    return cls(**given)


def split_specs(text: str) -> list[str]:
    """Split a comma-separated list of specs; an item with ``=`` and no ``:`` continues the spec before it.

    Raises:
        UsageError: the list begins with such an item, or is empty.

    >>> split_specs("alq:bits=3,bucket_size=64,qsgd")
    ['alq:bits=3,bucket_size=64', 'qsgd']
    """
    specs: list[str] = []
    for item in filter(None, (piece.strip() for piece in text.split(","))):
        if "=" in item and ":" not in item:
            if not specs:
                raise UsageError(f"methods: '{item}' belongs to no codec; write NAME:key=value")
            specs[-1] += ("," if ":" in specs[-1] else ":") + item
        else:
            specs.append(item)
    if not specs:
        raise UsageError("methods: the list is empty; name codecs such as qsgd,nuqsgd or write all")
    return specs
