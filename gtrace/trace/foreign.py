"""Readers of files that hold arrays: ``.npy``, ``.npz``, ``.safetensors``, HDF5 and Zarr stores.

They run in the child process of :mod:`gtrace.trace.guard`, which bounds what a file can take and turns any exception
into one line. So they check what makes values wrong, and not what makes reading them expensive.
"""

from __future__ import annotations

import json
import math
import mmap
import warnings
import zipfile
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from gtrace.errors import TraceError, printable
from gtrace.trace.guard import Entry

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray


#: safetensors' name -> type; bfloat16 is stored as numpy's uint16
_SAFETENSORS = {"BF16": "bfloat16", "C64": "complex64", "BOOL": "bool"} | {
    f"{kind[0].upper()}{bits}": f"{kind}{bits}"
    for kind, widths in (("float", (16, 32, 64)), ("int", (8, 16, 32, 64)), ("uint", (8, 16, 32, 64)))
    for bits in widths
}


class TensorFile:
    """A file of arrays, opened for reading. Any exception means that the file is damaged.

    Attributes:
        entries: its arrays.
    """

    entries: Sequence[Entry]
    #: name -> what has an array's values by index
    _arrays: Mapping[str, Any]

    def read(self, entry: Entry, row: int | None = None) -> NDArray[Any]:
        """An array, or one index of its first axis; bfloat16 as float32."""
        return np.asarray(self._arrays[entry.name][... if row is None else row])


def join_name(*parts: str) -> str:
    """A tensor's name from the names of its containers."""
    return ".".join(part for part in parts if part)


def bfloat16(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """Values of bfloat16 from their bits, as float32.

    >>> bfloat16(np.array([0x3F80, 0xC000], np.uint16)).tolist()
    [1.0, -2.0]
    """
    wide: NDArray[np.float32] = (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return wide


_HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


def _npy_entry(file: IO[bytes], name: str, where: str, *, by_row: bool) -> Entry:
    """The array in numpy's format at the start of a stream; TraceError if it does not hold numbers."""
    version = np.lib.format.read_magic(file)
    if version not in _HEADERS:
        raise TraceError(f"{where}: version {version[0]}.{version[1]} of numpy's format; save a plain array of numbers")
    shape, _, dtype = _HEADERS[version](file)
    if dtype.kind not in "fciub":
        raise TraceError(
            f"{where}: values of type {printable(dtype.str)[:60]} are not numbers; save float32 (numpy forgets that "
            "values were bfloat16, and pickled Python objects are never loaded)"
        )
    return Entry(name, shape, dtype.name, by_row=by_row)


class NpyFile(TensorFile):
    """One array in numpy's ``.npy``, memory-mapped, so that single rows can be read."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self.entries = (_npy_entry(file, "", printable(str(path)), by_row=True),)
        self._arrays = {"": np.lib.format.open_memmap(path, "r")}


class NpzFile(TensorFile):
    """Arrays in numpy's ``.npz``, unpacked one at a time."""

    def __init__(self, path: Path) -> None:
        self._zip = zipfile.ZipFile(path)
        entries = []
        for name in dict.fromkeys(info.filename for info in self._zip.infolist() if not info.is_dir()):
            where = f"{printable(str(path))}: array '{printable(name.removesuffix('.npy'))}'"
            if not name.endswith(".npy"):
                raise TraceError(f"{where}: not a numpy array; a .npz may hold only those")
            with self._zip.open(name) as file:
                entries.append(_npy_entry(file, name.removesuffix(".npy"), where, by_row=False))
        self.entries = entries

    def read(self, entry: Entry, row: int | None = None) -> NDArray[Any]:
        """An array, whole."""
        with self._zip.open(f"{entry.name}.npy") as file:
            values: NDArray[Any] = np.lib.format.read_array(file, allow_pickle=False)
            # Only the end of the stream shows whether its checksum is right.
            file.read(1)
        return values


class SafetensorsFile(TensorFile):
    """Arrays in Hugging Face's ``.safetensors``: eight bytes of length, a JSON header, the values; memory-mapped."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        length = int.from_bytes(self._bytes[:8], "little")
        self._start = 8 + length
        if self._start > len(self._bytes):
            raise ValueError(f"a header of {length} bytes in a file of {len(self._bytes)}")
        header = json.loads(self._bytes[8 : self._start], object_pairs_hook=_no_repetition)
        header.pop("__metadata__", None)
        self._begins = {name: described["data_offsets"][0] for name, described in header.items()}
        self.entries = [self._entry(path, name, described) for name, described in header.items()]
        # Values that overlap, or bytes of no tensor, mean that the header is of another file.
        at = self._start
        for described in sorted(header.values(), key=lambda described: described["data_offsets"]):
            begin, end = described["data_offsets"]
            if self._start + begin != at:
                raise ValueError(f"tensors overlap or leave a hole at byte {begin}")
            at = self._start + end
        if at != len(self._bytes):
            raise ValueError(f"the header describes {at} bytes of {len(self._bytes)}")

    def _entry(self, path: Path, name: str, described: dict[str, Any]) -> Entry:
        if described["dtype"] not in _SAFETENSORS:
            shown = printable(f"tensor '{name}': values of type {described['dtype']}")[:200]
            raise TraceError(f"{printable(str(path))}: {shown} are not read; save float32")
        entry = Entry(name, tuple(described["shape"]), _SAFETENSORS[described["dtype"]])
        begin, end = described["data_offsets"]
        if end - begin != entry.size * _stored(entry).itemsize:
            raise ValueError(f"bytes {begin} to {end} cannot hold {list(entry.shape)} of {described['dtype']}")
        return entry

    def read(self, entry: Entry, row: int | None = None) -> NDArray[Any]:
        """An array, or one index of its first axis; bfloat16 as float32."""
        stored = _stored(entry)
        shape = entry.shape if row is None else entry.shape[1:]
        count = math.prod(shape)
        begin = self._start + self._begins[entry.name] + (row or 0) * count * stored.itemsize
        flat = np.frombuffer(self._bytes[begin : begin + count * stored.itemsize], stored)
        return (bfloat16(flat) if entry.dtype == "bfloat16" else flat).reshape(shape)


def _stored(entry: Entry) -> np.dtype[Any]:
    return np.dtype("uint16" if entry.dtype == "bfloat16" else entry.dtype).newbyteorder("<")


def _no_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        raise ValueError("the header holds a name twice")
    return out


def write_safetensors_header(arrays: Sequence[tuple[str, tuple[int, ...]]], metadata: dict[str, str]) -> bytes:
    """The start of a ``.safetensors`` file of float32 arrays, with their names and shapes, and texts about the file."""
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


_ROOTS = ("zarr.json", ".zgroup", ".zarray", ".zmetadata")


def is_zarr(folder: Path) -> bool:
    """Whether a folder is a Zarr store."""
    return any((folder / name).is_file() for name in _ROOTS)


class ZarrStore(TensorFile):
    """The arrays of a Zarr store of format 2 or 3, except coordinates other than ``step``."""

    def __init__(self, path: Path) -> None:
        import numcodecs.registry
        import zarr

        # Decoding pickled data executes it, and numcodecs has such a filter.
        numcodecs.registry.codec_registry.pop("pickle", None)
        numcodecs.registry.entries.pop("pickle", None)
        # One chunk at a time is in memory.
        zarr.config.set({"async.concurrency": 1, "threading.max_workers": 1})
        # Zarr warns about unknown files.
        warnings.simplefilter("ignore")
        root = zarr.open(str(path), mode="r")
        members = root.members(max_depth=None) if isinstance(root, zarr.Group) else [("", root)]
        self._arrays = _by_name(path, {name: node for name, node in members if isinstance(node, zarr.Array)})
        listed = []
        for name, array in sorted(self._arrays.items()):
            # Names of the axes: a field in format 3, xarray's attribute in format 2.
            names = getattr(array.metadata, "dimension_names", None) or array.attrs.get("_ARRAY_DIMENSIONS") or ()
            axes = tuple(axis if isinstance(axis, str) else None for axis in names)
            listed.append(_chunked_entry(name, array, axes, array.shards or ()))
        self.entries = [
            entry
            for entry, last in ((entry, entry.name.rpartition(".")[2]) for entry in listed)
            if last == "step" or entry.dimensions != (last,)
        ]


def _by_name(path: Path, found: Mapping[str, Any]) -> dict[str, Any]:
    """Arrays by the names of their tensors, with dots between groups."""
    names = {name: name.replace("/", ".") for name in found}
    for name, dotted in names.items():
        if dotted != name and dotted in found:
            shown = printable(f"arrays '{dotted}' and '{name}'")
            raise TraceError(f"{printable(str(path))}: {shown} would have one name; rename one of them")
    return {names[name]: node for name, node in found.items()}


def _chunked_entry(name: str, array: Any, axes: tuple[str | None, ...], shard: tuple[int, ...] = ()) -> Entry:
    chunks = array.chunks or array.shape
    return Entry(
        name,
        tuple(array.shape),
        array.dtype.name,
        axes,
        pieces=math.prod(-(-length // max(chunk, 1)) for length, chunk in zip(array.shape, chunks, strict=True)),
        largest=max(math.prod(chunks), math.prod(shard)) * array.dtype.itemsize,
        by_row=array.chunks is None or chunks[:1] == (1,),
    )


class Hdf5File(TensorFile):
    """The data sets of an HDF5 file that hold numbers, except coordinates other than ``step``; no link is followed."""

    def __init__(self, path: Path) -> None:
        import h5py

        self._file = h5py.File(path, "r", locking=False)
        if '"gtrace"' in str(self._file.attrs.get("metadata")):
            raise TraceError(f"{printable(str(path))}: is already a gtrace trace; pass it to gtrace sweep")
        found: dict[str, Any] = {}
        self._file.visititems(lambda name, node: found.setdefault(name, node) and None)
        numbers = {
            name: node
            for name, node in found.items()
            if isinstance(node, h5py.Dataset) and node.dtype.kind in "fciub"
            if not node.is_scale or name.rpartition("/")[2] == "step"
        }
        self._arrays = _by_name(path, numbers)
        elsewhere = [name for name, node in self._arrays.items() if node.is_virtual or node.external]
        if elsewhere:
            where = f"{printable(str(path))}: array '{printable(elsewhere[0])}'"
            raise TraceError(f"{where}: its values are in another file, which is not read; copy them into this one")
        listed = []
        for name, array in self._arrays.items():
            # The name of an axis is its label, or that of the coordinates attached to it.
            axes = (axis.label or (axis[0].name.rpartition("/")[2] if len(axis) else None) for axis in array.dims)
            listed.append(_chunked_entry(name, array, tuple(axes)))
        self.entries = listed


#: suffix -> the reader of such a file, for :class:`gtrace.trace.guard.Guard`
READERS = {
    ".npy": f"{__name__}:NpyFile",
    ".npz": f"{__name__}:NpzFile",
    ".safetensors": f"{__name__}:SafetensorsFile",
    ".zarr": f"{__name__}:ZarrStore",
    ".h5": f"{__name__}:Hdf5File",
    ".hdf5": f"{__name__}:Hdf5File",
}
