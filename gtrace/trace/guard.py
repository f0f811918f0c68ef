"""Reads files that other people made in a child process, so that no file can take this process's memory or time.

The child has limits on memory and processor time, and this process one on the clock. On Linux 5.13 and later the child
can also open nothing but the files that are read and Python's own, and can write, execute and connect to nothing
(Landlock). It answers with JSON and with values in shared memory, so nothing that it says is executed either.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import math
import mmap
import os
import resource
import signal
import socket
import stat
import struct
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from gtrace.errors import GtraceError, TraceError, UsageError, printable, size_text
from gtrace.trace.files import HDF5_SUFFIXES, words_of

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from numpy.typing import NDArray


#: A file may declare this many times its own bytes (the most that deflate can shrink), or this many bytes.
_RATIO = 1032
_SMALL = 64 * 1024 * 1024
#: smallest unit that a file takes on a disk: a store may have as many chunks as it has bytes, and a file has some
_SECTOR = 512
_LONGEST_ANSWER = 256 * 1024 * 1024
_HEAD = struct.Struct("<QI")

#: Limits on reading one file: bytes of memory, beyond what the file and its declared arrays have; seconds of processor
#: time, beyond one for each MB of the file and each 50 MB that it declares; and times these seconds that an answer may
#: take by the clock, because a busy machine is not an attack.
MEMORY, SECONDS, WAIT = 256 * 1024 * 1024, 10.0, 10.0


class Entry(NamedTuple):
    """One array of a file.

    Attributes:
        name: its name in the file, empty if the file is one array.
        shape: its shape.
        dtype: the type of its values, such as ``bfloat16``.
        dimensions: names of its axes, if the file has them.
        pieces: number of parts that are decoded one by one.
        largest: bytes of the largest part, if it may exceed the array.
        by_row: one index of the first axis can be read without the others.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    dimensions: tuple[str | None, ...] = ()
    pieces: int = 1
    largest: int = 0
    by_row: bool = True

    @property
    def size(self) -> int:
        """Number of values."""
        return math.prod(self.shape)

    @property
    def is_real(self) -> bool:
        """Whether its values can be a gradient: real or complex numbers, not integers."""
        return self.dtype.startswith(("float", "bfloat", "complex", "longdouble", "clongdouble"))

    @property
    def is_complex(self) -> bool:
        """Whether its values are pairs of real numbers."""
        return "complex" in self.dtype or self.dtype == "clongdouble"

    @property
    def read_as(self) -> np.dtype[Any]:
        """The type of its values once they are read: numpy has no bfloat16 and no floats of 8 bits."""
        return np.dtype(np.float32 if self.dtype.startswith(("bfloat", "float8")) else self.dtype)

    @property
    def decoded(self) -> int:
        """Bytes that reading it takes."""
        return max(self.size * self.read_as.itemsize, self.largest)


class Guard(contextlib.AbstractContextManager["Guard"]):
    """The child process that reads files; a context manager.

    Args:
        files: all files and Zarr stores that will be read.
        readers: suffix -> ``module:class`` of what reads such a file, see :mod:`gtrace.trace.foreign`.
    """

    def __init__(self, files: Collection[Path], readers: Mapping[str, str]) -> None:
        self._held = 0
        self._channel, theirs = socket.socketpair()
        root = str(Path(__file__).resolve().parents[2])
        # -P: the folder that the command runs in may be the one that somebody else filled.
        start = f"import sys; sys.path.append({root!r}); from gtrace.trace.guard import serve; serve()"
        if sys.platform == "linux":
            # PR_SET_PDEATHSIG: if this process is killed, the kernel ends the child, whatever it is doing.
            start = f"import ctypes; ctypes.CDLL(None).prctl(1, {int(signal.SIGKILL)}); {start}"
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-c", start],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                # One thread: Landlock binds the thread that asks for it, and those that it starts.
                env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
            )
        places = sorted({os.path.realpath(path) for path in files})
        # torch may take long to load from a slow disk.
        self.ask("reading files", 60, readers=dict(readers), places=places)

    def open(self, path: Path, suffix: str, folder: Path | None = None) -> GuardedFile:
        """Open a file, or a Zarr store; if its rows are read one by one, ``folder`` takes unpacked copies.

        Raises:
            TraceError: it is not a regular file, holds links, is damaged, or declares more than it can hold.
        """
        stored = stored_bytes(path)
        answer = self.ask(printable(str(path)), SECONDS + stored / 1e6, needs=stored, path=str(path), suffix=suffix)
        self._held += stored
        return GuardedFile(self, path, stored, [_entry(*fields) for fields in answer["entries"]], folder)

    def release(self, file: GuardedFile) -> None:
        """Close a file."""
        self._held -= file.stored
        if self.process.poll() is None:
            self.ask(file.where, SECONDS, close=str(file.path))

    def ask(self, where: str, seconds: float, *descriptors: int, needs: int | None = None, **request: Any) -> Any:
        """The child's answer, for which it may take so much processor time, and memory for ``needs`` bytes more."""
        if needs is not None:
            request["memory"] = MEMORY + self._held + needs
        self._channel.settimeout(seconds * WAIT)
        try:
            _send(self._channel, {**request, "seconds": seconds}, descriptors)
            answer = _receive(self._channel)[0]
        except (OSError, EOFError, ValueError) as error:
            late = isinstance(error, TimeoutError)
            self.process.kill()
            code = self.process.wait()
            why = f"reading it ended its process (code {code})"
            if late or code == -signal.SIGXCPU:
                unit = "seconds" if late else "seconds of processor time"
                why = f"takes more than {seconds * (WAIT if late else 1):.3g} {unit} to read"
            raise TraceError(f"{where}: {why}; damaged or foreign") from None
        if "error" in answer:
            kind = UsageError if answer["usage"] else TraceError
            raise kind(printable(str(answer["error"]))[:600])
        return answer

    def __exit__(self, *args: object) -> None:
        # Closing the channel ends an idle child; a busy one is killed.
        self._channel.close()
        self.process.kill()
        self.process.wait()


class GuardedFile(contextlib.AbstractContextManager["GuardedFile"]):
    """A file that the child has open; a context manager.

    Attributes:
        entries: its arrays.
        stored: its bytes on disk.
    """

    def __init__(self, guard: Guard, path: Path, stored: int, entries: Sequence[Entry], folder: Path | None) -> None:
        self._guard = guard
        self._folder = folder
        self._unpacked: dict[str, NDArray[Any]] = {}
        self.path = path
        self.where = printable(str(path))
        self.stored = stored
        self.entries = entries
        self._numbers = {entry.name: number for number, entry in enumerate(entries)}
        declared = sum(entry.decoded for entry in entries)
        pieces = sum(entry.pieces for entry in entries)
        if declared > _RATIO * stored + _SMALL or pieces > stored:
            largest = max(entries, key=lambda entry: entry.size)
            parts = f" in {pieces} parts" if pieces > stored else ""
            raise TraceError(
                f"{self.where}: array '{printable(largest.name)}' of shape {largest.shape}: declares "
                f"{size_text(declared)}{parts}, but has {stored} bytes; damaged or foreign"
            )

    def read(self, entry: Entry, row: int | None = None) -> NDArray[Any]:
        """An array, or one index of its first axis; bfloat16 as float32. TraceError for damage, and beyond limits."""
        if row is None or entry.by_row:
            return self._shared(entry, row)
        if entry.name not in self._unpacked:
            self._unpacked[entry.name] = self._shared(entry, None, self._folder)
        return np.array(self._unpacked[entry.name][row])

    def _shared(self, entry: Entry, row: int | None, folder: Path | None = None) -> NDArray[Any]:
        shape, dtype = entry.shape if row is None else entry.shape[1:], entry.read_as
        length = math.prod(shape) * dtype.itemsize
        if not length:
            return np.empty(shape, dtype)
        if folder is None and hasattr(os, "memfd_create"):
            descriptor = os.memfd_create("gtrace")
        else:
            with tempfile.TemporaryFile(dir=folder) as file:
                descriptor = os.dup(file.fileno())
        try:
            os.truncate(descriptor, length)
            self._guard.ask(
                f"{self.where}: array '{printable(entry.name)}'",
                SECONDS + self.stored / 1e6 + entry.decoded / 50e6,
                descriptor,
                needs=entry.decoded,
                file=str(self.path),
                number=self._numbers[entry.name],
                row=row,
            )
            return np.frombuffer(mmap.mmap(descriptor, length), dtype).reshape(shape)
        finally:
            os.close(descriptor)

    def __exit__(self, *args: object) -> None:
        self._unpacked.clear()
        self._guard.release(self)


def stored_bytes(path: Path) -> int:
    """Bytes of a file, or of all files of a store, a disk sector each at least; TraceError for links and pipes."""
    try:
        if stat.S_ISREG(os.stat(path).st_mode):
            return os.stat(path).st_size
        total, pending = 0, [os.fspath(path)]
        while pending:
            with os.scandir(pending.pop()) as found:
                for item in found:
                    if item.is_dir(follow_symlinks=False):
                        pending.append(item.path)
                    elif item.is_file(follow_symlinks=False):
                        total += max(item.stat(follow_symlinks=False).st_size, _SECTOR)
                    else:
                        what = "links and pipes in a store are not read; copy the file"
                        raise TraceError(f"{printable(item.path)}: {what}")
    except OSError as error:
        raise TraceError(f"{printable(os.fspath(path))}: cannot be read ({error.strerror})") from None
    return total


def _entry(
    name: str, shape: list[int], dtype: str, dimensions: list[str | None], pieces: int, largest: int, by_row: bool
) -> Entry:
    """An entry as the child sends it; TraceError if it cannot be one of numbers."""
    entry = Entry(name, tuple(shape), dtype, tuple(dimensions), pieces, largest, by_row)
    if min(shape, default=0) < 0 or entry.read_as.kind not in "fciub":
        raise TraceError(f"array '{printable(name)}': {shape} of {printable(dtype)} are not numbers")
    return entry


def _send(channel: socket.socket, message: Any, descriptors: Sequence[int] = ()) -> None:
    data = json.dumps(message).encode()
    socket.send_fds(channel, [_HEAD.pack(len(data), len(descriptors))], descriptors)
    channel.sendall(data)


def _receive(channel: socket.socket) -> tuple[Any, list[int]]:
    """A message and its descriptors; EOFError if the other process has ended."""
    head, descriptors, _, _ = socket.recv_fds(channel, _HEAD.size, 1)
    if len(head) < _HEAD.size or (length := _HEAD.unpack(head)[0]) > _LONGEST_ANSWER:
        raise EOFError
    data = bytearray()
    while len(data) < length:
        part = channel.recv(min(length - len(data), 1 << 20))
        if not part:
            raise EOFError
        data += part
    return json.loads(data), descriptors


# The rest runs in the child.


def serve() -> None:
    """Answer the requests that come through standard input until it is closed."""
    # Ctrl-C reaches both processes; the one that was asked decides.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel = socket.socket(fileno=os.dup(0))
    setup, _ = _receive(channel)
    readers, missing = _load_readers(setup["readers"])
    private = _private_bytes()
    _confine(setup["places"])
    _send(channel, {})
    opened: dict[str, Any] = {}
    with contextlib.suppress(EOFError):
        while True:
            request, descriptors = _receive(channel)
            where = request.get("path") or request.get("file") or request.get("close")
            answer: dict[str, Any] = {}
            try:
                _limit(private, request)
                if "path" in request:
                    if request["suffix"] in missing:
                        package = missing[request["suffix"]]
                        raise UsageError(f"{where}: needs {package}, which is not installed: pip install {package}")
                    opened[where] = readers[request["suffix"]](Path(where))
                    answer["entries"] = opened[where].entries
                elif "close" in request:
                    del opened[where]
                else:
                    _fill(opened[where], request["number"], request["row"], descriptors[0])
            except MemoryError:
                why = "reading it takes more memory than its arrays need"
                answer = {"error": f"{where}: {why}; damaged or foreign", "usage": False}
            except Exception as error:  # noqa: BLE001 damaged bytes make libraries raise anything
                answer = {"error": _reason(where, error), "usage": isinstance(error, UsageError)}
            _send(channel, answer)


def _load_readers(named: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, str]]:
    """Suffix -> reader, and suffix -> the package that a reader lacks."""
    readers: dict[str, Any] = {}
    missing: dict[str, str] = {}
    for suffix, name in named.items():
        module, _, attribute = name.partition(":")
        try:
            readers[suffix] = getattr(importlib.import_module(module), attribute)
        except ModuleNotFoundError as error:
            missing[suffix] = str(error.name)
    return readers, missing


def _reason(where: str, error: Exception) -> str:
    if isinstance(error, GtraceError):
        return str(error)
    known = words_of(error)
    own = "truncated or damaged" if where.endswith(HDF5_SUFFIXES) else str(error).strip()
    lines = (known or own).splitlines() or [type(error).__name__]
    return f"{printable(where)}: cannot be read ({printable(lines[0])[:200]}){'' if known else '; damaged or foreign'}"


def _fill(file: Any, number: int, row: int | None, descriptor: int) -> None:
    entry = file.entries[number]
    shape = entry.shape if row is None else entry.shape[1:]
    try:
        place = np.frombuffer(mmap.mmap(descriptor, 0), entry.read_as).reshape(shape)
        values = file.read(entry, row)
        if values.shape != place.shape:
            raise ValueError(f"{values.shape} values instead of {place.shape}")
        place[...] = values
    finally:
        os.close(descriptor)


def _private_bytes() -> int:
    """Memory of this process that ``RLIMIT_DATA`` counts; 0 where the system does not say."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
            if line.startswith("VmData:"):
                return int(line.split()[1]) * 1024
    return 0


def _limit(private: int, request: Mapping[str, Any]) -> None:
    """Set the limits of one request. macOS accepts the one on memory and keeps it not."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    spent = usage.ru_utime + usage.ru_stime
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(spent + request["seconds"]), resource.RLIM_INFINITY))
    if "memory" in request and private:
        resource.setrlimit(resource.RLIMIT_DATA, (private + request["memory"], resource.RLIM_INFINITY))


_READ_FILE, _READ_FOLDER = 1 << 2, 1 << 3
#: version of Landlock -> number of the kinds of access to files that it knows
_KINDS_OF_ACCESS = {1: 13, 2: 14, 3: 15, 4: 15}
_CREATE, _ADD, _RESTRICT = 444, 445, 446


def _landlock(number: int, *arguments: Any) -> int:
    """A call of Landlock; negative if the kernel has none."""
    return int(ctypes.CDLL(None, use_errno=True).syscall(number, *arguments)) if sys.platform == "linux" else -1


def confines() -> int:
    """Version of Landlock, below 1 if the kernel has none."""
    return _landlock(_CREATE, None, ctypes.c_size_t(0), ctypes.c_uint(1))


def _confine(places: Sequence[str]) -> None:
    """Give up all rights to files but reading these places and Python's own, as far as the kernel can."""
    version = confines()
    if version < 1:
        return
    kinds = (1 << _KINDS_OF_ACCESS.get(version, 16)) - 1
    # Files, connections, and signals to other processes, of which older kernels know the first or the first two.
    words = [kinds, 3, 3][: 3 if version >= 6 else 2 if version >= 4 else 1]
    attributes = struct.pack(f"<{len(words)}Q", *words)
    rules = _landlock(_CREATE, attributes, ctypes.c_size_t(len(attributes)), ctypes.c_uint(0))
    own = {sys.prefix, sys.base_prefix, *(path for path in sys.path if path), "/usr", "/lib", "/lib64"}
    for place in (*places, *own):
        with contextlib.suppress(FileNotFoundError):
            descriptor = os.open(place, os.O_PATH | os.O_CLOEXEC)
            folder = stat.S_ISDIR(os.fstat(descriptor).st_mode)
            rule = struct.pack("<Qi", _READ_FILE | (_READ_FOLDER if folder else 0), descriptor)
            _landlock(_ADD, rules, ctypes.c_int(1), rule, ctypes.c_uint(0))
            os.close(descriptor)
    no_new_rights = 38  # PR_SET_NO_NEW_PRIVS
    ctypes.CDLL(None).prctl(no_new_rights, 1, 0, 0, 0)
    if _landlock(_RESTRICT, rules, ctypes.c_uint(0)):
        raise OSError(ctypes.get_errno(), "Landlock refused its own rules")
