"""TOML files of plans, weights and format tables: written one value a line, read as untrusted input."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gtrace.errors import TraceError, UsageError, printable

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Mapping

SUFFIXES = (".toml", ".json")
#: a plan of ten thousand tensors has a few megabytes
MAX_BYTES = 8 << 20
_MAX_DEPTH = 16
_BARE = re.compile(r"[A-Za-z0-9_-]+")
# tomllib takes time that grows with the square of the parts of a key, so a few megabytes of a.a.a. would run for hours.
_STRINGS = re.compile(r'"(?:[^"\\\n]|\\[^\n])*+"' + r"|'[^'\n]*+'")
_LONG_KEY = re.compile(r"(?<![\w-])(?:[\w-]++[ \t]*+\.[ \t]*+){32}")


def check_suffix(path: Path) -> None:
    """Refuse a name that says another format."""
    if path.suffix not in SUFFIXES:
        raise UsageError(f"{path}: has no known suffix; choose a name that ends in .toml or .json")


def dump(document: Mapping[str, Any]) -> str:
    """The document as TOML, one value a line; None is left out.

    A mapping of mappings becomes a ``[table]`` with a line for each, and a list of mappings that hold such becomes
    ``[[tables]]``.
    """
    return "\n".join(_lines(document, "")) + "\n"


def _lines(document: Mapping[str, Any], path: str) -> Iterator[str]:
    later: list[str] = []
    for name, value in document.items():
        place = f"{path}{_key(name)}"
        if _is_table(value):
            later += ["", f"[{place}]", *(f"{_key(key)} = {_inline(row)}" for key, row in value.items())]
        elif isinstance(value, (list, tuple)) and any(
            isinstance(v, dict) and any(map(_is_table, v.values())) for v in value
        ):
            for row in value:
                later += ["", f"[[{place}]]", *_lines(row, f"{place}.")]
        elif value is not None:
            yield f"{_key(name)} = {_inline(value)}"
    yield from later


def _is_table(value: Any) -> bool:
    return isinstance(value, dict) and bool(value) and all(isinstance(one, dict) for one in value.values())


def _inline(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, dict):
        inside = ", ".join(f"{_key(name)} = {_inline(one)}" for name, one in value.items() if one is not None)
        return f"{{ {inside} }}" if inside else "{}"
    if isinstance(value, (list, tuple)):
        if value and all(isinstance(one, dict) for one in value):
            return "\n".join(["[", *(f"  {_inline(one)}," for one in value), "]"])
        return f"[{', '.join(map(_inline, value))}]"
    return _quoted(value)


def _key(name: object) -> str:
    text = str(name)
    return text if _BARE.fullmatch(text) else _quoted(text)


def _quoted(text: str) -> str:
    """A basic string; what nobody sees, or what changes the order of what is seen, is written as its number."""
    return "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in json.dumps(text, ensure_ascii=False))


def load(path: str | os.PathLike[str], what: str, remedy: str) -> dict[str, Any]:
    """A TOML file, or a JSON file if the name ends in ``.json``, as plain values.

    Args:
        path: of at most :data:`MAX_BYTES`.
        what: what it should be, for messages.
        remedy: how to get one.

    Returns:
        Text without surrogates, finite or infinite numbers of at most 64 bits, booleans, and lists and mappings of
        these, at most 16 deep.

    Raises:
        TraceError: missing, too large, neither TOML nor JSON, or with other values.
    """
    place = Path(path)
    try:
        if place.is_dir():
            raise TraceError(f"{place}: is a folder, not {what}; {remedy}")
        if not place.is_file():
            raise TraceError(f"{place}: no such file; {remedy}")
        if place.stat().st_size > MAX_BYTES:
            raise TraceError(f"{place}: has more than {MAX_BYTES >> 20} MB, so it is not {what}; {remedy}")
        text = place.read_bytes().decode()
    except OSError as error:
        raise TraceError(f"{place}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise TraceError(f"{place}: not a text file, so not {what}; {remedy}") from None
    kind = "JSON" if place.suffix == ".json" else "TOML"
    try:
        found = json.loads(text) if kind == "JSON" else _toml(text)
        _check(found, 0)
    except (ValueError, RecursionError) as error:
        reason = "nested too deep" if isinstance(error, RecursionError) else " ".join(str(error).split())[:100]
        raise TraceError(f"{place}: not valid {kind} ({printable(reason)}); {remedy}") from None
    if not isinstance(found, dict):
        raise TraceError(f"{place}: not {what}; {remedy}")
    return found


def _toml(text: str) -> Any:
    if '"""' in text or "'''" in text:
        raise ValueError("strings over several lines are not supported")
    if _LONG_KEY.search(_STRINGS.sub("s", text)):
        raise ValueError("a key of more than 32 parts")
    return tomllib.loads(text)


def _check(value: Any, depth: int) -> None:
    """Raise ValueError unless these are the values that :func:`load` promises."""
    if depth > _MAX_DEPTH:
        raise ValueError("nested too deep")
    if isinstance(value, dict):
        for name, one in value.items():
            _check(name, depth)
            _check(one, depth + 1)
    elif isinstance(value, list):
        for one in value:
            _check(one, depth + 1)
    elif isinstance(value, str):
        # Refuses surrogates, which no file of text holds.
        value.encode()
    elif isinstance(value, int):
        if value.bit_length() > 63:
            raise ValueError("a number of more than 64 bits")
    elif value is not None and not isinstance(value, float):
        raise ValueError(f"a {type(value).__name__} is not expected here")
