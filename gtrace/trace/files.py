"""Files of a trace: written beside their place and then moved in; read without following links."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import os
import re
import shutil
import stat
import time
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NoReturn

from gtrace.errors import OutputExistsError, TraceError, UsageError, need_folder, printable, taken

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

#: the format's name in the attributes of a trace
FORMAT = "gtrace"
#: limit of a reader on the bytes of a metadata document or attribute
MAX_METADATA_BYTES = 4 * 1024 * 1024
#: what the name of an HDF5 trace ends in
HDF5_SUFFIXES = (".h5", ".hdf5")
_PARTIAL = ".partial"
#: the part of an address such as s3://bucket/run.zarr that looks like a folder if it is taken for a path
_SCHEME = re.compile(r"[a-z][a-z0-9+.-]+:")
_HDF5_ERRNO = re.compile(r"errno = (\d+)")

_LEFTOVER_SECONDS = 3600

_NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0)
_NO_WAIT = getattr(os, "O_NONBLOCK", 0)


def write_file(path: str, *parts: bytes | memoryview) -> None:
    """Write a file directly in its place; only for files that nobody reads yet. One that fails takes no room."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | _NO_FOLLOW, 0o666)
    try:
        written = os.writev(descriptor, parts)
        if written < sum(map(len, parts)):
            # A short write: the disk is full, or the chunk is beyond 2 GiB. The loop shows which.
            rest = memoryview(b"".join(parts))[written:]
            while rest:
                rest = rest[os.write(descriptor, rest) :]
    except BaseException:
        os.unlink(path)
        raise
    finally:
        os.close(descriptor)


def write_beside(path: str, *parts: bytes | memoryview) -> None:
    """Put a complete file in its place at once: readers see either the old or the new one.

    The name of the unfinished file is fixed, so a killed writer leaves at most one behind. Nothing is forced
    to the disk: this protects against the death of the process, not of the machine.
    """
    beside = path + _PARTIAL
    # A new file: in a folder that others may write to, a link of this name could lead anywhere.
    with suppress(FileNotFoundError):
        os.unlink(beside)
    write_file(beside, *parts)
    try:
        os.replace(beside, path)
    except OSError:
        with suppress(FileNotFoundError):
            os.unlink(beside)
        raise


def write_over(path: str, data: bytes) -> None:
    """Replace a small file's content in its place, for a full disk; OSError, and no change, if there is no room."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC | _NO_FOLLOW)
    try:
        size = os.fstat(descriptor).st_size
        os.posix_fallocate(descriptor, 0, max(size, len(data)))
        os.pwrite(descriptor, data.ljust(size), 0)
    finally:
        os.close(descriptor)


def lock_file(descriptor: int, how: int) -> bool:
    """Take a lock that ends with the process, if the file system has locks; whether it was free."""
    try:
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
    except OSError as error:
        # Without locks (some network file systems) nothing is known about other processes.
        return not isinstance(error, BlockingIOError)
    return True


def check_room(folder: str | os.PathLike[str], needed: int) -> None:
    """OSError, before anything is written, if the file system has less than ``needed`` free bytes."""
    room = os.statvfs(folder)
    # Some file systems without a size of their own report 0 of 0.
    if room.f_blocks and room.f_bavail * room.f_frsize < needed:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), os.fspath(folder))


def disk_bytes(path: Path) -> int:
    """Bytes of a file, or of all files in a folder."""
    if path.is_file():
        return path.stat().st_size
    total = 0
    for folder, _, files in os.walk(path):
        for file in files:
            # Another process of a run may be moving it into its place.
            with suppress(FileNotFoundError):
                total += os.stat(os.path.join(folder, file)).st_size
    return total


@contextmanager
def _regular(path: str) -> Iterator[BinaryIO]:
    """Open a regular file; FileNotFoundError without one, TraceError for anything else, and if it cannot be read."""
    try:
        # Without the flag, opening a named pipe would wait for its writer forever.
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | _NO_FOLLOW | _NO_WAIT)) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise IsADirectoryError
            yield file
    except FileNotFoundError:
        raise
    except IsADirectoryError:
        raise TraceError(f"{path}: not a regular file") from None
    except OSError as error:
        if os.path.islink(path):
            raise TraceError(f"{path}: symbolic links inside a trace are not followed") from None
        raise TraceError(f"{path}: cannot be read ({error.strerror})") from None


class LocalFiles:
    """Files of this machine."""

    def read(self, path: str, limit: int) -> bytes | None:
        """The bytes of a regular file, None if it does not exist; TraceError if there are more than ``limit``."""
        with suppress(FileNotFoundError), _regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size > limit:
                raise TraceError(f"{path}: {size} bytes, but at most {limit} are possible; damaged or foreign")
            return file.read(size)
        return None

    def read_range(self, path: str, start: int, length: int) -> bytes:
        """A part of a regular file; TraceError if the file does not exist, or is too short."""
        with suppress(FileNotFoundError), _regular(path) as file:
            if 0 <= start <= os.fstat(file.fileno()).st_size - length:
                file.seek(start)
                return file.read(length)
        raise TraceError(f"{path}: missing or truncated: no {length} bytes at {start}")

    def size(self, path: str) -> int | None:
        """Size in bytes of a file or folder, or None if it does not exist."""
        try:
            return os.lstat(path).st_size
        except OSError:
            return None

    def folders(self, path: str) -> list[str]:
        """Names of the folders in a folder, sorted; TraceError for a symbolic link, or if it cannot be read."""
        names = []
        try:
            with os.scandir(path) as entries:
                for entry in entries:
                    if entry.is_symlink():
                        raise TraceError(f"{entry.path}: symbolic links inside a trace are not followed")
                    if entry.is_dir(follow_symlinks=False):
                        names.append(entry.name)
        except OSError as error:
            raise TraceError(f"{path}: cannot be read ({error.strerror})") from None
        return sorted(names)


LOCAL = LocalFiles()


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not valid JSON")


def parse_json(text: str | bytes, where: str) -> object:
    """A JSON value; TraceError for NaN and infinities, which are not valid JSON, other faults, and deep nesting."""
    try:
        return json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        reason = "nested too deep" if isinstance(error, RecursionError) else printable(str(error))
        raise TraceError(f"{where}: bad JSON ({reason}); damaged or foreign") from None


def read_node(read: Callable[[str, int], bytes | None], folder: str) -> dict[str, Any] | None:
    """The zarr.json of a folder, None if it does not exist (a writer died before writing it); TraceError for damage.

    ``read`` is that of :class:`LocalFiles`, or of an address.
    """
    path = os.path.join(folder, "zarr.json")
    data = read(path, MAX_METADATA_BYTES)
    if data is None:
        return None
    match parse_json(data, path):
        case dict(document) if document.get("zarr_format") == 3:
            if isinstance(document.setdefault("attributes", {}), dict):
                return document
    raise TraceError(f"{path}: not Zarr format 3, the only one that is read, or 'attributes' is not an object")


def attributes_of(folder: Path) -> dict[str, Any] | None:
    """The attributes of a group on this machine, None if it does not exist or is damaged."""
    try:
        document = read_node(LOCAL.read, str(folder))
    except TraceError:
        return None
    return document["attributes"] if document is not None and document.get("node_type") == "group" else None


def is_gtrace_zarr(path: Path) -> bool:
    """Whether the folder is marked as a gtrace trace of any version."""
    return (attributes_of(path) or {}).get("format") == FORMAT


def write_json(folder: str, document: Mapping[str, Any]) -> None:
    """Write a zarr.json into a folder; on a full disk in the room of the old one, so that a trace can say how it ended.

    OSError if it cannot be written; the old one is kept.
    """
    path, data = os.path.join(folder, "zarr.json"), json.dumps(document, allow_nan=False).encode()
    try:
        write_beside(path, data)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not os.path.exists(path):
            raise
        write_over(path, data)


def write_root(folder: str, attributes: Mapping[str, Any], gathered: Mapping[str, Any] | None = None) -> None:
    """Store the attributes of the trace, and the metadata of everything in it unless they are too long.

    zarr-python and xarray look for the metadata of all arrays there. They are read if they are not ``gathered``.
    """
    if gathered is None:
        gathered = _read_below(folder)
    root = group_document(attributes)
    whole = root | {"consolidated_metadata": {"kind": "inline", "must_understand": False, "metadata": gathered}}
    write_json(folder, whole if len(json.dumps(whole)) < MAX_METADATA_BYTES else root)


def group_document(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """The metadata document of a group."""
    return {"attributes": dict(attributes), "zarr_format": 3, "node_type": "group"}


def _read_below(root: str) -> dict[str, Any]:
    """The metadata of every group and array below the root, by path."""
    found: dict[str, Any] = {}
    pending = LOCAL.folders(root)
    while pending:
        entry = pending.pop(0)
        document = read_node(LOCAL.read, os.path.join(root, entry))
        if document is not None:
            found[entry] = document
            if document.get("node_type") == "group":
                pending += [f"{entry}/{name}" for name in LOCAL.folders(os.path.join(root, entry))]
    return found


def write_group(folder: str, attributes: Mapping[str, Any]) -> None:
    """Write the metadata of a group."""
    write_json(folder, group_document(attributes))


def make_group(folder: str, attributes: Mapping[str, Any]) -> None:
    """Make a folder with a group's metadata, or none, so that the same can be tried again."""
    os.mkdir(folder)
    try:
        write_group(folder, attributes)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def write_error(path: str | os.PathLike[str], error: Exception) -> TraceError:
    """A failure to write as a TraceError with the system's words."""
    if isinstance(error, FileNotFoundError):
        return TraceError(f"{path}: is gone: it was deleted, moved or replaced while it was being written")
    # A lock that was waited for says itself who holds it.
    own = str(error) if isinstance(error, TimeoutError) else words_of(error)
    return TraceError(f"{path}: cannot be written ({own or 'the library that writes it failed'})")


def words_of(error: Exception) -> str | None:
    """The system's words for a failure, also from HDF5's long reports; None if it was not the system's."""
    number = getattr(error, "errno", None)
    if number is None and (code := _HDF5_ERRNO.search(str(error))):
        number = int(code[1])
    return os.strerror(number) if number else None


class Storing(AbstractContextManager["Storing"]):
    """A block that writes to a trace: system errors become a TraceError.

    A class, because every tensor of every step enters it: a generator would take several times as long.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        #: A write failed, so a part of the trace may be missing.
        self.failed = False

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if isinstance(error, (OSError, RuntimeError)):
            self.failed = True
            raise write_error(self._path, error) from error


def place_for(path: str | os.PathLike[str]) -> Path:
    """Where a new trace of this name goes; UsageError if it is not the name of a trace."""
    place = Path(os.path.realpath(path))
    if place.suffix not in (".zarr", *HDF5_SUFFIXES):
        raise UsageError(f"{os.fspath(path)}: the name of a trace must end in .zarr, .h5 or .hdf5")
    return place


def check_place(
    path: Path, *, force: bool, is_trace: Callable[[Path], bool] = is_gtrace_zarr, what: str = "a gtrace trace"
) -> None:
    """Refuse a place where a new trace, or ``what`` else ``is_trace`` recognizes, must not be put.

    Raises:
        UsageError: its folder does not exist.
        OutputExistsError: something is there and ``force`` is off; or it is a folder other than a trace,
            or neither a file nor a folder: those are never deleted.
    """
    if any(map(_SCHEME.fullmatch, path.parts)) and not path.parent.is_dir():
        raise UsageError(f"{path}: traces can be written only on this machine; write it here and copy it there")
    need_folder(path)
    if not os.path.lexists(path):
        return
    if not force:
        raise taken(path)
    if path.is_file():
        return
    if not path.is_dir():
        raise OutputExistsError(f"{path}: is neither a file nor a folder, so it is kept; choose another place")
    if not is_trace(path) and any(path.iterdir()):
        raise OutputExistsError(
            f"{path}: is a folder but not {what}, so it is kept; delete it yourself or choose another place"
        )


def beside(path: Path, purpose: str) -> Path:
    """A hidden name next to ``path`` that only this process uses, on the same file system."""
    return path.with_name(f".{path.name}.gtrace-{purpose}-{os.getpid()}")


@contextmanager
def new_beside(path: Path, purpose: str, what: str = "") -> Iterator[Path]:
    """A name from :func:`beside` for a new file or folder, which is deleted after the block if it is still there.

    What killed writers of the same trace left is deleted before; living ones touch theirs often enough to be kept.
    If ``what`` says what cannot be written, the system's errors become a TraceError.
    """
    new = beside(path, purpose)
    try:
        for leftover in _leftovers(path):
            if time.time() - leftover.stat(follow_symlinks=False).st_mtime > _LEFTOVER_SECONDS:
                remove(leftover)
        remove(new)
        yield new
    except OSError as error:
        if not what:
            raise
        raise TraceError(f"{what} cannot be written ({error.strerror or error})") from error
    finally:
        remove(new)


def dead_leftovers(path: Path) -> list[Path]:
    """Leftovers beside a trace from writers that no longer run on this machine."""
    return [leftover for leftover in _leftovers(path) if not _lives(leftover.name.rpartition("-")[2])]


def _leftovers(path: Path) -> list[Path]:
    return sorted(entry for entry in path.parent.iterdir() if entry.name.startswith(f".{path.name}.gtrace-"))


def _lives(process: str) -> bool:
    try:
        os.kill(int(process), 0)
    except (ValueError, OverflowError, ProcessLookupError):
        return False
    except PermissionError:
        return True
    return True


def remove(path: Path) -> None:
    """Delete a file or a folder if it exists; links are deleted, not followed."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def move_in(new: Path, path: Path, *, force: bool, backup: Path | None = None) -> None:
    """Move a finished file or folder to its place.

    With ``force`` the old one is deleted, or kept as ``backup``, once the new one is in its place. Without it, if two
    processes find the place free at the same moment, only one gets it.

    Raises:
        OutputExistsError: ``force`` is off and something is there.
    """
    if not force:
        try:
            if new.is_dir():
                # An empty folder gives way; a file or any other folder does not.
                os.rename(new, path)
            else:
                os.link(new, path)
                new.unlink()
        except OSError as error:
            if not os.path.lexists(path):
                raise
            raise OutputExistsError(f"{path}: appeared meanwhile and is kept; choose another place") from error
        return
    if backup is None and (not path.exists() or not (new.is_dir() or path.is_dir())):
        os.replace(new, path)
        return
    if backup is None and _exchange(new, path):
        remove(new)
        return
    old = backup or beside(path, "old")
    os.rename(path, old)
    try:
        os.rename(new, path)
    except OSError:
        os.rename(old, path)
        raise
    if backup is None:
        remove(old)


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two names at once, if kernel and file system can; a folder cannot be replaced in one step otherwise."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    here = -100  # AT_FDCWD
    swap = 2  # RENAME_EXCHANGE
    return rename is not None and rename(here, os.fsencode(one), here, os.fsencode(other), swap) == 0


def start_folder(path: Path, attrs: Mapping[str, Any], *, force: bool) -> None:
    """Put an empty trace in its place at once; errors as in ``check_place`` and ``move_in``."""
    check_place(path, force=force)
    with new_beside(path, "partial") as started:
        make_group(str(started), attrs)
        move_in(started, path, force=force)
