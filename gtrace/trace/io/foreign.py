"""Files of other programs that hold arrays: ``.npy``, ``.npz`` and ``.safetensors``, read without executing anything.

A file's claims are compared with its actual bytes before memory is allocated for them.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import warnings
import zipfile
from contextlib import ExitStack, contextmanager
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import numpy as np

from gtrace.errors import GtraceError, TraceError, printable
from gtrace.trace.format import are_lengths
from gtrace.trace.zarr import is_gtrace_zarr

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray


#: the largest factor by which deflate can shrink data
_DEFLATE = 1032
#: the limit of the safetensors library
_MAX_HEADER = 100_000_000

#: safetensors' name -> type; bfloat16 is stored as numpy's uint16
_SAFETENSORS = {"BF16": "bfloat16", "C64": "complex64", "BOOL": "bool"} | {
    f"{kind[0].upper()}{bits}": f"{kind}{bits}"
    for kind, widths in (("float", (16, 32, 64)), ("int", (8, 16, 32, 64)), ("uint", (8, 16, 32, 64)))
    for bits in widths
}


class Entry(NamedTuple):
    """One array of a file.

    Attributes:
        name: its name in the file, empty if the file is one array.
        shape: its shape.
        dtype: the type of its values, such as ``bfloat16``.
        dimensions: names of its axes, if the file has them.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    dimensions: tuple[str | None, ...] = ()

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


class TensorFile:
    """A file of arrays, opened for reading.

    Attributes:
        entries: its arrays.
    """

    entries: Sequence[Entry]

    def read(self, entry: Entry, row: int | None = None) -> NDArray[Any]:
        """A copy of an array, or of one index of its first axis; bfloat16 as float32.

        Raises:
            TraceError: the file is damaged.
        """
        raise NotImplementedError

    def prepare_rows(self, folder: Path) -> None:
        """Call this before reading rows one by one; ``folder`` takes unpacked copies."""

    def close(self) -> None:
        """Close the file."""


def join_name(*parts: str) -> str:
    """A tensor's name from the names of its containers."""
    return ".".join(part for part in parts if part)


@contextmanager
def reading(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turn failures to read a file into one line that names the file.

    Raises:
        TraceError: for any other error.
    """
    try:
        yield
    except GtraceError:
        raise
    except Exception as error:
        # zipfile, zlib and Zarr's codecs raise all kinds of errors on damaged bytes.
        known = isinstance(error, OSError) and error.strerror
        reason = str(known or error).strip().splitlines() or [type(error).__name__]
        hint = "" if known else "; damaged or foreign"
        raise TraceError(
            f"{printable(os.fspath(path))}: cannot be read ({printable(reason[0])[:200]}){hint}"
        ) from error


def bfloat16(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """Values of bfloat16 from their bits, as float32.

    >>> bfloat16(np.array([0x3F80, 0xC000], np.uint16)).tolist()
    [1.0, -2.0]
    """
    wide: NDArray[np.float32] = (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return wide


_HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


def _npy_entry(file: IO[bytes], size: int, name: str, where: str) -> Entry:
    """The array in numpy's format at the start of a stream of ``size`` bytes.

    Raises:
        TraceError: it holds Python objects or records, or declares more values than it has bytes.
        ValueError: it has no valid header.
    """
    version = np.lib.format.read_magic(file)
    if version not in _HEADERS:
        raise TraceError(f"{where}: version {version[0]}.{version[1]} of numpy's format; save a plain array of numbers")
    shape, _, dtype = _HEADERS[version](file)
    there = max(size - file.tell(), 0)
    if min(shape, default=0) < 0:
        raise TraceError(f"{where}: its shape is not a list of lengths; damaged or foreign")
    if dtype.hasobject:
        raise TraceError(f"{where}: holds pickled Python objects, which are never loaded; save plain arrays")
    if dtype.kind not in "fciub":
        raise TraceError(
            f"{where}: values of type {printable(dtype.str)[:60]} are not numbers; save float32 "
            "(numpy forgets that values were bfloat16)"
        )
    if math.prod(shape) * dtype.itemsize > there:
        raise TraceError(f"{where}: declares {shape} values of {dtype}, but has {there} bytes")
    return Entry(name, shape, dtype.name)


class NpyFile(TensorFile):
    """One array in numpy's ``.npy``, memory-mapped, so that single rows can be read."""

    def __init__(self, path: Path) -> None:
        with reading(path), path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            self.entries = (_npy_entry(file, size, "", printable(str(path))),)
            self._array = np.lib.format.open_memmap(path, "r")

    def read(self, entry: Entry, row: int | None = None) -> NDArray[Any]:
        """A copy of the array, or of one index of its first axis."""
        return np.array(self._array if row is None else self._array[row])

    def close(self) -> None:
        """Unmap the file."""
        del self._array


class NpzFile(TensorFile):
    """Arrays in numpy's ``.npz``, read one at a time; they are unpacked to files to read rows."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._unpacked: dict[str, NDArray[Any]] = {}
        self._folder: Path | None = None
        with reading(path), ExitStack() as opened:
            self._zip = opened.enter_context(zipfile.ZipFile(path))
            self.entries = tuple(self._read_entries(path.stat().st_size))
            opened.pop_all()

    def _read_entries(self, size: int) -> Iterator[Entry]:
        seen = set()
        for info in self._zip.infolist():
            if info.is_dir():
                continue
            name = info.filename.removesuffix(".npy")
            where = f"{printable(str(self._path))}: array '{printable(name)}'"
            if name == info.filename:
                raise TraceError(f"{where}: not a numpy array; a .npz may hold only those")
            if name in seen:
                raise TraceError(f"{where}: occurs twice; damaged or foreign")
            seen.add(name)
            if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise TraceError(f"{where}: numpy does not use this compression; damaged or foreign")
            if info.compress_size > size or info.file_size > _DEFLATE * info.compress_size + 1024:
                raise TraceError(f"{where}: declares {info.file_size} bytes, more than this file can hold")
            with self._zip.open(info) as file:
                yield _npy_entry(file, info.file_size, name, where)

    def read(self, entry: Entry, row: int | None = None) -> NDArray[Any]:
        """A copy of an array, or of one index of its first axis."""
        with reading(self._path):
            if row is not None:
                return np.array(self._row_source(entry.name)[row])
            with self._zip.open(f"{entry.name}.npy") as file:
                values: NDArray[Any] = np.lib.format.read_array(file, allow_pickle=False)
            return values

    def _row_source(self, name: str) -> NDArray[Any]:
        if name not in self._unpacked:
            assert self._folder is not None
            place = self._folder / f"{len(self._unpacked)}.npy"
            with self._zip.open(f"{name}.npy") as packed, place.open("wb") as file:
                shutil.copyfileobj(packed, file, 1 << 20)
            self._unpacked[name] = np.lib.format.open_memmap(place, "r")
        return self._unpacked[name]

    def prepare_rows(self, folder: Path) -> None:
        """Unpack into this folder."""
        self._folder = folder

    def close(self) -> None:
        """Close the archive."""
        self._unpacked.clear()
        self._zip.close()


class SafetensorsFile(TensorFile):
    """Arrays in Hugging Face's ``.safetensors``: eight bytes of length, a JSON header, the values; memory-mapped."""

    def __init__(self, path: Path) -> None:
        where = printable(str(path))
        with reading(path), path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, _MAX_HEADER):
                raise TraceError(f"{where}: a header of {length} bytes in a file of {size}; damaged or foreign")
            try:
                header = json.loads(file.read(length), object_pairs_hook=_no_repetition)
            except RecursionError:
                raise ValueError("the header is nested too deep") from None
            self._places, entries = _safetensors_entries(header, size - 8 - length, where)
            # A file without bytes after its header cannot be mapped from there.
            self._bytes: NDArray[np.uint8] = np.memmap(path, np.uint8, "r")[8 + length :]
        self.entries = tuple(entries)

    def read(self, entry: Entry, row: int | None = None) -> NDArray[Any]:
        """A copy of an array, or of one index of its first axis; bfloat16 as float32."""
        stored, begin, end = self._places[entry.name]
        if row is not None:
            width = (end - begin) // entry.shape[0]
            begin, end = begin + row * width, begin + (row + 1) * width
        # Copied first: the values' addresses may not be aligned for their type.
        flat = np.array(self._bytes[begin:end]).view(stored)
        values = bfloat16(flat) if entry.dtype == "bfloat16" else flat
        return values.reshape(entry.shape if row is None else entry.shape[1:])

    def close(self) -> None:
        """Unmap the file."""
        del self._bytes


def _no_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        raise ValueError("the header holds a name twice")
    return out


def _safetensors_entries(
    header: object, size: int, where: str
) -> tuple[dict[str, tuple[np.dtype[Any], int, int]], list[Entry]]:
    """The tensors in the header of ``size`` bytes of values.

    Raises:
        TraceError: a type that is not read, or values that overlap, leave gaps or exceed the end.
    """
    if not isinstance(header, dict):
        raise TraceError(f"{where}: not a safetensors header; damaged or foreign")
    places: dict[str, tuple[np.dtype[Any], int, int]] = {}
    entries = []
    for name, described in header.items():
        if name == "__metadata__":
            continue
        what = f"{where}: tensor '{printable(name)}'"
        if not isinstance(described, dict):
            raise TraceError(f"{what}: no description in the header; damaged or foreign")
        dtype, shape, offsets = described.get("dtype"), described.get("shape"), described.get("data_offsets")
        if not are_lengths(shape) or not are_lengths(offsets) or len(offsets) != 2:
            raise TraceError(f"{what}: the header lacks its shape or offsets; damaged or foreign")
        if dtype not in _SAFETENSORS:
            raise TraceError(f"{what}: values of type {printable(str(dtype))[:40]} are not read; save float32")
        meant = _SAFETENSORS[dtype]
        stored = np.dtype("uint16" if meant == "bfloat16" else meant).newbyteorder("<")
        begin, end = offsets
        if not begin <= end <= size or end - begin != math.prod(shape) * stored.itemsize:
            raise TraceError(f"{what}: bytes {begin} to {end} of {size} cannot hold {shape} of {dtype}; damaged")
        places[name] = stored, begin, end
        entries.append(Entry(name, tuple(shape), meant))
    at = 0
    for _, begin, end in sorted(places.values(), key=lambda place: place[1:]):
        if begin != at:
            raise TraceError(f"{where}: tensors overlap or leave a hole at byte {min(begin, at)}; damaged")
        at = end
    if at != size:
        raise TraceError(f"{where}: {size} bytes of values, but the header describes {at}; damaged")
    return places, entries


def write_safetensors_header(arrays: Sequence[tuple[str, tuple[int, ...]]], metadata: dict[str, str]) -> bytes:
    """The start of a ``.safetensors`` file of float32 arrays; the values follow in this order.

    Args:
        arrays: name and shape of each.
        metadata: texts about the file.
    """
    header: dict[str, Any] = {"__metadata__": metadata}
    at = 0
    for name, shape in arrays:
        end = at + 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    # Values start at a multiple of eight bytes.
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


#: suffix -> class that opens such a file
OPENERS: dict[str, Callable[[Path], TensorFile]] = {
    ".npy": NpyFile,
    ".npz": NpzFile,
    ".safetensors": SafetensorsFile,
}


_ROOTS = ("zarr.json", ".zgroup", ".zarray", ".zmetadata")
#: An array may be this many times larger than its stored bytes, or have this many bytes.
_RATIO = 1032
_SMALL = 64 * 1024 * 1024


def is_zarr(folder: Path) -> bool:
    """Whether a folder is a Zarr store."""
    return any((folder / name).is_file() for name in _ROOTS)


class ZarrStore(TensorFile):
    """The arrays of a Zarr store of format 2 or 3, except coordinates other than ``step``."""

    def __init__(self, path: Path) -> None:
        import zarr

        self._path = path
        self._where = printable(str(path))
        if is_gtrace_zarr(path):
            raise TraceError(f"{self._where}: is already a gtrace trace; pass it to gtrace sweep")
        self._arrays: dict[str, Any] = {}
        self._rows: dict[str, NDArray[Any]] = {}
        self._folder: Path | None = None
        self._checked: set[str] = set()
        with reading(path), warnings.catch_warnings():
            # Zarr warns about unknown files.
            warnings.simplefilter("ignore")
            root = zarr.open(str(path), mode="r")
            members = root.members(max_depth=None) if isinstance(root, zarr.Group) else [("", root)]
            found = {name.replace("/", "."): node for name, node in members if isinstance(node, zarr.Array)}
            listed = [Entry(name, tuple(a.shape), a.dtype.name, _dimensions(a)) for name, a in sorted(found.items())]
        entries = []
        for entry in listed:
            name = entry.name
            if entry.dimensions == (name.rpartition(".")[2],) and name != "step":
                continue
            self._arrays[name] = found[name]
            entries.append(entry)
        self.entries = tuple(entries)

    def read(self, entry: Entry, row: int | None = None) -> NDArray[Any]:
        """A copy of an array, or of one index of its first axis."""
        array = self._arrays[entry.name]
        with reading(self._path):
            if entry.name not in self._checked:
                self._check(array, f"{self._where}: array '{printable(entry.name)}'")
                self._checked.add(entry.name)
            if row is None:
                return np.asarray(array[...])
            if array.chunks[0] == 1:
                return np.asarray(array[row])
            return np.array(self._unpacked(entry)[row])

    def _check(self, array: Any, where: str) -> None:
        # Decoding pickled data executes it, and numcodecs has such a filter.
        metadata = {key: value for key, value in array.metadata.to_dict().items() if key != "attributes"}
        if "pickle" in json.dumps(metadata, default=str).lower():
            raise TraceError(f"{where}: is encoded with pickle, which is never loaded; store plain numbers")
        most = (
            max(math.prod(array.shape), math.prod(array.chunks), math.prod(array.shards or ())) * array.dtype.itemsize
        )
        if most > _SMALL and most > _RATIO * array.nbytes_stored():
            raise TraceError(f"{where}: declares {array.shape} values, but has {array.nbytes_stored()} bytes")

    def _unpacked(self, entry: Entry) -> NDArray[Any]:
        """The array in a file, if chunks hold several rows: each chunk is decoded once."""
        if entry.name not in self._rows:
            assert self._folder is not None
            array = self._arrays[entry.name]
            place = self._folder / f"{len(self._rows)}.npy"
            unpacked = np.lib.format.open_memmap(place, "w+", array.dtype, entry.shape)
            for start in range(0, entry.shape[0], array.chunks[0]):
                unpacked[start : start + array.chunks[0]] = array[start : start + array.chunks[0]]
            self._rows[entry.name] = unpacked
        return self._rows[entry.name]

    def prepare_rows(self, folder: Path) -> None:
        """Unpack into this folder."""
        self._folder = folder

    def close(self) -> None:
        """Drop the arrays."""
        self._arrays.clear()
        self._rows.clear()


def _dimensions(array: Any) -> tuple[str | None, ...]:
    """Names of the axes: a field in format 3, xarray's attribute in format 2."""
    names = getattr(array.metadata, "dimension_names", None) or array.attrs.get("_ARRAY_DIMENSIONS") or ()
    return tuple(name if isinstance(name, str) else None for name in names)
