"""Files of other programs that hold arrays: ``.npy``, ``.npz`` and ``.safetensors``, read without executing anything.

What a file declares is compared with the bytes that are there before memory is spent on it.
"""

from __future__ import annotations

import ast
import json
import math
import os
import shutil
import warnings
import zipfile
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Any, NamedTuple, Protocol, TypeGuard

import numpy as np

from gtrace.errors import GtraceError, TraceError, printable
from gtrace.trace.zarr import is_gtrace_zarr

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray


#: The most that deflate can shrink anything.
_DEFLATE = 1032
#: What the safetensors library takes as well.
_MAX_HEADER = 100_000_000

#: safetensors' word -> numpy's type of the stored bytes, and the type that is meant.
_SAFETENSORS = {
    "F64": ("<f8", "float64"),
    "F32": ("<f4", "float32"),
    "F16": ("<f2", "float16"),
    "BF16": ("<u2", "bfloat16"),
    "C64": ("<c8", "complex64"),
    "I64": ("<i8", "int64"),
    "I32": ("<i4", "int32"),
    "I16": ("<i2", "int16"),
    "I8": ("i1", "int8"),
    "U64": ("<u8", "uint64"),
    "U32": ("<u4", "uint32"),
    "U16": ("<u2", "uint16"),
    "U8": ("u1", "uint8"),
    "BOOL": ("u1", "bool"),
}


class Entry(NamedTuple):
    """One array of a file.

    Attributes:
        name: its name in the file, empty where the file is the array.
        shape: its shape.
        dtype: the type of its values, such as ``bfloat16``.
        dimensions: names of its axes, where the file has some.
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
        """Whether it holds what a gradient can be: real or complex numbers, no integers."""
        return self.dtype.startswith(("float", "bfloat", "complex", "longdouble", "clongdouble"))

    @property
    def is_complex(self) -> bool:
        """Whether its values are pairs of real numbers."""
        return "complex" in self.dtype or self.dtype == "clongdouble"


class TensorFile(Protocol):
    """A file of arrays, opened for reading."""

    @property
    def entries(self) -> Sequence[Entry]:
        """Its arrays."""

    def read(self, entry: Entry, row: int | None = None) -> NDArray[Any]:
        """A copy of an array, or of one place along its first axis; bfloat16 as float32.

        Raises:
            TraceError: the file is damaged.
        """

    def prepare_rows(self, folder: Path) -> None:
        """Told before rows are read one after another; ``folder`` takes unpacked copies."""

    def close(self) -> None:
        """Give back what is held open."""


def join_name(*parts: str) -> str:
    """A tensor's name from the names of what it is nested in."""
    return ".".join(part for part in parts if part)


@contextmanager
def reading(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turn what fails while a file is read into one line that names the file.

    Raises:
        TraceError: for any other error.
    """
    try:
        yield
    except GtraceError:
        raise
    except Exception as error:
        # zipfile, zlib and the codecs of Zarr raise whatever damaged bytes lead them to.
        known = isinstance(error, OSError) and error.strerror
        reason = str(known or error).strip().splitlines() or [type(error).__name__]
        hint = "" if known else "; damaged or foreign"
        raise TraceError(
            f"{printable(os.fspath(path))}: cannot be read ({printable(reason[0])[:200]}){hint}"
        ) from error


def bfloat16(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """Values of bfloat16, given as their bits, as float32.

    >>> bfloat16(np.array([0x3F80, 0xC000], np.uint16)).tolist()
    [1.0, -2.0]
    """
    wide: NDArray[np.float32] = (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return wide


class _Header(NamedTuple):
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    fortran: bool
    offset: int

    def map(self, path: str | os.PathLike[str]) -> NDArray[Any]:
        """The array, in the file at ``path``."""
        if not math.prod(self.shape):
            return np.empty(self.shape, self.dtype)
        order: Any = "F" if self.fortran else "C"
        return np.memmap(path, self.dtype, "r", self.offset, self.shape, order)


def _npy_header(file: IO[bytes], size: int, where: str) -> _Header:
    """The header of an array of numpy's format in a stream of ``size`` bytes that stands at its start.

    Raises:
        TraceError: it holds Python objects or records, or declares more values than there are bytes.
        ValueError: it is no such header.
    """
    version = np.lib.format.read_magic(file)
    if version not in ((1, 0), (2, 0)):
        raise TraceError(f"{where}: version {version[0]}.{version[1]} of numpy's format; no plain array of numbers")
    width = 2 if version == (1, 0) else 4
    length = int.from_bytes(file.read(width), "little")
    if length > 10_000:
        raise TraceError(f"{where}: a header of {length} bytes; damaged or foreign")
    told = ast.literal_eval(file.read(length).decode("latin1").strip())
    if not isinstance(told, dict) or set(told) != {"descr", "fortran_order", "shape"}:
        raise TraceError(f"{where}: no header of a numpy array; damaged or foreign")
    shape, descr = told["shape"], told["descr"]
    if not isinstance(shape, tuple) or any(type(n) is not int or n < 0 for n in shape):
        raise TraceError(f"{where}: its shape is no list of lengths; damaged or foreign")
    if not isinstance(descr, str) or np.dtype(descr).kind not in "fciub":
        if isinstance(descr, str) and np.dtype(descr).hasobject:
            raise TraceError(f"{where}: holds pickled Python objects, which are never loaded; save plain arrays")
        raise TraceError(
            f"{where}: values of type {printable(str(descr))[:60]} are no numbers; save float32 "
            "(numpy forgets that values were bfloat16)"
        )
    dtype = np.dtype(descr)
    offset = len(np.lib.format.MAGIC_PREFIX) + 2 + width + length
    if math.prod(shape) * dtype.itemsize > size - offset:
        raise TraceError(f"{where}: {shape} values of {dtype} are declared, {max(size - offset, 0)} bytes are there")
    return _Header(dtype, shape, bool(told["fortran_order"]), offset)


class NpyFile:
    """One array in numpy's ``.npy``; mapped, so that rows are read alone."""

    def __init__(self, path: Path) -> None:
        with reading(path), path.open("rb") as file:
            try:
                header = _npy_header(file, os.fstat(file.fileno()).st_size, printable(str(path)))
            except (SyntaxError, TypeError, RecursionError) as error:
                raise ValueError("no header of a numpy array") from error
            self._array = header.map(path)
        self.entries = (Entry("", header.shape, header.dtype.name),)

    def read(self, entry: Entry, row: int | None = None) -> NDArray[Any]:
        """See :class:`TensorFile`."""
        return np.array(self._array if row is None else self._array[row])

    def prepare_rows(self, folder: Path) -> None:
        """Rows are mapped already."""

    def close(self) -> None:
        """See :class:`TensorFile`."""
        del self._array


class NpzFile:
    """Arrays in numpy's ``.npz``, read one at a time; for rows they are unpacked to files."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._unpacked: dict[str, NDArray[Any]] = {}
        self._folder: Path | None = None
        with reading(path):
            self._zip = zipfile.ZipFile(path)
            try:
                self._headers = self._read_headers(path.stat().st_size)
            except BaseException:
                self._zip.close()
                raise
        self.entries = tuple(Entry(name, h.shape, h.dtype.name) for name, (_, h) in self._headers.items())

    def _read_headers(self, size: int) -> dict[str, tuple[zipfile.ZipInfo, _Header]]:
        out: dict[str, tuple[zipfile.ZipInfo, _Header]] = {}
        for info in self._zip.infolist():
            if info.is_dir():
                continue
            name = info.filename.removesuffix(".npy")
            where = f"{printable(str(self._path))}: array '{printable(name)}'"
            if name == info.filename:
                raise TraceError(f"{where}: no numpy array; only those are taken from a .npz")
            if name in out:
                raise TraceError(f"{where}: there twice; damaged or foreign")
            if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise TraceError(f"{where}: compressed otherwise than numpy does; damaged or foreign")
            if info.compress_size > size or info.file_size > _DEFLATE * info.compress_size + 1024:
                raise TraceError(f"{where}: {info.file_size} bytes are declared, which cannot be in this file")
            with self._zip.open(info) as file:
                try:
                    out[name] = info, _npy_header(file, info.file_size, where)
                except (SyntaxError, TypeError, RecursionError) as error:
                    raise ValueError(f"array '{name}' has no header of numpy's") from error
        return out

    def read(self, entry: Entry, row: int | None = None) -> NDArray[Any]:
        """See :class:`TensorFile`."""
        if row is not None:
            return np.array(self._row_source(entry.name)[row])
        info, header = self._headers[entry.name]
        with reading(self._path), self._zip.open(info) as file:
            file.read(header.offset)
            values = np.empty(math.prod(header.shape), header.dtype)
            rest = values.view(np.uint8).data
            while rest:
                data = file.read(min(len(rest), 1 << 20))
                if not data:
                    raise EOFError(f"array '{entry.name}' ends early")
                rest[: len(data)] = data
                rest = rest[len(data) :]
            return values.reshape(header.shape, order="F" if header.fortran else "C")

    def _row_source(self, name: str) -> NDArray[Any]:
        if name not in self._unpacked:
            assert self._folder is not None
            info, header = self._headers[name]
            place = self._folder / f"{len(self._unpacked)}.npy"
            with reading(self._path), self._zip.open(info) as packed, place.open("wb") as file:
                shutil.copyfileobj(packed, file, 1 << 20)
            self._unpacked[name] = header.map(place)
        return self._unpacked[name]

    def prepare_rows(self, folder: Path) -> None:
        """See :class:`TensorFile`."""
        self._folder = folder

    def close(self) -> None:
        """See :class:`TensorFile`."""
        self._unpacked.clear()
        self._zip.close()


class SafetensorsFile:
    """Arrays in Hugging Face's ``.safetensors``: eight bytes of length, a JSON header, the values; mapped."""

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
            # A file of no bytes beyond its header cannot be mapped from there on.
            self._bytes: NDArray[np.uint8] = np.memmap(path, np.uint8, "r")[8 + length :]
        self.entries = tuple(entries)

    def read(self, entry: Entry, row: int | None = None) -> NDArray[Any]:
        """See :class:`TensorFile`."""
        stored, begin, end = self._places[entry.name]
        if row is not None:
            width = (end - begin) // entry.shape[0]
            begin, end = begin + row * width, begin + (row + 1) * width
        # Copied first: values may lie at addresses that their type does not allow.
        flat = np.array(self._bytes[begin:end]).view(stored)
        values = bfloat16(flat) if entry.dtype == "bfloat16" else flat
        return values.reshape(entry.shape if row is None else entry.shape[1:])

    def prepare_rows(self, folder: Path) -> None:
        """Rows are mapped already."""

    def close(self) -> None:
        """See :class:`TensorFile`."""
        del self._bytes


def _no_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        raise ValueError("the header names something twice")
    return out


def _safetensors_entries(
    header: object, size: int, where: str
) -> tuple[dict[str, tuple[np.dtype[Any], int, int]], list[Entry]]:
    """What a header tells of ``size`` bytes of values.

    Raises:
        TraceError: a type that is not read, or values that overlap, leave holes or go beyond the end.
    """
    if not isinstance(header, dict):
        raise TraceError(f"{where}: no safetensors header; damaged or foreign")
    places: dict[str, tuple[np.dtype[Any], int, int]] = {}
    entries = []
    for name, told in header.items():
        if name == "__metadata__":
            continue
        what = f"{where}: tensor '{printable(name)}'"
        if not isinstance(told, dict):
            raise TraceError(f"{what}: no description in the header; damaged or foreign")
        dtype, shape, offsets = told.get("dtype"), told.get("shape"), told.get("data_offsets")
        if not _are_lengths(shape) or not _are_lengths(offsets) or len(offsets) != 2:
            raise TraceError(f"{what}: no shape or no place in the header; damaged or foreign")
        if dtype not in _SAFETENSORS:
            raise TraceError(f"{what}: values of type {printable(str(dtype))[:40]} are not read; save float32")
        stored, meant = np.dtype(_SAFETENSORS[dtype][0]), _SAFETENSORS[dtype][1]
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
        raise TraceError(f"{where}: {size} bytes of values where the header tells of {at}; damaged")
    return places, entries


def _are_lengths(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(n) is int and n >= 0 for n in value)


def write_safetensors_header(arrays: Sequence[tuple[str, tuple[int, ...]]], metadata: dict[str, str]) -> bytes:
    """The start of a ``.safetensors`` file of float32 arrays, which follow it in this order.

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


#: suffix -> what opens such a file.
OPENERS: dict[str, Callable[[Path], TensorFile]] = {
    ".npy": NpyFile,
    ".npz": NpzFile,
    ".safetensors": SafetensorsFile,
}


_ROOTS = ("zarr.json", ".zgroup", ".zarray", ".zmetadata")
#: An array may be so much larger than what is stored of it, or have so many bytes.
_RATIO = 1032
_SMALL = 64 * 1024 * 1024


def is_zarr(folder: Path) -> bool:
    """Whether a folder is a Zarr store."""
    return any((folder / name).is_file() for name in _ROOTS)


class ZarrStore:
    """The arrays of a Zarr store of format 2 or 3, but for coordinates other than ``step``."""

    def __init__(self, path: Path) -> None:
        import zarr

        self._path = path
        self._where = printable(str(path))
        if is_gtrace_zarr(path):
            raise TraceError(f"{self._where}: is a gtrace trace already; gtrace sweep takes it as it is")
        self._arrays: dict[str, Any] = {}
        self._rows: dict[str, NDArray[Any]] = {}
        self._folder: Path | None = None
        self._checked: set[str] = set()
        with reading(path), warnings.catch_warnings():
            # Zarr warns of files that it does not know.
            warnings.simplefilter("ignore")
            root = zarr.open(str(path), mode="r")
            members = root.members(max_depth=None) if isinstance(root, zarr.Group) else [("", root)]
            found = {name.replace("/", "."): node for name, node in members if isinstance(node, zarr.Array)}
            told = [Entry(name, tuple(a.shape), a.dtype.name, _dimensions(a)) for name, a in sorted(found.items())]
        entries = []
        for entry in told:
            name = entry.name
            if entry.dimensions == (name.rpartition(".")[2],) and name != "step":
                continue
            self._arrays[name] = found[name]
            entries.append(entry)
        self.entries = tuple(entries)

    def read(self, entry: Entry, row: int | None = None) -> NDArray[Any]:
        """See :class:`TensorFile`."""
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
        # Decoding with pickle executes what is stored; numcodecs knows such a filter.
        metadata = {key: told for key, told in array.metadata.to_dict().items() if key != "attributes"}
        if "pickle" in json.dumps(metadata, default=str).lower():
            raise TraceError(f"{where}: is encoded with pickle, which is never loaded; store plain numbers")
        most = (
            max(math.prod(array.shape), math.prod(array.chunks), math.prod(array.shards or ())) * array.dtype.itemsize
        )
        if most > _SMALL and most > _RATIO * array.nbytes_stored():
            raise TraceError(f"{where}: {array.shape} values are declared, {array.nbytes_stored()} bytes are there")

    def _unpacked(self, entry: Entry) -> NDArray[Any]:
        """The array in a file, where chunks hold several rows: each is decoded once."""
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
        """See :class:`TensorFile`."""
        self._folder = folder

    def close(self) -> None:
        """See :class:`TensorFile`."""
        self._arrays.clear()
        self._rows.clear()


def _dimensions(array: Any) -> tuple[str | None, ...]:
    """Names of the axes: format 3 has a place for them, in format 2 it is xarray's attribute."""
    names = getattr(array.metadata, "dimension_names", None) or array.attrs.get("_ARRAY_DIMENSIONS") or ()
    return tuple(name if isinstance(name, str) else None for name in names)
