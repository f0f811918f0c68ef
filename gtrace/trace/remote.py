"""Traces at an address such as ``s3://bucket/run.zarr``, read through fsspec.

Only what the metadata declare is read: files are requested by name and in ranges of known length, and folders are
listed only if the trace's root does not name its content. fsspec is loaded only here; it is not a
dependency, and neither are the packages that it needs for each kind of address.
"""

from __future__ import annotations

import json
import os
import re
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias
from urllib.parse import unquote, urlsplit

from gtrace.errors import GtraceError, TraceError, UsageError, printable
from gtrace.trace.files import HDF5_SUFFIXES, MAX_METADATA_BYTES, LocalFiles

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    #: reads the files of a trace from any place
    Files: TypeAlias = "LocalFiles | RemoteFiles"


_ADDRESS = re.compile(r"[a-z][a-z0-9+.:-]*://.*", re.DOTALL)
#: block size for reading an HDF5 file; the rest of each block is kept for the next read
_BLOCK_BYTES = 1024 * 1024


def place_of(path: str | os.PathLike[str]) -> Path | str:
    """A path of this machine (also for ``file://``), or an address without its last slash; UsageError for a chain."""
    if not isinstance(path, str) or not _ADDRESS.fullmatch(path):
        return Path(path)
    if "::" in path:
        raise UsageError(f"{printable(path)}: chains of addresses are not supported; give the trace's address alone")
    parts = urlsplit(path)
    if parts.scheme in ("file", "local"):
        return Path(unquote(parts.netloc + parts.path))
    return path.rstrip("/")


def stem_of(path: str | os.PathLike[str]) -> str:
    """The name of a trace without folder and ending, for the names of outputs."""
    place = place_of(path)
    return place.stem if isinstance(place, Path) else Path(unquote(urlsplit(place).path) or place).stem


def is_hdf5(place: Path | str) -> bool:
    """Whether the name of a trace means a single file."""
    if isinstance(place, Path):
        return place.suffix in HDF5_SUFFIXES
    return urlsplit(place).path.lower().endswith(HDF5_SUFFIXES)


class RemoteFiles:
    """Files below one address, with the methods of :class:`gtrace.trace.files.LocalFiles` and their errors.

    Raises:
        UsageError: fsspec, or a package that it needs for this kind of address, is not installed.
        TraceError: the file system cannot be reached.
    """

    def __init__(self, address: str) -> None:
        try:
            import fsspec.core
        except ImportError:
            raise UsageError(f"{address}: needs fsspec, which is not installed: pip install fsspec") from None
        scheme = urlsplit(address).scheme
        with _reported(printable(address)):
            try:
                self._system, _ = fsspec.core.url_to_fs(address)
            except ImportError as error:
                raise UsageError(f"{address}: a package that reads {scheme}:// is not installed ({error})") from None
            except ValueError as error:
                said = printable(str(error))
                raise UsageError(f"{printable(address)}: cannot read such an address ({said})") from None
        self._http = scheme in ("http", "https")
        self._known: dict[str, bytes] = {}
        self._names: dict[str, list[str]] = {}

    def read_root(self, root: str) -> bool:
        """Whether there is a Zarr trace; for a finished one, takes all metadata from its root."""
        path = os.path.join(root, "zarr.json")
        data = self.read(path, MAX_METADATA_BYTES)
        if data is None:
            return False
        documents = _gathered(root, data)
        if documents is None:
            return True
        names: dict[str, set[str]] = {root: set()}
        for entry, document in documents.items():
            parts = entry.split("/")
            if any(part in ("", ".", "..") for part in parts):
                raise TraceError(f"{root}: '{printable(entry)[:80]}' is not a path inside a trace; damaged or foreign")
            self._known[os.path.join(root, entry, "zarr.json")] = json.dumps(document).encode()
            for depth in range(len(parts)):
                names.setdefault(os.path.join(root, *parts[:depth]), set()).add(parts[depth])
        self._known[path] = data
        self._names = {folder: sorted(found) for folder, found in names.items()}
        return True

    def read(self, path: str, limit: int) -> bytes | None:
        """The bytes of a file, or None if it does not exist; TraceError if there are more than ``limit``."""
        if path in self._known:
            return self._known[path]
        # A server may send the whole file instead of the requested part.
        size = self.size(path) if self._http else 0
        if size is None:
            return None
        with _reported(path):
            try:
                data = self._bytes(path, 0, limit + 1) if size <= limit else bytes(limit + 1)
            except (FileNotFoundError, IsADirectoryError):
                return None
        if len(data) > limit:
            raise TraceError(f"{path}: more than {limit} bytes, the most that is possible; damaged or foreign")
        return data

    def read_range(self, path: str, start: int, length: int) -> bytes:
        """A part of a file; TraceError if it does not exist, is too short, or the server sends no parts."""
        with _reported(path):
            data = self._bytes(path, start, start + length)
        if len(data) > length:
            raise TraceError(
                f"{path}: asked for {length} bytes and got {len(data)}: the server does not support ranges"
            )
        if len(data) < length:
            raise TraceError(f"{path}: missing or truncated: no {length} bytes at {start}")
        return data

    def size(self, path: str) -> int | None:
        """Size of a file in bytes, or None if it does not exist; TraceError if it is unknown."""
        with _reported(path):
            try:
                found = self._system.info(path)
            except FileNotFoundError:
                return None
        if found.get("type") == "directory":
            return None
        if found.get("type") != "file":
            raise TraceError(f"{path}: not a regular file")
        if not isinstance(found.get("size"), int):
            raise TraceError(f"{path}: cannot be read (the server does not give its size)")
        return int(found["size"])

    def folders(self, path: str) -> list[str]:
        """Names of the folders in a folder, sorted; TraceError for a link, or if the folder cannot be listed."""
        if self._names:
            return self._names.get(path, [])
        if self._http:
            raise TraceError(
                f"{path}: HTTP cannot list a folder, and the trace's root does not name its content; "
                "on its machine, finish it with `gtrace trace check --repair`, or pack it"
            )
        with _reported(path):
            entries = self._system.ls(path, detail=True)
        names = []
        for entry in entries:
            name = str(entry["name"]).rstrip("/").rpartition("/")[2]
            if entry.get("type") == "link" or entry.get("islink"):
                raise TraceError(f"{path}/{printable(name)}: symbolic links inside a trace are not followed")
            if entry.get("type") == "directory" and name:
                names.append(name)
        return sorted(names)

    def stream(self, path: str) -> Any:
        """A file object that supports seeking, for HDF5; TraceError if there is no file."""
        with _reported(path):
            try:
                return self._system.open(path, "rb", block_size=_BLOCK_BYTES)
            except FileNotFoundError:
                raise TraceError(f"{path}: no such trace") from None

    def total(self, path: str) -> int | None:
        """Bytes of all files below, None if they cannot be listed."""
        if self._http:
            return None
        with _reported(path):
            return int(self._system.du(path, total=True))

    def _bytes(self, path: str, start: int, stop: int) -> bytes:
        return bytes(self._system.cat_file(path, start=start, end=stop))


@contextmanager
def _reported(path: str) -> Iterator[None]:
    """Turn any error of a file system into one line that names the place."""
    try:
        yield
    except GtraceError:
        raise
    except FileNotFoundError:
        raise TraceError(f"{path}: no such file") from None
    except Exception as error:  # noqa: BLE001 file systems raise errors of their own, without a common base
        said = printable(" ".join(str(error).split()))[:200]
        raise TraceError(f"{path}: cannot be read ({type(error).__name__}: {said})") from None


def _gathered(address: str, data: bytes) -> Mapping[str, Any] | None:
    """The metadata of all groups and arrays in the root of a finished trace; None if they are not there."""
    try:
        document = json.loads(data)
        found = document["consolidated_metadata"]["metadata"]
        complete = document["attributes"]["status"] == "complete"
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    if not isinstance(found, dict) or not all(isinstance(item, dict) for item in found.values()):
        raise TraceError(f"{address}: its consolidated metadata are not objects; damaged or foreign")
    return found if complete and found else None
