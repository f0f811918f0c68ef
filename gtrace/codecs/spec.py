"""Names of codecs, and specs such as ``qsgd:bits=3,bucket_size=512`` turned into codecs and back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from gtrace.codecs.base import Codec, parameter_fields
from gtrace.coding.envelope import codec_number
from gtrace.errors import UsageError, suggest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


_REGISTRY: dict[str, type[Codec]] = {}
_WRAPPERS: dict[str, type[Codec]] = {}
C = TypeVar("C", bound="type[Codec]")
_TEXTS = {"summary", "formula", "paper", "about", "sends", "behavior"}
#: characters of a spec; a thousand prefixes would nest deeper than Python calls
MAX_SPEC = 500


#: where to look for names that are not gtrace's own, known before they are loaded: what gives all of them, and what
#: loads the class of a name, None for an unknown one
ELSEWHERE: list[tuple[Callable[[], tuple[str, ...]], Callable[[str], type[Codec] | None]]] = []


def register(cls: C) -> C:
    """Class decorator: make a codec known by its ``name``.

    Raises:
        ValueError: the name, or its number in payloads, is taken.
    """
    return _entered(_REGISTRY, cls, free=codec_number(cls.name) not in map(codec_number, _REGISTRY))


def register_wrapper(cls: C) -> C:
    """Class decorator: make a wrapper known by its ``name``, which then prefixes any spec: ``ef:qsgd:bits=3``.

    Raises:
        ValueError: the name is taken.
    """
    return _entered(_WRAPPERS, cls)


def _entered(registry: dict[str, type[Codec]], cls: C, *, free: bool = True) -> C:
    if not (cls.name and free) or cls.name in _REGISTRY or cls.name in _WRAPPERS:
        raise ValueError(f"codec name {cls.name!r} is empty or taken")
    for word in _TEXTS & vars(cls).keys():
        # A text may go over several lines of the class.
        setattr(cls, word, " ".join(getattr(cls, word).split()))
    registry[cls.name] = cls
    return cls


def unregister(name: str) -> None:
    """Forget a codec, so that an edited plugin can be loaded again."""
    _REGISTRY.pop(name, None)


def codec_names() -> tuple[str, ...]:
    """All registered codecs, in the order of registration; wrappers are in :func:`wrapper_names`.

    Codecs of other packages are known by name but not included, so that ``all`` means the same everywhere.
    """
    return tuple(_REGISTRY)


def wrapper_names() -> tuple[str, ...]:
    """All prefixes, in the order of registration."""
    return tuple(_WRAPPERS)


def codec_class(name: str) -> type[Codec]:
    """The class of a codec or wrapper by its name; loads one that an installed package brings.

    Raises:
        UsageError: unknown; the nearest names are suggested.
        ScriptError: the package that brings it cannot be loaded.
    """
    known = _REGISTRY.get(name) or _WRAPPERS.get(name)
    for _, load in ELSEWHERE:
        known = known or load(name)
    if known is None:
        raise UsageError(f"no codec '{name}'; {suggest(name, _names())}")
    return known


def _names() -> set[str]:
    """All names of codecs and prefixes; no package is loaded for that."""
    return {*_REGISTRY, *_WRAPPERS, *(name for names, _ in ELSEWHERE for name in names())}


class Spec(NamedTuple):
    """A spec taken apart, before anything is built.

    Attributes:
        wrappers: (name, its own parameters as text), outermost first.
        name: of the innermost codec.
        given: its parameters as text.
    """

    wrappers: tuple[tuple[str, dict[str, str]], ...]
    name: str
    given: dict[str, str]


def parse_spec(text: str) -> Spec:
    """Take a spec apart: prefixes, the codec's name, its parameters.

    Raises:
        UsageError: an unknown name, text that is not ``key=value``, a key given twice, a prefix without a codec, or
            more than :data:`MAX_SPEC` characters.

    >>> parse_spec("ef:rotate:block=256:qsgdinf:bits=3")
    Spec(wrappers=(('ef', {}), ('rotate', {'block': '256'})), name='qsgdinf', given={'bits': '3'})
    """
    wrappers: list[tuple[str, dict[str, str]]] = []
    rest = text.strip()
    if len(rest) > MAX_SPEC:
        raise UsageError(f"codec '{rest[:40]}...': has {len(rest)} characters; a spec has at most {MAX_SPEC}")
    while True:
        name, _, rest = rest.partition(":")
        name = name.strip()
        codec_class(name)
        if name not in _WRAPPERS:
            return Spec(tuple(wrappers), name, _given(text, name, rest))
        own, colon, after = rest.partition(":")
        if "=" not in own:
            own, colon, after = "", ":", rest
        if not colon or not after.strip():
            raise UsageError(f"codec '{text}': {name} goes before a codec; write {name}:NAME:key=value")
        wrappers.append((name, _given(text, name, own)))
        rest = after


def codec(spec: str, **overrides: Any) -> Codec:
    """Build a codec from its spec string, from keyword parameters, or from both (keywords win).

    Prefixes wrap it; keywords are parameters of the codec inside.

    Raises:
        UsageError: unknown codec or parameter, or a value that is not allowed.

    >>> str(codec("qsgdinf", bits=3, bucket_size=512))
    'qsgdinf:bits=3,bucket_size=512'
    >>> codec("qsgdinf:bits=3,bucket_size=512") == codec("qsgdinf", bits=3, bucket_size=512)
    True
    """
    parsed = parse_spec(spec)
    given: dict[str, Any] = {**parsed.given, **overrides}
    _check_known(parsed.name, given)
    made = codec_class(parsed.name)(**given)
    for name, own in reversed(parsed.wrappers):
        _check_known(name, own)
        made = _WRAPPERS[name](**{"inner": made, **own})
    return made


def split_specs(text: str) -> list[str]:
    """Split a comma-separated list of specs; an item that begins ``key=value`` continues the spec before it.

    Raises:
        UsageError: the list begins with such an item, or is empty.

    >>> split_specs("alq:bits=3,bucket_size=64,ef:topk,ratio=0.1,qsgd")
    ['alq:bits=3,bucket_size=64', 'ef:topk:ratio=0.1', 'qsgd']
    >>> split_specs("fp:e3m2,scale=mean,fp:bits=8")
    ['fp:e3m2,scale=mean', 'fp:bits=8']
    """
    specs: list[str] = []
    for item in filter(None, (piece.strip() for piece in text.split(","))):
        if "=" in item.partition(":")[0]:
            if not specs:
                raise UsageError(f"methods: '{item}' belongs to no codec; write NAME:key=value")
            last = specs[-1].rpartition(":")[2]
            specs[-1] += (":" if ":" not in specs[-1] or last in _names() else ",") + item
        else:
            specs.append(item.removesuffix(":"))
    if not specs:
        raise UsageError("methods: the list is empty; name codecs such as qsgd,nuqsgd or write all")
    return specs


def _given(spec: str, name: str, text: str) -> dict[str, str]:
    # A codec inside a codec goes last, and what follows it belongs to it.
    text, inner, own = text.partition("values=")
    given: dict[str, str] = {"values": own.strip()} if inner and own else {}
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        key, equals, value = part.partition("=")
        word = codec_class(name).word
        if not equals and word:
            key, equals, value = word, "=", part
        key = key.strip()
        if not equals or not value:
            raise UsageError(f"codec '{spec}': '{part}' is not key=value; write {name}:key=value,key=value")
        if key in given:
            raise UsageError(f"codec '{spec}': {key} is given twice")
        given[key] = value.strip()
    return given


def _check_known(name: str, given: Iterable[str]) -> None:
    known = [item.name for item in parameter_fields(codec_class(name))]
    for key in given:
        if key not in known:
            hint = suggest(key, known) if known else f"{name} has no parameters"
            raise UsageError(f"codec {name}: no parameter '{key}'; {hint}")
