"""Codecs that other packages bring, by entry points of the group ``gtrace.codecs``.

A package names a class that extends :class:`gtrace.codecs.Codec` in its ``pyproject.toml``::

    [project.entry-points."gtrace.codecs"]
    my-codec = "my_codec:MyCodec"

From then on ``my-codec`` is a spec like any other, in every process that sees the package. Nothing is imported before
somebody uses the name. gtrace's own names come first, and a package that cannot be loaded costs nobody else anything.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import traceback
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from gtrace.codecs import registry
from gtrace.codecs.base import Codec
from gtrace.codecs.plugin import guarded, in_words, names_a_codec
from gtrace.codecs.wrappers import Wrapper
from gtrace.coding.envelope import codec_number
from gtrace.errors import ScriptError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable

GROUP = "gtrace.codecs"


class Origin(NamedTuple):
    """Where an installed codec comes from.

    Attributes:
        name: of the codec.
        package: name and version of the distribution.
        target: ``module:Class``.
    """

    name: str
    package: str
    target: str


_LOADED: dict[str, tuple[Origin, type[Codec]]] = {}


def origins() -> tuple[Origin, ...]:
    """Every codec that an installed package names, by name; those that gtrace's own names hide are among them."""
    found = set()
    for entry in metadata.entry_points(group=GROUP):
        package = "a package" if entry.dist is None else f"{entry.dist.name} {entry.dist.version}"
        found.add(Origin(entry.name, package, entry.value))
    return tuple(sorted(found))


def installed_names() -> tuple[str, ...]:
    """The names that installed packages add to gtrace's own, loaded or not."""
    own = {*registry.codec_names(), *registry.wrapper_names()}
    return tuple(dict.fromkeys(origin.name for origin in origins() if origin.name not in own))


def hidden(origin: Origin) -> str:
    """Why a name that a package brings means something else, in a line; empty where it does not."""
    if origin.name in (*registry.codec_names(), *registry.wrapper_names()):
        return f"codec '{origin.name}' of the package {origin.package} is left out: gtrace has one of this name"
    return ""


def load_installed(name: str) -> type[Codec] | None:
    """The codec that a package brings under a name; None where none does.

    Raises:
        UsageError: two packages bring it, it is no codec, or its name cannot be had.
        ScriptError: the package cannot be imported; the message names the line.
    """
    if name in _LOADED:
        return _LOADED[name][1]
    named = [origin for origin in origins() if origin.name == name]
    if not named:
        return None
    if len(named) > 1:
        packages = " and ".join(origin.package for origin in named)
        raise UsageError(f"codec {name}: {packages} bring it; uninstall one of them")
    cls = _load(named[0])
    _LOADED[name] = named[0], cls
    return cls


def origin_of(cls: type[Codec]) -> Origin | None:
    """Where a codec's class comes from; None for one that no package brought."""
    return next((origin for origin, loaded in _LOADED.values() if loaded is cls), None)


def source_digest(cls: type[Codec]) -> str:
    """The file of a codec's class in 16 hexadecimal digits, so that two processes can compare theirs."""
    return hashlib.blake2b(Path(inspect.getfile(cls)).read_bytes(), digest_size=8).hexdigest()


def require_installed(name: str, package: str, digest: str) -> None:
    """Make sure that this process has the codec that another one uses.

    Raises:
        UsageError: it has not, or another version or source of it.
        ScriptError: the package cannot be imported here.
    """
    cls = load_installed(name)
    origin = None if cls is None else origin_of(cls)
    if cls is None or origin is None:
        raise UsageError(f"it has no codec {name}: install {package} there too")
    if origin.package != package or source_digest(cls) != digest:
        raise UsageError(f"its codec {name} is of {origin.package} or other source: install {package} on both")


def package_versions(codecs: Iterable[Codec]) -> dict[str, str]:
    """Package -> version of the codecs, wrapped ones among them, that packages bring."""
    found = {}
    for item in codecs:
        part: Codec | None = item
        while part is not None:
            origin = origin_of(type(part))
            if origin is not None:
                package, _, version = origin.package.rpartition(" ")
                found[package] = version
            part = getattr(part, "inner", None)
    return found


def _load(origin: Origin) -> type[Codec]:
    where = f"codec {origin.name} of the package {origin.package}"
    if not names_a_codec(origin.name):
        raise UsageError(f"{where}: no name for a codec; use letters, digits, '_', '-' and '.'")
    try:
        cls = metadata.EntryPoint(origin.name, origin.target, GROUP).load()
    except (Exception, SystemExit) as error:  # whatever somebody's module does must not look like a bug of gtrace
        raise ScriptError(f"{where}: cannot load {origin.target}: {in_words(error)}{_line(error)}") from error
    if not isinstance(cls, type) or not issubclass(cls, Codec) or issubclass(cls, Wrapper) or inspect.isabstract(cls):
        raise UsageError(f"{where}: {origin.target} is no class of a codec; extend gtrace.codecs.Codec")
    if cls.name != origin.name:
        raise UsageError(f"{where}: its class calls itself '{cls.name}'; let the entry point have the same name")
    taken = {codec_number(other): other for other in (*registry.codec_names(), *_LOADED) if other != origin.name}
    if codec_number(origin.name) in taken:
        raise UsageError(f"{where}: its number in payloads is that of {taken[codec_number(origin.name)]}; rename it")
    return guarded(cls, Path(inspect.getfile(cls)))


def _line(error: BaseException) -> str:
    """Where in a module an import failed, in brackets; empty where no module is to blame."""
    if isinstance(error, SyntaxError) and error.filename:
        return f" ({Path(error.filename).name}, line {error.lineno})"
    machinery = (__file__, importlib.__file__, metadata.__file__)
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename[:1] != "<"]
    frames = [f for f in frames if f.filename not in machinery]
    return f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
