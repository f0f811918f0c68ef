"""Your own codec from a Python file: a class, two functions, or a compressor object.

Three kinds of file are understood:

- classes that extend :class:`gtrace.codecs.Codec`, each under its ``name``;
- functions ``compress(values) -> bytes`` and ``decompress(data, size) -> values``; values are float32[n], and
  a ``compress`` with a parameter ``rng`` gets a :class:`numpy.random.Generator` made from the key. The codec is
  named after the file;
- an object, or a class without arguments, with these two functions as methods, or with
  ``compress(tensor, name) -> (tensors, ctx)`` and ``decompress(tensors, ctx) -> tensor``. Tensors are torch's if the
  file uses torch, otherwise numpy's; flat, unless ``shaped`` of the object is true and the parameter's shape known.
  The receiver needs ``ctx``, which no payload carries, so bits are those of ``tensors`` and flagged as declared, and
  only the process that encoded a payload can decode it. :mod:`gtrace.codecs.peers` makes such objects of other
  packages' methods.

Installed packages also bring codecs, by entry points of the group ``gtrace.codecs`` (docs/own-codec.md). Nothing is
imported before a command uses the name. gtrace's own names come first, and a package that fails to load affects no
other codec.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import re
import sys
import threading
import traceback
from collections import OrderedDict
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np

from gtrace.buckets import as_values
from gtrace.codecs import spec
from gtrace.codecs.base import Codec
from gtrace.codecs.engine import Composed
from gtrace.codecs.wrappers import Wrapper
from gtrace.coding.envelope import codec_number
from gtrace.errors import GtraceError, PayloadError, ScriptError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from gtrace.codecs.parts import Values
    from gtrace.types import State

#: payloads of compressor objects whose ctx is remembered; callers decode soon after they encode
REMEMBERED = 64
_NAME = re.compile(r"[A-Za-z][\w.-]*")
_LOADED: dict[Path, list[type[Codec]]] = {}
#: entry points of other packages
GROUP = "gtrace.codecs"


def load_plugin(path: str | Path) -> list[type[Codec]]:
    """Run a Python file and register the codecs in it. Loaded again, it replaces its codecs.

    Args:
        path: the file; this function runs its code.

    Returns:
        the codecs' classes, in the order of the file; their specs work from now on.

    Raises:
        UsageError: the file does not exist, holds no codec, or a codec's name is taken.
        ScriptError: the file raised; the message names its line.
    """
    file = Path(path).resolve()
    if not file.is_file():
        raise UsageError(f"plugin {path}: no such file")
    before = _LOADED.pop(file, [])
    for cls in before:
        spec.unregister(cls.name)
    known = set(spec.codec_names())
    module = ModuleType(f"gtrace_plugin_{hashlib.blake2b(str(file).encode(), digest_size=6).hexdigest()}")
    module.__file__ = str(file)
    module_before = sys.modules.get(module.__name__)
    try:
        _run(file, module)
        found = _codecs(module, file)
        if not found:
            raise UsageError(
                f"plugin {file.name}: holds no codec; write a class that extends gtrace.codecs.Codec, or "
                "compress(values) and decompress(data, size)"
            )
        for cls in found:
            if cls.name in spec.codec_names() and spec.codec_class(cls.name) is cls:
                continue  # the file itself registered it
            try:
                spec.register(cls)
            except ValueError as error:
                raise UsageError(f"plugin {file.name}: {error}; give it another name") from None
    except BaseException:
        for name in set(spec.codec_names()) - known:
            spec.unregister(name)
        for cls in before:
            spec.register(cls)
        if before:
            _LOADED[file] = before
        sys.modules.pop(module.__name__, None)
        if module_before is not None:
            sys.modules[module.__name__] = module_before
        raise
    _LOADED[file] = found
    return found


def plugin_of(cls: type[Codec]) -> Path | None:
    """The file that a codec was loaded from, None if it came from elsewhere."""
    return next((file for file, found in _LOADED.items() if cls in found), None)


@dataclass(frozen=True)
class PluginCodec(Composed):
    """A codec made of a plugin's functions. Calls are serialized, because the functions may share state.

    Attributes:
        compressor: has ``compress`` and ``decompress``: an object, or the plugin itself.
        file: the plugin's file; errors name its lines.
        lock: held while the code runs.
        draws: ``compress`` takes ``rng``.
    """

    summary = "a plugin"
    formula = "as the plugin's code says"
    unbiased = False
    compressor: ClassVar[Any]
    file: ClassVar[Path]
    lock: ClassVar[threading.Lock]
    draws: ClassVar[bool]

    def call(self, what: Callable[..., Any], *arguments: Any) -> Any:
        """Call the plugin's code.

        Raises:
            ScriptError: the code raised; the message names file and line.
        """
        with type(self).lock, blamed(type(self).file):
            return what(*arguments)

    def drawn(self, key: tuple[int, int]) -> dict[str, np.random.Generator]:
        """The argument ``rng`` of a ``compress`` that takes one."""
        return {"rng": np.random.default_rng(np.random.SeedSequence(list(key)))} if self.draws else {}

    def arrived(self, values: Any, size: int) -> Values:
        """The plugin's decoded values, checked: float32[size], finite.

        Raises:
            ScriptError: they are not.
        """
        where = type(self).file.name
        try:
            out = as_values(values)
        except (UsageError, ValueError, TypeError) as error:
            raise ScriptError(f"plugin {where}: decompress returned no real numbers: {error}") from None
        if out.size != size or not np.isfinite(out).all():
            what = f"{out.size} values where {size} were sent" if out.size != size else "values that are not finite"
            raise ScriptError(f"plugin {where}: decompress returned {what}")
        return out if out.flags.writeable else out.copy()


class FunctionCodec(PluginCodec):
    """``compress(values)`` and ``decompress(data, size)``; bits are the length of the bytes."""

    def write(self, state: State, x: Values, key: tuple[int, int]) -> tuple[bytes, int]:
        body = self.call(lambda: self.compressor.compress(x.copy(), **self.drawn(key)))
        if not isinstance(body, (bytes, bytearray, memoryview)):
            raise ScriptError(f"plugin {self.file.name}: compress returned {type(body).__name__}, not bytes")
        return bytes(body), 0

    def read(self, shared: bytes, body: memoryview, flags: int, size: int) -> Values:
        if flags:
            raise PayloadError(f"payload has unknown flags {flags:#x}")
        return self.arrived(self.call(self.compressor.decompress, bytes(body), size), size)


class CompressorCodec(PluginCodec):
    """An object with ``compress(tensor, name)`` and ``decompress(tensors, ctx)``; bits are those of ``tensors``.

    The payload does not carry the object's ``ctx``, so it is remembered here.
    """

    declared = True
    torch: ClassVar[ModuleType | None]
    kept: ClassVar[OrderedDict[bytes, tuple[Any, Any]]]

    def write(self, state: State, x: Values, key: tuple[int, int]) -> tuple[bytes, int]:
        """The bytes of the tensors that ``compress`` returns."""
        cls, x = type(self), x.copy()
        if getattr(self.compressor, "shaped", False) and state.shape is not None:
            x = x.reshape(state.shape)
        given = x if cls.torch is None else cls.torch.from_numpy(x)
        returned = self.call(lambda: self.compressor.compress(given, self.name, **self.drawn(key)))
        if not isinstance(returned, tuple) or len(returned) != 2:
            raise ScriptError(f"plugin {self.file.name}: compress must return a pair (tensors, ctx)")
        body = b"".join(self.call(_tensor_bytes, tensor) for tensor in _flat(returned[0]))
        with cls.lock:
            cls.kept[_digest(body, x.size)] = returned
            while len(cls.kept) > REMEMBERED:
                cls.kept.popitem(last=False)
        return body, 0

    def read(self, shared: bytes, body: memoryview, flags: int, size: int) -> Values:
        """Decompress what this process remembers of the payload."""
        cls = type(self)
        with cls.lock:
            returned = cls.kept.get(_digest(body, size))
        if returned is None:
            raise PayloadError(
                f"payload of {self.name} was not encoded here, or long ago; its ctx does not travel in payloads"
            )
        values = self.call(self.compressor.decompress, *returned)
        if cls.torch is not None and isinstance(values, cls.torch.Tensor):
            values = values.detach().cpu().float().numpy()
        return self.arrived(values, size)


def _run(file: Path, module: ModuleType) -> None:
    """Run a file as a module; nothing is written beside it."""
    # Dataclasses look their module up, and a plugin may import its neighbours.
    sys.modules[module.__name__] = module
    sys.path.insert(0, str(file.parent))
    try:
        with blamed(file):
            # Not importlib's loader: its cached bytecode would miss an edit within a second.
            exec(compile(file.read_bytes(), str(file), "exec"), module.__dict__)  # noqa: S102
    finally:
        if str(file.parent) in sys.path:
            sys.path.remove(str(file.parent))


def _codecs(module: ModuleType, file: Path) -> list[type[Codec]]:
    found: list[type[Codec]] = []
    objects: dict[str, Any] = {}
    for variable, value in vars(module).items():
        own = getattr(value, "__module__", None) == module.__name__
        if isinstance(value, type):
            if issubclass(value, Codec):
                if own and not inspect.isabstract(value) and value not in found:
                    found.append(guarded(value, file))
            elif own and _compresses(value) and not inspect.isabstract(value):
                objects[variable] = value
        elif not isinstance(value, ModuleType) and _compresses(value):
            objects[variable] = value
    # An object of a class carries more than the class.
    made = {type(value) for value in objects.values() if not isinstance(value, type)}
    objects = {k: value for k, value in objects.items() if not (isinstance(value, type) and value in made)}
    # A class may import another module's compress for its own use; then that function is not a codec.
    own = getattr(getattr(module, "compress", None), "__module__", None) == module.__name__
    if _compresses(module) and (own or not (found or objects)):
        found.append(_made(module, file.stem, module, file))
    for variable, value in objects.items():
        if isinstance(value, type):
            with blamed(file):
                value = value()
        found.append(_made(value, file.stem if len(objects) == 1 and not found else variable, module, file))
    bad = next((cls.name for cls in found if not names_a_codec(cls.name)), None)
    if bad is not None:
        raise UsageError(
            f"plugin {file.name}: '{bad}' is not a valid codec name; use letters, digits, '_', '-' and '.'"
        )
    return found


def _made(value: Any, name: str, module: ModuleType, file: Path) -> type[Codec]:
    """The codec of an object, or of the plugin's own functions."""
    needed, draws = _parameters(value.compress)
    base = FunctionCodec if value is module or needed == 1 else CompressorCodec
    described = {"__module__": module.__name__, "__doc__": base.__doc__, "name": name, "paper": file.name}
    fields = {"compressor": value, "file": file, "lock": threading.Lock(), "draws": draws}
    return type(name, (base,), {**described, **fields, "torch": _torch_of(value, module), "kept": OrderedDict()})


def _compresses(value: Any) -> bool:
    return callable(getattr(value, "compress", None)) and callable(getattr(value, "decompress", None))


def _parameters(function: Callable[..., Any]) -> tuple[int, bool]:
    """How many parameters a function has without a default, ``rng`` aside, and whether it has ``rng``."""
    try:
        found = inspect.signature(function).parameters
    except (TypeError, ValueError):  # a builtin without a signature
        return 0, False
    needed = [name for name, one in found.items() if one.default is one.empty and one.kind < one.VAR_POSITIONAL]
    return len(set(needed) - {"rng"}), "rng" in found


def _torch_of(compressor: Any, module: ModuleType) -> ModuleType | None:
    """torch, if the plugin or the module of one of the compressor's classes uses it; nothing is imported here."""
    torch = sys.modules.get("torch")
    places = [module, *(sys.modules.get(cls.__module__) for cls in type(compressor).__mro__ if cls is not object)]
    for value in (value for place in places if place is not None for value in vars(place).values()):
        home = value.__name__ if isinstance(value, ModuleType) else str(getattr(value, "__module__", ""))
        if home.partition(".")[0] == "torch":
            return torch
    return None


def _flat(tensors: Any) -> Iterator[Any]:
    if isinstance(tensors, (list, tuple)):
        for tensor in tensors:
            yield from _flat(tensor)
    elif tensors is not None:
        yield tensors


def _tensor_bytes(tensor: Any) -> bytes:
    """The memory of a tensor; torch's are viewed as bytes, since numpy lacks some of its types."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(tensor, torch.Tensor):
        return bytes(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    array = np.asarray(tensor)
    if array.dtype.kind not in "biufc":
        raise TypeError(f"compress returned a {type(tensor).__name__} among its tensors")
    return array.tobytes()


def _digest(body: bytes | memoryview, size: int) -> bytes:
    return hashlib.blake2b(body, digest_size=16, salt=size.to_bytes(16, "little")).digest()


def names_a_codec(name: str) -> bool:
    """Whether a codec can have this name: a spec can hold it, and it has no other meaning."""
    return _NAME.fullmatch(name) is not None and name != "all"


def guarded(cls: type[Codec], file: Path) -> type[Codec]:
    """Make the class's own methods name the line of the file in which they fail."""
    for name, method in list(vars(cls).items()):
        if inspect.isfunction(method) and not name.startswith("_"):
            setattr(cls, name, blamed(file)(method))
    return cls


@contextmanager
def blamed(file: Path) -> Iterator[None]:
    """Turn any error of the file's code into one line that names file and line."""
    try:
        yield
    except GtraceError:
        raise
    except (Exception, SystemExit) as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(file)]
        if isinstance(error, SyntaxError) and error.filename == str(file):
            lines.append(error.lineno)
        where = f"{file.name}, line {lines[-1]}" if lines else file.name
        raise ScriptError(f"plugin {where}: {in_words(error)}") from error


def in_words(error: BaseException) -> str:
    """An exception's name and message in one line."""
    said = " ".join(str(error.msg if isinstance(error, SyntaxError) else error).split())
    return f"{type(error).__name__}: {said}".rstrip(": ")


class Origin(NamedTuple):
    """Where an installed codec comes from.

    Attributes:
        name: the codec's name.
        package: name and version of the distribution.
        target: ``module:Class``.
    """

    name: str
    package: str
    target: str


_INSTALLED: dict[str, tuple[Origin, type[Codec]]] = {}


def origins() -> tuple[Origin, ...]:
    """Every codec that an installed package names, by name, including those hidden by gtrace's own names."""
    found = set()
    for entry in metadata.entry_points(group=GROUP):
        package = "a package" if entry.dist is None else f"{entry.dist.name} {entry.dist.version}"
        found.add(Origin(entry.name, package, entry.value))
    return tuple(sorted(found))


def installed_names() -> tuple[str, ...]:
    """The names that installed packages add to gtrace's own, loaded or not."""
    own = {*spec.codec_names(), *spec.wrapper_names()}
    return tuple(dict.fromkeys(origin.name for origin in origins() if origin.name not in own))


def hidden(origin: Origin) -> str:
    """A line that says why a package's codec name is already taken; empty if it is free."""
    if origin.name in (*spec.codec_names(), *spec.wrapper_names()):
        return f"codec '{origin.name}' of the package {origin.package} is left out: gtrace has one of this name"
    return ""


def load_installed(name: str) -> type[Codec] | None:
    """The codec that a package brings under a name; None if no package does.

    Raises:
        UsageError: two packages bring it, it is not a codec, or its name is not allowed.
        ScriptError: the package cannot be imported; the message names the line.
    """
    if name in _INSTALLED:
        return _INSTALLED[name][1]
    named = [origin for origin in origins() if origin.name == name]
    if not named:
        return None
    if len(named) > 1:
        packages = " and ".join(origin.package for origin in named)
        raise UsageError(f"codec {name}: {packages} bring it; uninstall one of them")
    cls = _load(named[0])
    _INSTALLED[name] = named[0], cls
    return cls


def origin_of(cls: type[Codec]) -> Origin | None:
    """Where a codec's class comes from; None for one that no package brought."""
    return next((origin for origin, loaded in _INSTALLED.values() if loaded is cls), None)


def source_digest(cls: type[Codec]) -> str:
    """A digest of the file of a codec's class, 16 hexadecimal digits, so that two processes can compare theirs."""
    return hashlib.blake2b(Path(inspect.getfile(cls)).read_bytes(), digest_size=8).hexdigest()


def require_installed(name: str, package: str, digest: str) -> None:
    """Check that this process has the codec that another one uses.

    Raises:
        UsageError: it does not, or has another version or source of it.
        ScriptError: the package cannot be imported here.
    """
    cls = load_installed(name)
    origin = None if cls is None else origin_of(cls)
    if cls is None or origin is None:
        raise UsageError(f"it has no codec {name}: install {package} there too")
    if origin.package != package or source_digest(cls) != digest:
        raise UsageError(f"its codec {name} is of {origin.package} or other source: install {package} on both")


def package_versions(codecs: Iterable[Codec]) -> dict[str, str]:
    """Package -> version, for the codecs (wrapped ones too) that come from packages."""
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
        raise UsageError(f"{where}: not a valid codec name; use letters, digits, '_', '-' and '.'")
    try:
        cls = metadata.EntryPoint(origin.name, origin.target, GROUP).load()
    except (Exception, SystemExit) as error:  # an error in a package must not look like a bug of gtrace
        raise ScriptError(f"{where}: cannot load {origin.target}: {in_words(error)}{_line(error)}") from error
    if not isinstance(cls, type) or not issubclass(cls, Codec) or issubclass(cls, Wrapper) or inspect.isabstract(cls):
        raise UsageError(f"{where}: {origin.target} is not a codec class; extend gtrace.codecs.Codec")
    if cls.name != origin.name:
        raise UsageError(f"{where}: the name of its class is '{cls.name}'; give the entry point the same name")
    taken = {codec_number(other): other for other in (*spec.codec_names(), *_INSTALLED) if other != origin.name}
    if codec_number(origin.name) in taken:
        raise UsageError(f"{where}: its number in payloads is that of {taken[codec_number(origin.name)]}; rename it")
    return guarded(cls, Path(inspect.getfile(cls)))


def _line(error: BaseException) -> str:
    """Where in a module an import failed, in brackets; empty if no module is to blame."""
    if isinstance(error, SyntaxError) and error.filename:
        return f" ({Path(error.filename).name}, line {error.lineno})"
    machinery = (__file__, importlib.__file__, metadata.__file__)
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename[:1] != "<"]
    frames = [f for f in frames if f.filename not in machinery]
    return f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""


spec.ELSEWHERE.append((installed_names, load_installed))
